"""Partitions: which sample belongs to which client, as a pure function of the labels and the seed.

groups = partition(Samples.Params("samples", samples=16, alpha=0.0), split, classes=100, seed=1)
groups[7]   # the samples of client 7
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from fedssl import config
from fedssl.config import PartitionParams, SourceParams, plugins, variant
from fedssl.data.dataset import Dataset, Groups, Split
from fedssl.data.random import key, mix, permutation
from fedssl.util.errors import UserError

Ints = NDArray[np.int64]
Shares = NDArray[np.floating[Any]]

_WINDOW = 8192  # places drawn at once: bounds the work that a class running out undoes
_TRIES = 50  # draws of the dirichlet partition before it gives up
_BALANCED_TRIES = 1000  # the same, where clients of about the same size are asked for
_UNLABELED = ", and so does partition.source=features"
_ROWS = 20  # clients that the table lists
_COLUMNS = 12  # the most classes that get a column each


def partition(params: PartitionParams, split: Split, classes: int, seed: int) -> Groups:
    """Return the samples of each client; ``classes`` is the number of classes of the data set."""
    chosen = variant("partition", params.name)
    with plugins.translate_errors():
        groups = cast(Groups, chosen(params).split(split, classes, seed))
    if params.name not in config.VARIANTS["partition"]:
        check_groups(groups, len(split), params.name)
    return groups if params.fraction == 1 else _thinned(groups, params.fraction, seed)


def check_groups(groups: object, samples: int, name: str) -> None:
    """Check that a user's partition gives each client samples that exist, and each to one only."""

    def refuse(problem: str) -> UserError:
        return UserError(problem, key="partition.name", value=name)

    if not isinstance(groups, Groups):
        kind = type(groups).__name__
        raise refuse(f"split returned {kind}, not fedssl.data.dataset.Groups")
    members, offsets = groups.members, groups.offsets
    arrays = [each for each in (members, offsets) if isinstance(each, np.ndarray)]
    if len(arrays) < 2 or not all(np.issubdtype(each.dtype, np.integer) for each in arrays):
        raise refuse("members and offsets must be arrays of whole numbers")
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(members):
        raise refuse(f"offsets must start with 0 and end with {len(members)}, the members")
    if not len(groups) or int(groups.sizes.min()) < 1:
        raise refuse("has a client without a sample; leave the client out")
    if int(members.min()) < 0 or int(members.max()) >= samples:
        raise refuse(f"names samples beyond the {samples} that there are")
    if len(np.unique(members)) < len(members):
        raise refuse("gives a sample to two clients")


def _thinned(groups: Groups, fraction: float, seed: int) -> Groups:
    """Each client keeps a random part of its samples, in their order, at least one."""
    kept = [
        own[
            np.sort(
                permutation(key(seed, "fraction", k), len(own))[
                    : max(1, round(fraction * len(own)))
                ]
            )
        ]
        for k, own in enumerate(groups[i] for i in range(len(groups)))
    ]
    return Groups(np.concatenate(kept), np.cumsum([0, *map(len, kept)]))


