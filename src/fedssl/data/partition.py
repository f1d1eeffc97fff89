"""Partitions: which sample belongs to which client, as a pure function of the labels and the seed.

groups = partition(Samples.Params("samples", samples=16, alpha=0.0), split, classes=100, seed=1)
groups[7]   # the samples of client 7
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from fedssl import config
from fedssl.config import VARIANTS, PartitionParams, Recipe, SourceParams, plugins, variant
from fedssl.data.dataset import Dataset, Groups, Ints, Split
from fedssl.data.random import key, permutation
from fedssl.util.errors import UserError


def partition(params: PartitionParams, split: Split, classes: int, seed: int) -> Groups:
    """Divide the samples among clients; the data set has ``classes`` named classes."""
    chosen = variant("partition", params.name)
    with plugins.translate_errors():
        groups = chosen(params).split(split, classes, seed)
    if params.name not in VARIANTS["partition"]:
        _check_groups(groups, len(split), params.name)
    if params.fraction < 1:
        groups = _keep_fraction(groups, params.fraction, seed)
    return groups if params.minimum == 1 else _leave_out_small(params, groups)


def _leave_out_small(params: PartitionParams, groups: Groups) -> Groups:
    """Leave out the clients with fewer samples than the loss needs."""
    large = np.flatnonzero(groups.sizes >= params.minimum)
    if not len(large):
        most = groups.sizes.max()
        raise key_error(params, "minimum", "no client has so many images", f"Use at most {most}.")
    members, sizes = groups.select(large)
    return Groups(members, np.concatenate(([0], np.cumsum(sizes))))


def _keep_fraction(groups: Groups, fraction: float, seed: int) -> Groups:
    """Keep a random part of each client's samples, in their order, at least one."""

    def keep(client: int) -> Ints:
        members = groups[client]
        count = max(1, round(fraction * len(members)))
        order = permutation(key(seed, "fraction", client), len(members))
        return members[np.sort(order[:count])]

    kept = [keep(client) for client in range(len(groups))]
    return Groups(np.concatenate(kept), np.cumsum([0, *map(len, kept)]))


def _check_groups(groups: Any, samples: int, name: str) -> None:
    """Refuse a result of a user's partition with empty clients or samples that do not exist."""
    if not isinstance(groups, Groups):
        problem = f"split returned {type(groups).__name__}"
    elif not all(_has_integers(each) for each in (groups.members, groups.offsets)):
        problem = "members and offsets are not arrays of integers"
    elif groups.offsets[:1].tolist() + groups.offsets[-1:].tolist() != [0, len(groups.members)]:
        problem = "offsets do not start at 0 and end at the number of members"
    elif not len(groups) or int(groups.sizes.min()) < 1:
        problem = "a client has no sample"
    elif int(groups.members.min()) < 0 or int(groups.members.max()) >= samples:
        problem = f"members name samples beyond the {samples} that exist"
    elif len(np.unique(groups.members)) < len(groups.members):
        problem = "two clients have the same sample"
    else:
        return
    fix = "Return fedssl.data.dataset.Groups, with each sample in at most one client."
    raise UserError(problem, key="partition.name", value=name, fix=fix)


def _has_integers(array: Any) -> bool:
    return isinstance(array, np.ndarray) and bool(np.issubdtype(array.dtype, np.integer))


# What partitions share ------------------------------------------------------------------------


def key_error(params: PartitionParams, key: str, problem: str, fix: str) -> UserError:
    """Return an error about a key of a partition."""
    return UserError(problem, key=f"partition.{key}", value=getattr(params, key), fix=fix)


def check_at_most(params: PartitionParams, key: str, total: int) -> None:
    """Refuse more clients, or more samples for each, than there are samples."""
    if getattr(params, key) > total:
        raise key_error(params, key, f"more than the {total} samples", f"Use at most {total}.")


def shuffle(count: int, seed: int) -> Ints:
    """Return the samples in random order."""
    return permutation(key(seed, "partition", 0), count)


