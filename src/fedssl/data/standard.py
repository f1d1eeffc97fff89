"""Standard data sets: scikit-learn's digits, Fashion-MNIST, CIFAR, STL-10, Tiny-ImageNet.

They are read from ``data.root``, else from where they are installed, else downloaded once.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedssl import config
from fedssl.data.cache import Meta, check_room, grow_array, load_or_build, replace_folder
from fedssl.data.dataset import Dataset, Split
from fedssl.data.decode import Pixels
from fedssl.data.folders import SplitFiles, find_split, load_files
from fedssl.data.image_files import File, digest_files
from fedssl.data.places import cache_folder, data_root, list_folders, name_images, root_error
from fedssl.data.stored import place_images
from fedssl.util.errors import UserError
from fedssl.util.memory import find_free_memory
from fedssl.util.status import stage

TINY_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
TINY_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
TINY_FILES = "train/<wnid>/images/*.JPEG and val/val_annotations.txt"
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
STL_CLASSES = (
    *("airplane", "bird", "car", "cat", "deer"),
    *("dog", "horse", "monkey", "ship", "truck"),
)
BLOCK = 1024  # images resized at once
PATIENCE = 10.0  # seconds without a sign of the network before a download is given up

Raw = dict[str, tuple[list[Pixels], NDArray[Any]]]  # split → images in parts, labels of them all
Read = Callable[[Path, Sequence[str]], tuple[Sequence[str], Raw]]  # class names, arrays


@dataclass(frozen=True)
class ArraySource:
    """A data set that is published as arrays: its files, how to read them, and who downloads it."""

    files: tuple[str, ...]
    read: Read
    torchvision: str
    inside: tuple[str, ...] = ("",)  # folders below the root that may hold the files


def load_digits(data: config.Data) -> Dataset:
    """Load scikit-learn's 8 × 8 digits; every fifth is a test sample."""
    from sklearn import datasets

    bunch, size = datasets.load_digits(), data.size or 16
    if len(bunch.images) * size**2 * 4 > find_free_memory():
        raise MemoryError
    pixels = torch.from_numpy(bunch.images).float()[:, None] * (255 / 16)
    pixels = resize(pixels, size, data.interpolation)
    labels = torch.from_numpy(bunch.target).long()
    is_test = torch.arange(len(labels)) % 5 == 4
    return Dataset(
        "digits",
        Split((pixels[~is_test],), labels[~is_test]),
        Split((pixels[is_test],), labels[is_test]),
        tuple(map(str, range(10))),
    )


def load_tiny_imagenet(data: config.Data) -> Dataset:
    """Load Tiny-ImageNet; its validation images are the test split."""

    def is_there(folder: Path) -> bool:
        return (folder / "train").is_dir() and (folder / "val/val_annotations.txt").is_file()

    def download(folder: Path) -> None:
        from torchvision.datasets import utils

        utils.download_and_extract_archive(TINY_URL, folder, md5=TINY_MD5, remove_finished=True)

    folder = _locate(data, is_there, ("tiny-imagenet-200", ""), download, TINY_FILES)
    train, val = find_split(folder, "train"), find_split(folder, "val/images")
    lines = (folder / "val/val_annotations.txt").read_text(encoding="utf-8").splitlines()
    wnid = dict(line.split("\t")[:2] for line in lines if "\t" in line)
    within: list[tuple[str, ...]] = []
    for (file,) in val.rows:
        name = Path(file.path).name
        if name not in wnid:
            problem = f"{file.path} is not in val/val_annotations.txt"
            raise root_error(folder, problem, "Remove the file.")
        within.append((wnid[name],))
    files = {"train": train, "test": SplitFiles(val.rows, within, {})}
    return load_files(dataclasses.replace(data, root=str(folder)), files, ("class",))


