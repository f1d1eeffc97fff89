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
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from fedssl.data.cache import Array, Meta, check_room, grow_array, load_or_build
from fedssl.data.image_files import Row, digest_files
from fedssl.data.places import root_error
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
S = TypeVar("S")
T = TypeVar("T")


def decode_file(
    path: Path,
    size: int,
    channels: int = 3,
    whole: bool = False,
    interpolation: str = "bilinear",
) -> Pixels:
    """Decode an image file to ``[channels, height, width]``: see ``to_pixels``."""
    with _open_image(path) as image:
        # JPEG decodes at a fraction of its size for less work. Pixels differ a little from those of
        # the whole image, so an export's steps say it.
        short = size * min(image.size) / max(image.size) if whole else size
        image.draft(None, (math.ceil(DRAFT * short), math.ceil(DRAFT * short)))
        return to_pixels(image, size, channels, whole, interpolation)


def to_pixels(
    image: Image.Image,
    size: int | None,
    channels: int = 3,
    whole: bool = False,
    interpolation: str = "bilinear",
) -> Pixels:
    """Turn an image upright, crop its middle square and resize; grey if there is 1 channel.

    A ``whole`` image keeps its aspect ratio, and is only reduced: its longer side has at most
    ``size`` pixels. Without a size, an image is neither cropped nor resized.
    """
    image.load()
    image = _to_bytes(_turn_upright(image))
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


def _try(decode: Callable[[Path], T], path: Path) -> T | str:
    try:
        return decode(path)
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


def _open_image(path: Path) -> Image.Image:
    """Read a file's header; refuse an image that takes gigabytes to decode.

    Pillow goes by the header's number of pixels. A JPEG of any size is read at a fraction of it,
    but a progressive one is held in memory whole.
    """
    try:
        return Image.open(path)
    except Image.DecompressionBombError:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        with contextlib.suppress(SyntaxError):
            image = JpegImageFile(path)
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


def _to_bytes(image: Image.Image) -> Image.Image:
    """Convert to RGB or grey with 8 bits, without alpha. Pillow would cut 16-bit values at 255."""
    if image.mode == "F":
        raise ValueError("floating-point pixels, whose range is unknown")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("32-bit pixels, whose range is unknown")
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


def decode_splits(
    root: Path,
    splits: Mapping[str, Sequence[Row]],
    size: int | None,
    cache: Path,
    name: str,
    unpaired: Mapping[str, str],
    whole: bool = False,
    interpolation: str = "bilinear",
) -> Decoded:
    """Return the rows of each split as arrays of the cache, decoded unless it has them.

    A row with an unreadable file is left out of the arrays, and the file is in ``unreadable``.
    ``unpaired`` files, which are in no row, are noted in the cache's meta file.
    """
    files = [file for rows in splits.values() for row in rows for file in row]
    modalities = {split: len(rows[0]) for split, rows in splits.items()}
    settings = [size, modalities, unpaired, *(["whole"] if whole else [])]
    settings += [interpolation] if interpolation != "bilinear" else []
    cached = load_or_build(
        cache,
        f"{name}-{digest_files(root, files, *settings)}",
        lambda folder: {
            "unpaired": unpaired,
            **_decode_into(folder, root, splits, size, whole, interpolation),
        },
        lambda meta: _is_mended(root, meta["unreadable"]),
    )

    def collect(ending: str) -> dict[str, tuple[StoredArray, ...]]:
        return {
            split: tuple(cached.arrays[f"{split}-{i}{ending}"] for i in range(count))
            for split, count in modalities.items()
        }

    return Decoded(collect(""), collect("-sizes") if whole else {}, cached.meta["unreadable"])


def _is_mended(root: Path, unreadable: Iterable[str]) -> bool:
    """Return whether an unreadable file can be read now; new permissions keep a file's time."""
    with warnings.catch_warnings(action="ignore"):
        decoded = decode_files((root / path for path in unreadable), lambda p: decode_file(p, 8))
        return any(not isinstance(pixels, str) for pixels in decoded)


