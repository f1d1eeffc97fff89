"""Partitions by Dirichlet distributions, against the processes that the papers state."""

from __future__ import annotations

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
    check,
    data,
    divided,
    held,
    labels_of,
    unlabeled,
)

from fedssl.data import dirichlet
from fedssl.data.dataset import Groups, Split
from fedssl.data.dirichlet import Dirichlet, describe_imbalance
from fedssl.data.partition import Iid, random_generator, shuffle
from fedssl.util.errors import UserError

pytestmark = pytest.mark.filterwarnings("error")  # numpy warns where it divides 0 by 0

# Whatever the number of places drawn at once, the partition must be sound.
WINDOWS = st.sampled_from([1, 3, 8192])


def samples(
    split: Split,
    size: int,
    alpha: float,
    seed: int = 0,
    clients: int | None = None,
    window: int = 8192,
) -> Groups:
    with patch.object(dirichlet, "WINDOW", window):
        return divided("samples", split, seed, samples=size, alpha=alpha, clients=clients)


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
    groups = samples(split, size, alpha, seed, None if share == 1 else clients, window)
    check(groups, len(split), clients, used=clients * size)
    assert (groups.sizes == size).all()


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1000.0, INF])
@pytest.mark.parametrize(("size", "clients"), [(1, 50_000), (4, 12_500), (16, 3_125)])
def test_samples_at_full_size(size: int, clients: int, alpha: float) -> None:
    groups = samples(CIFAR100, size, alpha, 5)
    check(groups, 50_000, clients)
    assert (groups.sizes == size).all()
    distinct = (held(groups, CIFAR100) > 0).sum(axis=1)
    if alpha == 0:
        assert (distinct > 1).sum() <= 100
        assert (distinct > 1).any() == (size == 16)  # 500 = 31 × 16 + 4, and 125 × 4
    elif alpha < INF:  # the Dirichlet-multinomial's chance that a class is absent
        absent = math.prod((0.99 * alpha + j) / (alpha + j) for j in range(size))
        assert distinct.mean() == pytest.approx(100 * (1 - absent), rel=0.02)


@given(counts=COUNTS, size=st.integers(1, 20), seed=SEEDS, window=WINDOWS)
def test_samples_at_alpha_0_leave_a_class_only_when_it_is_empty(
    counts: list[int], size: int, seed: int, window: int
) -> None:
    split = data(counts, seed)
    assume(size <= len(split))
    drawn = labels_of(split)[samples(split, size, 0.0, seed, window=window).members]
    change = np.flatnonzero(np.diff(drawn)) + 1  # places whose class is not the one before
    for place in change[change % size != 0]:
        assert drawn[place - 1] not in drawn[place:]
        assert (drawn[:place] == drawn[place - 1]).sum() == counts[drawn[place - 1]]


def test_samples_at_alpha_0_choose_the_class_by_its_share() -> None:
    split = data([6000, 3000, 1000])
    groups = samples(split, 5, 0.0, 2, clients=500)
    first = np.bincount(labels_of(split)[groups.members[::5]], minlength=3) / 500
    assert first == pytest.approx([0.6, 0.3, 0.1], abs=0.06)
    assert ((held(groups, split) > 0).sum(axis=1) == 1).all()


def test_samples_of_a_class_are_random() -> None:
    split = data([50, 50])
    taken = np.concatenate([samples(split, 10, 1.0, s, clients=1).members for s in range(300)])
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


@pytest.mark.parametrize(("alpha", "window"), [(0.7, 3), (5.0, 8192)])
def test_samples_have_the_distribution_of_the_slow_process_as_classes_run_out(
    alpha: float, window: int
) -> None:
    """Chi-square of two samples, on what each client draws, in order; every sample is used."""
    counts, size, runs = [6, 4, 2], 4, 1500
    split, rng = data(counts), np.random.default_rng(1)
    quick = [
        labels_of(split)[samples(split, size, alpha, seed, window=window).members]
        for seed in range(runs)
    ]
    reference = [slow(counts, 3, size, alpha, rng) for _ in range(runs)]
    for k in range(3):
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
        groups = samples(split, 8, alpha, seed, window=window)
        if not labels_of(split)[groups[0]].any():  # client 0 took all of class 0
            first, second = labels_of(split)[groups[1][:2]]
            agree.append(first == second)
    assert len(agree) > 400
    assert np.mean(agree) == pytest.approx((alpha / 4 + 1) / (alpha / 2 + 1), abs=0.04)


