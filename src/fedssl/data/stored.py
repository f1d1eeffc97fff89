"""Arrays in ``.npy`` files of the cache: mapped or, if images need too much memory, read in use."""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data.dataset import ImageArray
from fedssl.util.memory import find_free_memory

READERS = 8  # threads that read one batch: a disk answers several requests at once
LARGEST_SHARE = 0.5  # of the free memory, which images may take


class StoredArray:
    """An open ``.npy`` file. Its uint8 images are indexed like a tensor, and read each time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)
        np.lib.format.read_magic(self._file)
        shape, _, self._dtype = np.lib.format.read_array_header_1_0(self._file)
        self._start = self._file.tell()
        self._length = math.prod(shape[1:]) * self._dtype.itemsize  # of a row, in bytes
        self.shape = torch.Size(shape)
        if os.fstat(self._file.fileno()).st_size < self._start + self.size:
            raise ValueError(f"{path} is cut short")

    @property
    def size(self) -> int:
        """The number of bytes of the whole array."""
        return self.shape[0] * self._length

    def map(self) -> NDArray[Any]:
        """Map the file into memory. The array can be written, without a change to the file."""
        return np.memmap(self._file, self._dtype, "c", self._start, tuple(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        is_slice = isinstance(index, slice)
        numbers = range(len(self))[index] if is_slice else torch.as_tensor(index).tolist()
        images = torch.empty((len(numbers), *self.shape[1:]), dtype=torch.uint8)
        self.read(numbers, images)
        return images

    def read(self, numbers: Sequence[int], out: Tensor) -> None:
        """Read the images with these numbers into a tensor of bytes."""
        rows = out.numpy().reshape(len(numbers), self._length)

        def read_part(part: range) -> None:
            for k in part:
                self._read_row(rows[k], numbers[k])

        parts = [range(k, len(numbers), READERS) for k in range(min(READERS, len(numbers)))]
        for _ in _readers().map(read_part, parts):
            pass  # an error in a thread is raised here

    def _read_row(self, row: NDArray[np.uint8], number: int) -> None:
        place, rest = self._start + number * self._length, row.data
        while rest:
            count = os.preadv(self._file.fileno(), [rest], place)
            if not count:
                raise OSError(f"{self._file.name} is cut short")
            place, rest = place + count, rest[count:]


@functools.cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(READERS, "read")


class ChangedImages:
    """Images that a function changes each time they are used."""

    def __init__(self, images: ImageArray, change: Callable[[Tensor], Tensor]) -> None:
        self.images = images
        self.change = change
        self.shape = torch.Size((len(images), *change(images[:1]).shape[1:]))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Any) -> Tensor:
        return self.change(self.images[index])


def place_images(stored: StoredArray, stream: str) -> ImageArray:
    """Map images or, if they are to be streamed, leave them in their file.

    With ``data.stream=auto``, images that take more than half of the free memory are streamed.
    """
    is_large = stored.size > LARGEST_SHARE * find_free_memory()
    if stream == "on" or (stream == "auto" and is_large):
        return stored
    return torch.from_numpy(stored.map())
