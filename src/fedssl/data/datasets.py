"""The data sets by name: bundled, installed, downloaded, or the user's own folders."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import itertools
import math
import os
import socket
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from fedssl.data import images, random
from fedssl.data.dataset import Dataset, Split
from fedssl.util.errors import UserError

DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
TINY_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
TINY_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
STL_CLASSES = (
    *("airplane", "bird", "car", "cat", "deer"),
    *("dog", "horse", "monkey", "ship", "truck"),
)
BLOCK = 1024  # images resized at once
UNUSED = ("val", "valid", "validation")  # folders of images that neither train nor judge
EMPTIED = 20  # folders named in a message: whole clients that are missing
PATIENCE = 10.0  # seconds without a sign of the network before a download is given up

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
Raw = dict[str, tuple[list[Pixels], NDArray[Any]]]  # split → images in parts, labels of them all


def load(data: config.Data, seed: int = 0, size: int | None = None) -> Dataset:
    """The data set that ``data`` describes; ``size`` replaces ``data.size``.

    Images are memory-mapped where that is possible: nothing is read until it is used.
    ``seed`` decides which samples ``data.labels`` keeps.
    """
    _check(data)
    wanted = dataclasses.replace(data, size=size or data.size)
    try:
        dataset = LOADERS[data.name](wanted)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        key = f"data.size={data.size}" if size is None else f"evaluate.size={size}"
        text = f"{key}: images of that size do not fit into memory; lower it"
        raise UserError(text, text) from None
    if data.labels is not None:
        dataset = _keep_labels(dataset, data.labels, seed)
    if data.halves:
        dataset = _halve(dataset)
    return _order_clients(dataset)


def here(data: config.Data) -> config.Data:
    """The same data from where it is on this machine: never downloaded, but refused."""
    if data.root is not None or data.name in ("digits", "folder", "paired"):
        return data
    places = [_cache(data) / "downloads" / data.name]
    if data.name == "fashion-mnist":
        places.insert(0, DEBIAN_FASHION)
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        looked = ", ".join(map(str, places))
        raise UserError(f"data.name={data.name}: not in {looked}, and not downloaded for this")
    return dataclasses.replace(data, root=str(found))


def where(data: config.Data) -> str:
    """The key that says which images these are, and its value: how a line about them begins."""
    return f"data.name={data.name}" if data.root is None else f"data.root={data.root}"


def draw_labels(
    labels: Tensor,
    count: int,
    classes: int,
    seed: int,
    key: str = "data.labels",
    names: Sequence[str] = (),
) -> Tensor:
    """Sorted indices of ``count`` labelled samples, equally many of each class.

    A pure function of the seed, and nested: ``draw_labels(y, 10, 10, seed)`` is part of
    ``draw_labels(y, 50, 10, seed)``. ``key`` is the configuration key that an error names, and
    ``names`` are those of the classes, for it too.
    """
    numbers = labels.cpu().numpy()
    available = np.bincount(numbers[numbers >= 0], minlength=classes)
    each, rest = divmod(count, classes)
    if rest or count <= 0:
        raise UserError(
            f"{key}={count}: must be a multiple of the {classes} classes, "
            f"for example {max(each, 1) * classes}"
        )
    if each > available.min():
        raise UserError(
            f"{key}={count}: needs {each} samples of each class, but {_rarest(available, names)}; "
            f"at most {available.min() * classes}"
        )
    ranks = random.mix(random.key(seed, "labels"), np.arange(len(numbers), dtype=np.uint64))
    order = np.lexsort((ranks, numbers))[np.count_nonzero(numbers < 0) :]
    starts = np.cumsum(available) - available
    chosen = order[(starts[:, None] + np.arange(each)).ravel()]
    return torch.from_numpy(np.sort(chosen))


def held_out(
    labels: Tensor,
    share: float,
    classes: int,
    seed: int,
    where: str | None = None,
    names: Sequence[str] = (),
) -> Tensor:
    """Sorted indices of a share of the labelled samples, equally many of each class.

    These are the samples that ``data.holdout`` keeps from the clients, for fine-tuning alone
    (FedEMA, appendix B.3). Drawn as in ``draw_labels``, so a larger share contains a smaller one.
    ``where`` begins an error's line about a protocol, whose share is in percent; ``names`` are the
    classes', for such a line.
    """
    percent, where = where is not None, where or f"data.holdout={share}"
    if not 0 <= share < 1:
        raise UserError(f"{where}: the share must be at least 0 and below 1")
    if share == 0:
        return torch.empty(0, dtype=torch.int64)
    known = labels[labels >= 0].cpu()
    if not len(known):
        raise UserError(
            f"{where}: is drawn evenly from the classes, but no sample has a label; leave it out"
        )
    available = torch.bincount(known, minlength=classes).numpy()
    # Up, by less than any share that a person writes: 0.29 × 100 is 28.999999999999996.
    each = math.floor(share * len(known) / classes + 1e-9)
    if each < 1:
        few = f"{where}: less than one of the {len(known)} labelled samples for each of the "
        if len(known) <= classes:
            raise UserError(f"{few}{classes} classes, as any share would be; leave it out")
        least = _share(1, classes, len(known), percent)
        raise UserError(f"{few}{classes} classes; take at least {least}")
    if each > available.min():
        most = _share(int(available.min()), classes, len(known), percent)
        raise UserError(
            f"{where}: takes {each} samples of each class, but {_rarest(available, names)}; take "
            f"at most {most}"
        )
    return draw_labels(labels, each * classes, classes, seed)


def _rarest(available: Labels, names: Sequence[str]) -> str:
    """The class with the fewest samples, in a sentence: by its name, else by its number."""
    rarest = int(available.argmin())
    called = names[rarest] if names else f"number {rarest}"
    return f"class {called} has {available[rarest]}"


def _share(each: int, classes: int, total: int, percent: bool) -> str:
    """The share of ``total`` samples that is so many of each class, and not one more."""
    grid = 10**4  # of a round number, which is larger by less than a sample
    while grid * classes <= total:
        grid *= 10
    share = -(-grid * each * classes // total) / grid
    return f"{100 * share:g} %" if percent else f"{share:g}"


def _check(data: config.Data) -> None:
    """What can be said before looking for files."""
    own = data.name in ("folder", "paired")
    if data.name == "digits" and data.root is not None:
        raise UserError(
            f"data.root={data.root}: digits come with scikit-learn and take no data.root; "
            "leave it out, or set data.name=folder for your own images"
        )
    if own and data.root is None:
        raise UserError(f"data.name={data.name}: needs data.root, the folder with the images")
    if data.levels is not None and not own:
        raise UserError(
            f"data.levels={','.join(data.levels)}: {data.name} has no folder levels; leave it out"
        )
    if data.levels is not None and len(set(data.levels)) < len(data.levels):
        raise UserError(f"data.levels={','.join(data.levels)}: name each level once")
    if data.halves and data.name == "paired":
        raise UserError("data.halves=true: data.name=paired has two modalities already")
    if data.root is not None:
        root = _root(data)
        if not root.exists():
            full = "" if root.is_absolute() else f" (looked for {root.absolute()})"
            raise UserError(f"data.root={data.root}: no such folder{full}", "no such folder")
        if not root.is_dir():
            raise UserError(f"data.root={data.root}: a file, not a folder", "a file, not a folder")
        if not os.access(root, os.R_OK | os.X_OK):
            text = "not readable; change its permissions"
            raise UserError(f"data.root={data.root}: {text}", text)


def _root(data: config.Data) -> Path:
    return Path(data.root or "").expanduser()


def _cache(data: config.Data) -> Path:
    place = data.cache or os.environ.get("FEDSSL_CACHE") or "~/.cache/fedssl"
    return Path(place).expanduser()


# What can be done with any data set -------------------------------------------------------------


def _keep_labels(dataset: Dataset, count: int, seed: int) -> Dataset:
    """The data set with ``count`` labelled training samples only."""
    train = dataset.train
    if train.labels is None:
        raise UserError(
            f"data.labels={count}: {dataset.name} has no classes here; "
            "leave it out, or name the class level in data.levels"
        )
    names = dataset.classes
    index = draw_labels(train.labels, count, len(names), seed, names=names)
    rows = index.numpy()
    kept = Split(
        tuple(x[index] for x in train.images),
        train.labels[index],
        None if train.clients is None else train.clients[rows],
        None if train.cases is None else _numbers(train.cases[rows].tolist()),
    )
    return dataclasses.replace(dataset, train=kept)


def _halve(dataset: Dataset) -> Dataset:
    """Left and right half of each image as two modalities (DCCO's Figure 1 c)."""
    width = dataset.train.images[0].shape[-1] // 2
    if width == 0:
        raise UserError("data.halves=true: images of 1 pixel have no halves; raise data.size")

    def halves(split: Split) -> Split:
        (whole,) = split.images
        parts = (whole[..., :width].contiguous(), whole[..., -width:].contiguous())
        return dataclasses.replace(split, images=parts)

    test = dataset.test and halves(dataset.test)
    return dataclasses.replace(dataset, train=halves(dataset.train), test=test)


def in_channels(dataset: Dataset, wanted: Sequence[int]) -> Dataset:
    """The data set grey or in colour, as each modality is ``wanted``; pixels as files' have it."""

    def converted(split: Split) -> Split:
        pairs = zip(split.images, itertools.cycle(wanted), strict=False)
        return dataclasses.replace(split, images=tuple(_in_channels(x, n) for x, n in pairs))

    test = dataset.test and converted(dataset.test)
    return dataclasses.replace(dataset, train=converted(dataset.train), test=test)


def _in_channels(pixels: Tensor, channels: int) -> Tensor:
    if pixels.shape[1] == channels:
        return pixels
    if {pixels.shape[1], channels} != {1, 3}:
        raise UserError(
            f"images of {pixels.shape[1]} channels cannot become images of {channels}: only grey "
            "ones (1) and ones in colour (3) can become each other"
        )
    if channels == 3:
        return pixels.expand(-1, 3, -1, -1).contiguous()
    grey = torch.empty_like(pixels[:, :1])
    for whole, part in zip(pixels.split(BLOCK), grey.split(BLOCK), strict=True):
        red, green, blue = whole.int().split(1, dim=1)
        part.copy_((19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16)  # Pillow's "L"
    return grey


def _order_clients(dataset: Dataset) -> Dataset:
    """Number first the clients that have training samples, so that none of those is empty."""
    train, test = dataset.train, dataset.test
    if train.clients is None:
        return dataset
    count = len(dataset.clients)
    has = np.bincount(train.clients, minlength=count) > 0
    order = np.argsort(~has, kind="stable")
    number = np.argsort(order)
    if test is not None and test.clients is not None:
        test = dataclasses.replace(test, clients=number[test.clients])
    return dataclasses.replace(
        dataset,
        train=dataclasses.replace(train, clients=number[train.clients]),
        test=test,
        clients=tuple(dataset.clients[k] for k in order),
    )


def _resize(pixels: Tensor, size: int) -> Tensor:
    """Square images ``[N, C, H, W]`` with values 0 to 255 as uint8 of another size."""
    if pixels.shape[-1] != size:
        pixels = functional.interpolate(
            pixels.to(torch.float32), (size, size), mode="bilinear", antialias=True
        )
    return pixels if pixels.dtype == torch.uint8 else pixels.round().clamp(0, 255).byte()


# Data sets that come as arrays ------------------------------------------------------------------


def _digits(data: config.Data) -> Dataset:
    """Scikit-learn's 8 × 8 digits; every fifth is a test sample."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images).float()[:, None] * (255 / 16)
    pixels = _resize(pixels, data.size or 16)
    labels = torch.from_numpy(bunch.target).long()
    test = torch.arange(len(labels)) % 5 == 4
    return Dataset(
        "digits",
        Split((pixels[~test],), labels[~test]),
        Split((pixels[test],), labels[test]),
        tuple(map(str, range(10))),
    )


def _fashion(data: config.Data) -> Dataset:
    files = tuple(
        f"{split}-{part}-ubyte"
        for split in ("train", "t10k")
        for part in ("images-idx3", "labels-idx1")
    )
    inside = ("", "FashionMNIST/raw")
    place = _locate_files(data, "FashionMNIST", files, inside, (DEBIAN_FASHION,))
    return _from_arrays(data, *place, _read_fashion)


def _cifar10(data: config.Data) -> Dataset:
    names = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")
    place = _locate_files(data, "CIFAR10", [f"cifar-10-batches-py/{name}" for name in names])
    return _from_arrays(data, *place, functools.partial(_read_cifar, "CIFAR10"))


def _cifar100(data: config.Data) -> Dataset:
    files = [f"cifar-100-python/{name}" for name in ("train", "test", "meta")]
    place = _locate_files(data, "CIFAR100", files)
    return _from_arrays(data, *place, functools.partial(_read_cifar, "CIFAR100"))


def _stl10(data: config.Data) -> Dataset:
    names = ("train_X", "unlabeled_X", "train_y", "test_X", "test_y")
    place = _locate_files(data, "STL10", [f"stl10_binary/{name}.bin" for name in names])
    return _from_arrays(data, *place, _read_stl)


def _read_fashion(folder: Path, files: Sequence[str]) -> tuple[Sequence[str], Raw]:
    x, y, test_x, test_y = (_read_idx(folder / name) for name in files)
    return FASHION_CLASSES, {"train": ([x[:, None]], y), "test": ([test_x[:, None]], test_y)}


def _read_idx(path: Path) -> Pixels:
    """An IDX file of bytes: two zeros, the type 8, the number of axes, their lengths, the data."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if data[:3] != b"\0\0\x08":
            raise ValueError("no IDX file of bytes")
        shape = np.frombuffer(data, ">u4", count=data[3], offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise UserError(f"{path}: damaged ({error}); replace the file") from None


def _read_cifar(name: str, folder: Path, files: Sequence[str]) -> tuple[Sequence[str], Raw]:
    import torchvision.datasets

    kind = getattr(torchvision.datasets, name)
    try:  # torchvision compares checksums before it unpickles anything
        train, test = (kind(str(folder), train=train) for train in (True, False))
    except RuntimeError:
        raise UserError(f"{folder}: the files of {name} there are damaged; replace them") from None
    return train.classes, {
        "train": ([train.data.transpose(0, 3, 1, 2)], np.array(train.targets)),
        "test": ([test.data.transpose(0, 3, 1, 2)], np.array(test.targets)),
    }


def _read_stl(folder: Path, files: Sequence[str]) -> tuple[Sequence[str], Raw]:
    """Labels count from 1, images are stored column by column; mapped, for they are 3 GB."""
    for name in files:
        length = (folder / name).stat().st_size
        if not length or (name.endswith("X.bin") and length % (3 * 96 * 96)):
            raise UserError(f"{folder / name}: damaged (no whole images); replace the file")
    maps = [np.memmap(folder / name, np.uint8, mode="r") for name in files]
    x, unlabeled, test_x = (maps[i].reshape(-1, 3, 96, 96).swapaxes(2, 3) for i in (0, 1, 3))
    y, test_y = (maps[i].astype(np.int64) - 1 for i in (2, 4))
    y = np.concatenate((y, np.full(len(unlabeled), -1)))
    return STL_CLASSES, {"train": ([x, unlabeled], y), "test": ([test_x], test_y)}


def _from_arrays(
    data: config.Data,
    folder: Path,
    files: Sequence[str],
    read: Callable[[Path, Sequence[str]], tuple[Sequence[str], Raw]],
) -> Dataset:
    """A data set from ``read`` at the wanted size, by way of the cache."""
    cache = _cache(data)

    def build(new: Path) -> images.Meta:
        classes, raw = read(folder, files)
        total, known = sum(len(labels) for _, labels in raw.values()), {}
        with images.progress(total, f"preparing {total} images of {data.name}") as update:
            for split, (parts, labels) in raw.items():
                if sum(map(len, parts)) != len(labels):
                    raise UserError(f"{folder}: {split} images and labels differ in number")
                seen = hashlib.blake2b(labels.astype(np.int64).data, digest_size=16)
                with images.ArrayFile(new / f"{split}-labels.npy", cache) as file:
                    file.append(labels.astype(np.int64))
                with images.ArrayFile(new / f"{split}-0.npy", cache) as file:
                    for block in _blocks(parts):
                        seen.update(np.ascontiguousarray(block).data)
                        resized = _resize(torch.from_numpy(block), data.size or block.shape[-1])
                        file.append(resized.numpy())
                        update(len(block))
                known[split] = seen.hexdigest()
        return {"classes": list(classes), "contents": known}

    stats = [(name, (folder / name).stat()) for name in files]
    listing = [images.File(name, s.st_size, s.st_mtime_ns) for name, s in stats]
    name = f"{data.name}-{images.digest(folder, listing, data.size)}"
    # Older versions' have no digest.
    found = images.cached(cache, name, build, lambda meta: "contents" not in meta)
    train, test = (
        Split(
            (torch.from_numpy(found.arrays[f"{split}-0"]),),
            torch.from_numpy(found.arrays[f"{split}-labels"]),
        )
        for split in ("train", "test")
    )
    classes, contents = tuple(found.meta["classes"]), found.meta["contents"]
    return Dataset(data.name, train, test, classes, files=contents)


def _blocks(parts: Iterable[Pixels]) -> Iterator[Pixels]:
    for part in parts:
        for start in range(0, len(part), BLOCK):
            yield np.array(part[start : start + BLOCK])


# Where data sets are looked for -----------------------------------------------------------------


def _locate_files(
    data: config.Data,
    torchvision: str,
    names: Sequence[str],
    inside: Sequence[str] = ("",),
    installed: Sequence[Path] = (),
) -> tuple[Path, list[str]]:
    """The folder of a data set that torchvision knows, and its files there, ``.gz`` or not."""

    def files(folder: Path) -> list[str]:
        ends = ("", ".gz")
        found = [next((n + e for e in ends if (folder / (n + e)).is_file()), "") for n in names]
        return found if all(found) else []

    def download(folder: Path) -> None:
        import torchvision.datasets as known

        kind = getattr(known, torchvision)
        if torchvision == "FashionMNIST":
            kind(str(folder), download=True)
        else:
            known.utils.download_and_extract_archive(
                kind.url, folder, filename=kind.filename, md5=kind.tgz_md5, remove_finished=True
            )

    parent = names[0].rpartition("/")[0]
    expected = f"{parent}/ with " if parent else ""
    expected += ", ".join(name.removeprefix(f"{parent}/") for name in names)
    folder = _locate(data, files, inside, download, expected, installed)
    return folder, files(folder)


def _locate(
    data: config.Data,
    present: Callable[[Path], object],
    inside: Sequence[str],
    download: Callable[[Path], None],
    expected: str,
    installed: Sequence[Path] = (),
) -> Path:
    """The folder that holds the files: below ``data.root`` if given, else installed, downloaded."""
    if data.root is not None:
        for folder in (_root(data) / name for name in inside):
            if present(folder):
                return folder
        raise UserError(f"data.root={data.root}: no {data.name} there; expected {expected}")
    downloaded = _cache(data) / "downloads" / data.name
    for folder in (*installed, *(downloaded / name for name in inside)):
        if present(folder):
            return folder
    try:
        with images.replacing(downloaded, _cache(data)) as new, _network_patience():
            download(new)
            found = next((name for name in inside if present(new / name)), None)
            if found is None:
                raise ValueError("the archive holds something else")
    except UserError:
        raise
    except Exception as error:  # of urllib, http, tarfile, zipfile, zlib, torchvision, …
        looked = ", ".join(map(str, (*installed, downloaded)))
        raise UserError(
            f"data.name={data.name}: not in {looked}, and the download failed "
            f"({' '.join(str(error).split()) or type(error).__name__}); "
            f"set data.root to a folder that holds {expected}"
        ) from None
    return downloaded / found


@contextmanager
def _network_patience() -> Iterator[None]:
    """Give up on a silent network soon; torchvision's downloads would wait for minutes."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


# Data sets that come as image files -------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """One split: its samples, the folders that each lies in, and every folder with its path."""

    rows: list[images.Row]
    within: list[tuple[str, ...]]
    folders: dict[tuple[str, ...], str]


def _folder(data: config.Data) -> Dataset:
    root = _root(data)
    found = {split: _find(root, below) for split, below in _splits(root).items()}
    return _from_files(data, found, _levels(data, found["train"], (root / "train").is_dir()), {})


def _paired(data: config.Data) -> Dataset:
    root = _root(data)
    names, layouts = _modalities(root)
    found, unpaired = {}, {}
    for split in layouts[0] | layouts[1]:
        sides = [_find(root, each[split]) if split in each else _EMPTY for each in layouts]
        found[split], alone = _pair(root, names, sides)
        unpaired.update(alone)
    if unpaired and data.corrupt == "fail":
        raise UserError(
            f"data.corrupt=fail: {len(unpaired)} files below {root} have no partner: "
            f"{images.listed(unpaired)}; data.corrupt=skip leaves such files out"
        )
    divided = any(each["train"] != name for name, each in zip(names, layouts, strict=True))
    return _from_files(data, found, _levels(data, found["train"], divided), unpaired)


def _modalities(root: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The names of the two, and for each split → its folder: train/NAME, NAME/train or NAME."""
    # A folder called train beside test/ may be trained on alone, as it always could.
    above = _splits(root) if (root / "train").is_dir() else {"train": ""}
    names = _two(root, above["train"])
    if above["train"]:
        for split in above:
            other = _two(root, split)
            if other != names:
                raise UserError(
                    f"data.root={root}: the modalities are called {', '.join(names)} in train/ and "
                    f"{', '.join(other)} in {split}/; rename the folders"
                )
        return names, [{split: f"{split}/{name}" for split in above} for name in names]
    below = [_splits(root / name) for name in names]
    return names, [
        {split: f"{name}/{folder}".rstrip("/") for split, folder in each.items()}
        for name, each in zip(names, below, strict=True)
    ]


def _two(root: Path, below: str) -> list[str]:
    folders = (path for path in (root / below).iterdir() if path.is_dir())
    names = sorted(path.name for path in folders if not path.name.startswith("."))
    if len(names) != 2:
        raise UserError(
            f"data.root={root}: paired data are exactly two folders, one for each modality; "
            f"found {len(names)}{f' in {below}/' if below else ''}"
            f"{': ' + ', '.join(names) if names else ''}"
        )
    return names


_EMPTY = _Found([], [], {})


def _pair(
    root: Path, names: Sequence[str], sides: Sequence[_Found]
) -> tuple[_Found, dict[str, str]]:
    """Samples with a file on both sides, by path without ending; and the files without partner."""
    by_stem: list[dict[tuple[str, ...], images.File]] = []
    for side in sides:
        stems: dict[tuple[str, ...], images.File] = {}
        for (file,), within in zip(side.rows, side.within, strict=True):
            stem = (*within, Path(file.path).stem)
            if stem in stems:
                raise UserError(
                    f"data.root={root}: {stems[stem].path} and {file.path} differ only in their "
                    "ending, so their partner is not clear; rename one"
                )
            stems[stem] = file
        by_stem.append(stems)
    first, second = by_stem
    both = [stem for stem in first if stem in second]
    unpaired = {
        file.path: f"no partner in {other}"
        for stems, others, other in ((first, second, names[1]), (second, first, names[0]))
        for stem, file in stems.items()
        if stem not in others
    }
    rows: list[images.Row] = [(first[stem], second[stem]) for stem in both]
    folders = sides[0].folders | sides[1].folders
    return _Found(rows, [stem[:-1] for stem in both], folders), unpaired


def _tiny_imagenet(data: config.Data) -> Dataset:
    def present(folder: Path) -> bool:
        return (folder / "train").is_dir() and (folder / "val/val_annotations.txt").is_file()

    def download(folder: Path) -> None:
        from torchvision.datasets import utils

        utils.download_and_extract_archive(TINY_URL, folder, md5=TINY_MD5, remove_finished=True)

    expected = "train/<wnid>/images/*.JPEG and val/val_annotations.txt"
    inside = ("tiny-imagenet-200", "")
    folder = _locate(data, present, inside, download, expected)
    train, val = _find(folder, "train"), _find(folder, "val/images")
    lines = (folder / "val/val_annotations.txt").read_text(encoding="utf-8").splitlines()
    wnid = dict(line.split("\t")[:2] for line in lines if "\t" in line)
    within: list[tuple[str, ...]] = []
    for (file,) in val.rows:
        name = Path(file.path).name
        if name not in wnid:
            raise UserError(f"{folder}/{file.path}: not in val/val_annotations.txt; remove it")
        within.append((wnid[name],))
    found = {"train": train, "test": _Found(val.rows, within, {})}
    return _from_files(dataclasses.replace(data, root=str(folder)), found, ("class",), {})


def _splits(root: Path) -> dict[str, str]:
    """Split → its folder below ``root``; without train/ everything is training data."""
    if (root / "train").is_dir():
        return {s: s for s in ("train", "test") if (root / s).is_dir()}
    if (root / "test").is_dir():
        raise UserError(f"data.root={root}: there is test/ but no train/; rename or add it")
    if root.name == "train" and (root.parent / "test").is_dir():
        raise UserError(
            f"data.root={root}: there is test/ beside it; give the folder above train, "
            f"data.root={root.parent}"
        )
    return {"train": ""}


def check_whole(data: config.Data) -> None:
    """Refuse a site's folder of which a part would be left out: nobody there sees our notes."""
    root = _root(data)
    used = ("train", "test", *UNUSED)  # or known not to be, as everywhere
    if not (root / "train").is_dir():
        return
    others = sorted(each.name for each in root.iterdir() if each.name not in used)
    lost = [file for name in others for file in _images_at(root, name)]
    if lost:
        text = f"{len(lost)} images are not below train/, and only those in there would be used"
        fix = "move them there, or rename train"
        raise UserError(
            f"data.root={data.root}: {text} ({images.few(lost, 3)}); {fix}", f"{text}; {fix}"
        )


def _images_at(root: Path, name: str) -> list[str]:
    """Those in one place below ``root``; none where nobody looks, or may look (lost+found)."""
    if name.startswith("."):
        return []
    if not (root / name).is_dir():
        return [name] if Path(name).suffix.lower() in images.extensions() else []
    try:
        return [file.path for file in images.find(root, name)[0]]
    except UserError:
        return []


def unused(data: config.Data) -> Iterator[str]:
    """A line for a folder beside train/ that many data sets have, and nothing here looks into."""
    root = _root(data)
    for name in UNUSED if (root / "train").is_dir() else ():
        if (root / name).is_dir() and (root / "test").is_dir():
            yield f"data.root={root}: train/ is trained on, test/ judges, and {name}/ is not used"
        elif (root / name).is_dir():
            yield f"data.root={root}: {name}/ is not used; rename it to test to judge with it"


def _find(root: Path, below: str) -> _Found:
    files, folders = images.find(root, below)
    depth = len(below.split("/")) if below else 0
    return _Found(
        [(file,) for file in files],
        [tuple(file.path.split("/")[depth:-1]) for file in files],
        {tuple(folder.split("/")[depth:]): folder for folder in folders},
    )


def _levels(data: config.Data, train: _Found, split: bool) -> tuple[str, ...]:
    """What the folders mean; if not said: those in train/ are classes if all images lie in one."""
    if data.levels is not None:
        return data.levels
    return ("class",) if split and all(train.within) else ()


def _from_files(
    data: config.Data,
    found: Mapping[str, _Found],
    levels: tuple[str, ...],
    unpaired: Mapping[str, str],
) -> Dataset:
    """Decode what was found, and give it labels, clients and cases by its folders."""
    for split, part in found.items():
        _check_found(data, split, part, levels)
    within = {split: part.within for split, part in found.items()}
    classes = _names("class", levels, [within["train"]])
    unknown = set(_names("class", levels, within.values())) - set(classes)
    if unknown:
        raise UserError(
            f"data.root={data.root}: test/ has classes that train/ lacks: "
            f"{', '.join(sorted(unknown))}; add them to train/ or remove them from test/"
        )
    rows = {split: part.rows for split, part in found.items()}
    decoded = images.load(_root(data), rows, data.size, _cache(data), data.name, unpaired)
    total = sum(len(row) for part in rows.values() for row in part) + len(unpaired)
    read = {split: _readable(part, decoded.unreadable) for split, part in found.items()}
    emptied = [path for split, part in found.items() for path in _emptied(part, read[split])]
    _complain(data, total, {**unpaired, **decoded.unreadable}, emptied)
    within = {split: part.within for split, part in read.items()}
    lost = set(classes) - set(_names("class", levels, [within["train"]]))
    if lost:
        raise UserError(
            f"data.root={data.root}: no training image of the class {min(lost)} can be read; "
            "mend one or remove the class"
        )
    dataset = _assemble(data.name, levels, classes, within, decoded.images)
    return dataclasses.replace(
        dataset, files={s: images.identity(part.rows) for s, part in read.items()}
    )


def _check_found(data: config.Data, split: str, part: _Found, levels: tuple[str, ...]) -> None:
    """There are images, every one lies below all levels, and no folder at a level is empty."""
    if not part.rows:
        pairs = "pairs of " if data.name == "paired" else ""
        raise UserError(
            f"data.root={data.root}: no {pairs}images for {split} (any format that Pillow reads, "
            "at any depth); fill it or give another folder",
            f"no {pairs}images for {split}",
        )
    for row, within in zip(part.rows, part.within, strict=True):
        for name in within[: len(levels)]:
            _check_name(data, name)
        if len(within) < len(levels):
            raise UserError(
                f"data.levels={','.join(levels)}: {row[0].path} lies in no "
                f"{levels[len(within)]} folder; move it into one or change data.levels",
                f"data.levels={','.join(levels)}: an image lies in no {levels[len(within)]} folder",
            )
    for depth, level in enumerate(levels, start=1):
        used = {within[:depth] for within in part.within}
        for folder, path in part.folders.items():
            if len(folder) == depth and folder not in used:
                raise UserError(
                    f"data.root={data.root}: the {level} folder {path} holds no image; "
                    "remove it or fill it"
                )


def _check_name(data: config.Data, name: str) -> None:
    """Names of clients and classes stand in files and on the screen, which are UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(name).decode(errors="backslashreplace")
        raise UserError(
            f"data.root={data.root}: the name of the folder {shown} is not UTF-8; rename it"
        ) from None


def _complain(
    data: config.Data, total: int, unreadable: Mapping[str, str], emptied: Sequence[str]
) -> None:
    """Refuse files that cannot be read or, if they may be left out, say what is then missing."""
    if not unreadable:
        return
    text, fix = f"{len(unreadable)} of {total} images", "data.corrupt=skip leaves such files out"
    names = images.listed(unreadable)
    if data.corrupt == "fail":
        raise UserError(
            f"data.corrupt=fail: {text} below {data.root} cannot be read: {names}; {fix}",
            f"data.corrupt=fail: {text} cannot be read; {fix}",
        )
    gone = f"; no image is left in {images.few(emptied, EMPTIED)}" if emptied else ""
    _warn(f"left out {text} below {_root(data).resolve()}: {names}{gone}")


@functools.cache
def _warn(text: str) -> None:
    """Once: a run loads its images again for its baselines, at another size and for its page."""
    print(f"warning: {text}", file=sys.stderr)


def _readable(part: _Found, unreadable: Mapping[str, str]) -> _Found:
    """The samples that were decoded."""
    if not unreadable:
        return part
    kept = [
        i for i, row in enumerate(part.rows) if not any(file.path in unreadable for file in row)
    ]
    return _Found([part.rows[i] for i in kept], [part.within[i] for i in kept], part.folders)


def _emptied(part: _Found, read: _Found) -> list[str]:
    """Folders (clients, cases) that had images of which none can be read; not those below them."""
    if read is part:
        return []
    before, after = (
        {within[:depth] for within in each.within for depth in range(len(within) + 1)}
        for each in (part, read)
    )
    lost = before - after
    return [
        part.folders.get(folder, "/".join(folder))
        for folder in sorted(lost)
        if folder[:-1] not in lost
    ]


def _assemble(
    name: str,
    levels: tuple[str, ...],
    classes: tuple[str, ...],
    within: Mapping[str, list[tuple[str, ...]]],
    arrays: Mapping[str, tuple[Pixels, ...]],
) -> Dataset:
    clients = _names("client", levels, within.values())

    def numbers(part: list[tuple[str, ...]], level: str, names: Sequence[str]) -> Labels | None:
        if level not in levels:
            return None
        number = {n: i for i, n in enumerate(names)}
        column = levels.index(level)
        return np.array([number[w[column]] for w in part], np.int64)

    def split(name: str) -> Split:
        part = within[name]
        labels = numbers(part, "class", classes)
        return Split(
            tuple(torch.from_numpy(x) for x in arrays[name]),
            None if labels is None else torch.from_numpy(labels),
            numbers(part, "client", clients),
            _numbers([w[: len(levels)] for w in part]) if "case" in levels else None,
        )

    test = split("test") if "test" in within else None
    return Dataset(name, split("train"), test, classes, clients)


def _names(
    level: str, levels: tuple[str, ...], parts: Iterable[list[tuple[str, ...]]]
) -> tuple[str, ...]:
    """The sorted names of the folders at one level."""
    if level not in levels:
        return ()
    column = levels.index(level)
    return tuple(sorted({within[column] for part in parts for within in part}))


def _numbers(things: Sequence[Any]) -> Labels:
    """Equal things get equal numbers, counted from 0 in order of appearance."""
    number: dict[Any, int] = {}
    return np.array([number.setdefault(thing, len(number)) for thing in things], np.int64)


LOADERS: dict[str, Callable[[config.Data], Dataset]] = {
    "digits": _digits,
    "fashion-mnist": _fashion,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "stl10": _stl10,
    "tiny-imagenet": _tiny_imagenet,
    "folder": _folder,
    "paired": _paired,
}
