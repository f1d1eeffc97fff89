"""Decode image files into uint8 arrays: upright, square or whole, resized, in threads."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import statistics
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from fedssl import config
from fedssl.data import dicom, tiff
from fedssl.data.cache import Array, Meta, check_room, grow_array, load_or_build
from fedssl.data.dicom import Window
from fedssl.data.image_files import File, Row, digest_files
from fedssl.data.places import root_error
from fedssl.data.records import open_image
from fedssl.data.stored import StoredArray
from fedssl.util.errors import UserError
from fedssl.util.status import stage
from fedssl.util.text import printable, shorten_list

CHUNK = 32  # images that a thread decodes in one go
MOST_PIXELS = 1 << 24  # fewer images, if they are large
MOST_NAMED = 3  # files named in a message; the rest is a count
DRAFT = 2  # a JPEG file is decoded at no less than this many times the target size
BYTES_PER_THREAD = 3500  # of an image: with fewer, threads mostly wait for Python's lock

Pixels = NDArray[np.uint8]
Block = tuple[tuple[Array, ...], dict[str, str]]  # arrays of some rows, and bad files
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Storage:
    """The form in which images are stored, by the keys of ``data``."""

    size: int | None
    whole: bool = False
    channels: int = 3
    interpolation: str = "bilinear"
    window: Window | None = None  # center and width of the values of images of more than 8 bits
    frame: int | None = 0  # of a file with several; None: the one in the middle

    @classmethod
    def from_config(cls, data: config.Data) -> Storage:
        """Read the keys."""
        frame = None if data.frames == "middle" else 0
        whole, how = data.shape == "whole", data.interpolation
        return cls(data.size, whole, data.channels, how, data.window, frame)

    def decode(self, root: Path, file: File, on_deep: Callable[[], object]) -> Pixels:
        """Decode a file, or a frame of it."""
        assert self.size is not None
        source, number = open_image(root, file)
        frame = self.frame if number is None else number
        settings = (self.size, self.channels, self.whole, self.interpolation, self.window)
        return decode_file(source, *settings, frame, on_deep)


def decode_file(
    source: Path | BytesIO,
    size: int,
    channels: int = 3,
    whole: bool = False,
    interpolation: str = "bilinear",
    window: Window | None = None,
    frame: int | None = 0,
    on_deep: Callable[[], object] = lambda: None,
) -> Pixels:
    """Decode an image file to ``[channels, height, width]``: see ``to_pixels``.

    ``on_deep`` is called if an image has more than 8 bits and no ``window`` was given.
    """
    if channels not in (1, 3):
        layers = tiff.to_bytes(tiff.read_channels(source, channels), window, on_deep)
        images = (to_pixels(Image.fromarray(x), size, 1, whole, interpolation) for x in layers)
        return np.concatenate(list(images))
    if dicom.is_dicom(source):
        image = dicom.read_frame(source, window, frame, on_deep)
        return to_pixels(image, size, channels, whole, interpolation)
    with _open_image(source) as image:
        if frame != 0:
            count = getattr(image, "n_frames", 1)
            image.seek(count // 2 if frame is None else frame)
        if is_deep(image) and window is None:
            on_deep()
        # JPEG decodes at a fraction of its size for less work. Pixels differ a little from those of
        # the whole image, so an export's steps say it.
        short = size * min(image.size) / max(image.size) if whole else size
        image.draft(None, (math.ceil(DRAFT * short), math.ceil(DRAFT * short)))
        return to_pixels(image, size, channels, whole, interpolation, window)


def to_pixels(
    image: Image.Image,
    size: int | None,
    channels: int = 3,
    whole: bool = False,
    interpolation: str = "bilinear",
    window: Window | None = None,
) -> Pixels:
    """Turn an image upright, crop its middle square and resize; grey if there is 1 channel.

    A ``whole`` image keeps its aspect ratio, and is only reduced: its longer side has at most
    ``size`` pixels. Without a size, an image is neither cropped nor resized.
    """
    image.load()
    image = _to_bytes(_turn_upright(image), window)
    method = Image.Resampling[interpolation.upper()]
    if size is not None and whole:
        image = _reduce(image, size, method)
    elif size is not None:
        image = ImageOps.fit(image, (size, size), method)
    if channels == 1:
        return np.asarray(image.convert("L"))[None]
    return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


def decode_files(
    paths: Iterable[Path], decode: Callable[[Path], T]
) -> Generator[T | str, None, None]:
    """Yield each file's pixels or, if it cannot be read, the reason; threads run a little ahead."""
    return _map_in_threads(functools.partial(_try, decode), paths)


