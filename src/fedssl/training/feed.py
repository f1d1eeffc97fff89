"""The images of a training step: on the device already, or read and sent to it step by step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fedssl.data.dataset import ImageArray, Split
from fedssl.data.stored import LARGEST_SHARE, StoredArray

AHEAD = 2  # steps whose images are read before they are needed
Streamed = tuple[Tensor, ...]  # images of each modality, then their sizes; empty if resident


class Feed:
    """The images of this process's clients.

    Resident images are on the device, where a step chooses them by their numbers (``members``).
    Streamed images are read by threads into pinned memory, some steps ahead, and sent to the
    device.
    """

    def __init__(self, split: Split, device: torch.device, stream: str, modalities: int) -> None:
        self.device = device
        self.streams = _must_stream(split.images, device, stream)
        self.images: tuple[ImageArray, ...] = split.images
        self.sizes = split.sizes
        if not self.streams:
            self.images = tuple(_place(images, device) for images in split.images)
            if split.sizes is not None:
                self.sizes = tuple(sizes.to(device) for sizes in split.sizes)
        self._modalities = min(modalities, len(split.images))
        self._ahead = WeakIdKeyDictionary()  # members → their images, when these are read

    @property
    def numbers_on(self) -> torch.device | None:
        """The device on which a step's images are chosen; ``None``: the host."""
        return None if self.streams else self.device

    def prefetch(self, members: Tensor, numbers: Tensor) -> None:
        """Begin to read the images of a later step; ``numbers`` are ``members`` on the host."""
        self._ahead[members] = _reader().submit(self._read, numbers)

    def fetch(self, members: Tensor) -> Streamed:
        """Return the images of a step, in pinned memory; nothing if they are resident."""
        if not self.streams:
            return ()
        future: Future[Streamed] | None = self._ahead.pop(members, None)
        return self._read(members.cpu()) if future is None else future.result()

    def send(self, members: Tensor) -> Streamed:
        """Return the images of a step, on the device; nothing if they are resident."""
        return tuple(each.to(self.device, non_blocking=True) for each in self.fetch(members))

    def places(self, count: int) -> Streamed:
        """Return tensors on the device that ``count`` images fit into; none if resident."""
        if not self.streams:
            return ()
        like = self._read(torch.zeros(1, dtype=torch.int64))
        return tuple(x.new_zeros((count, *x.shape[1:]), device=self.device) for x in like)

    def choose(
        self, members: Tensor, streamed: Streamed
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return the images of each modality, and their sizes if they are whole."""
        count = self._modalities
        if self.streams:
            return list(streamed[:count]), list(streamed[count:]) or None
        images = [modality[members] for modality in self.images[:count]]
        if self.sizes is None:
            return images, None
        return images, [sizes[members] for sizes in self.sizes[:count]]

    def _read(self, numbers: Tensor) -> Streamed:
        images = [self._read_modality(each, numbers) for each in self.images[: self._modalities]]
        sizes = [] if self.sizes is None else [s[numbers] for s in self.sizes[: self._modalities]]
        pinned = self.device.type == "cuda"
        return (*images, *(each.pin_memory() if pinned else each for each in sizes))

    def _read_modality(self, images: ImageArray, numbers: Tensor) -> Tensor:
        shape, pinned = (len(numbers), *images.shape[1:]), self.device.type == "cuda"
        out = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        if isinstance(images, StoredArray):
            images.read(numbers.tolist(), out)
        else:
            out.copy_(images[numbers])
        return out


def _must_stream(images: Sequence[ImageArray], device: torch.device, stream: str) -> bool:
    """Return whether images are in files, or take more than half of the free memory of a GPU."""
    if device.type == "meta":
        return False
    if stream == "on" or not all(isinstance(each, Tensor) for each in images):
        return True
    if stream == "off" or device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return sum(each.shape.numel() for each in images) > LARGEST_SHARE * free


def _place(images: ImageArray, device: torch.device) -> Tensor:
    """Copy images to the device; on the meta device, only their shape."""
    if device.type == "meta":
        return torch.empty(images.shape, dtype=torch.uint8, device=device)
    return images[:].to(device)


@functools.cache
def _reader() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AHEAD, "prefetch")
