"""Partitions: sound, exact, seeded, and refused with a fix."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused
from hypothesis import assume, given
from hypothesis import strategies as st
from partitions import COUNTS, DIGITS, INF, SEEDS, check, data, divided, held, unlabeled

from fedssl.config import PartitionParams, variant
from fedssl.data.dataset import Dataset, Groups, Split
from fedssl.data.partition import Folder, Iid, client_names, partition
from fedssl.util.errors import UserError

pytestmark = pytest.mark.filterwarnings("error")  # numpy warns where it divides 0 by 0


def params(name: str, **keys: Any) -> PartitionParams:
    return variant("partition", name).Params(name, **keys)


# Every partition


@pytest.mark.parametrize(
    "params",
    [
        params("iid", clients=7),
        params("samples", samples=4, alpha=0.0),
        params("samples", samples=4, alpha=0.5),
        params("samples", samples=4, alpha=INF),
        params("classes", clients=5, classes=4),
        params("dirichlet", clients=5, alpha=0.5),
        params("dirichlet", clients=5, alpha=0.1, balanced=True),
        params("skew", clients=5, beta=0.3),
        params("skew", clients=20, beta=0.0),
    ],
    ids=str,
)
def test_a_partition_depends_on_the_seed_and_not_on_global_generators(
    params: PartitionParams,
) -> None:
    groups = []
    for seed in (3, 3, 4):
        np.random.seed(len(groups))
        torch.manual_seed(len(groups))
        groups.append(partition(params, DIGITS, 10, seed))
    one, two, other = groups
    assert np.array_equal(one.members, two.members) and np.array_equal(one.offsets, two.offsets)
    sets = [[set(g[k].tolist()) for k in range(len(g))] for g in (one, other)]
    assert sets[0] != sets[1]


@pytest.mark.parametrize(
    ("params", "members"),
    [
        (params("iid", clients=3), [0, 6, 1, 2, 7, 8, 5, 4, 9, 3]),
        (params("samples", samples=3, alpha=0.0), [0, 1, 4, 3, 7, 5, 6, 2, 8]),
        (params("samples", samples=3, alpha=1.0), [0, 1, 4, 3, 6, 7, 2, 8, 5]),
        (params("dirichlet", clients=3, alpha=0.5), [0, 6, 2, 7, 8, 5, 1, 4, 9, 3]),
        (params("classes", clients=3, classes=1), [0, 1, 4, 3, 6, 2, 8, 7, 5, 9]),
    ],
    ids=str,
)
def test_every_machine_agrees(params: PartitionParams, members: list[int]) -> None:
    labels = np.array([0, 0, 1, 0, 0, 2, 1, 2, 1, 2])
    assert partition(params, unlabeled(labels), 3, 11).members.tolist() == members


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.99])
@pytest.mark.parametrize(
    "params", [params("iid", clients=7), params("dirichlet", clients=5, alpha=0.3)]
)
def test_a_fraction_keeps_that_part_of_each_client(
    params: PartitionParams, fraction: float
) -> None:
    split, fewer = data([40, 30, 50]), dataclasses.replace(params, fraction=fraction)
    whole = partition(params, split, 3, seed=1)
    part = partition(fewer, split, 3, seed=1)
    check(part, len(split), len(whole), used=len(part.members))
    for k in range(len(whole)):
        assert len(part[k]) == max(1, round(fraction * len(whole[k])))
        places = [whole[k].tolist().index(member) for member in part[k]]
        assert places == sorted(places)  # the order is the client's own
    again = partition(fewer, split, 3, seed=1)
    assert np.array_equal(again.members, part.members)


def test_a_fraction_is_drawn_for_each_client() -> None:
    split = data([100, 100])
    whole, half = (divided("iid", split, fraction=f, clients=2) for f in (1, 0.5))
    kept = [np.isin(whole[k], half[k]) for k in range(2)]
    assert not np.array_equal(*kept) and not kept[0][:50].all()


# iid


@given(total=st.integers(1, 200), clients=st.integers(1, 200), seed=SEEDS)
def test_iid_uses_all_and_is_even(total: int, clients: int, seed: int) -> None:
    assume(clients <= total)
    groups = divided("iid", unlabeled(total), seed, clients=clients)
    check(groups, total, clients)
    assert np.ptp(groups.sizes) <= 1


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
    groups = divided("classes", split, seed, clients=clients, classes=each)
    check(groups, len(split), clients)
    table = held(groups, split)
    assert ((table > 0).sum(axis=1) == each).all()
    for count, column in zip(counts, table.T, strict=True):
        pieces = column[column > 0]
        assert len(pieces) == sets
        assert set(pieces) <= {count // sets, -(-count // sets)}


def test_classes_are_dealt_at_random() -> None:
    """Not as a rotation, in which a class comes back when all were dealt."""
    split, times, shared = data([4] * 6), np.zeros((6, 6)), 0
    for seed in range(300):
        has = held(divided("classes", split, seed, clients=6, classes=2), split) > 0
        times += has
        shared += bool((has[0] & has[1]).any())
    assert times.min() > 65  # 100 each; 8 is its standard deviation
    assert times.max() < 135
    assert 90 < shared < 150  # 120 expected: 1 - (8 of 10 sets) × (6 of the other 8)


def test_classes_without_a_sample_do_not_count() -> None:
    groups = divided("classes", data([8, 0, 8, 0]), clients=4, classes=1)
    assert groups.sizes.tolist() == [4] * 4


@given(total=st.integers(2, 30), clients=st.integers(1, 30), each=st.integers(1, 30))
def test_classes_that_do_not_divide_name_numbers_that_do(
    total: int, clients: int, each: int
) -> None:
    assume(each <= total and clients * each % total)
    split = data([60] * total)
    with pytest.raises(UserError) as caught:
        divided("classes", split, clients=clients, classes=each)
    assert (caught.value.key, caught.value.value) == ("partition.classes", each)
    advice = re.search(r"partition.classes=(\d+) or partition.clients=(\d+)", caught.value.fix)
    assert advice is not None
    for k, classes in ((clients, int(advice[1])), (int(advice[2]), each)):
        assert len(divided("classes", split, clients=k, classes=classes)) == k


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
    try:
        groups = divided("skew", split, seed, clients=clients, beta=beta)
    except UserError as error:
        assert error.key == "partition.clients" and beta < 1
        return
    check(groups, len(split), clients)


@given(total=st.integers(1, 100), clients=st.integers(1, 100), seed=SEEDS)
def test_skew_at_beta_1_is_iid(total: int, clients: int, seed: int) -> None:
    assume(clients <= total)
    split = unlabeled(np.arange(total) % 3)
    skew = divided("skew", split, seed, clients=clients, beta=1.0)
    iid = divided("iid", split, seed, clients=clients)
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
    groups = divided("skew", split, seed, clients=clients, beta=0.0)
    check(groups, len(split), clients)
    table = held(groups, split)
    each, sharing = (table > 0).sum(axis=1), (table > 0).sum(axis=0)
    if clients <= classes:
        assert (sharing == 1).all()
        assert set(each) <= {classes // clients, -(-classes // clients)}
        assert all(np.ptp(np.flatnonzero(row)) + 1 == n for row, n in zip(table, each, strict=True))
    else:
        assert (each == 1).all()
        assert set(sharing) <= {clients // classes, -(-clients // classes)}
        for column in table.T:  # and its clients divide a class evenly
            assert np.ptp(column[column > 0]) <= 1


@pytest.mark.parametrize("clients", [5, 10, 100])
def test_skew_in_between(clients: int) -> None:
    """Each client has β of its samples as the whole has them, the rest of its own classes."""
    split = data([1000] * 10)
    groups = divided("skew", split, 1, clients=clients, beta=0.5)
    assert np.ptp(groups.sizes) <= 1
    shares = held(groups, split) / groups.sizes[:, None]
    mine = max(1, 10 // clients)
    top = np.sort(shares, axis=1)[:, -mine:].sum(axis=1)
    assert top == pytest.approx(np.full(clients, 0.5 + 0.5 * mine / 10), abs=0.12)
    assert top.mean() == pytest.approx(0.5 + 0.5 * mine / 10, abs=0.02)


# folder


def test_clients_are_the_folders_of_a_level_and_have_their_names() -> None:
    split = Split(unlabeled(6).images, None, np.array([2, 0, 2, 0, 2, 4]), np.array([1, 0, 1] * 2))
    data = Dataset("folder", split, None, (), ("aachen", "bern", "celle", "davos", "erfurt"))
    by_client, by_case = Folder.Params("folder"), Folder.Params("folder", level="case")
    groups = partition(by_client, split, 0, 0)
    assert [groups[k].tolist() for k in range(3)] == [[1, 3], [0, 2, 4], [5]]
    assert client_names(by_client, groups, data) == ["aachen", "celle", "erfurt"]
    left = Groups(np.array([4, 0, 5]), np.array([0, 2, 3]))  # no image of aachen is trained on
    assert client_names(by_client, left, data) == ["celle", "erfurt"]
    cases = partition(by_case, split, 0, 0)
    assert [cases[k].tolist() for k in range(2)] == [[1, 4], [0, 2, 3, 5]]
    for params in (by_case, Iid.Params("iid", clients=2)):
        assert client_names(params, cases, data) == ["0", "1"]


# Refusals

HALF = Split(unlabeled(180).images, torch.tensor([0, -1] * 90))


@pytest.mark.parametrize(
    ("params", "split", "key", "fix"),
    [
        (params("iid", clients=181), DIGITS, "clients", "at most 180"),
        (params("samples", samples=181), DIGITS, "samples", "at most 180"),
        (params("samples", samples=4, clients=46), DIGITS, "clients", "at most 45"),
        (params("samples", alpha=1.0), unlabeled(180), "name", "partition.alpha=inf"),
        (params("samples", alpha=1.0), HALF, "name", "partition.name=iid"),
        (params("classes", clients=181, classes=2), DIGITS, "clients", "at most 180"),
        (params("classes", clients=5, classes=11), DIGITS, "classes", "1 to 10"),
        (params("classes", clients=100, classes=2), DIGITS, "clients", "fewer"),
        (params("classes"), HALF, "name", "partition.name=iid"),
        (params("dirichlet", clients=150, alpha=0.1), DIGITS, "alpha", "larger"),
        (params("dirichlet"), unlabeled(180), "name", "partition.source=features"),
        (params("skew"), unlabeled(180), "name", "partition.source=features"),
        (params("skew", clients=50), data([90, 2]), "clients", "fewer"),
        (params("folder"), DIGITS, "name", "data.levels=client"),
    ],
    ids=str,
)
def test_refusals_name_the_key_and_a_fix(
    params: PartitionParams, split: Split, key: str, fix: str
) -> None:
    with refused(f"partition.{key}", getattr(params, key), fix):
        partition(params, split, 10, 0)