@dataclass(frozen=True)
class Iid:
    """Samples dealt at random; the sizes of two clients differ by at most one."""

    @dataclass(frozen=True)
    class Params(PartitionParams):
        """Keys of an IID partition."""

        clients: int = config.key(10, ge=1, help="Number of clients.")

    params: Params

    def split(self, split: Split, classes: int, seed: int) -> Groups:
        """Needs no labels."""
        clients, total = self.params.clients, len(split)
        _check_clients(clients, total)
        return Groups(_shuffle(total, seed), np.arange(clients + 1) * total // clients)


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

        samples: int = config.key(4, ge=1, help="Samples of each client.")
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
        """Needs labels, except at α = ∞."""
        clients, size = self._clients(len(split)), self.params.samples
        if math.isinf(self.params.alpha) and not _labeled(split):
            labels = np.zeros(len(split), np.int64)
        else:
            labels = _labels(split, "samples", " (and so does partition.alpha=inf)")
        counts = np.bincount(labels, minlength=classes)
        drawn = _Urn(counts, clients, size, self.params.alpha, seed).draw()
        order = _shuffle(len(split), seed)
        by_class = order[np.argsort(labels[order], kind="stable")]
        first = np.cumsum(counts) - counts
        return Groups(by_class[first[drawn] + _rank(drawn)], np.arange(clients + 1) * size)

    def _clients(self, total: int) -> int:
        size, clients = self.params.samples, self.params.clients
        if size > total:
            raise UserError(
                f"partition.samples={size}: more than the {total} samples there are; "
                f"use at most {total}"
            )
        if clients is None:
            return total // size
        _check_clients(clients, total)
        if clients * size > total:
            raise UserError(
                f"partition.clients={clients}: with partition.samples={size} that takes "
                f"{clients * size} samples of {total}; use at most {total // size} clients"
            )
        return clients


@dataclass(frozen=True)
class Classes:
    """Every client holds l classes, or sources (FedEMA, appendix B.1; Dec-SSL, B.6).

    K clients take Kl sets. Each of the C classes is cut into Kl/C sets, equal to within one sample,
    and a client gets l random sets of different classes.
    """

    @dataclass(frozen=True)
    class Params(SourceParams):
        """Keys of a partition by classes."""

        clients: int = config.key(5, ge=1, help="Number of clients.")
        classes: int = config.key(
            2, ge=1, help="l, the number of classes (or sources) of each client."
        )

    params: Params

    def split(self, split: Split, classes: int, seed: int) -> Groups:
        """Needs labels; a class without a sample does not count."""
        clients, each = self.params.clients, self.params.classes
        _check_clients(clients, len(split))
        order = _shuffle(len(split), seed)
        labels = _labels(split, "classes", _UNLABELED)[order]
        _, labels, counts = np.unique(labels, return_inverse=True, return_counts=True)
        self._check(counts)
        sets = clients * each // len(counts)
        dealt = _deal(len(counts), sets, clients, each, _generator(seed))
        # Which client of a class gets one sample more is random too, so shuffle before grouping.
        places = permutation(key(seed, "partition", 1), clients * each)
        by_class = places[np.argsort(dealt.ravel()[places], kind="stable")].reshape(-1, sets)
        owners = by_class[labels, _rank(labels) * sets // counts[labels]] // each
        return _grouped(order, owners, clients)

    def _check(self, counts: Ints) -> None:
        clients, each, total = self.params.clients, self.params.classes, len(counts)
        if not 1 <= each <= total:
            raise UserError(
                f"partition.classes={each}: the data has {total} classes; use 1 to {total}"
            )
        if clients * each % total:
            near = _nearest_multiple(total // math.gcd(total, clients), each)
            more = _nearest_multiple(total // math.gcd(total, each), clients)
            raise UserError(
                f"partition.classes={each}: {clients} clients × {each} classes = {clients * each} "
                f"sets do not divide evenly over {total} classes; use partition.classes={near} "
                f"or partition.clients={more}"
            )
        if counts.min() < clients * each // total:
            raise UserError(
                f"partition.clients={clients}: every class is cut into {clients * each // total} "
                f"sets, but one has {counts.min()} samples; use fewer clients or classes a client"
            )


@dataclass(frozen=True)
class Dirichlet:
    """Each class is divided over all clients by proportions ~ Dir(α, …, α); sizes vary.

    A draw that leaves a client without a sample is drawn again. So is, if ``balanced``, one with a
    client smaller than half or larger than one and a half of the mean, as in Dec-SSL; where that
    is out of reach, the most balanced draw is kept (see ``uneven``).
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
        """Needs labels; every sample is used."""
        clients, alpha = self.params.clients, self.params.alpha
        _check_clients(clients, len(split))
        order = _shuffle(len(split), seed)
        labels = Groups.from_labels(_labels(split, "dirichlet", _UNLABELED)[order], classes)
        balanced = self.params.balanced
        for attempt in [self._balanced(labels.sizes, seed)] if balanced else range(_TRIES):
            owners = self._draw(labels, _generator(seed, attempt))
            empty = clients - len(np.unique(owners))
            if not empty:
                return _grouped(order, owners, clients)
            if empty > 20:  # then a draw without any is out of reach
                break
        raise UserError(
            f"partition.alpha={alpha}: some of {clients} clients would get no sample; "
            "use a larger partition.alpha or fewer partition.clients"
        )

    def _draw(self, labels: Groups, generator: np.random.Generator) -> Ints:
        """The client of each sample, given the samples of each class."""
        owners = np.empty(len(labels.members), np.int64)
        for c, cuts in enumerate(self._cuts(labels.sizes, generator)):
            owners[labels[c]] = np.searchsorted(cuts, np.arange(labels.sizes[c]), side="right")
        return owners

    def _cuts(self, sizes: Ints, generator: np.random.Generator) -> Iterator[Shares]:
        """Where each class is cut into the clients' pieces."""
        for size in sizes:
            shares = _dirichlet(self.params.alpha, self.params.clients, generator)
            # One random offset for all cuts: the expected size of every piece is its share.
            yield np.floor(np.cumsum(shares) * size + generator.random())

    def _balanced(self, sizes: Ints, seed: int) -> int:
        """The first draw with sizes in the range, else the one with the least uneven ones."""
        clients = self.params.clients
        best, least = 0, (clients + 1, math.inf)
        for attempt in range(_BALANCED_TRIES):
            cuts = np.stack(list(self._cuts(sizes, _generator(seed, attempt))))
            held = np.diff(np.minimum(cuts, sizes[:, None]), axis=1, prepend=0).sum(axis=0)
            if _even(held):
                return attempt
            spread = (int((held == 0).sum()), float(held.std()))
            if spread < least:
                best, least = attempt, spread
        return best


def _even(sizes: Shares | Ints) -> bool:
    """Within half to one and a half of the mean (Dec-SSL)."""
    mean = sizes.mean()
    return bool(sizes.min() >= mean / 2 and sizes.max() <= 1.5 * mean)


def uneven(params: PartitionParams, sizes: Ints) -> Iterator[str]:
    """What to say of clients that were to be of about the same size, and are not."""
    if isinstance(params, Dirichlet.Params) and params.balanced and not _even(sizes):
        yield (
            f"partition.balanced=true: none of {_BALANCED_TRIES} draws had all clients within half "
            f"to one and a half of the mean size; the most balanced one is kept, with clients of "
            f"{sizes.min()} to {sizes.max()} samples"
        )


@dataclass(frozen=True)
class Skew:
    """Of each class a share β goes to all clients evenly, the rest to its own (Dec-SSL, C.2).

    At β = 1 that is ``iid``. At β = 0 clients take neighbouring classes whole; where there are
    more clients than classes, each has one, and its clients divide it evenly.
    """

    @dataclass(frozen=True)
    class Params(SourceParams):
        """Keys of a skewed partition."""

        clients: int = config.key(5, ge=1, help="Number of clients.")
        beta: float = config.key(
            0.0, ge=0, le=1, help="β, the share of each class that all clients divide evenly."
        )

    params: Params

    def split(self, split: Split, classes: int, seed: int) -> Groups:
        """Needs labels; every sample is used."""
        clients, beta = self.params.clients, self.params.beta
        _check_clients(clients, len(split))
        order = _shuffle(len(split), seed)
        labels = _labels(split, "skew", _UNLABELED)[order]
        _, labels, counts = np.unique(labels, return_inverse=True, return_counts=True)
        rank, own = _rank(labels), np.rint((1 - beta) * counts).astype(np.int64)
        even = rank >= own[labels]
        owners = np.empty(len(order), np.int64)
        owners[~even] = self._owners(labels[~even], rank[~even], own)
        # Shuffled already; equal sizes to within one.
        cuts = np.arange(1, clients) * even.sum() // clients
        owners[even] = np.searchsorted(cuts, np.arange(even.sum()), side="right")
        if len(np.unique(owners)) < clients:
            raise UserError(
                f"partition.clients={clients}: some would get no sample, as {len(counts)} "
                f"{'classes' if self.params.source == 'labels' else 'sources'} do not go round; "
                "use fewer partition.clients"
            )
        return _grouped(order, owners, clients)

    def _owners(self, labels: Ints, rank: Ints, own: Ints) -> Ints:
        """The client that has each sample of its own classes."""
        clients, classes = self.params.clients, len(own)
        if clients <= classes:
            return labels * clients // classes
        edges = -(-np.arange(classes + 1) * clients // classes)  # a class's first client
        return edges[labels] + rank * np.diff(edges)[labels] // own[labels]


@dataclass(frozen=True)
class Folder:
    """One sub-folder is one client; an empty one is refused.

    One of which no image is trained on (only in test/, unreadable, held out) is no client.
    """

    @dataclass(frozen=True)
    class Params(PartitionParams):
        """Keys of a partition by folders."""

        level: Literal["client", "case"] = config.key(
            "client", help="Folder level of a client. Clients of DERM are cases (DCCO paper, 4.3)."
        )

    params: Params

    def split(self, split: Split, classes: int, seed: int) -> Groups:
        """Needs data that was read with folders of that level."""
        level = self.params.level
        folders = split.clients if level == "client" else split.cases
        if folders is None:
            raise UserError(
                f"partition.name=folder: the data has no {level} folders; "
                f"data.levels must contain {level}, as in data.levels={level}"
            )
        present, owners = np.unique(folders, return_inverse=True)
        return Groups.from_labels(owners, len(present))


def client_names(params: PartitionParams, groups: Groups, data: Dataset) -> list[str]:
    """What the clients are called: by their folder where each is one, else by their number.

    A folder of which no image is trained on is no client, so a name's place says nothing.
    """
    folders = data.train.clients
    if isinstance(params, Folder.Params) and params.level == "client" and folders is not None:
        return [data.clients[folder] for folder in folders[groups.members[groups.offsets[:-1]]]]
    return list(map(str, range(len(groups))))


def called(names: Sequence[str], client: int) -> str:
    """A client in a sentence: by its folder's name, else by its number."""
    return worded(names[client] if names else str(client))


def worded(name: str) -> str:
    """A client's name in a sentence; a number alone would say nothing."""
    return f"client {name}" if name.isdecimal() else name


def table(
    groups: Groups,
    labels: Ints | None,
    classes: Sequence[str],
    total: int | None = None,
    names: Sequence[str] = (),
    word: str = "classes",
) -> str:
    """Who holds what, in plain text; ``total`` (samples in all) is only needed without labels.

    ``names`` are those of the clients, where they have any; ``word`` is what ``labels`` are.
    """
    if labels is not None:
        total = len(labels)
        if (labels < 0).all():
            labels = None
    lines = _summary(groups, labels, total, word)
    shown = [groups[k] for k in range(min(len(groups), _ROWS))]
    called = names or [str(k) for k in range(len(shown))]
    rows = [["client", "samples"], *([called[k], str(len(s))] for k, s in enumerate(shown))]
    if labels is not None:
        held = [Counter(labels[s][labels[s] >= 0].tolist()) for s in shown]
        rows = [a + b for a, b in zip(rows, _class_cells(held, classes, word), strict=True)]
    lines += ["", *_align(rows)]
    if len(groups) > _ROWS:
        lines.append(f"… and {len(groups) - _ROWS} more clients")
    return "\n".join(lines)


def _summary(groups: Groups, labels: Ints | None, total: int | None, word: str) -> list[str]:
    used = len(groups.members)
    lines = [
        f"clients            {len(groups)}",
        f"samples            {used} used" + (f", {total - used} left out" if total else ""),
        f"samples a client   {_spread(groups.sizes)}",
    ]
    if labels is not None:
        distinct = (counts(groups, labels) > 0).sum(axis=1)
        lines.append(f"{word + ' a client':<19}{_spread(distinct)}")
        lines.append(
            f"distance           {distance(groups, labels):.3f} on average (earth mover's, of a "
            f"client's {word} to all)"
        )
    return lines


def counts(groups: Groups, labels: Ints) -> Ints:
    """How many samples of each class every client has, ``[clients, classes]``; -1 is no class."""
    span = max(int(labels.max()) + 1, 1)
    owners, held = np.repeat(np.arange(len(groups)), groups.sizes), labels[groups.members]
    pairs = (owners * span + held)[held >= 0]
    return np.bincount(pairs, minlength=len(groups) * span).reshape(-1, span)


def distance(groups: Groups, labels: Ints) -> float:
    """The mean earth mover's distance from a client's classes to all clients' (Dec-SSL, Figure 17).

    Any two classes are at distance 1, so it is half the sum of the absolute differences of the
    shares: 0 for clients that are all alike, 1 - 1/C for one class of C equal ones each.
    """
    held = counts(groups, labels)
    held = held[held.sum(axis=1) > 0]
    shares = held / held.sum(axis=1, keepdims=True)
    return float(np.abs(shares - held.sum(axis=0) / held.sum()).sum(axis=1).mean() / 2)


def _spread(values: Ints) -> str:
    return f"{values.min()} smallest, {np.median(values):g} median, {values.max()} largest"


def _class_cells(held: list[Counter[int]], classes: Sequence[str], word: str) -> list[list[str]]:
    """A heading and a row a client: a column a class, or one column with the most frequent."""
    if len(classes) <= _COLUMNS:
        rows = [[str(counts[c]) for c in range(len(classes))] for counts in held]
        return [[name[:10] for name in classes], *rows]
    lines = [[f"most frequent {word}"]]
    for counts in held:
        ranked = sorted(counts, key=lambda c: (-counts[c], c))
        names = [f"{classes[c]}×{counts[c]}" for c in ranked[:3]]
        lines.append([", ".join(names + ["…"] * (len(ranked) > 3))])
    return lines


def _align(rows: list[list[str]]) -> list[str]:
    """Numbers to the right under their heading, text to the left."""
    columns = []
    for column in zip(*rows, strict=True):
        width = max(map(len, column))
        number = column[-1].isdigit()
        columns.append([cell.rjust(width) if number else cell.ljust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


class _Urn:
    """The class of each of the clients' places, one client after another (see ``Samples``).

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
        """The class of each place."""
        for start in range(0, len(self.drawn), _WINDOW):
            now, end = start, min(start + _WINDOW, len(self.drawn))
            self._draw(np.arange(now, end), now)
            while (now := self._accept(now, end)) < end:
                source = self.parent[now:end]
                own = (source < now) | (source == np.arange(now, end))
                gone = self.left[self.drawn[source]] == 0
                self._draw(now + np.flatnonzero(own & gone), now)
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
        """Take samples for the places from ``now`` on; the first place that there is none for."""
        source = self.parent[now:end]
        chain = np.where(source < now, np.arange(now, end), source) - now
        while not np.array_equal(further := chain[chain], chain):
            chain = further
        drawn = self.drawn[now:end] = self.drawn[source[chain]]
        short = _rank(drawn) >= self.left[drawn]
        taken = int(np.argmax(short)) if short.any() else len(drawn)
        self.left -= np.bincount(drawn[:taken], minlength=len(self.left))
        return now + taken


def _deal(classes: int, sets: int, clients: int, each: int, generator: np.random.Generator) -> Ints:
    """``each`` different classes for every client, ``[clients, each]``; every class ``sets`` times.

    A client draws from the sets that are left, so a class with more sets is likelier. A class with
    as many sets left as there are clients left must be taken. It never gets stuck: with m clients
    left there are m × each sets and no class has more than m, so at most ``each`` classes must be
    taken and at least ``each`` can be.
    """
    left = np.full(classes, sets)
    dealt = np.empty((clients, each), np.int64)
    with np.errstate(divide="ignore"):
        for k in range(clients):
            # The first arrivals of a race with rates `left` are a draw without replacement.
            arrival = generator.standard_exponential(classes) / left
            arrival[left == clients - k] = -1.0
            first = np.argpartition(arrival, each - 1)[:each]
            dealt[k] = first
            left[first] -= 1
    dealt.sort(axis=1)  # argpartition's own order is not the same on every machine
    return dealt


def _dirichlet(alpha: float, count: int, generator: np.random.Generator) -> Shares:
    """One draw of Dir(α, …, α). In logs: gamma numbers of a small shape underflow."""
    if math.isinf(alpha):
        return np.ones(count) / count
    logs = np.log(generator.standard_gamma(alpha + 1.0, count))
    logs -= generator.standard_exponential(count) / alpha  # Gamma(α) = Gamma(α + 1) U^(1/α)
    shares = np.exp(logs - logs.max())
    return shares / shares.sum()


def _uniform(state: int, counter: Ints) -> Shares:
    """A number in [0, 1) for each counter."""
    return (mix(state, counter.astype(np.uint64)) >> np.uint64(11)) * 2.0**-53


def _shuffle(count: int, seed: int) -> Ints:
    return permutation(key(seed, "partition", 0), count)


def _generator(seed: int, attempt: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key(seed, "partition", 3, attempt)))


def _rank(values: Ints) -> Ints:
    """How many equal values stand before each one."""
    order = np.argsort(values, kind="stable")
    counts = np.bincount(values)
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank


def _grouped(samples: Ints, owners: Ints, clients: int) -> Groups:
    groups = Groups.from_labels(owners, clients)
    return Groups(samples[groups.members], groups.offsets)


def _nearest_multiple(step: int, wanted: int) -> int:
    return max(1, round(wanted / step)) * step


def _labeled(split: Split) -> bool:
    return split.labels is not None and bool((split.labels >= 0).all())


def _labels(split: Split, name: str, hint: str = "") -> Ints:
    if split.labels is None or not _labeled(split):
        without = len(split) if split.labels is None else int((split.labels < 0).sum())
        raise UserError(
            f"partition.name={name}: needs labels, but {without} of {len(split)} samples have "
            f"none; partition.name=iid works without labels{hint}"
        )
    return cast(Ints, split.labels.cpu().numpy())


def _check_clients(clients: int, total: int) -> None:
    if clients > total:
        raise UserError(
            f"partition.clients={clients}: more than the {total} samples there are; "
            f"use at most {total}"
        )