def load_arrays(data: config.Data) -> Dataset:
    """Load a data set that is published as arrays, through the cache."""
    source = ARRAYS[data.name]
    folder, files = _locate_arrays(data, source)
    stats = [(name, (folder / name).stat()) for name in files]
    listing = [File(name, s.st_size, s.st_mtime_ns) for name, s in stats]
    settings = [data.size] + [data.interpolation] * (data.interpolation != "bilinear")
    cached = load_or_build(
        cache_folder(data),
        f"{data.name}-{digest_files(folder, listing, *settings)}",
        lambda new: _write_arrays(new, data, folder, files, source.read),
    )
    train, test = (
        Split(
            (place_images(cached.arrays[f"{split}-0"], data.stream),),
            torch.from_numpy(cached.arrays[f"{split}-labels"].map()),
        )
        for split in ("train", "test")
    )
    classes, contents = tuple(cached.meta["classes"]), cached.meta["contents"]
    return Dataset(data.name, train, test, classes, files=contents)


def _write_arrays(
    new: Path, data: config.Data, folder: Path, files: Sequence[str], read: Read
) -> Meta:
    """Write images at the wanted size and labels into the cache folder ``new``."""
    try:
        classes, raw = read(folder, files)
        for split, (parts, labels) in raw.items():
            if sum(map(len, parts)) != len(labels):
                raise ValueError(f"{split} images and labels in {folder} differ in number")
    except (OSError, ValueError) as error:
        key, value = name_images(data)
        raise UserError(str(error), key=key, value=value, fix="Replace the file.") from None
    contents = {}
    total = sum(len(labels) for _, labels in raw.values())
    whole = [part for parts, _ in raw.values() for part in parts]
    check_room(new, sum(len(p) * p.shape[1] * (data.size or p.shape[-1]) ** 2 for p in whole))
    with stage(f"preparing {total:,} images of {data.name}", total) as progress:
        for split, (parts, labels) in raw.items():
            numbers = labels.astype(np.int64)
            np.save(new / f"{split}-labels.npy", numbers)
            digest = hashlib.blake2b(numbers.data, digest_size=16)
            with grow_array(new / f"{split}-0.npy") as append:
                for block in _blocks(parts):
                    digest.update(np.ascontiguousarray(block).data)
                    pixels, size = torch.from_numpy(block), data.size or block.shape[-1]
                    append(resize(pixels, size, data.interpolation).numpy())
                    progress.advance(len(block))
            contents[split] = digest.hexdigest()
    return {"classes": list(classes), "contents": contents}


def _blocks(parts: Iterable[Pixels]) -> Iterator[Pixels]:
    for part in parts:
        for start in range(0, len(part), BLOCK):
            yield np.array(part[start : start + BLOCK])


def resize(pixels: Tensor, size: int, interpolation: str) -> Tensor:
    """Resize square images ``[N, C, H, W]`` with values 0 to 255; return uint8."""
    if pixels.shape[-1] != size:
        pixels = functional.interpolate(
            pixels.to(torch.float32), (size, size), mode=interpolation, antialias=True
        )
    return pixels if pixels.dtype == torch.uint8 else pixels.round().clamp(0, 255).byte()


# Readers ---------------------------------------------------------------------------------------


def _read_fashion(folder: Path, files: Sequence[str]) -> tuple[Sequence[str], Raw]:
    x, y, test_x, test_y = (_read_idx(folder / name) for name in files)
    return FASHION_CLASSES, {"train": ([x[:, None]], y), "test": ([test_x[:, None]], test_y)}


