"""Partitions by a Dirichlet distribution: clients of n samples, or of shares of each class."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedssl import config
from fedssl.config import PartitionParams, Recipe, SourceParams
from fedssl.data.dataset import Groups, Ints, Split
from fedssl.data.partition import (
    check_at_most,
    group_samples,
    key_error,
    random_generator,
    rank_equal,
    require_labels,
    shuffle,
    shuffle_labels,
)
from fedssl.data.random import key, mix

Shares = NDArray[np.floating[Any]]

WINDOW = 8192  # places drawn at once: bounds the work that a class running out undoes
TRIES = 50  # draws before giving up
BALANCED_TRIES = 1000  # the same for clients of about the same size


@dataclass(frozen=True)
class Samples:
    """Clients of exactly n samples, by the process of Hsu et al. 2019 (arXiv 1909.06335).

    Client k has class probabilities q ~ Dir(αp), p being the classes' shares of all samples, and
    each of its n places draws a class from q among the classes that still have samples. At α = 0 a
    client holds one class, and moves on to another only when that one runs out; at α = ∞ every
    place draws from p.
    """

    @dataclass(frozen=True)
    class Params(PartitionParams):
        """Keys of a partition into clients of equal size."""

        recommended: ClassVar[Recipe] = {
            "cohort": {"size": 32},
            # The paper's λ = 20 is for cohorts of 512 samples; with 128 the correlations are
            # noisier and it learns less. Chosen on a held-out fifth of digits' training set.
            "objective.name=cco": {"objective": {"lambda": 2}},
        }

        samples: int = config.key(4, ge=1, help="Number of samples of each client.")
        alpha: float = config.key(
            0.0,
            ge=0,
            finite=False,
            help="α of the Dirichlet distribution. 0: a client holds one class. `inf`: clients are "
            "alike.",
        )
        clients: int | None = config.key(
            None, ge=1, help="Number of clients. `null`: as many as there are samples for."
        )

    params: Params

    def split(self, split: Split, classes: int, seed: int) -> Groups:
        """Divide samples; labels are needed except at α = ∞."""
        clients, size = self._count_clients(len(split)), self.params.samples
        if math.isinf(self.params.alpha) and (split.full_labels < 0).any():
            labels = np.zeros(len(split), np.int64)
        else:
            fix = "Use partition.name=iid or partition.alpha=inf."
            labels = require_labels(self.params, split, fix)
        counts = np.bincount(labels, minlength=classes)
        drawn = _Urn(counts, clients, size, self.params.alpha, seed).draw()
        order = shuffle(len(split), seed)
        by_class = order[np.argsort(labels[order], kind="stable")]
        first = np.cumsum(counts) - counts
        return Groups(by_class[first[drawn] + rank_equal(drawn)], np.arange(clients + 1) * size)

    def _count_clients(self, total: int) -> int:
        size, clients = self.params.samples, self.params.clients
        check_at_most(self.params, "samples", total)
        most = total // size
        if clients is not None and clients > most:
            problem = f"partition.samples={size} takes {clients * size} samples of {total}"
            raise key_error(self.params, "clients", problem, f"Use at most {most}.")
        return clients or most


class _Urn:
    """Draw the class of each of the clients' places, client after client (see ``Samples``).

    q is integrated out. Given its earlier places, a client's next place draws class c with a
    probability proportional to αp_c + (places of class c so far): the urn of Blackwell and MacQueen
    1973. Restricted to the classes that still have samples this stays exact, since a Dirichlet
    vector restricted to some classes is again one. So a place either copies an earlier place of
    its client, chosen evenly, or draws from p; nothing underflows, whatever α is.

    Many places are drawn at once as if no class ran out. From the first place whose class has no
    sample left, the places that drew an empty class draw again, and the rest stand: to reject
    and to draw again is to draw from what is left. Each time a class is gone, so this is rare.
    """

    def __init__(self, counts: Ints, clients: int, size: int, alpha: float, seed: int) -> None:
        self.counts, self.size, self.alpha, self.seed = counts, size, alpha, seed
        self.left = counts.copy()
        self.drawn = np.zeros(clients * size, np.int64)  # the class of each place
        self.parent = np.arange(clients * size)  # the place that it copies; itself: drawn from p

    def draw(self) -> Ints:
        """Return the class of each place."""
        for start in range(0, len(self.drawn), WINDOW):
            now, end = start, min(start + WINDOW, len(self.drawn))
            self._draw(np.arange(now, end), now)
            while (now := self._accept(now, end)) < end:
                source = self.parent[now:end]
                is_fresh = (source < now) | (source == np.arange(now, end))
                is_gone = self.left[self.drawn[source]] == 0
                self._draw(now + np.flatnonzero(is_fresh & is_gone), now)
        return self.drawn

    def _draw(self, places: Ints, now: int) -> None:
        """Draw ``places`` from the classes that have samples; those before ``now`` are final."""
        share = np.where(self.left > 0, self.counts, 0)
        # A client that `now` cuts in two may copy a final place only if its class has samples.
        # Number those places as if they stood right before `now`: what it may copy is one range.
        begun = np.arange(now // self.size * self.size, now)
        begun = begun[share[self.drawn[begun]] > 0]
        lowest = np.maximum(places // self.size * self.size, now - len(begun))
        earlier = places - lowest
        coin, pick = (_uniform(key(self.seed, "partition", 2, now, i), places) for i in range(2))
        weight = self.alpha * (share.sum() / self.counts.sum())
        # Without an earlier place the chance is 0 / (… + 1): no 0 / 0 at α = 0.
        copies = coin < earlier / (weight + np.maximum(earlier, 1))
        copied = lowest + (pick * earlier).astype(np.int64)
        copied[copied < now] = begun[copied[copied < now] - now]  # counted from the end of `begun`
        self.parent[places] = np.where(copies, copied, places)
        upto = np.cumsum(share)
        fresh = (pick * upto[-1]).astype(np.int64)
        self.drawn[places] = np.searchsorted(upto, fresh, side="right")

    def _accept(self, now: int, end: int) -> int:
        """Take samples for the places from ``now`` on; return the first place without one."""
        source = self.parent[now:end]
        chain = np.where(source < now, np.arange(now, end), source) - now
        while not np.array_equal(further := chain[chain], chain):
            chain = further
        drawn = self.drawn[now:end] = self.drawn[source[chain]]
        is_short = rank_equal(drawn) >= self.left[drawn]
        taken = int(np.argmax(is_short)) if is_short.any() else len(drawn)
        self.left -= np.bincount(drawn[:taken], minlength=len(self.left))
        return now + taken


def _uniform(state: int, counter: Ints) -> Shares:
    """Return a number in [0, 1) for each counter."""
    return (mix(state, counter.astype(np.uint64)) >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class Dirichlet:
    """Each class is divided over all clients by proportions ~ Dir(α, …, α); sizes vary.

    A draw that leaves a client without a sample is drawn again. With ``balanced`` so is one with a
    client smaller than half or larger than one and a half of the mean, as in Dec-SSL; if no draw
    avoids that, the most balanced one is kept (see ``describe_imbalance``).
    """

    @dataclass(frozen=True)
    class Params(SourceParams):
        """Keys of a Dirichlet partition."""

        clients: int = config.key(10, ge=1, help="Number of clients.")
        alpha: float = config.key(
            0.5,
            gt=0,
            finite=False,
            help="α of the Dirichlet distribution. Small: clients differ. Large: alike.",
        )
        balanced: bool = config.key(
            False, help="Draw until all clients have between 0.5 and 1.5 times the mean size."
        )

    params: Params

    def split(self, split: Split, classes: int, seed: int) -> Groups:
        """Divide labelled samples; every sample is used."""
        clients = self.params.clients
        order, labels = shuffle_labels(self.params, split, seed)
        by_class = Groups.from_labels(labels, classes)
        attempts = range(TRIES)
        if self.params.balanced:
            best = self._most_balanced(by_class.sizes, seed)
            attempts = range(best, best + 1)
        for attempt in attempts:
            owners = self._draw(by_class, random_generator(seed, attempt))
            empty = clients - len(np.unique(owners))
            if not empty:
                return group_samples(order, owners, clients)
            if empty > 20:  # then a draw without any is out of reach
                break
        fix = "Use a larger partition.alpha or fewer partition.clients."
        problem = f"some of {clients} clients would get no sample"
        raise key_error(self.params, "alpha", problem, fix)

    def _draw(self, by_class: Groups, generator: np.random.Generator) -> Ints:
        """Return the client of each sample."""
        owners = np.empty(len(by_class.members), np.int64)
        for c, cuts in enumerate(self._cuts(by_class.sizes, generator)):
            owners[by_class[c]] = np.searchsorted(cuts, np.arange(by_class.sizes[c]), side="right")
        return owners

    def _cuts(self, sizes: Ints, generator: np.random.Generator) -> Iterator[Shares]:
        """Yield for each class where it is cut into the clients' pieces."""
        for size in sizes:
            shares = _draw_shares(self.params.alpha, self.params.clients, generator)
            # One random offset for all cuts: the expected size of every piece is its share.
            yield np.floor(np.cumsum(shares) * size + generator.random())

    def _most_balanced(self, sizes: Ints, seed: int) -> int:
        """Return the first draw with sizes in the range, else the one with the least uneven."""
        best, least = 0, (self.params.clients + 1, math.inf)
        for attempt in range(BALANCED_TRIES):
            cuts = np.stack(list(self._cuts(sizes, random_generator(seed, attempt))))
            held = np.diff(np.minimum(cuts, sizes[:, None]), axis=1, prepend=0).sum(axis=0)
            if _is_balanced(held):
                return attempt
            spread = (int((held == 0).sum()), float(held.std()))
            if spread < least:
                best, least = attempt, spread
        return best


def _draw_shares(alpha: float, count: int, generator: np.random.Generator) -> Shares:
    """Draw from Dir(α, …, α). In logs: gamma numbers of a small shape underflow."""
    if math.isinf(alpha):
        return np.ones(count) / count
    logs = np.log(generator.standard_gamma(alpha + 1.0, count))
    logs -= generator.standard_exponential(count) / alpha  # Gamma(α) = Gamma(α + 1) U^(1/α)
    shares = np.exp(logs - logs.max())
    return shares / shares.sum()


def _is_balanced(sizes: Shares | Ints) -> bool:
    """Return whether all sizes are within half to one and a half of the mean (Dec-SSL)."""
    mean = sizes.mean()
    return bool(sizes.min() >= mean / 2 and sizes.max() <= 1.5 * mean)


def describe_imbalance(params: PartitionParams, sizes: Ints) -> Iterator[str]:
    """Yield a note if clients should be of about the same size, and are not."""
    if isinstance(params, Dirichlet.Params) and params.balanced and not _is_balanced(sizes):
        yield (
            f"partition.balanced=true: no draw of {BALANCED_TRIES} had all clients within half to "
            f"one and a half of the mean size. Clients have {sizes.min()} to {sizes.max()} samples."
        )
