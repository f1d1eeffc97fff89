"""Images in files of the cache that are read when they are used, for sets larger than memory."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data.dataset import ImageArray
from fedssl.util.memory import free_memory

READERS = 8  # threads that read one batch: a disk answers several requests at once
LARGEST_SHARE = 0.5  # of the free memory, which images may take


class StoredImages:
    """uint8 images in a ``.npy`` file, indexed like a tensor by a slice or a list of numbers.

    They are read and not mapped, so that the process takes memory only for those in use.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        np.lib.format.read_magic(self._file)
        shape, _, _ = np.lib.format.read_array_header_1_0(self._file)
        self._start = self._file.tell()
        self._length = math.prod(shape[1:])  # of an image, in bytes
        self.shape = torch.Size(shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        numbers: Sequence[int]
        if isinstance(index, slice):
            numbers = range(len(self))[index]
        else:
            numbers = torch.as_tensor(index).tolist()
        images = torch.empty((len(numbers), *self.shape[1:]), dtype=torch.uint8)
        self.read(numbers, images)
        return images

    def read(self, numbers: Sequence[int], out: Tensor) -> None:
        """Read images into a tensor of bytes."""
        rows = out.numpy().reshape(len(numbers), self._length)
        if isinstance(numbers, range) and numbers.step == 1:
            self._read_bytes(rows.reshape(-1), numbers.start if len(numbers) else 0)
            return

        def read_part(part: range) -> None:
            for k in part:
                self._read_bytes(rows[k], numbers[k])

        # One part in this thread is enough for few images.
        parts = [range(k, len(numbers), READERS) for k in range(min(READERS, len(numbers)))]
        list(_readers().map(read_part, parts))

    def _read_bytes(self, row: NDArray[np.uint8], number: int) -> None:
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
    """Images that a function changes whenever they are used."""

    def __init__(self, images: ImageArray, change: Callable[[Tensor], Tensor]) -> None:
        self.images = images
        self.change = change
        self.shape = torch.Size((len(images), *change(images[:1]).shape[1:]))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Any) -> Tensor:
        return self.change(self.images[index])


def open_images(array: NDArray[np.uint8], path: Path, stream: str) -> ImageArray:
    """Return the images of a file of the cache, which is mapped as ``array``.

    With ``data.stream=auto``, images that take more than half of the free memory are streamed.
    """
    is_large = array.nbytes > LARGEST_SHARE * free_memory()
    if stream == "on" or (stream == "auto" and is_large):
        return StoredImages(path)
    return torch.from_numpy(array)
