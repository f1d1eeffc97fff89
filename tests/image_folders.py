"""Folders of made images, and what of them was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedssl.config import Data
from fedssl.data.dataset import Dataset, Split
from fedssl.data.decode import Pixels, Storage, decode_splits
from fedssl.data.image_files import Row, find_images
from fedssl.data.load import load_dataset
from fedssl.data.places import cache_folder


def make(root: Path, *names: str, size: tuple[int, int] = (8, 8)) -> None:
    """Write image files whose red value is their place in the call."""
    for value, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (value, 0, 100)).save(path)


def folder(root: Path, **keys: Any) -> Dataset:
    return load_dataset(Data(name="folder", root=str(root), **keys))


def paired(root: Path, **keys: Any) -> Dataset:
    return load_dataset(Data(name="paired", root=str(root), **keys))


def reds(split: Split | None, modality: int = 0) -> list[int]:
    assert split is not None
    return split.images[modality][:, 0, 0, 0].tolist()


def labels(split: Split | None) -> list[int]:
    assert split is not None and split.labels is not None
    assert split.labels.dtype == torch.int64
    return split.labels.tolist()


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards: shows any flip, turn or shift."""
    x = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    y = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    return Image.fromarray(np.stack((x, y, np.full_like(x, 90)), -1).astype(np.uint8))


def save(path: Path, image: Image.Image | None = None, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or gradient(8, 8)).save(path, **options)
    return path


def save_noise(root: Path, *folders: str, count: int = 8, size: int = 16) -> None:
    """Write images of random colors into each folder."""
    generator = np.random.default_rng(count)
    for folder in folders:
        for k in range(count):
            pixels = generator.integers(0, 256, (size, size, 3), dtype=np.uint8)
            save(root / folder / f"{k}.png", Image.fromarray(pixels))


def rows(root: Path, below: str = "") -> list[Row]:
    return [(file,) for file in find_images(root, below)[0]]


def decode_train(root: Path, size: int | None = 8) -> tuple[Pixels, dict[str, str]]:
    """The images below a folder, through the cache, and the files that cannot be read."""
    found = decode_splits(
        root, {"train": rows(root)}, Storage(size), cache_folder(Data()), "test", {}
    )
    return found.images["train"][0].map(), found.unreadable
