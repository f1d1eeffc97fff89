"""Read images from Python objects: torch data sets, tensors and arrays, one for each client."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedssl import config
from fedssl.config import plugins
from fedssl.data.dataset import Dataset, Split
from fedssl.data.decode import describe_failure, to_pixels
from fedssl.data.squares import frame
from fedssl.data.standard import resize
from fedssl.util.errors import UserError

GRAY_OR_COLOR = (1, 3, 4)  # channels of an array that is one image
Labels = list[int]


def load_own(data: config.Data) -> Dataset:
    """Load the images of ``data.name=FILE.py:NAME``, or those passed to ``fedssl.train``.

    The function ``NAME`` gets the section ``data`` of the configuration and returns
    ``{"clients": …, "test": …}``; ``test`` may be missing. ``clients`` is a list or a mapping of
    data sets, one for each client, or a single data set that ``partition.*`` divides. A data set is
    a torch ``Dataset`` (or anything with a length and items), a tensor or array of images, or a
    pair of images and labels. Its items are images, pairs of image and label, or mappings with
    ``image`` and ``label``.
    """
    given = plugins.find_object("data.name", data.name)
    if callable(given):
        with plugins.translate_errors(("data.name", data.name)):
            given = given(data)
    if not isinstance(given, Mapping) or not {"clients"} <= set(given) <= {"clients", "test"}:
        kind = list(given) if isinstance(given, Mapping) else type(given).__name__
        fix = 'Return {"clients": …, "test": …}.'
        raise UserError(f"returned {kind}", key="data.name", value=data.name, fix=fix)
    clients = given["clients"]
    if isinstance(clients, list):
        clients = dict(enumerate(clients))
    is_pool = not isinstance(clients, Mapping)
    sources: Mapping[Any, Any] = {"": clients} if is_pool else clients
    names = () if is_pool else tuple(map(str, sources))
    reader = _Reader(data)
    parts = [reader.read(source, f"client {name}") for name, source in sources.items()]
    if not parts:
        raise reader.error("there are no clients", "Give at least one data set.")
    test = None if given.get("test") is None else reader.read(given["test"], "test")
    every = [*parts, *([] if test is None else [test])]
    images = reader.unify([part.images for part in every])
    every = [replace(part, images=each) for part, each in zip(every, images, strict=True)]
    owners = np.repeat(np.arange(len(parts)), [len(each.images) for each in parts])
    train = _join(every[: len(parts)], owners if names else None)
    test_split = None if test is None else _join(every[len(parts) :])
    first = next(iter(sources.values()))
    classes = _name_classes(first, max((n for part in every for n in part.labels), default=-1))
    splits = {"train": train} | ({} if test_split is None else {"test": test_split})
    files = {name: _digest(split) for name, split in splits.items()}
    return Dataset(data.name, train, test_split, classes, names, files)


@dataclass(frozen=True)
class _Part:
    """uint8 images ``[N, C, H, W]``, labels or -1, and the true sizes of whole images."""

    images: Tensor
    labels: Labels
    sizes: Tensor | None


class _Reader:
    """Reads data sets into parts of a split."""

    def __init__(self, data: config.Data) -> None:
        self.data, self.name = data, ""
        self.whole = data.shape == "whole"

    def read(self, source: Any, name: str) -> _Part:
        """Read one data set; errors call it ``name``."""
        self.name = name.strip()
        tensors = getattr(source, "tensors", source)  # of a TensorDataset
        pair = tensors if isinstance(tensors, tuple) else (tensors, None)
        if isinstance(pair[0], Tensor | np.ndarray):
            labels = pair[1] if len(pair) > 1 else None
            return self._read_arrays(pair[0], labels)
        rows = list(map(self._read_item, self._items(source)))
        if not rows:
            raise self.error("has no image", "Give at least one image, or leave it out.")
        images, sizes, labels = zip(*rows, strict=True)
        whole = None if sizes[0] is None else torch.cat(sizes)
        return _Part(torch.cat(self.unify(list(images))), list(labels), whole)

    def _items(self, source: Any) -> Iterator[Any]:
        if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
            return (source[i] for i in range(len(source)))
        if isinstance(source, Iterable):
            return iter(source)
        fix = "Give a torch Dataset, or a tensor of images [N, channels, height, width]."
        raise self.error(f"is of type {type(source).__name__}, not a data set", fix)

    def _read_arrays(self, pixels: Tensor | NDArray[Any], labels: Any) -> _Part:
        if isinstance(pixels, np.ndarray):  # height, width, channels
            pixels = torch.from_numpy(pixels)
            pixels = pixels[:, None] if pixels.ndim == 3 else pixels.movedim(-1, 1)
        if pixels.ndim != 4 or not len(pixels):
            shape = " × ".join(map(str, pixels.shape))
            fix = "Give a tensor [N, channels, height, width]."
            raise self.error(f"has images of the shape {shape}", fix)
        numbers = [-1] * len(pixels) if labels is None else [int(label) for label in labels]
        if len(numbers) != len(pixels):
            problem = f"has {len(pixels)} images and {len(numbers)} labels"
            raise self.error(problem, "Give one label for each image.")
        images, sizes = self._fit(self._quantize(pixels))
        return _Part(images, numbers, sizes)

    def _read_item(self, item: Any) -> tuple[Tensor, Tensor | None, int]:
        """Return an image ``[1, C, H, W]``, its size if it is whole, and its label or -1."""
        label: Any = None
        if isinstance(item, Mapping):
            item, label = item.get("image"), item.get("label")
        elif isinstance(item, tuple | list):
            item, label = item[0], item[1] if len(item) > 1 else None
        if isinstance(item, np.ndarray):
            item = open_array(item)
        if isinstance(item, Image.Image):
            channels, data = _count_channels(item), self.data
            try:
                pixels = to_pixels(item, data.size, channels, self.whole, data.interpolation)
                image = torch.from_numpy(np.array(pixels))
            except Exception as error:  # Pillow raises almost any exception on damaged files
                fix = "Convert the image to 8 bits, or leave it out."
                raise self.error(f"has an image with {describe_failure(error)}", fix) from None
        elif isinstance(item, Tensor) and item.ndim == 3:
            image = self._quantize(item)
        else:
            fix = "Items are a Pillow image, a tensor [channels, height, width] or an array."
            raise self.error(f"has an item with a {type(item).__name__} for its image", fix)
        return *self._fit(image[None]), -1 if label is None else int(label)

    def _quantize(self, pixels: Tensor) -> Tensor:
        try:
            return quantize(pixels)
        except ValueError as error:
            fix = "Give uint8, or floats between 0 and 1. Leave normalization out."
            raise self.error(f"has {error}", fix) from None

    def _fit(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Crop the middle square and resize it to ``data.size``, or frame whole images."""
        size, (height, width) = self.data.size, images.shape[2:]
        if self.whole:
            if size is None:
                problem, fix = "whole images need a size", "Set it, for example data.size=256."
                raise UserError(problem, key="data.size", value=None, fix=fix)
            return frame(images, size, self.data.interpolation)
        if size is None or height == width == size:
            return images, None
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        square = images[..., top : top + side, left : left + side]
        return resize(square, size, self.data.interpolation), None

    def unify(self, parts: list[Tensor]) -> list[Tensor]:
        """Return images of one shape; gray images become colored if others are."""
        most = max(part.shape[1] for part in parts)
        if most == 3:
            parts = [p.expand(-1, 3, -1, -1) if p.shape[1] == 1 else p for p in parts]
        self._check_shapes({tuple(part.shape[1:]) for part in parts})
        return parts

    def _check_shapes(self, shapes: set[tuple[int, ...]]) -> None:
        if len(shapes) > 1:
            first, second = (" × ".join(map(str, shape)) for shape in sorted(shapes)[:2])
            problem = f"images have different shapes ({first} and {second})"
            fix = "Set data.size=64, for example, and use one number of channels."
            raise UserError(problem, key="data.size", value=self.data.size, fix=fix)

    def error(self, problem: str, fix: str) -> UserError:
        """Return an error about the data set that is read."""
        return UserError(
            f"{self.name} {problem}".strip(), key="data.name", value=self.data.name, fix=fix
        )