def _read_idx(path: Path) -> Pixels:
    """Read an IDX file of bytes: two zeros, type 8, the number of axes, their lengths, the data."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if data[:3] != b"\0\0\x08":
            raise ValueError("no IDX file of bytes")
        shape = np.frombuffer(data, ">u4", count=data[3], offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error})") from None


def _read_cifar(name: str, folder: Path, files: Sequence[str]) -> tuple[Sequence[str], Raw]:
    import torchvision.datasets

    kind = getattr(torchvision.datasets, name)
    try:  # torchvision compares checksums before it unpickles anything
        train, test = (kind(str(folder), train=train) for train in (True, False))
    except RuntimeError:
        raise ValueError(f"the files of {name} in {folder} are damaged") from None
    return train.classes, {
        "train": ([train.data.transpose(0, 3, 1, 2)], np.array(train.targets)),
        "test": ([test.data.transpose(0, 3, 1, 2)], np.array(test.targets)),
    }


def _read_stl(folder: Path, files: Sequence[str]) -> tuple[Sequence[str], Raw]:
    """Map 3 GB of images, stored column by column; labels count from 1."""
    for name in files:
        length = (folder / name).stat().st_size
        if not length or (name.endswith("X.bin") and length % (3 * 96 * 96)):
            raise ValueError(f"{folder / name} is damaged (no whole images)")
    maps = [np.memmap(folder / name, np.uint8, mode="r") for name in files]
    x, unlabeled, test_x = (maps[i].reshape(-1, 3, 96, 96).swapaxes(2, 3) for i in (0, 1, 3))
    y, test_y = (maps[i].astype(np.int64) - 1 for i in (2, 4))
    y = np.concatenate((y, np.full(len(unlabeled), -1)))
    return STL_CLASSES, {"train": ([x, unlabeled], y), "test": ([test_x], test_y)}


ARRAYS = {
    "fashion-mnist": ArraySource(
        (
            *("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
            *("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
        ),
        _read_fashion,
        "FashionMNIST",
        ("", "FashionMNIST/raw"),
    ),
    "cifar10": ArraySource(
        (
            *(f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)),
            *("cifar-10-batches-py/test_batch", "cifar-10-batches-py/batches.meta"),
        ),
        functools.partial(_read_cifar, "CIFAR10"),
        "CIFAR10",
    ),
    "cifar100": ArraySource(
        ("cifar-100-python/train", "cifar-100-python/test", "cifar-100-python/meta"),
        functools.partial(_read_cifar, "CIFAR100"),
        "CIFAR100",
    ),
    "stl10": ArraySource(
        tuple(
            f"stl10_binary/{name}.bin"
            for name in ("train_X", "unlabeled_X", "train_y", "test_X", "test_y")
        ),
        _read_stl,
        "STL10",
    ),
}


# Finding and downloading -----------------------------------------------------------------------


def _locate_arrays(data: config.Data, source: ArraySource) -> tuple[Path, list[str]]:
    """Return the folder with the files of a data set, and their names there, ``.gz`` or not."""

    def list_files(folder: Path) -> list[str]:
        present = [
            next((name + end for end in ("", ".gz") if (folder / (name + end)).is_file()), "")
            for name in source.files
        ]
        return present if all(present) else []

    def download(folder: Path) -> None:
        from torchvision import datasets

        kind = getattr(datasets, source.torchvision)
        if source.torchvision == "FashionMNIST":
            kind(str(folder), download=True)
        else:
            datasets.utils.download_and_extract_archive(
                kind.url, folder, filename=kind.filename, md5=kind.tgz_md5, remove_finished=True
            )

    parent = source.files[0].rpartition("/")[0]
    expected = f"{parent}/ with " if parent else ""
    expected += ", ".join(name.removeprefix(f"{parent}/") for name in source.files)
    folder = _locate(data, list_files, source.inside, download, expected)
    return folder, list_files(folder)


def _locate(
    data: config.Data,
    is_there: Callable[[Path], object],
    inside: Sequence[str],
    download: Callable[[Path], None],
    expected: str,
) -> Path:
    """Return the folder that holds the files: below ``data.root``, else installed or downloaded."""
    roots = list_folders(data, data.name) if data.root is None else [data_root(data)]
    for folder in (root / name for root in roots for name in inside):
        if is_there(folder):
            return folder
    fix = f"a folder that holds {expected}."
    if data.root is not None:
        raise root_error(data.root, f"no {data.name} there", f"Use {fix}")
    downloaded = roots[-1]
    with replace_folder(downloaded, cache_folder(data)) as new:
        try:
            with _network_patience():
                download(new)
            name = next(name for name in inside if is_there(new / name))
        except Exception as error:  # of urllib, http, tarfile, zipfile, zlib, torchvision, …
            places = " or ".join(map(str, roots))
            reason = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, StopIteration):
                reason = "the archive holds something else"
            problem = f"is not in {places}, and the download failed ({reason})"
            fix = f"Set data.root to {fix}"
            raise UserError(problem, key="data.name", value=data.name, fix=fix) from None
    return downloaded / name


@contextmanager
def _network_patience() -> Iterator[None]:
    """Give up on a silent network soon; torchvision's downloads would wait for minutes."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
