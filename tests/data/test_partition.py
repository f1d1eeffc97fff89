from __future__ import annotations

import dataclasses
import math
import re
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedssl.config import PartitionParams
from fedssl.data import partition as module
from fedssl.data.dataset import Dataset, Groups, Split
from fedssl.data.partition import (
    Classes,
    Dirichlet,
    Folder,
    Iid,
    Samples,
    Skew,
    client_names,
    distance,
    partition,
    table,
    uneven,
)
from fedssl.util.errors import UserError

pytestmark = pytest.mark.filterwarnings("error")  # numpy warns where it divides 0 by 0

INF = float("inf")
COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any)
SEEDS = st.integers(0, 2**31)
# Whatever the number of places drawn at once, the partition must be sound.
WINDOWS = st.sampled_from([1, 3, 8192])


def data(counts: Sequence[int], seed: int = 0) -> Split:
    """As many samples of each class as ``counts`` says, in random order."""
    labels = np.repeat(np.arange(len(counts)), counts)
    return unlabeled(np.random.default_rng(seed).permutation(labels))


def unlabeled(labels: NDArray[np.int64] | int) -> Split:
    count = labels if isinstance(labels, int) else len(labels)
    images = (torch.zeros(count, 1, 1, 1, dtype=torch.uint8),)
    return Split(images, None if isinstance(labels, int) else torch.from_numpy(labels))


def labels_of(split: Split) -> NDArray[np.int64]:
    assert split.labels is not None
    return split.labels.numpy()