@pytest.mark.parametrize("labels", [None, torch.tensor([0, 1, -1] * 20)])
def test_samples_without_labels_at_infinite_alpha(labels: torch.Tensor | None) -> None:
    check(samples(Split(unlabeled(60).images, labels), 6, INF, 1), 60, 10)


def test_fifty_thousand_clients_within_a_second_and_little_memory() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        samples(CIFAR100, 1, 0.1)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 1.0
    tracemalloc.start()
    samples(CIFAR100, 1, 0.1)
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
        groups = divided("dirichlet", split, seed, clients=clients, alpha=alpha)
    except UserError as error:
        assert clients > 1
        assert error.key == "partition.alpha"
        return
    check(groups, len(split), clients)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_shares_have_the_right_spread(alpha: float) -> None:
    """With two clients, the first one's share of a class is Beta(α, α): variance 1 / (8α + 4)."""
    split = data([100] * 500)
    share = held(divided("dirichlet", split, clients=2, alpha=alpha), split)[0] / 100
    assert share.mean() == pytest.approx(0.5, abs=0.06)
    assert share.var() == pytest.approx(1 / (8 * alpha + 4), rel=0.2)


def test_dirichlet_at_infinite_alpha_divides_evenly() -> None:
    split = data([10] * 40)
    table = held(divided("dirichlet", split, clients=4, alpha=INF), split)
    assert set(table.flat) == {2, 3}
    # A class smaller than the number of clients: its samples do not go to the same ones each time.
    assert divided("dirichlet", split, clients=20, alpha=INF).sizes.min() > 10


def test_dirichlet_draws_again_when_a_client_is_empty() -> None:
    split, keys = data([20] * 4), {"clients": 5, "alpha": 0.2}
    with patch.object(dirichlet, "TRIES", 1):
        failures = 0
        for seed in range(20):
            try:
                divided("dirichlet", split, seed, **keys)
            except UserError:
                failures += 1
    assert 0 < failures < 20
    for seed in range(20):
        assert divided("dirichlet", split, seed, **keys).sizes.min() >= 1


def test_dirichlet_gives_up_at_once_where_it_is_hopeless() -> None:
    with patch.object(Dirichlet, "_draw", autospec=True, side_effect=Dirichlet._draw) as draw:
        with refused("partition.alpha", 1.0):
            divided("dirichlet", DIGITS, clients=170, alpha=1.0)
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
    labels = labels_of(split)[shuffle(len(split), seed)]
    by_class = Groups.from_labels(labels, labels.max() + 1)
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
    keys = {"clients": clients, "alpha": alpha, "balanced": True}
    with patch.object(dirichlet, "BALANCED_TRIES", 20):
        if wanted.min() == 0:
            with refused("partition.alpha", alpha):
                divided("dirichlet", split, seed, **keys)
            return
        groups = divided("dirichlet", split, seed, **keys)
        notes = list(describe_imbalance(params, groups.sizes))
    check(groups, len(split), clients)
    assert groups.sizes.tolist() == wanted.tolist()
    assert bool(notes) == (groups.sizes.min() < mean / 2 or groups.sizes.max() > 1.5 * mean)


def test_dec_ssls_draws_are_balanced_and_a_note_names_those_that_cannot_be() -> None:
    """Few of 20 clients are within the range at α = 0.02: a class goes to few of them."""
    split, keys = data([500] * 10), {"alpha": 0.02, "balanced": True}
    for seed in range(20):
        sizes = divided("dirichlet", split, seed, clients=5, **keys).sizes
        assert sizes.min() >= 500 and sizes.max() <= 1500
    uneven = divided("dirichlet", data([5000] * 10), clients=20, **keys)
    check(uneven, 50_000, 20)
    low, high = uneven.sizes.min(), uneven.sizes.max()
    params = Dirichlet.Params("dirichlet", balanced=True)
    (note,) = describe_imbalance(params, uneven.sizes)
    assert f"{low} to {high} samples" in note and "\n" not in note
    assert not list(describe_imbalance(params, sizes))
    for other in (Dirichlet.Params("dirichlet"), Iid.Params("iid")):
        assert not list(describe_imbalance(other, uneven.sizes))