def shuffle_labels(params: PartitionParams, split: Split, seed: int) -> tuple[Ints, Ints]:
    """Return the samples in random order, and their labels in that order."""
    check_at_most(params, "clients", len(split))
    order = shuffle(len(split), seed)
    fix = "Use partition.name=iid or partition.source=features."
    return order, require_labels(params, split, fix)[order]


def random_generator(seed: int, attempt: int = 0) -> np.random.Generator:
    """Return the generator of one attempt to draw a partition."""
    return np.random.Generator(np.random.Philox(key=key(seed, "partition", 3, attempt)))


def rank_equal(values: Ints) -> Ints:
    """Count how many equal values stand before each one."""
    order = np.argsort(values, kind="stable")
    counts = np.bincount(values)
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank


def group_samples(samples: Ints, owners: Ints, clients: int) -> Groups:
    """Group samples by the client that owns each."""
    groups = Groups.from_labels(owners, clients)
    return Groups(samples[groups.members], groups.offsets)


def require_labels(params: PartitionParams, split: Split, fix: str) -> Ints:
    """Return the labels; refuse samples without one."""
    labels = split.full_labels.cpu().numpy()
    if missing := np.count_nonzero(labels < 0):
        problem = f"{missing} of {len(split)} samples have no label"
        raise key_error(params, "name", problem, fix)
    return labels


# The partitions (Dirichlet's are in dirichlet.py) -----------------------------------------------


