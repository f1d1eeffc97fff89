"""Made labels, and what any partition of them must be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedssl.config import PartitionParams
from fedssl.data.client_table import mean_distance
from fedssl.data.dataset import Groups, Split
from fedssl.data.partition import partition

INF = float("inf")
COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any)
SEEDS = st.integers(0, 2**31)


def data(counts: Sequence[int], seed: int = 0) -> Split:
    """As many samples of each class as ``counts`` says, in random order."""
    labels = np.repeat(np.arange(len(counts)), counts)
    return unlabeled(np.random.default_rng(seed).permutation(labels))


def unlabeled(labels: NDArray[np.int64] | int) -> Split:
    count = labels if isinstance(labels, int) else len(labels)
    images = (torch.zeros(count, 1, 1, 1, dtype=torch.uint8),)
    return Split(images, None if isinstance(labels, int) else torch.from_numpy(labels))


DIGITS = data([18] * 10)
CIFAR100 = data([500] * 100)


def labels_of(split: Split) -> NDArray[np.int64]:
    assert split.labels is not None
    return split.labels.numpy()


def groups_of(*clients: list[int]) -> Groups:
    return Groups(np.concatenate(clients), np.cumsum([0, *map(len, clients)]))


def check_disjoint(groups: Groups, total: int) -> None:
    assert groups.offsets[0] == 0
    assert groups.offsets[-1] == len(groups.members)
    assert len(np.unique(groups.members)) == len(groups.members)
    assert groups.members.min() >= 0
    assert groups.members.max() < total


def check_all_used(groups: Groups, total: int) -> None:
    assert np.array_equal(np.sort(groups.members), np.arange(total))


def average_distance(params: PartitionParams, split: Split, classes: int) -> float:
    """The mean distance of clients to the whole, over ten seeds."""
    labels = labels_of(split)
    return float(
        np.mean([mean_distance(partition(params, split, classes, s), labels) for s in range(10)])
    )