def _try(decode: Callable[[S], T], source: S) -> T | str:
    try:
        return decode(source)
    except Exception as error:  # Pillow's readers raise nearly anything on broken bytes
        return describe_failure(error)


def describe_failure(error: Exception) -> str:
    """Say in a few words why a file cannot be read."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow knows"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def list_failures(files: Mapping[str, str]) -> str:
    """Name the first few files with their reasons, and count the others."""
    named = [f"{printable(path)} ({reason})" for path, reason in files.items()]
    return shorten_list(named, MOST_NAMED)


# One image -----------------------------------------------------------------------------------


def _open_image(source: Path | BytesIO) -> Image.Image:
    """Read a file's header; refuse an image that takes gigabytes to decode.

    Pillow goes by the header's number of pixels. A JPEG of any size is read at a fraction of it,
    but a progressive one is held in memory whole.
    """
    try:
        return Image.open(source)
    except Image.DecompressionBombError:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        with contextlib.suppress(SyntaxError):
            image = JpegImageFile(source)
            if "progressive" not in image.info:
                return image
            image.close()
        raise ValueError(
            f"more than {limit:,} pixels, maybe a decompression bomb; make a smaller copy"
        ) from None


def _turn_upright(image: Image.Image) -> Image.Image:
    try:
        is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
        return ImageOps.exif_transpose(image) if is_turned else image  # which would be a copy
    except Exception:  # a broken EXIF block says nothing about the pixels
        return image


def read_size(source: Path | BytesIO) -> tuple[int, int]:
    """Return the width and height in a file's header."""
    if dicom.is_dicom(source):
        return dicom.read_size(source)
    with Image.open(source) as image:
        return image.size


def is_deep(image: Image.Image) -> bool:
    """Return whether an image has more than 8 bits, with which it is stored."""
    return image.mode == "F" or image.mode.startswith("I")


def _to_bytes(image: Image.Image, window: Window | None) -> Image.Image:
    """Convert to RGB or grey with 8 bits, without alpha. Pillow would cut 16-bit values at 255."""
    if is_deep(image) and window is not None:
        image = Image.fromarray(dicom.scale_values(np.asarray(image), window))
    elif is_deep(image):
        values = np.asarray(image)
        if image.mode == "F" or values.min() < 0 or values.max() > 65535:
            kind = "floating-point" if image.mode == "F" else "32-bit"
            raise ValueError(f"{kind} pixels, whose range is unknown; set data.window")
        image = Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
    return image if image.mode in ("RGB", "L") else image.convert("RGB")


def _reduce(image: Image.Image, size: int, method: Image.Resampling) -> Image.Image:
    """Reduce an image whose longer side has more than ``size`` pixels."""
    longest = max(image.size)
    if longest <= size:
        return image
    width, height = (max(1, round(side * size / longest)) for side in image.size)
    return image.resize((width, height), method)


# Threads -------------------------------------------------------------------------------------


