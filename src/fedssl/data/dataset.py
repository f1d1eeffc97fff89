"""Records of a loaded data set: images as uint8 tensors, labels, and groups of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

PIXELS_PER_PASS = 512 * 64 * 64  # 512 images of 64 pixels per side, or 10 of 448


class ImageArray(Protocol):
    """uint8 images ``[N, C, H, W]``: a tensor, or an object that makes its parts when asked."""

    @property
    def shape(self) -> torch.Size:
        """The shape of all images."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Tensor:
        """Return the images of a slice, or of a list of numbers."""


def split_for_encoding(images: ImageArray) -> Iterator[Tensor]:
    """Yield images in parts that are encoded in one pass: 512 images, or fewer large ones."""
    count = max(1, min(512, PIXELS_PER_PASS // (images.shape[2] * images.shape[3])))
    for start in range(0, max(1, len(images)), count):
        yield images[start : start + count]


@dataclass(frozen=True)
class Groups:
    """Members of each group, stored flat: group k has ``members[offsets[k]:offsets[k + 1]]``.

    A partition (the samples of each client) and cases (the images of each patient) are groups.
    50,000 groups cost two arrays.
    """

    members: Ints
    offsets: Ints

    @classmethod
    def from_labels(cls, group_of: Ints, count: int) -> Groups:
        """Build groups from the group number of each member; members keep their order."""
        sizes = np.bincount(group_of, minlength=count)
        return cls(np.argsort(group_of, kind="stable"), np.concatenate(([0], np.cumsum(sizes))))

    @cached_property
    def sizes(self) -> Ints:
        """Number of members of each group."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, group: int) -> Ints:
        return self.members[self.offsets[group] : self.offsets[group + 1]]

    def select(self, groups: Ints) -> tuple[Ints, Ints]:
        """Return the members of several groups, group after group, and the size of each."""
        sizes = self.offsets[groups + 1] - self.offsets[groups]
        starts = np.repeat(self.offsets[groups] - np.cumsum(sizes) + sizes, sizes)
        return self.members[starts + np.arange(len(starts))], sizes


@dataclass(frozen=True)
class Split:
    """Training or test samples: uint8 images ``[N, C, H, W]``, twice for paired modalities.

    ``sizes`` are the true heights and widths ``[N, 2]`` of images that are smaller than H × W: such
    an image lies in the upper left corner, and the rest is 0.
    """

    images: tuple[ImageArray, ...]
    labels: Tensor | None = None  # int64, -1 where a sample has none
    clients: Ints | None = None  # number of the client folder of each sample
    cases: Ints | None = None  # number of the case of each sample
    sizes: tuple[Tensor, ...] | None = None

    def __len__(self) -> int:
        return len(self.images[0])

    @property
    def full_labels(self) -> Tensor:
        """Label of every sample, -1 where it has none."""
        return torch.full((len(self),), -1) if self.labels is None else self.labels

    def select(self, index: Tensor) -> Split:
        """Return the samples with these indices."""
        rows = index.cpu().numpy()
        return Split(
            tuple(images[index] for images in self.images),
            None if self.labels is None else self.labels[index],
            None if self.clients is None else self.clients[rows],
            None if self.cases is None else self.cases[rows],
            None if self.sizes is None else tuple(sizes[index] for sizes in self.sizes),
        )


@dataclass(frozen=True)
class Census:
    """Classes that each client holds; only a simulation with labels knows them."""

    labels: Tensor  # of every training image
    groups: Groups
    classes: int

    def count(self, members: Ints | Tensor) -> Tensor:
        """Count the images of each class among ``members``."""
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
    # A digest of each split, wherever its files lie: of their names and lengths or, for files that
    # hold arrays, of the arrays (Fashion-MNIST's files have the names and lengths of MNIST's).
    files: Mapping[str, str] = field(default_factory=dict)
    val: Split | None = None  # validation images, if ``data.val`` asks for them
