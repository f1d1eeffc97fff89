"""What a data set is once it is loaded: uint8 tensors, labels, and groups of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PIXELS = 512 * 64 * 64  # to be encoded in one pass: 512 images of 64 pixels a side, or 10 of 448


def in_passes(images: Tensor) -> tuple[Tensor, ...]:
    """Images in parts that are encoded at once: 512 of them, or fewer large ones."""
    return images.split(max(1, min(512, PIXELS // (images.shape[2] * images.shape[3]))))


@dataclass(frozen=True)
class Groups:
    """Members of each group, stored flat: group k has ``members[offsets[k]:offsets[k + 1]]``.

    A partition is one (the samples of each client), and so are cases (the images of each patient).
    50,000 groups cost two arrays.
    """

    members: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @classmethod
    def from_labels(cls, group_of: NDArray[np.int64], count: int) -> Groups:
        """Groups from the group number of each member; members keep their order."""
        sizes = np.bincount(group_of, minlength=count)
        return cls(np.argsort(group_of, kind="stable"), np.concatenate(([0], np.cumsum(sizes))))

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The number of members of each group."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, group: int) -> NDArray[np.int64]:
        return self.members[self.offsets[group] : self.offsets[group + 1]]

    def select(self, groups: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The members of several groups, one group after another, and the size of each group."""
        sizes = self.offsets[groups + 1] - self.offsets[groups]
        starts = np.repeat(self.offsets[groups] - np.cumsum(sizes) + sizes, sizes)
        return self.members[starts + np.arange(len(starts))], sizes


@dataclass(frozen=True)
class Split:
    """Training or test samples: one uint8 tensor ``[N, C, H, W]``, or two for paired modalities."""

    images: tuple[Tensor, ...]
    labels: Tensor | None = None  # int64, -1 where a sample has none
    clients: NDArray[np.int64] | None = None  # number of the client folder of each sample
    cases: NDArray[np.int64] | None = None  # number of the case of each sample

    def __len__(self) -> int:
        return len(self.images[0])


@dataclass(frozen=True)
class Census:
    """Who holds which classes: known where all clients' labels are, in a simulation."""

    labels: Tensor  # of every training image
    groups: Groups
    classes: int

    def count(self, members: NDArray[np.int64] | Tensor) -> Tensor:
        """How many of some images each class has."""
        index = torch.as_tensor(members, device=self.labels.device)
        return torch.bincount(self.labels[index], minlength=self.classes).double()


@dataclass(frozen=True)
class Dataset:
    """A loaded data set."""

    name: str
    train: Split
    test: Split | None
    classes: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()  # names of the client folders
    # A digest of each split's files, wherever they are: of their names and lengths or, where they
    # hold arrays, of these (Fashion-MNIST's files have the names and lengths of MNIST's).
    files: Mapping[str, str] = field(default_factory=dict)
