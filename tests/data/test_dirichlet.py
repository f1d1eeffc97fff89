"""Partitions by Dirichlet distributions, against the processes that the papers state."""

from __future__ import annotations

import dataclasses
import math
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import refused
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from partitions import (
    CIFAR100,
    COUNTS,
    DIGITS,
    INF,
    SEEDS,
    average_distance,
    check_all_used,
    check_disjoint,
    data,
    labels_of,
    unlabeled,
)

from fedssl.data import dirichlet
from fedssl.data.client_table import count_labels
from fedssl.data.dataset import Groups, Split
from fedssl.data.dirichlet import Dirichlet, Samples, describe_imbalance
from fedssl.data.partition import (
    Iid,
    partition,
    random_generator,
    shuffle,
)
from fedssl.util.errors import UserError

pytestmark = pytest.mark.filterwarnings("error")  # numpy warns where it divides 0 by 0

# Whatever the number of places drawn at once, the partition must be sound.
WINDOWS = st.sampled_from([1, 3, 8192])


def distinct(groups: Groups, split: Split) -> NDArray[np.int64]:
    """The number of classes that each client holds."""
    return (count_labels(groups, labels_of(split)) > 0).sum(axis=1)


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
    with patch.object(dirichlet, "WINDOW", window):
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
    with patch.object(dirichlet, "WINDOW", window):
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
    with patch.object(dirichlet, "WINDOW", window):
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
        with patch.object(dirichlet, "WINDOW", window):
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
        assert error.key == "partition.alpha"
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
    with patch.object(dirichlet, "TRIES", 1):
        failures = 0
        for seed in range(20):
            try:
                partition(params, split, 4, seed)
            except UserError:
                failures += 1
    assert 0 < failures < 20
    for seed in range(20):
        assert partition(params, split, 4, seed).sizes.min() >= 1


def test_dirichlet_gives_up_at_once_where_it_is_hopeless() -> None:
    with patch.object(Dirichlet, "_draw", autospec=True, side_effect=Dirichlet._draw) as draw:
        with refused("partition.alpha", 1.0):
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
    order = shuffle(len(split), seed)
    by_class = Groups.from_labels(labels_of(split)[order], len(counts))
    mean, best, wanted = len(split) / clients, (INF, INF), None
    for attempt in range(20):
        owners = Dirichlet(params)._draw(by_class, random_generator(seed, attempt))
        sizes = np.bincount(owners, minlength=clients)
        if sizes.min() >= mean / 2 and sizes.max() <= 1.5 * mean:
            wanted = sizes
            break
        if ((sizes == 0).sum(), sizes.std()) < best:
            best, wanted = ((sizes == 0).sum(), sizes.std()), sizes
    assert wanted is not None
    with patch.object(dirichlet, "BALANCED_TRIES", 20):
        if wanted.min() == 0:
            with refused("partition.alpha", alpha):
                partition(params, split, len(counts), seed)
            return
        groups = partition(params, split, len(counts), seed)
        notes = list(describe_imbalance(params, groups.sizes))
    check_all_used(groups, len(split))
    assert groups.sizes.tolist() == wanted.tolist()
    assert bool(notes) == (groups.sizes.min() < mean / 2 or groups.sizes.max() > 1.5 * mean)


def test_dirichlet_as_dec_ssl_draws_it() -> None:
    """Five clients of CIFAR-10 are always balanced, a plain draw is not."""
    split, plain = data([500] * 10), 0
    for seed in range(20):
        params = Dirichlet.Params("dirichlet", clients=5, alpha=0.02, balanced=True)
        sizes = partition(params, split, 10, seed).sizes
        assert sizes.min() >= 500 and sizes.max() <= 1500
        assert not list(describe_imbalance(params, sizes))
        try:
            sizes = partition(dataclasses.replace(params, balanced=False), split, 10, seed).sizes
            plain += sizes.min() >= 500 and sizes.max() <= 1500
        except UserError:
            pass
    assert plain < 15


def test_balance_that_is_out_of_reach_is_noted() -> None:
    """20 clients, α = 0.02: a class goes to few clients, and most are not within the range."""
    split = data([5000] * 10)
    params = Dirichlet.Params("dirichlet", clients=20, alpha=0.02, balanced=True)
    groups = partition(params, split, 10, 0)
    check_all_used(groups, 50_000)
    (note,) = describe_imbalance(params, groups.sizes)
    low, high = groups.sizes.min(), groups.sizes.max()
    assert f"{low} to {high} samples" in note
    assert "\n" not in note
    assert not list(describe_imbalance(dataclasses.replace(params, balanced=False), groups.sizes))
    assert not list(describe_imbalance(Iid.Params("iid"), groups.sizes))


@pytest.mark.parametrize("balanced", [False, True])
def test_dirichlet_goes_from_uniform_to_one_class(balanced: bool) -> None:
    """Ten classes, ten clients: from 0 to 0.9, which is one class each."""
    split = data([200] * 10)
    alphas = [1000.0, 100.0, 5.0, 1.0, 0.3, 0.1, 0.05]
    found = [
        average_distance(
            Dirichlet.Params("dirichlet", clients=10, alpha=alpha, balanced=balanced), split, 10
        )
        for alpha in alphas
    ]
    assert found[0] < 0.03
    assert found[-1] > 0.7
    assert np.all(np.diff(found) > 0)
