"""Made labels, and what any partition of them must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedssl.config import variant
from fedssl.data.client_table import count_labels
from fedssl.data.dataset import Groups, Split
from fedssl.data.partition import partition

INF = float("inf")
COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any)
SEEDS = st.integers(0, 2**31)


def data(counts: Sequence[int], seed: int = 0) -> Split:
    """Draw ``counts`` samples of each class, in random order."""
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


def divided(name: str, split: Split, seed: int = 0, /, **keys: Any) -> Groups:
    """Divide a split by the partition of this name and these keys."""
    classes = 0 if split.labels is None else int(split.labels.max()) + 1
    return partition(variant("partition", name).Params(name, **keys), split, classes, seed)


def held(groups: Groups, split: Split) -> NDArray[np.int64]:
    """The samples of each class that every client holds."""
    return count_labels(groups, labels_of(split))


def check(groups: Groups, total: int, clients: int, used: int | None = None) -> None:
    """Every client has a sample, no sample has two, and all are used if nothing else is said."""
    members = np.sort(groups.members)
    assert groups.offsets[0] == 0 and groups.offsets[-1] == len(members)
    assert len(groups) == clients and groups.sizes.min() >= 1
    assert members[0] >= 0 and members[-1] < total and np.diff(members).min(initial=1) > 0
    assert len(members) == (total if used is None else used)