def quantize(pixels: Tensor) -> Tensor:
    """Return pixels as uint8; floats are between 0 and 1."""
    if pixels.dtype == torch.uint8:
        return pixels
    if not pixels.is_floating_point():
        raise ValueError(f"pixels of {pixels.dtype}")
    low, high = (float(pixels.min()), float(pixels.max())) if pixels.numel() else (0.0, 0.0)
    if not 0 <= low <= high <= 1:
        raise ValueError(f"pixels from {low:.3g} to {high:.3g}")
    return (pixels * 255).round().to(torch.uint8)


def open_array(array: NDArray[Any]) -> Image.Image:
    """Return an array ``[height, width]`` or ``[height, width, channels]`` as a Pillow image."""
    array = quantize(torch.from_numpy(np.array(array))).numpy()  # a copy: Pillow's are read-only
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.ndim != 2 and (array.ndim != 3 or array.shape[2] not in GRAY_OR_COLOR):
        shape = " × ".join(map(str, array.shape))
        raise ValueError(f"the shape {shape} in place of height × width × 1 or 3 channels")
    return Image.fromarray(array)


def _count_channels(image: Image.Image) -> int:
    return 1 if image.mode in ("1", "L") or image.mode.startswith("I") else 3


def _join(parts: Sequence[_Part], owners: NDArray[np.int64] | None = None) -> Split:
    labels = [label for part in parts for label in part.labels]
    known = torch.tensor(labels) if max(labels, default=-1) >= 0 else None
    sizes = [part.sizes for part in parts if part.sizes is not None]
    images = torch.cat([part.images for part in parts]).contiguous()
    return Split((images,), known, owners, sizes=(torch.cat(sizes),) if sizes else None)


def _name_classes(source: Any, highest: int) -> tuple[str, ...]:
    """Return the names that a data set gives its classes, as torchvision's do, or numbers."""
    names = getattr(source, "classes", None)
    if isinstance(names, list | tuple) and len(names) > highest >= 0:
        return tuple(map(str, names))
    return tuple(map(str, range(highest + 1)))


def _digest(split: Split) -> str:
    """Return a digest of images and labels, by which a resumed run knows them again."""
    digest = hashlib.sha256(split.images[0][:].numpy().tobytes())
    digest.update(split.full_labels.numpy().tobytes())
    return digest.hexdigest()
