"""Partitions: sound, exact, seeded, and refused with a fix."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from helpers import refused
from hypothesis import assume, given
from hypothesis import strategies as st
from partitions import (
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

from fedssl.config import PartitionParams
from fedssl.data.client_table import count_labels
from fedssl.data.dataset import Dataset, Groups, Split
from fedssl.data.dirichlet import Dirichlet, Samples
from fedssl.data.partition import (
    Classes,
    Folder,
    Iid,
    Skew,
    client_names,
    partition,
)
from fedssl.util.errors import UserError

pytestmark = pytest.mark.filterwarnings("error")  # numpy warns where it divides 0 by 0

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


def test_classes_are_dealt_at_random() -> None:
    """Not as a rotation, in which a class comes back when all were dealt."""
    split, times, shared = data([4] * 6), np.zeros((6, 6)), 0
    for seed in range(300):
        groups = partition(Classes.Params("classes", clients=6, classes=2), split, 6, seed)
        held = count_labels(groups, labels_of(split)) > 0
        times += held
        shared += bool((held[0] & held[1]).any())
    assert times.min() > 65  # 100 each; 8 is its standard deviation
    assert times.max() < 135
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
    with pytest.raises(UserError) as caught:
        partition(Classes.Params("classes", clients=clients, classes=each), split, total, 0)
    assert (caught.value.key, caught.value.value) == ("partition.classes", each)
    advice = re.search(r"partition.classes=(\d+) or partition.clients=(\d+)", caught.value.fix)
    assert advice is not None
    for k, classes in ((clients, int(advice[1])), (int(advice[2]), each)):
        params = Classes.Params("classes", clients=k, classes=classes)
        assert len(partition(params, split, total, 0)) == k


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
        assert error.key == "partition.clients" and beta < 1
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
    held = count_labels(groups, labels_of(split))
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


@pytest.mark.parametrize("clients", [5, 10, 100])
def test_skew_in_between(clients: int) -> None:
    """Each client has β of its samples as the whole has them, the rest of its own classes."""
    split = data([1000] * 10)
    groups = partition(Skew.Params("skew", clients=clients, beta=0.5), split, 10, 1)
    assert np.ptp(groups.sizes) <= 1
    held = count_labels(groups, labels_of(split)) / groups.sizes[:, None]
    mine = max(1, 10 // clients)
    top = np.sort(held, axis=1)[:, -mine:].sum(axis=1)
    assert top == pytest.approx(np.full(clients, 0.5 + 0.5 * mine / 10), abs=0.12)
    assert top.mean() == pytest.approx(0.5 + 0.5 * mine / 10, abs=0.02)


def test_distance_falls_with_beta() -> None:
    split = data([100] * 10)
    betas = [0.0, 0.2, 0.5, 0.8, 1.0]
    found = [
        average_distance(Skew.Params("skew", clients=5, beta=beta), split, 10) for beta in betas
    ]
    assert found[0] == pytest.approx(0.8)  # two classes of ten each
    assert found[-1] < 0.1
    assert np.all(np.diff(found) < 0)


# One class a client (Dec-SSL, B.6), and more clients than classes.


# folder


def test_cases_can_be_the_clients() -> None:
    split = Split((torch.zeros(4, 1, 2, 2, dtype=torch.uint8),), cases=np.array([1, 0, 1, 2]))
    groups = partition(Folder.Params("folder", level="case"), split, 0, 0)
    assert [groups[k].tolist() for k in range(3)] == [[1], [0, 2], [3]]
    with refused("partition.name", "folder", "data.levels=client"):
        partition(Folder.Params("folder"), split, 0, 0)


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


# Refusals

HALF = Split(unlabeled(180).images, torch.tensor([0, -1] * 90))


@pytest.mark.parametrize(
    ("params", "split", "key", "fix"),
    [
        (Iid.Params("iid", clients=181), DIGITS, "clients", "at most 180"),
        (Samples.Params("samples", samples=181), DIGITS, "samples", "at most 180"),
        (Samples.Params("samples", samples=4, clients=46), DIGITS, "clients", "at most 45"),
        (Samples.Params("samples", samples=1, clients=181), DIGITS, "clients", "at most 180"),
        (Samples.Params("samples", alpha=1.0), unlabeled(180), "name", "=iid or .*alpha=inf"),
        (Samples.Params("samples", alpha=1.0), HALF, "name", "=iid"),
        (Classes.Params("classes", clients=181, classes=2), DIGITS, "clients", "at most 180"),
        (Classes.Params("classes", clients=5, classes=11), DIGITS, "classes", "1 to 10"),
        (Classes.Params("classes", clients=5, classes=3), DIGITS, "classes", "=4 or .*clients=10"),
        (Classes.Params("classes", clients=100, classes=2), DIGITS, "clients", "fewer"),
        (Classes.Params("classes"), unlabeled(180), "name", "=iid or partition.source=features"),
        (Classes.Params("classes"), HALF, "name", "=iid"),
        (Dirichlet.Params("dirichlet", clients=181), DIGITS, "clients", "at most 180"),
        (Dirichlet.Params("dirichlet", clients=150, alpha=0.1), DIGITS, "alpha", "larger"),
        (Dirichlet.Params("dirichlet"), unlabeled(180), "name", "partition.source=features"),
        (Dirichlet.Params("dirichlet"), HALF, "name", "=iid"),
        (Skew.Params("skew", clients=181), DIGITS, "clients", "at most 180"),
        (Skew.Params("skew"), unlabeled(180), "name", "partition.source=features"),
        (Skew.Params("skew", clients=100), data([90, 2]), "clients", "at most 92"),
        (Skew.Params("skew", clients=50), data([90, 2]), "clients", "fewer"),
        (Folder.Params("folder"), DIGITS, "name", "data.levels=client"),
    ],
    ids=str,
)
def test_refusals_name_the_key_and_a_fix(
    params: PartitionParams, split: Split, key: str, fix: str
) -> None:
    with pytest.raises(UserError) as caught:
        partition(params, split, 10, 0)
    assert caught.value.key == f"partition.{key}"
    assert caught.value.value == getattr(params, key)
    assert re.search(fix, caught.value.fix)
    assert "\n" not in str(caught.value)


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