def _map_in_threads(
    function: Callable[[S], T], items: Iterable[S], size: float = math.inf
) -> Generator[T, None, None]:
    """Call a function that decodes files of ``size`` bytes on average; yield results in order.

    Threads run only a little ahead of the reader, so that memory stays small.
    """
    threads = int(max(1, min(os.cpu_count() or 1, size // BYTES_PER_THREAD)))
    pool = ThreadPoolExecutor(threads)
    waiting: deque[Future[T]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 4 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C: do not decode what is still waiting


# Many files ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoded:
    """Arrays ``[N, 3, size, size]`` of each split, and the files that could not be read.

    ``sizes`` are the true heights and widths ``[N, 2]`` of whole images; there are none of squares.
    """

    images: dict[str, tuple[StoredArray, ...]]
    sizes: dict[str, tuple[StoredArray, ...]]
    unreadable: dict[str, str]  # path → reason
    deep: int  # images of more than 8 bits that were scaled without ``data.window``


def decode_splits(
    root: Path,
    splits: Mapping[str, Sequence[Row]],
    storage: Storage,
    cache: Path,
    name: str,
    unpaired: Mapping[str, str],
) -> Decoded:
    """Return the rows of each split as arrays of the cache, decoded unless it has them.

    A row with an unreadable file is left out of the arrays, and the file is in ``unreadable``.
    ``unpaired`` files, which are in no row, are noted in the cache's meta file.
    """
    files = [file for rows in splits.values() for row in rows for file in row]
    modalities = {split: len(rows[0]) for split, rows in splits.items()}
    whole = storage.whole
    settings: list[object] = [storage.size, modalities, unpaired, *(["whole"] if whole else [])]
    settings += [storage] if storage != Storage(storage.size, whole) else []
    cached = load_or_build(
        cache,
        f"{name}-{digest_files(root, files, *settings)}",
        lambda folder: {"unpaired": unpaired, **_decode_into(folder, root, splits, storage)},
        lambda meta: _is_mended(root, meta["unreadable"], storage),
    )

    def collect(ending: str) -> dict[str, tuple[StoredArray, ...]]:
        return {
            split: tuple(cached.arrays[f"{split}-{i}{ending}"] for i in range(count))
            for split, count in modalities.items()
        }

    sizes = collect("-sizes") if whole else {}
    return Decoded(collect(""), sizes, cached.meta["unreadable"], cached.meta.get("deep", 0))


def _is_mended(root: Path, unreadable: Iterable[str], storage: Storage) -> bool:
    """Return whether an unreadable file can be read now; new permissions keep a file's time."""
    with warnings.catch_warnings(action="ignore"):
        decode = functools.partial(decode_file, size=8, window=storage.window)
        decoded = decode_files((root / path for path in unreadable), decode)
        return any(not isinstance(pixels, str) for pixels in decoded)


def _decode_into(
    folder: Path,
    root: Path,
    splits: Mapping[str, Sequence[Row]],
    storage: Storage,
) -> Meta:
    """Decode all splits into array files in ``folder``."""
    unreadable: dict[str, str] = {}
    deep: list[str] = []
    files = (file for rows in splits.values() for row in rows for file in row)
    if any(file.path.lower().endswith(dicom.ENDINGS) for file in files):
        dicom.check_package()
    if storage.channels not in (1, 3):
        tiff.check_package(storage.channels)
    total = sum(map(len, splits.values()))
    with (
        warnings.catch_warnings(action="ignore"),  # Pillow's remarks on odd files, one for each
        stage(f"decoding {total:,} images of {root}", total) as progress,
    ):
        if storage.size is None:
            size = _common_size(root, splits.values(), storage.whole)
            storage = replace(storage, size=size)
        assert storage.size is not None
        images = sum(len(rows) * len(rows[0]) for rows in splits.values())
        check_room(folder, images * storage.channels * storage.size**2)
        decode = functools.partial(_decode_rows, root, storage, deep)
        chunk = max(1, min(CHUNK, MOST_PIXELS // storage.size**2))
        for split, rows in splits.items():
            names = [f"{split}-{i}" for i in range(len(rows[0]))]
            names += [f"{name}-sizes" for name in names] if storage.whole else []
            paths = [folder / f"{name}.npy" for name in names]
            count, failed = _decode_split(decode, chunk, rows, paths, progress.advance)
            if not count:
                problem = f"no image for {split} can be read"
                fix = "Replace the files, or remove them all."
                raise root_error(root, f"{problem}: {list_failures(failed)}", fix, problem)
            unreadable |= failed
    found = {"size": storage.size, "unreadable": unreadable, "deep": len(set(deep))}
    return {"root": str(root.resolve()), **found}


def _decode_split(
    decode: Callable[[Sequence[Row]], Block],
    chunk: int,
    rows: Sequence[Row],
    paths: Iterable[Path],
    advance: Callable[[int], object],
) -> tuple[int, dict[str, str]]:
    """Decode rows into files with ``_decode_rows``; return their number, and bad files."""
    count, failed = 0, dict[str, str]()
    mean = statistics.fmean(file.size for row in rows for file in row)
    with contextlib.ExitStack() as stack:
        appends = [stack.enter_context(grow_array(path)) for path in paths]
        decoded = stack.enter_context(
            contextlib.closing(_map_in_threads(decode, _chunks(rows, chunk), mean))
        )
        for part, (blocks, bad) in zip(_chunks(rows, chunk), decoded, strict=True):
            failed |= bad
            for append, block in zip(appends, blocks, strict=True):
                append(block)
            count += len(blocks[0])
            advance(len(part))
    return count, failed


def _decode_rows(root: Path, storage: Storage, deep: list[str], rows: Sequence[Row]) -> Block:
    """Decode a block for each modality, without rows that have a bad file; return these files.

    Whole images lie in the upper left corner of black squares, and their sizes follow the blocks.
    Add the paths of images that are stored with fewer bits to ``deep``.
    """
    assert storage.size is not None
    shape = (len(rows), storage.channels, storage.size, storage.size)
    blocks = tuple(np.zeros(shape, np.uint8) for _ in rows[0])
    sizes = tuple(np.zeros((len(rows), 2), np.int64) for _ in rows[0] if storage.whole)
    bad: dict[str, str] = {}
    count = 0

    def decode(file: File) -> Pixels:
        return storage.decode(root, file, lambda: deep.append(file.path))

    for row in rows:
        images: list[Pixels | str] = [_try(decode, file) for file in row]
        pairs = zip(row, images, strict=True)
        failed = {file.path: reason for file, reason in pairs if isinstance(reason, str)}
        bad |= failed
        if failed:
            continue
        for k, image in enumerate(each for each in images if not isinstance(each, str)):
            height, width = image.shape[1:]
            blocks[k][count, :, :height, :width] = image
            if storage.whole:
                sizes[k][count] = height, width
        count += 1
    arrays: tuple[Array, ...] = (*blocks, *sizes)
    return tuple(array[:count] for array in arrays), bad


def _common_size(root: Path, splits: Iterable[Sequence[Row]], whole: bool) -> int:
    """Return the one square size that all images have, or refuse; of whole images the longest."""

    def read_sizes(rows: Sequence[Row]) -> Counter[tuple[int, int]]:
        sizes: Counter[tuple[int, int]] = Counter()
        for file in itertools.chain.from_iterable(rows):
            with contextlib.suppress(Exception):
                sizes[read_size(open_image(root, file)[0])] += 1
        return sizes

    rows = list(itertools.chain.from_iterable(splits))
    sizes = sum(_map_in_threads(read_sizes, _chunks(rows)), Counter())
    if not sizes:
        return 1  # no file has a header; decoding reports each file
    if whole:
        return max(map(max, sizes))
    width, height = sizes.most_common(1)[0][0]
    if len(sizes) == 1 and width == height:
        return width
    seen = shorten_list([f"{w} × {h}" for (w, h), _ in sizes.most_common()], MOST_NAMED)
    raise UserError(
        f"the images below {root} are not all of one square size ({seen})",
        "data.size is not set, and the images are not of one square size",
        key="data.size",
        value=None,
        fix=f"Set it, for example data.size={min(64, width, height)}.",
    )


def _chunks(rows: Sequence[Row], size: int = CHUNK) -> Iterator[Sequence[Row]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))