@dataclass(frozen=True)
class Iid:
    """Samples dealt at random; the sizes of two clients differ by at most one."""

    @dataclass(frozen=True)
    class Params(PartitionParams):
        """Keys of an IID partition."""

        clients: int = config.key(10, ge=1, help="Number of clients.")

    params: Params

    def split(self, split: Split, classes: int, seed: int) -> Groups:
        """Divide samples; labels are not needed."""
        clients, total = self.params.clients, len(split)
        check_at_most(self.params, "clients", total)
        return Groups(shuffle(total, seed), np.arange(clients + 1) * total // clients)


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
        classes: int = config.key(2, ge=1, help="Number of classes of each client.")

    params: Params

    def split(self, split: Split, classes: int, seed: int) -> Groups:
        """Divide labelled samples; a class without a sample does not count."""
        clients, each = self.params.clients, self.params.classes
        order, labels = shuffle_labels(self.params, split, seed)
        _, labels, counts = np.unique(labels, return_inverse=True, return_counts=True)
        self._check(counts)
        sets = clients * each // len(counts)
        dealt = _deal_sets(len(counts), sets, clients, each, random_generator(seed))
        # Which client of a class gets one sample more is random too, so shuffle before grouping.
        places = permutation(key(seed, "partition", 1), clients * each)
        by_class = places[np.argsort(dealt.ravel()[places], kind="stable")].reshape(-1, sets)
        owners = by_class[labels, rank_equal(labels) * sets // counts[labels]] // each
        return group_samples(order, owners, clients)

    def _check(self, counts: Ints) -> None:
        clients, each, total = self.params.clients, self.params.classes, len(counts)
        sets = clients * each
        if each > total:
            problem = f"the data have {total} classes"
            raise key_error(self.params, "classes", problem, f"Use 1 to {total}.")
        if sets % total:
            problem = (
                f"{clients} clients × {each} classes = {sets} sets do not divide evenly over "
                f"{total} classes"
            )
            near = _nearest_multiple(total // math.gcd(total, clients), each)
            more = _nearest_multiple(total // math.gcd(total, each), clients)
            fix = f"Use partition.classes={near} or partition.clients={more}."
            raise key_error(self.params, "classes", problem, fix)
        if counts.min() < sets // total:
            cut = f"every class is cut into {sets // total} sets"
            problem = f"{cut}, but one has {counts.min()} samples"
            fix = "Use fewer clients, or fewer classes for each."
            raise key_error(self.params, "clients", problem, fix)


def _nearest_multiple(step: int, wanted: int) -> int:
    return max(1, round(wanted / step)) * step


def _deal_sets(
    classes: int, sets: int, clients: int, each: int, generator: np.random.Generator
) -> Ints:
    """Deal ``each`` different classes to every client, and every class ``sets`` times.

    Return ``[clients, each]``. A client draws from the sets that are left, so a class with more
    sets is likelier. A class with as many sets left as there are clients left must be taken. This
    never gets stuck: with m clients left there are m × each sets and no class has more than m, so
    at most ``each`` classes must be taken and at least ``each`` can be.
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


@dataclass(frozen=True)
class Skew:
    """A share β of each class goes to all clients evenly, the rest to few (Dec-SSL, C.2).

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
        """Divide labelled samples; every sample is used."""
        clients, beta = self.params.clients, self.params.beta
        order, labels = shuffle_labels(self.params, split, seed)
        _, labels, counts = np.unique(labels, return_inverse=True, return_counts=True)
        rank, exclusive = rank_equal(labels), np.rint((1 - beta) * counts).astype(np.int64)
        is_even = rank >= exclusive[labels]
        owners = np.empty(len(order), np.int64)
        owners[~is_even] = self._exclusive_owners(labels[~is_even], rank[~is_even], exclusive)
        # Shuffled already; equal sizes to within one.
        cuts = np.arange(1, clients) * is_even.sum() // clients
        owners[is_even] = np.searchsorted(cuts, np.arange(is_even.sum()), side="right")
        if len(np.unique(owners)) < clients:
            kind = "classes" if self.params.source == "labels" else "sources"
            problem = f"some clients would get no sample of the {len(counts)} {kind}"
            raise key_error(self.params, "clients", problem, "Use fewer clients.")
        return group_samples(order, owners, clients)

    def _exclusive_owners(self, labels: Ints, rank: Ints, sizes: Ints) -> Ints:
        """Return the client of each sample that clients do not divide evenly."""
        clients, classes = self.params.clients, len(sizes)
        if clients <= classes:
            return labels * clients // classes
        edges = -(-np.arange(classes + 1) * clients // classes)  # a class's first client
        return edges[labels] + rank * np.diff(edges)[labels] // sizes[labels]


@dataclass(frozen=True)
class Folder:
    """Each sub-folder is one client, unless none of its images is in training.

    Images that are only in test/, unreadable or held out are not in training.
    """

    @dataclass(frozen=True)
    class Params(PartitionParams):
        """Keys of a partition by folders."""

        recommended: ClassVar[Recipe] = {**PartitionParams.recommended, "data": {"name": "folder"}}

        level: Literal["client", "case"] = config.key(
            "client", help="Folder level that is a client: a site, or a case (a patient)."
        )

        def check(self, settings: config.Config) -> None:
            """Refuse data sets without folders."""
            name = settings.data.name
            if name not in config.OWN_DATA and not plugins.is_own(name):
                problem = f"data.name={name} has no folders"
                fix = "Use data.name=folder data.root=DIR, or another partition."
                against = "data.name"
                raise UserError(
                    problem, key="partition.name", value=self.name, fix=fix, against=against
                )

    params: Params

    def split(self, split: Split, classes: int, seed: int) -> Groups:
        """Divide data that were read with folders of that level."""
        level = self.params.level
        folders = split.clients if level == "client" else split.cases
        if folders is None:
            fix = f"Say what the folders mean, as in data.levels={level}."
            raise key_error(self.params, "name", f"the data have no {level} folders", fix)
        present, owners = np.unique(folders, return_inverse=True)
        return Groups.from_labels(owners, len(present))


def client_names(params: PartitionParams, groups: Groups, data: Dataset) -> list[str]:
    """Return the clients' names: those of their folders if each is one, else their numbers.

    A folder without a training image is no client.
    """
    folders = data.train.clients
    if isinstance(params, Folder.Params) and params.level == "client" and folders is not None:
        return [data.clients[folder] for folder in folders[groups.members[groups.offsets[:-1]]]]
    return list(map(str, range(len(groups))))
