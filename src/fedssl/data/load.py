"""Load a data set: find its images, decode them, keep some labels, halve or convert images."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedssl import config
from fedssl.config import plugins
from fedssl.data.dataset import Dataset, ImageArray, Split
from fedssl.data.folders import load_folder, load_paired
from fedssl.data.in_memory import load_own
from fedssl.data.labels import draw_labels
from fedssl.data.places import check_root
from fedssl.data.standard import ARRAYS, load_arrays, load_digits, load_tiny_imagenet
from fedssl.data.stored import ChangedImages
from fedssl.util.errors import UserError
from fedssl.util.memory import is_out_of_memory

BLOCK = 1024  # images converted at once

Images = tuple[ImageArray, ...]

LOADERS: dict[str, Callable[[config.Data], Dataset]] = {
    "digits": load_digits,
    **dict.fromkeys(ARRAYS, load_arrays),
    "tiny-imagenet": load_tiny_imagenet,
    "folder": load_folder,
    "paired": load_paired,
}


def load_dataset(data: config.Data, seed: int = 0, size: int | None = None) -> Dataset:
    """Load the data set that ``data`` describes; ``size`` replaces ``data.size``.

    Images are memory-mapped where that is possible, so they are read only when they are used.
    ``seed`` decides which samples ``data.labels`` keeps.
    """
    if data.name == "paired" and data.halves:
        problem = "paired images have two modalities already"
        raise UserError(problem, key="data.halves", value=True, fix="Leave it out.")
    check_root(data)
    try:
        load = load_own if plugins.is_own(data.name) else LOADERS[data.name]
        dataset = load(dataclasses.replace(data, size=size or data.size))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        problem, value = "images of that size do not fit into memory", size or data.size
        key = "evaluate.size" if size else "data.size"
        raise UserError(problem, problem, key=key, value=value, fix="Lower it.") from None
    if data.labels is not None:
        dataset = _keep_labels(dataset, data.labels, seed)
    return _halve(dataset) if data.halves else dataset


def _keep_labels(dataset: Dataset, count: int, seed: int) -> Dataset:
    """Keep ``count`` labelled training samples."""
    train, names = dataset.train, dataset.classes
    if train.labels is None:
        fix = "Leave it out, or name the class folders with data.levels=class."
        raise UserError("the images have no classes", key="data.labels", value=count, fix=fix)
    index = draw_labels(train.labels, count, len(names), seed, names=names)
    return dataclasses.replace(dataset, train=train.select(index))


def _halve(dataset: Dataset) -> Dataset:
    """Make the left and right half of each image two modalities (DCCO's Figure 1 c)."""
    width = dataset.train.images[0].shape[-1] // 2

    def halve(images: Images) -> Images:
        return (
            _change(images[0], lambda x: x[..., :width].contiguous()),
            _change(images[0], lambda x: x[..., -width:].contiguous()),
        )

    return _change_images(dataset, halve)


def convert_channels(dataset: Dataset, channels: Sequence[int]) -> Dataset:
    """Make images grey or coloured, with ``channels`` for each modality, as files are read."""

    def convert(images: Images) -> Images:
        pairs = zip(images, itertools.cycle(channels), strict=False)
        return tuple(_change(x, functools.partial(_to_channels, channels=n)) for x, n in pairs)

    return _change_images(dataset, convert)


def _change_images(dataset: Dataset, change: Callable[[Images], Images]) -> Dataset:
    def changed(split: Split) -> Split:
        return dataclasses.replace(split, images=change(split.images))

    test, val = dataset.test and changed(dataset.test), dataset.val and changed(dataset.val)
    return dataclasses.replace(dataset, train=changed(dataset.train), test=test, val=val)


def _change(images: ImageArray, change: Callable[[Tensor], Tensor]) -> ImageArray:
    """Change images in memory at once, others whenever they are used."""
    return change(images) if isinstance(images, Tensor) else ChangedImages(images, change)


def _to_channels(pixels: Tensor, channels: int) -> Tensor:
    if pixels.shape[1] == channels:
        return pixels
    if {pixels.shape[1], channels} != {1, 3}:
        raise UserError(
            f"images of {pixels.shape[1]} channels cannot be converted to {channels} channels",
            fix="Use grey images (1 channel) or images in colour (3 channels).",
        )
    if channels == 3:
        return pixels.expand(-1, 3, -1, -1).contiguous()
    grey = torch.empty_like(pixels[:, :1])
    for whole, part in zip(pixels.split(BLOCK), grey.split(BLOCK), strict=True):
        red, green, blue = whole.int().split(1, dim=1)
        part.copy_((19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16)  # Pillow's "L"
    return grey