def distinct(groups: Groups, split: Split) -> NDArray[np.int64]:
    """The number of classes that each client holds."""
    owners = np.repeat(np.arange(len(groups)), groups.sizes)
    pairs = np.unique(owners * 1000 + labels_of(split)[groups.members])
    return np.bincount(pairs // 1000, minlength=len(groups))


def check_disjoint(groups: Groups, total: int) -> None:
    assert groups.offsets[0] == 0
    assert groups.offsets[-1] == len(groups.members)
    assert len(np.unique(groups.members)) == len(groups.members)
    assert groups.members.min() >= 0
    assert groups.members.max() < total


def check_all_used(groups: Groups, total: int) -> None:
    assert np.array_equal(np.sort(groups.members), np.arange(total))


CIFAR100 = data([500] * 100)
DIGITS = data([18] * 10)
EACH = [
    Iid.Params("iid", clients=7),
    Samples.Params("samples", samples=4, alpha=0.0),
    Samples.Params("samples", samples=4, alpha=0.5),
    Samples.Params("samples", samples=4, alpha=INF),
    Classes.Params("classes", clients=5, classes=4),
    Dirichlet.Params("dirichlet", clients=5, alpha=0.5),
    Dirichlet.Params("dirichlet", clients=5, alpha=0.1, balanced=True),
    Skew.Params("skew", clients=5, beta=0.3),
    Skew.Params("skew", clients=20, beta=0.0),
]
names = pytest.mark.parametrize("params", EACH, ids=str)


# Every partition.


@names
def test_same_seed_same_partition_whatever_the_global_generator(params: PartitionParams) -> None:
    np.random.seed(1)
    torch.manual_seed(1)
    one = partition(params, DIGITS, 10, 3)
    np.random.seed(2)
    torch.manual_seed(2)
    two = partition(params, DIGITS, 10, 3)
    assert np.array_equal(one.members, two.members)
    assert np.array_equal(one.offsets, two.offsets)


@names
def test_another_seed_is_another_partition(params: PartitionParams) -> None:
    one, two = (partition(params, DIGITS, 10, seed) for seed in (3, 4))
    sets = [[set(g[k].tolist()) for k in range(len(g))] for g in (one, two)]
    assert sets[0] != sets[1]


@names
def test_members_are_not_in_the_order_of_the_data(params: PartitionParams) -> None:
    groups = partition(params, DIGITS, 10, 3)
    assert any((np.diff(groups[k]) < 0).any() for k in range(len(groups)))


@pytest.mark.parametrize(
    ("params", "members"),
    [
        (Iid.Params("iid", clients=3), [0, 6, 1, 2, 7, 8, 5, 4, 9, 3]),
        (Samples.Params("samples", samples=3, alpha=0.0), [0, 1, 4, 3, 7, 5, 6, 2, 8]),
        (Samples.Params("samples", samples=3, alpha=1.0), [0, 1, 4, 3, 6, 7, 2, 8, 5]),
        # As they were before there were sources, and so are the papers' recipes.
        (
            Dirichlet.Params("dirichlet", clients=3, alpha=0.5),
            [0, 6, 2, 7, 8, 5, 1, 4, 9, 3],
        ),
        (Classes.Params("classes", clients=3, classes=1), [0, 1, 4, 3, 6, 2, 8, 7, 5, 9]),
    ],
    ids=str,
)
def test_every_machine_agrees(params: PartitionParams, members: list[int]) -> None:
    labels = np.array([0, 0, 1, 0, 0, 2, 1, 2, 1, 2])
    assert partition(params, unlabeled(labels), 3, 11).members.tolist() == members


# iid


@given(total=st.integers(1, 200), clients=st.integers(1, 200), seed=SEEDS)
def test_iid_uses_all_and_is_even(total: int, clients: int, seed: int) -> None:
    assume(clients <= total)
    groups = partition(Iid.Params("iid", clients=clients), unlabeled(total), 0, seed)
    check_all_used(groups, total)
    assert len(groups) == clients
    assert groups.sizes.max() - groups.sizes.min() <= 1


# samples


@given(
    counts=COUNTS,
    size=st.integers(1, 20),
    share=st.floats(0.1, 1.0),
    alpha=st.sampled_from([0.0, 1e-300, 1e-3, 0.3, 1.0, 50.0, 1e308, INF]),
    seed=SEEDS,
    window=WINDOWS,
)
def test_samples_are_disjoint_and_sizes_exact(
    counts: list[int], size: int, share: float, alpha: float, seed: int, window: int
) -> None:
    split = data(counts, seed)
    assume(size <= len(split))
    clients = math.ceil(share * (len(split) // size))
    with patch.object(module, "_WINDOW", window):
        params = Samples.Params(
            "samples", samples=size, alpha=alpha, clients=None if share == 1 else clients
        )
        groups = partition(params, split, len(counts), seed)
    check_disjoint(groups, len(split))
    assert groups.sizes.tolist() == [size] * clients


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1000.0, INF])
@pytest.mark.parametrize(("size", "clients"), [(1, 50_000), (4, 12_500), (16, 3_125)])
def test_samples_at_full_size(size: int, clients: int, alpha: float) -> None:
    groups = partition(Samples.Params("samples", samples=size, alpha=alpha), CIFAR100, 100, 5)
    assert len(groups) == clients
    assert (groups.sizes == size).all()
    check_all_used(groups, 50_000)
    held = distinct(groups, CIFAR100)
    if alpha == 0:
        assert (held > 1).sum() <= 100
        assert (held > 1).any() == (size == 16)  # 500 = 31 × 16 + 4, and 125 × 4
    elif alpha < INF:  # the Dirichlet-multinomial's chance that a class is absent
        absent = math.prod((0.99 * alpha + j) / (alpha + j) for j in range(size))
        assert held.mean() == pytest.approx(100 * (1 - absent), rel=0.02)


@given(counts=COUNTS, size=st.integers(1, 20), seed=SEEDS, window=WINDOWS)
def test_samples_at_alpha_0_leave_a_class_only_when_it_is_empty(
    counts: list[int], size: int, seed: int, window: int
) -> None:
    split = data(counts, seed)
    assume(size <= len(split))
    with patch.object(module, "_WINDOW", window):
        groups = partition(
            Samples.Params("samples", samples=size, alpha=0.0), split, len(counts), seed
        )
    drawn = labels_of(split)[groups.members]
    change = np.flatnonzero(np.diff(drawn)) + 1  # places whose class is not the one before
    for place in change[change % size != 0]:
        assert drawn[place - 1] not in drawn[place:]
        assert (drawn[:place] == drawn[place - 1]).sum() == counts[drawn[place - 1]]


def test_samples_at_alpha_0_choose_the_class_by_its_share() -> None:
    split = data([6000, 3000, 1000])
    groups = partition(Samples.Params("samples", samples=5, alpha=0.0, clients=500), split, 3, 2)
    first = np.bincount(labels_of(split)[groups.members[::5]], minlength=3) / 500
    assert first == pytest.approx([0.6, 0.3, 0.1], abs=0.06)
    assert (distinct(groups, split) == 1).all()


@pytest.mark.parametrize("alpha", [1000.0, INF])
def test_samples_at_large_alpha_follow_the_prior(alpha: float) -> None:
    split = data([6000, 3000, 1000])
    groups = partition(Samples.Params("samples", samples=500, alpha=alpha, clients=10), split, 3, 2)
    for k in range(10):
        share = np.bincount(labels_of(split)[groups[k]], minlength=3) / 500
        assert share == pytest.approx([0.6, 0.3, 0.1], abs=0.1)


def test_samples_of_a_class_are_random() -> None:
    split = data([50, 50])
    params = Samples.Params("samples", samples=10, alpha=1.0, clients=1)
    taken = np.concatenate([partition(params, split, 2, s).members for s in range(300)])
    times = np.bincount(taken, minlength=100)  # 30 each; 5 is its standard deviation
    assert times.min() > 8
    assert times.max() < 55


def slow(
    counts: Sequence[int], clients: int, size: int, alpha: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """The process as Hsu et al. state it, place by place: the class of each place."""
    prior = np.array(counts) / sum(counts)
    left = np.array(counts)
    drawn = []
    for _ in range(clients):
        q = rng.dirichlet(alpha * prior)
        for _ in range(size):
            upto = np.cumsum(np.where(left > 0, q, 0))
            c = int(np.searchsorted(upto, rng.random() * upto[-1], side="right"))
            left[c] -= 1
            drawn.append(c)
    return np.array(drawn).reshape(clients, size)


def test_samples_hold_as_many_classes_as_the_slow_process_gives() -> None:
    split, rng = data([100] * 10), np.random.default_rng(0)
    quick = [
        distinct(
            partition(Samples.Params("samples", samples=10, alpha=1.0), split, 10, seed), split
        )
        for seed in range(20)
    ]
    reference = [
        [len(set(row)) for row in slow([100] * 10, 100, 10, 1.0, rng).tolist()] for _ in range(20)
    ]
    error = math.sqrt(np.var(quick) / np.size(quick) + np.var(reference) / np.size(reference))
    assert abs(np.mean(quick) - np.mean(reference)) < 4 * error
    assert 4 * error < 0.15  # about 2.9 classes a client: the comparison says something


@pytest.mark.parametrize(
    ("counts", "size", "alpha", "window"),
    [
        ([6, 4, 2], 4, 0.7, 3),
        ([6, 4, 2], 4, 5.0, 8192),
    ],
)
def test_samples_have_the_distribution_of_the_slow_process_as_classes_run_out(
    counts: list[int], size: int, alpha: float, window: int
) -> None:
    """Chi-square of two samples, on what each client draws, in order; every sample is used."""
    split, rng, runs = data(counts), np.random.default_rng(1), 1500
    labels, params = labels_of(split), Samples.Params("samples", samples=size, alpha=alpha)
    clients = len(split) // size
    with patch.object(module, "_WINDOW", window):
        quick = [labels[partition(params, split, 3, seed).members] for seed in range(runs)]
    reference = [slow(counts, clients, size, alpha, rng) for _ in range(runs)]
    for k in range(clients):
        ours = Counter(tuple(q[k * size :][:size].tolist()) for q in quick)
        theirs = Counter(tuple(r[k].tolist()) for r in reference)
        frequent = [c for c in ours | theirs if ours[c] + theirs[c] >= 20]
        chi = sum((ours[c] - theirs[c]) ** 2 / (ours[c] + theirs[c]) for c in frequent)
        assert len(frequent) > 8
        assert chi < len(frequent) + 4 * math.sqrt(2 * len(frequent))


@pytest.mark.parametrize("window", [8, 16])  # client 1 is drawn after, or before, class 0 is gone
def test_samples_keep_the_concentration_of_the_classes_that_are_left(window: int) -> None:
    """Without class 0, q is Dir(α/4, α/4): two places agree with chance (α/4 + 1) / (α/2 + 1)."""
    split, alpha, agree = data([8, 4, 4]), 0.5, []
    for seed in range(2000):
        with patch.object(module, "_WINDOW", window):
            groups = partition(Samples.Params("samples", samples=8, alpha=alpha), split, 3, seed)
        if not labels_of(split)[groups[0]].any():  # client 0 took all of class 0
            first, second = labels_of(split)[groups[1][:2]]
            agree.append(first == second)
    assert len(agree) > 400
    assert np.mean(agree) == pytest.approx((alpha / 4 + 1) / (alpha / 2 + 1), abs=0.04)


def test_samples_without_labels_at_infinite_alpha() -> None:
    some = torch.tensor([0, 1, -1] * 20)
    for split in (unlabeled(60), Split(unlabeled(60).images, some)):
        groups = partition(Samples.Params("samples", samples=6, alpha=INF), split, 0, 1)
        check_all_used(groups, 60)


def test_fifty_thousand_clients_within_a_second_and_little_memory() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        partition(Samples.Params("samples", samples=1, alpha=0.1), CIFAR100, 100, 1)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 1.0
    tracemalloc.start()
    partition(Samples.Params("samples", samples=1, alpha=0.1), CIFAR100, 100, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6


# classes


@given(numbers=st.data(), total=st.integers(1, 12), seed=SEEDS)
def test_classes_are_always_dealt_evenly(numbers: st.DataObject, total: int, seed: int) -> None:
    each = numbers.draw(st.integers(1, total), label="classes a client")
    step = total // math.gcd(total, each)
    clients = step * numbers.draw(st.integers(1, 40 // step + 1), label="clients / step")
    sets = clients * each // total
    extra = numbers.draw(st.lists(st.integers(0, 20), min_size=total, max_size=total))
    counts = [sets + e for e in extra]
    split = data(counts, seed)
    groups = partition(Classes.Params("classes", clients=clients, classes=each), split, total, seed)
    check_all_used(groups, len(split))
    assert len(groups) == clients
    held = np.stack(
        [np.bincount(labels_of(split)[groups[k]], minlength=total) for k in range(clients)]
    )
    assert ((held > 0).sum(axis=1) == each).all()
    for c, count in enumerate(counts):
        pieces = held[:, c][held[:, c] > 0]
        assert len(pieces) == sets
        assert set(pieces) <= {count // sets, -(-count // sets)}


def test_classes_example_of_the_fedema_appendix() -> None:
    split = data([5000] * 10)
    groups = partition(Classes.Params("classes", clients=5, classes=4), split, 10, 0)
    for k in range(5):
        held = np.bincount(labels_of(split)[groups[k]], minlength=10)
        assert sorted(held.tolist()) == [0] * 6 + [2500] * 4


def test_every_class_is_as_likely_for_every_client() -> None:
    split, times = data([4] * 6), np.zeros((6, 6))
    for seed in range(300):
        groups = partition(Classes.Params("classes", clients=6, classes=2), split, 6, seed)
        for k in range(6):
            times[k, np.unique(labels_of(split)[groups[k]])] += 1
    assert times.min() > 65  # 100 each; 8 is its standard deviation
    assert times.max() < 135


def test_neighbouring_clients_may_share_a_class() -> None:
    """The dealing is random, not a rotation in which a class comes back when all were dealt."""
    split, shared = data([4] * 6), 0
    for seed in range(300):
        groups = partition(Classes.Params("classes", clients=6, classes=2), split, 6, seed)
        one, two = (set(labels_of(split)[groups[k]].tolist()) for k in range(2))
        shared += bool(one & two)
    assert 90 < shared < 150  # 120 expected: 1 - (8 of 10 sets) × (6 of the other 8)


def test_classes_without_a_sample_do_not_count() -> None:
    split = data([8, 0, 8, 0])
    groups = partition(Classes.Params("classes", clients=4, classes=1), split, 4, 0)
    assert groups.sizes.tolist() == [4] * 4


@given(total=st.integers(2, 30), clients=st.integers(1, 30), each=st.integers(1, 30))
def test_classes_that_do_not_divide_name_numbers_that_do(
    total: int, clients: int, each: int
) -> None:
    assume(each <= total and clients * each % total)
    split = data([60] * total)
    with pytest.raises(UserError, match="do not divide evenly") as error:
        partition(Classes.Params("classes", clients=clients, classes=each), split, total, 0)
    advice = re.search(r"use partition.classes=(\d+) or partition.clients=(\d+)", str(error.value))
    assert advice is not None
    for k, classes in ((clients, int(advice[1])), (int(advice[2]), each)):
        assert (
            len(partition(Classes.Params("classes", clients=k, classes=classes), split, total, 0))
            == k
        )


# dirichlet


@given(
    counts=COUNTS,
    clients=st.integers(1, 6),
    alpha=st.sampled_from([1e-300, 0.05, 0.5, 5.0, 1e308, INF]),
    seed=SEEDS,
)
def test_dirichlet_uses_all_and_leaves_no_client_empty(
    counts: list[int], clients: int, alpha: float, seed: int
) -> None:
    split = data(counts, seed)
    assume(clients <= len(split))
    try:
        groups = partition(
            Dirichlet.Params("dirichlet", clients=clients, alpha=alpha), split, len(counts), seed
        )
    except UserError as error:
        assert clients > 1
        assert "use a larger partition.alpha or fewer partition.clients" in str(error)
        return
    check_all_used(groups, len(split))
    assert len(groups) == clients
    assert groups.sizes.min() >= 1


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_shares_have_the_right_spread(alpha: float) -> None:
    """Of two clients, the first one's share of a class is Beta(α, α): variance 1 / (8α + 4)."""
    split = data([100] * 500)
    groups = partition(Dirichlet.Params("dirichlet", clients=2, alpha=alpha), split, 500, 0)
    share = np.bincount(labels_of(split)[groups[0]], minlength=500) / 100
    assert share.mean() == pytest.approx(0.5, abs=0.06)
    assert share.var() == pytest.approx(1 / (8 * alpha + 4), rel=0.2)


def test_dirichlet_at_tiny_alpha_gives_a_class_to_one_client() -> None:
    split = data([10] * 40)
    groups = partition(Dirichlet.Params("dirichlet", clients=3, alpha=1e-6), split, 40, 0)
    assert distinct(groups, split).sum() == 40
    assert groups.sizes.min() > 50  # 133 each on average


def test_dirichlet_at_infinite_alpha_divides_evenly() -> None:
    split = data([10] * 40)
    groups = partition(Dirichlet.Params("dirichlet", clients=4, alpha=INF), split, 40, 0)
    for k in range(4):
        assert set(np.bincount(labels_of(split)[groups[k]], minlength=40)) == {2, 3}
    # A class smaller than the number of clients: its samples do not go to the same ones each time.
    groups = partition(Dirichlet.Params("dirichlet", clients=20, alpha=INF), split, 40, 0)
    assert groups.sizes.min() > 10


def test_dirichlet_draws_again_when_a_client_is_empty() -> None:
    split, params = data([20] * 4), Dirichlet.Params("dirichlet", clients=5, alpha=0.2)
    with patch.object(module, "_TRIES", 1):
        refused = 0
        for seed in range(20):
            try:
                partition(params, split, 4, seed)
            except UserError:
                refused += 1
    assert 0 < refused < 20
    for seed in range(20):
        assert partition(params, split, 4, seed).sizes.min() >= 1


def test_dirichlet_gives_up_at_once_where_it_is_hopeless() -> None:
    with patch.object(Dirichlet, "_draw", autospec=True, side_effect=Dirichlet._draw) as draw:
        with pytest.raises(UserError, match="a larger"):
            partition(Dirichlet.Params("dirichlet", clients=170, alpha=1.0), DIGITS, 10, 0)
        assert draw.call_count == 1


@given(
    counts=COUNTS,
    clients=st.integers(1, 6),
    alpha=st.sampled_from([0.02, 0.5, 5.0, INF]),
    seed=SEEDS,
)
def test_balanced_dirichlet_uses_all_and_is_the_first_balanced_draw_or_the_best(
    counts: list[int], clients: int, alpha: float, seed: int
) -> None:
    """Against a plain search: every draw made in full, and its sizes counted."""
    split = data(counts, seed)
    assume(clients <= len(split))
    params = Dirichlet.Params("dirichlet", clients=clients, alpha=alpha, balanced=True)
    order = module._shuffle(len(split), seed)
    by_class = Groups.from_labels(labels_of(split)[order], len(counts))
    mean, best, wanted = len(split) / clients, (INF, INF), None
    for attempt in range(20):
        owners = Dirichlet(params)._draw(by_class, module._generator(seed, attempt))
        sizes = np.bincount(owners, minlength=clients)
        if sizes.min() >= mean / 2 and sizes.max() <= 1.5 * mean:
            wanted = sizes
            break
        if ((sizes == 0).sum(), sizes.std()) < best:
            best, wanted = ((sizes == 0).sum(), sizes.std()), sizes
    assert wanted is not None
    with patch.object(module, "_BALANCED_TRIES", 20):
        if wanted.min() == 0:
            with pytest.raises(UserError, match="would get no sample"):
                partition(params, split, len(counts), seed)
            return
        groups = partition(params, split, len(counts), seed)
        said = list(uneven(params, groups.sizes))
    check_all_used(groups, len(split))
    assert groups.sizes.tolist() == wanted.tolist()
    assert bool(said) == (groups.sizes.min() < mean / 2 or groups.sizes.max() > 1.5 * mean)


def test_dirichlet_as_dec_ssl_draws_it() -> None:
    """Five clients of CIFAR-10 are always balanced, a plain draw is not."""
    split, plain = data([500] * 10), 0
    for seed in range(20):
        params = Dirichlet.Params("dirichlet", clients=5, alpha=0.02, balanced=True)
        sizes = partition(params, split, 10, seed).sizes
        assert sizes.min() >= 500 and sizes.max() <= 1500
        assert not list(uneven(params, sizes))
        try:
            sizes = partition(dataclasses.replace(params, balanced=False), split, 10, seed).sizes
            plain += sizes.min() >= 500 and sizes.max() <= 1500
        except UserError:
            pass
    assert plain < 15


def test_where_balance_is_out_of_reach_it_is_said() -> None:
    """20 clients, α = 0.02: a class goes to few clients, and most are not within the range."""
    split = data([5000] * 10)
    params = Dirichlet.Params("dirichlet", clients=20, alpha=0.02, balanced=True)
    groups = partition(params, split, 10, 0)
    check_all_used(groups, 50_000)
    (note,) = uneven(params, groups.sizes)
    low, high = groups.sizes.min(), groups.sizes.max()
    assert re.search(f"none of 1000 draws .* {low} to {high} samples", note)
    assert "\n" not in note
    assert not list(uneven(dataclasses.replace(params, balanced=False), groups.sizes))
    assert not list(uneven(Iid.Params("iid"), groups.sizes))


# The distance of clients to the whole (issue: near uniform, near one class, monotone).


def test_distance_is_half_the_sum_of_differences() -> None:
    labels = np.array([0, 0, 0, 1, 1, 2, -1, 2])
    groups = groups_of([0, 1, 3], [4, 5, 6], [2])
    # Of all six: 1/2, 1/3, 1/6. Clients: (2/3, 1/3, 0), (0, 1/2, 1/2), (1, 0, 0).
    assert distance(groups, labels) == pytest.approx((1 / 6 + 1 / 2 + 1 / 2) / 3)
    assert distance(groups_of([0, 3], [1, 4]), labels) == 0
    # A client without any label says nothing.
    assert distance(groups_of([0, 3], [1, 4], [6]), labels) == 0


def mean_distance(params: PartitionParams, split: Split, classes: int) -> float:
    labels = labels_of(split)
    return float(
        np.mean([distance(partition(params, split, classes, s), labels) for s in range(10)])
    )


@pytest.mark.parametrize("balanced", [False, True])
def test_dirichlet_goes_from_uniform_to_one_class(balanced: bool) -> None:
    """Ten classes, ten clients: from 0 to 0.9, which is one class each."""
    split = data([200] * 10)
    alphas = [1000.0, 100.0, 5.0, 1.0, 0.3, 0.1, 0.05]
    found = [
        mean_distance(
            Dirichlet.Params("dirichlet", clients=10, alpha=alpha, balanced=balanced), split, 10
        )
        for alpha in alphas
    ]
    assert found[0] < 0.03
    assert found[-1] > 0.7
    assert np.all(np.diff(found) > 0)


def test_dirichlet_at_small_alpha_is_near_one_class() -> None:
    """Two classes and clients, balanced: at α → 0 each client has a class, 1/2 from the whole."""
    split = data([500] * 2)
    params = Dirichlet.Params("dirichlet", clients=2, alpha=0.005, balanced=True)
    assert mean_distance(params, split, 2) > 0.49


# skew


@given(
    counts=COUNTS,
    clients=st.integers(1, 30),
    beta=st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.99, 1.0]),
    seed=SEEDS,
)
def test_skew_uses_all_and_leaves_no_client_empty(
    counts: list[int], clients: int, beta: float, seed: int
) -> None:
    split = data(counts, seed)
    assume(clients <= len(split))
    params = Skew.Params("skew", clients=clients, beta=beta)
    try:
        groups = partition(params, split, len(counts), seed)
    except UserError as error:
        assert "use fewer partition.clients" in str(error)
        assert beta < 1
        return
    check_all_used(groups, len(split))
    assert len(groups) == clients
    assert groups.sizes.min() >= 1


@given(total=st.integers(1, 100), clients=st.integers(1, 100), seed=SEEDS)
def test_skew_at_beta_1_is_iid(total: int, clients: int, seed: int) -> None:
    assume(clients <= total)
    split = unlabeled(np.arange(total) % 3)
    skew = partition(Skew.Params("skew", clients=clients, beta=1.0), split, 3, seed)
    iid = partition(Iid.Params("iid", clients=clients), split, 3, seed)
    assert np.array_equal(skew.members, iid.members)
    assert np.array_equal(skew.offsets, iid.offsets)


@given(
    counts=st.lists(st.integers(30, 60), min_size=1, max_size=10),
    clients=st.integers(1, 30),
    seed=SEEDS,
)
def test_skew_at_beta_0_is_exclusive(counts: list[int], clients: int, seed: int) -> None:
    """No class of two clients, or no client of two classes; classes of unequal sizes too."""
    split, classes = data(counts, seed), len(counts)
    groups = partition(Skew.Params("skew", clients=clients, beta=0.0), split, classes, seed)
    check_all_used(groups, len(split))
    held = module.counts(groups, labels_of(split))
    if clients <= classes:
        assert ((held > 0).sum(axis=0) == 1).all()
        each = (held > 0).sum(axis=1)
        assert set(each) <= {classes // clients, -(-classes // clients)}
        assert all(np.ptp(np.flatnonzero(row)) + 1 == n for row, n in zip(held, each, strict=True))
    else:
        assert ((held > 0).sum(axis=1) == 1).all()
        sharing = (held > 0).sum(axis=0)
        assert set(sharing) <= {clients // classes, -(-clients // classes)}
        for column in held.T:  # and its clients divide a class evenly
            assert np.ptp(column[column > 0]) <= 1


@pytest.mark.parametrize(("clients", "own"), [(5, 0.5), (10, 0.5), (100, 0.5)])
def test_skew_in_between(clients: int, own: float) -> None:
    """Each client has β of its samples as the whole has them, the rest of its own classes."""
    split = data([1000] * 10)
    groups = partition(Skew.Params("skew", clients=clients, beta=1 - own), split, 10, 1)
    assert np.ptp(groups.sizes) <= 1
    held = module.counts(groups, labels_of(split)) / groups.sizes[:, None]
    mine = max(1, 10 // clients)
    top = np.sort(held, axis=1)[:, -mine:].sum(axis=1)
    assert top == pytest.approx(np.full(clients, own + (1 - own) * mine / 10), abs=0.12)
    assert top.mean() == pytest.approx(own + (1 - own) * mine / 10, abs=0.02)


def test_distance_falls_with_beta() -> None:
    split = data([100] * 10)
    betas = [0.0, 0.2, 0.5, 0.8, 1.0]
    found = [mean_distance(Skew.Params("skew", clients=5, beta=beta), split, 10) for beta in betas]
    assert found[0] == pytest.approx(0.8)  # two classes of ten each
    assert found[-1] < 0.1
    assert np.all(np.diff(found) < 0)


# One class a client (Dec-SSL, B.6), and more clients than classes.


@pytest.mark.parametrize("clients", [10, 20, 100])
def test_one_class_a_client_shared_by_several(clients: int) -> None:
    split = data([203] * 10)
    groups = partition(Classes.Params("classes", clients=clients, classes=1), split, 10, 0)
    check_all_used(groups, len(split))
    held = module.counts(groups, labels_of(split))
    assert ((held > 0).sum(axis=1) == 1).all()
    assert ((held > 0).sum(axis=0) == clients // 10).all()
    assert np.ptp(groups.sizes) <= 1
    assert distance(groups, labels_of(split)) == pytest.approx(0.9, abs=0.01)


# folder


def test_cases_can_be_the_clients() -> None:
    split = Split((torch.zeros(4, 1, 2, 2, dtype=torch.uint8),), cases=np.array([1, 0, 1, 2]))
    groups = partition(Folder.Params("folder", level="case"), split, 0, 0)
    assert [groups[k].tolist() for k in range(3)] == [[1], [0, 2], [3]]
    with pytest.raises(UserError, match="no client folders"):
        partition(Folder.Params("folder"), split, 0, 0)


def test_folder_is_one_client_a_folder() -> None:
    split = Split(unlabeled(6).images, None, clients=np.array([2, 0, 2, 0, 2, 4]))
    groups = partition(Folder.Params("folder"), split, 0, 0)
    assert [groups[k].tolist() for k in range(len(groups))] == [[1, 3], [0, 2, 4], [5]]


def test_clients_have_the_names_of_their_own_folders() -> None:
    split = Split(unlabeled(6).images, None, np.array([2, 0, 2, 0, 2, 4]), np.array([0, 0, 1] * 2))
    data = Dataset("folder", split, None, (), ("aachen", "bern", "celle", "davos", "erfurt"))
    by_client, by_case = Folder.Params("folder"), Folder.Params("folder", level="case")
    groups = partition(by_client, split, 0, 0)
    assert client_names(by_client, groups, data) == ["aachen", "celle", "erfurt"]
    left = Groups(np.array([4, 0, 5]), np.array([0, 2, 3]))  # no image of aachen is trained on
    assert client_names(by_client, left, data) == ["celle", "erfurt"]
    for params in (by_case, Iid.Params("iid", clients=3)):
        assert client_names(params, groups, data) == ["0", "1", "2"]


# What is refused.

HALF = Split(unlabeled(180).images, torch.tensor([0, -1] * 90))


@pytest.mark.parametrize(
    ("params", "split", "message"),
    [
        (Iid.Params("iid", clients=181), DIGITS, "partition.clients=181: .*at most 180"),
        (Iid.Params("iid", clients=0), DIGITS, "partition.clients=0: .*at least 1"),
        (Samples.Params("samples", samples=0), DIGITS, "partition.samples=0: .*at least 1"),
        (Samples.Params("samples", samples=181), DIGITS, "partition.samples=181: .*at most 180"),
        (
            Samples.Params("samples", samples=4, alpha=0.0, clients=46),
            DIGITS,
            "partition.clients=46: .*at most 45",
        ),
        (
            Samples.Params("samples", samples=1, alpha=0.0, clients=0),
            DIGITS,
            "partition.clients=0: .*at least 1",
        ),
        (
            Samples.Params("samples", samples=1, alpha=0.0, clients=181),
            DIGITS,
            "partition.clients=181: .*at most 180",
        ),
        (
            Samples.Params("samples", samples=4, alpha=-0.5),
            DIGITS,
            "partition.alpha=-0.5: .*0 to inf",
        ),
        (
            Samples.Params("samples", samples=4, alpha=math.nan),
            DIGITS,
            "partition.alpha=nan: .*0 to inf",
        ),
        (
            Samples.Params("samples", samples=4, alpha=1.0),
            unlabeled(180),
            "180 of 180 .*=iid works.*alpha=inf",
        ),
        (
            Samples.Params("samples", samples=4, alpha=1.0),
            HALF,
            "90 of 180 .*partition.name=iid works",
        ),
        (
            Classes.Params("classes", clients=0, classes=2),
            DIGITS,
            "partition.clients=0: .*at least 1",
        ),
        (
            Classes.Params("classes", clients=181, classes=2),
            DIGITS,
            "partition.clients=181: .*at most 180",
        ),
        (
            Classes.Params("classes", clients=5, classes=11),
            DIGITS,
            "partition.classes=11: .*1 to 10",
        ),
        (Classes.Params("classes", clients=5, classes=0), DIGITS, "partition.classes=0: .*1 to 10"),
        (
            Classes.Params("classes", clients=5, classes=3),
            DIGITS,
            "partition.classes=3: .*classes=4 or .*=10",
        ),
        (
            Classes.Params("classes", clients=100, classes=2),
            DIGITS,
            "partition.clients=100: .*20 sets.*18 samples",
        ),
        (
            Classes.Params("classes", clients=5, classes=2),
            unlabeled(180),
            "classes: needs.*partition.name=iid",
        ),
        (
            Classes.Params("classes", clients=5, classes=2),
            HALF,
            "partition.name=classes: needs labels",
        ),
        (Dirichlet.Params("dirichlet", clients=0), DIGITS, "partition.clients=0: .*at least 1"),
        (
            Dirichlet.Params("dirichlet", clients=181),
            DIGITS,
            "partition.clients=181: .*at most 180",
        ),
        (
            Dirichlet.Params("dirichlet", clients=5, alpha=0.0),
            DIGITS,
            "partition.alpha=0.0: .*name=samples",
        ),
        (Dirichlet.Params("dirichlet", clients=5, alpha=-1.0), DIGITS, "partition.alpha=-1.0: "),
        (Dirichlet.Params("dirichlet", clients=5, alpha=math.nan), DIGITS, "partition.alpha=nan: "),
        (
            Dirichlet.Params("dirichlet", clients=150, alpha=0.1),
            DIGITS,
            "partition.alpha=0.1: .*larger .*fewer",
        ),
        (
            Dirichlet.Params("dirichlet", clients=5, alpha=1.0),
            unlabeled(180),
            "partition.name=iid works",
        ),
        (
            Dirichlet.Params("dirichlet", clients=5, alpha=1.0),
            HALF,
            "partition.name=dirichlet: needs labels",
        ),
        (
            Dirichlet.Params("dirichlet", clients=5, alpha=1.0),
            unlabeled(180),
            "partition.source=features$",
        ),
        (Skew.Params("skew", clients=0), DIGITS, "partition.clients=0: .*at least 1"),
        (Skew.Params("skew", clients=181), DIGITS, "partition.clients=181: .*at most 180"),
        (Skew.Params("skew", beta=-0.1), DIGITS, "partition.beta=-0.1: .*0 to 1"),
        (Skew.Params("skew", beta=1.1), DIGITS, "partition.beta=1.1: .*0 to 1"),
        (Skew.Params("skew", beta=math.nan), DIGITS, "partition.beta=nan: .*0 to 1"),
        (Skew.Params("skew"), unlabeled(180), "name=skew: needs labels.*source=features"),
        (
            Skew.Params("skew", clients=100),
            data([90, 2]),
            "partition.clients=100: more than the 92",
        ),
        (
            Skew.Params("skew", clients=50),
            data([90, 2]),
            "partition.clients=50: .*2 classes do not go round; use fewer",
        ),
        (Folder.Params("folder"), DIGITS, "partition.name=folder: .*data.levels must contain"),
        (PartitionParams("foldr"), DIGITS, "partition.name=foldr: unknown.*folder"),
    ],
    ids=str,
)
def test_refusals_are_one_line_with_key_and_fix(
    params: PartitionParams, split: Split, message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        partition(params, split, 10, 0)
    assert "\n" not in str(error.value)


# table


def groups_of(*clients: list[int]) -> Groups:
    return Groups(np.concatenate(clients), np.cumsum([0, *map(len, clients)]))


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.99])
@pytest.mark.parametrize(
    "params", [Iid.Params("iid", clients=7), Dirichlet.Params("dirichlet", clients=5, alpha=0.3)]
)
def test_a_fraction_keeps_that_part_of_each_client(
    params: PartitionParams, fraction: float
) -> None:
    split = data([40, 30, 50])
    whole = partition(params, split, 3, seed=1)
    part = partition(dataclasses.replace(params, fraction=fraction), split, 3, seed=1)
    assert len(part) == len(whole)
    check_disjoint(part, len(split))
    for k in range(len(whole)):
        assert len(part[k]) == max(1, round(fraction * len(whole[k])))
        places = [whole[k].tolist().index(member) for member in part[k]]
        assert places == sorted(places)  # the order is the client's own


def test_a_fraction_is_drawn_by_seed_and_client() -> None:
    split = data([100, 100])
    halves = [
        partition(Iid.Params("iid", fraction=0.5, clients=2), split, 2, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert np.array_equal(halves[0].members, halves[1].members)
    assert not np.array_equal(halves[0].members, halves[2].members)
    whole = partition(Iid.Params("iid", clients=2), split, 2, seed=0)
    kept = [np.isin(whole[k], halves[0][k]) for k in range(2)]
    assert not np.array_equal(*kept) and not kept[0][:50].all()


def test_table_of_few_classes_has_a_column_each() -> None:
    groups = groups_of([0, 1, 2], [3], [5, 7])
    labels = np.array([0, 0, 1, 0, 1, 1, 0, -1])
    assert table(groups, labels, ["cat", "a very long name"]).splitlines() == [
        "clients            3",
        "samples            6 used, 2 left out",
        "samples a client   1 smallest, 2 median, 3 largest",
        "classes a client   1 smallest, 1 median, 2 largest",
        "distance           0.356 on average (earth mover's, of a client's classes to all)",
        "",
        "client  samples  cat  a very lon",
        "     0        3    2           1",
        "     1        1    1           0",
        "     2        2    0           1",
    ]


def test_table_of_many_classes_shows_the_three_most_frequent() -> None:
    labels = np.array([5, 12, 12, 3, 3, 3, 1, 2, -1, 2])
    lines = table(groups_of(list(range(7)), [7, 8]), labels, [f"c{i}" for i in range(13)])
    assert lines.splitlines()[-3:] == [
        "client  samples  most frequent classes",
        "     0        7  c3×3, c12×2, c1×1, …",
        "     1        2  c2×1",
    ]


def test_table_of_another_source() -> None:
    lines = table(groups_of([0, 1], [2]), np.array([0, 1, 1]), ["0°", "180°"], word="rotations")
    assert "rotations a client 1 smallest, 1.5 median, 2 largest" in lines
    assert "a client's rotations" in lines
    assert "client  samples  0°  180°" in lines


def test_table_lists_twenty_clients() -> None:
    lines = table(groups_of(*([k] for k in range(25))), np.zeros(30, np.int64), ["x"]).splitlines()
    assert lines[-1] == "… and 5 more clients"
    assert lines[-2].split() == ["19", "1", "1"]
    full = table(groups_of(*([k] for k in range(20))), None, [])
    assert "more clients" not in full


def test_table_without_labels() -> None:
    lines = table(groups_of([1, 2], [0]), None, [], total=5)
    assert "3 used, 2 left out" in lines
    assert "classes" not in lines
    assert lines.endswith("     1        1")
    assert table(groups_of([1, 2], [0]), np.full(5, -1), []) == lines
    assert "3 used\n" in table(groups_of([1, 2], [0]), None, [])
