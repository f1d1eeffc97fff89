"""The middle square of stored images, as evaluation and embedding see them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedssl.data.dataset import Dataset, ImageArray, Split


class MiddleSquares:
    """The middle squares of stored images, resized when they are used.

    They are indexed like a tensor ``[N, C, size, size]``, by a slice or a list of numbers.
    ``sizes`` are the true heights and widths of images that are stored in a larger frame.
    """

    def __init__(
        self,
        images: ImageArray,
        sizes: Tensor | None,
        size: int,
        interpolation: str = "bilinear",
    ) -> None:
        self.images = images
        self.sizes = sizes
        self.size = size
        self.interpolation = interpolation

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor that they stand for."""
        return torch.Size((*self.images.shape[:2], self.size, self.size))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Any) -> Tensor:
        images, sizes = self.images[index], self.sizes
        if sizes is None:
            return middle_squares(images, self.size, self.interpolation)
        squares = images.new_empty((len(images), *self.shape[1:]))
        for square, image, (height, width) in zip(
            squares, images, sizes[index].tolist(), strict=True
        ):
            image = image[None, :, :height, :width]
            square.copy_(middle_squares(image, self.size, self.interpolation)[0])
        return squares


def select_squares(dataset: Dataset, size: int, interpolation: str) -> Dataset:
    """Return a data set of the middle squares of all images."""

    def squares(split: Split) -> Split:
        sizes = split.sizes or (None,) * len(split.images)
        pairs = zip(split.images, sizes, strict=True)
        images = tuple(MiddleSquares(*pair, size, interpolation) for pair in pairs)
        return replace(split, images=images, sizes=None)

    test, val = dataset.test and squares(dataset.test), dataset.val and squares(dataset.val)
    return replace(dataset, train=squares(dataset.train), test=test, val=val)


def frame(images: Tensor, size: int, interpolation: str = "bilinear") -> tuple[Tensor, Tensor]:
    """Reduce uint8 images ``[N, C, H, W]`` to fit into a square, and put them into its corner.

    Return the black squares that hold them, and the images' heights and widths ``[N, 2]``.
    """
    longest = max(images.shape[2:])
    if longest > size:
        sides = [max(1, round(side * size / longest)) for side in images.shape[2:]]
        images = functional.interpolate(images, sides, mode=interpolation, antialias=True)
    height, width = images.shape[2:]
    frames = images.new_zeros((*images.shape[:2], size, size))
    frames[..., :height, :width] = images
    return frames, torch.tensor([[height, width]]).repeat(len(images), 1)


def middle_squares(images: Tensor, size: int, interpolation: str = "bilinear") -> Tensor:
    """Crop the middle square of uint8 images ``[N, C, H, W]`` and resize it."""
    height, width = images.shape[2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = images[..., top : top + side, left : left + side]
    if side == size:
        return square
    # Of bytes, this is Pillow's resize up to rounding, and four times as fast as of floats.
    return functional.interpolate(square, (size, size), mode=interpolation, antialias=True)