def _decode_into(
    folder: Path,
    root: Path,
    splits: Mapping[str, Sequence[Row]],
    size: int | None,
    whole: bool,
    interpolation: str,
) -> Meta:
    """Decode all splits into array files in ``folder``."""
    unreadable: dict[str, str] = {}
    total = sum(map(len, splits.values()))
    with (
        warnings.catch_warnings(action="ignore"),  # Pillow's remarks on odd files, one for each
        stage(f"decoding {total:,} images of {root}", total) as progress,
    ):
        size = size or _common_size(root, splits.values(), whole)
        check_room(folder, sum(len(rows) * len(rows[0]) for rows in splits.values()) * 3 * size**2)
        for split, rows in splits.items():
            names = [f"{split}-{i}" for i in range(len(rows[0]))]
            names += [f"{name}-sizes" for name in names] if whole else []
            paths = [folder / f"{name}.npy" for name in names]
            decode = functools.partial(_decode_rows, root, size, whole, interpolation)
            count, failed = _decode_split(rows, size, decode, paths, progress.advance)
            if not count:
                problem = f"no image for {split} can be read"
                fix = "Replace the files, or remove them all."
                raise root_error(root, f"{problem}: {list_failures(failed)}", fix, problem)
            unreadable |= failed
    return {"root": str(root.resolve()), "size": size, "unreadable": unreadable}


def _decode_split(
    rows: Sequence[Row],
    size: int,
    decode: Callable[[Sequence[Row]], tuple[tuple[Array, ...], dict[str, str]]],
    paths: Iterable[Path],
    advance: Callable[[int], object],
) -> tuple[int, dict[str, str]]:
    """Decode rows into files with ``_decode_rows``; return their number, and bad files."""
    count, failed = 0, dict[str, str]()
    mean = statistics.fmean(file.size for row in rows for file in row)
    chunk = max(1, min(CHUNK, MOST_PIXELS // size**2))
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


def _decode_rows(
    root: Path, size: int, whole: bool, interpolation: str, rows: Sequence[Row]
) -> tuple[tuple[Array, ...], dict[str, str]]:
    """Decode a block for each modality, without rows that have a bad file; return these files.

    Whole images lie in the upper left corner of black squares, and their sizes follow the blocks.
    """
    blocks = tuple(np.zeros((len(rows), 3, size, size), np.uint8) for _ in rows[0])
    sizes = tuple(np.zeros((len(rows), 2), np.int64) for _ in rows[0] if whole)
    bad: dict[str, str] = {}
    count = 0

    def decode(path: Path) -> Pixels:
        return decode_file(path, size, whole=whole, interpolation=interpolation)

    for row in rows:
        images: list[Pixels | str] = [_try(decode, root / file.path) for file in row]
        pairs = zip(row, images, strict=True)
        failed = {file.path: reason for file, reason in pairs if isinstance(reason, str)}
        bad |= failed
        if failed:
            continue
        for k, image in enumerate(each for each in images if not isinstance(each, str)):
            height, width = image.shape[1:]
            blocks[k][count, :, :height, :width] = image
            if whole:
                sizes[k][count] = height, width
        count += 1
    arrays: tuple[Array, ...] = (*blocks, *sizes)
    return tuple(array[:count] for array in arrays), bad


def _common_size(root: Path, splits: Iterable[Sequence[Row]], whole: bool) -> int:
    """Return the one square size that all images have, or refuse; of whole images the longest."""

    def read_sizes(rows: Sequence[Row]) -> Counter[tuple[int, int]]:
        sizes: Counter[tuple[int, int]] = Counter()
        for file in itertools.chain.from_iterable(rows):
            with contextlib.suppress(Exception), Image.open(root / file.path) as image:
                sizes[image.size] += 1
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
