"""Image files become memory-mapped uint8 arrays: found by extension, decoded once, kept in a cache.

A cache folder holds ``.npy`` files and ``meta.json``. It is written beside its final place and
renamed, so it is there completely or not at all, whoever else writes the same one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import itertools
import json
import math
import os
import secrets
import shutil
import statistics
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from tqdm import tqdm

from fedssl.util.errors import UserError

LAYOUT = 1  # of a cache folder, and of how pixels are made; a new number leaves old folders unused
CHUNK = 32  # images that a thread decodes in one go
NAMED = 3  # files named in a message; the rest is a count
DRAFT = 2  # times the target: a JPEG file is decoded no smaller than that
SHARE = 3500  # bytes of an image for each thread: with fewer, they mostly wait for Python's lock

Array = NDArray[Any]
Pixels = NDArray[np.uint8]
Meta = dict[str, Any]
S = TypeVar("S")
T = TypeVar("T")


class File(NamedTuple):
    """An image file: its path relative to the data root, and what tells that it has changed."""

    path: str
    size: int
    mtime: int


Row = tuple[File, ...]  # one sample: a file for each modality


# Finding -------------------------------------------------------------------------------------


@functools.cache
def extensions() -> frozenset[str]:
    """File name endings of the formats that Pillow reads."""
    Image.preinit()  # the usual formats first, or every JPEG is tried as several rare ones before
    # Pillow reads MPO as a kind of JPEG, so that name has no opener of its own.
    known = Image.registered_extensions().items()
    return frozenset(end for end, kind in known if kind in Image.OPEN or kind == "MPO")


def find(root: Path, below: str = "", key: str = "data.root") -> tuple[list[File], list[str]]:
    """The image files and the folders at any depth of ``root/below``, as sorted relative paths.

    ``key`` is what a complaint names.
    """
    files: list[File] = []
    folders: list[str] = []
    try:
        _scan(root / below, f"{below}/" if below else "", (), files, folders)
    except OSError as error:
        raise UserError(
            f"{key}: cannot list {error.filename or root / below} ({error.strerror}); "
            "make it readable or move it away",
            "cannot list a folder",
        ) from None
    return sorted(files), sorted(folders)


def _scan(
    folder: Path,
    prefix: str,
    above: tuple[tuple[int, int], ...],
    files: list[File],
    folders: list[str],
) -> None:
    """Collect what lies below ``folder``; ``above`` is the way here, for links that lead back."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(prefix + entry.name)
                _scan(Path(entry), f"{prefix}{entry.name}/", (*above, here), files, folders)
            elif os.path.splitext(entry.name)[1].lower() in extensions():  # noqa: PTH122
                files.extend(_file(entry, prefix))


def _file(entry: os.DirEntry[str], prefix: str) -> list[File]:
    if entry.is_file():
        status = entry.stat()
        return [File(prefix + entry.name, status.st_size, status.st_mtime_ns)]
    # A link to nothing is an image that cannot be read; a pipe or a socket is no image at all.
    return [File(prefix + entry.name, 0, 0)] if entry.is_symlink() else []


def digest(root: Path, files: Iterable[File], *what: object) -> str:
    """A name for what these files become: changes with any path, size, time or ``what``."""
    # The root is part of it because unpacked archives often share names, sizes and times.
    lines = itertools.chain(
        (repr((LAYOUT, str(root.resolve()), what)),),
        (f"{path}\0{size}\0{mtime}" for path, size, mtime in files),
    )
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:24]


def identity(rows: Iterable[Row]) -> str:
    """A name for these files in this order, wherever they lie: changes with any path or size.

    Not with a time, which a copy does not keep; so a file that another of the same name and length
    takes the place of is not noticed.
    """
    lines = (f"{path}\0{size}" for row in rows for path, size, _ in row)
    text = "\n".join(lines).encode(errors="surrogateescape")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


# Decoding ------------------------------------------------------------------------------------


def decode(path: Path, size: int, channels: int = 3) -> Pixels:
    """An image file as ``[channels, size, size]``: see ``pixels``."""
    with _open_image(path) as image:
        # JPEG decodes at a fraction of its size for less work. Pixels differ a little from those of
        # the whole, so an export's steps say it.
        image.draft(None, (DRAFT * size, DRAFT * size))
        return pixels(image, size, channels)


def pixels(image: Image.Image, size: int, channels: int = 3) -> Pixels:
    """An image upright, the square in its middle, resized; RGB, or grey with one channel."""
    image.load()
    square = _to_square(_to_bytes(_upright(image)), size)
    if channels == 1:
        return np.asarray(square.convert("L"))[None]
    return np.asarray(square.convert("RGB")).transpose(2, 0, 1)


def read(paths: Iterable[Path], size: int, channels: int) -> Generator[Pixels | str, None, None]:
    """Each file's pixels or, where it cannot be read, why; threads decode a little ahead."""

    def decoded(path: Path) -> Pixels | str:
        try:
            return decode(path, size, channels)
        except Exception as error:  # Pillow's readers raise nearly anything on broken bytes
            return reason(error)

    with _thread_pool() as pool:
        yield from _in_order(pool, decoded, paths)


def _open_image(path: Path) -> Image.Image:
    """The file's header, read; what would take gigabytes to decode is refused.

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


def _upright(image: Image.Image) -> Image.Image:
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
        return ImageOps.exif_transpose(image) if turned else image  # which would be a copy
    except Exception:  # a broken EXIF block says nothing about the pixels
        return image


def _to_bytes(image: Image.Image) -> Image.Image:
    """RGB or grey with 8 bits; alpha is dropped. Pillow itself would cut 16-bit values at 255."""
    if image.mode == "F":
        raise ValueError("floating-point pixels, whose range is unknown")
    if image.mode.startswith("I"):
        image = Image.fromarray(_rounded(np.asarray(image)))
    return image if image.mode in ("RGB", "L") else image.convert("RGB")


def _rounded(values: Array) -> Pixels:
    """16-bit values as 8-bit ones, rounded; some rows at a time, for memory's sake."""
    if values.min() < 0 or values.max() > 65535:
        raise ValueError("32-bit pixels, whose range is unknown")
    found = np.empty(values.shape, np.uint8)
    for row in range(0, len(values), 256):
        found[row : row + 256] = (values[row : row + 256].astype(np.int64) + 128) // 257
    return found


def _to_square(image: Image.Image, size: int) -> Image.Image:
    """Shorter side to ``size`` and centre crop, in one step."""
    if image.size == (size, size):
        return image
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


def reason(error: Exception) -> str:
    """Why a file cannot be read, in a few words."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow knows"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _decode_rows(
    root: Path, size: int, rows: Sequence[Row]
) -> tuple[tuple[Pixels, ...], dict[str, str]]:
    """A block for each modality, without the rows in which any file is bad; and the bad files."""
    blocks = tuple(np.empty((len(rows), 3, size, size), np.uint8) for _ in rows[0])
    bad: dict[str, str] = {}
    count = 0
    for row in rows:
        before = len(bad)
        for block, file in zip(blocks, row, strict=True):
            try:
                block[count] = decode(root / file.path, size)
            except Exception as error:  # Pillow's readers raise nearly anything on broken bytes
                bad[file.path] = reason(error)
        count += len(bad) == before
    return tuple(block[:count] for block in blocks), bad


def _sizes(root: Path, rows: Sequence[Row]) -> Counter[tuple[int, int]]:
    """Width and height of the images, from their headers."""
    sizes: Counter[tuple[int, int]] = Counter()
    for file in itertools.chain.from_iterable(rows):
        with contextlib.suppress(Exception), Image.open(root / file.path) as image:
            sizes[image.size] += 1
    return sizes


def _own_size(pool: ThreadPoolExecutor, root: Path, rows: Sequence[Row]) -> int:
    """The one square size that all images have."""
    sizes: Counter[tuple[int, int]] = Counter()
    for some in _in_order(pool, functools.partial(_sizes, root), _chunks(rows)):
        sizes += some
    if not sizes:
        return 1  # no file has a header; decoding says so, file by file
    seen = sizes.most_common(NAMED)
    width, height = seen[0][0]
    if len(sizes) == 1 and width == height:
        return width
    text = ", ".join(f"{w} × {h}" for (w, h), _ in seen)
    more = f" and {len(sizes) - len(seen)} more sizes" if len(sizes) > len(seen) else ""
    raise UserError(
        f"data.size is not set and the images below {root} are not of one square size "
        f"({text}{more}); set it, for example data.size={min(64, width, height)}",
        "data.size is not set and the images are not of one square size; set it",
    )


def _chunks(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    return (rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK))


def _in_order(
    pool: ThreadPoolExecutor, function: Callable[[S], T], items: Iterable[S]
) -> Iterator[T]:
    """``pool.map`` that runs only a little ahead of its reader, so that memory stays small."""
    ahead = 4 * workers()
    waiting: deque[Future[T]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def workers(size: float = math.inf) -> int:
    """Threads that decode image files of so many bytes in the mean."""
    return int(max(1, min(os.cpu_count() or 1, size // SHARE)))


@contextlib.contextmanager
def _thread_pool(size: float = math.inf) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(workers(size))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C: do not decode what is still waiting


# From files to arrays ------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoded:
    """Arrays ``[N, 3, size, size]`` of each split, and the files that could not be read."""

    images: dict[str, tuple[Pixels, ...]]
    unreadable: dict[str, str]  # path → reason


def load(
    root: Path,
    splits: Mapping[str, Sequence[Row]],
    size: int | None,
    cache: Path,
    name: str,
    unpaired: Mapping[str, str],
) -> Decoded:
    """The rows of each split as memory-mapped arrays, decoded unless the cache has them.

    A row with an unreadable file is left out of the arrays, and the file is in ``unreadable``.
    ``unpaired`` files, which are in no row, are noted in the cache's meta file.
    """
    files = [file for rows in splits.values() for row in rows for file in row]
    modalities = {split: len(rows[0]) for split, rows in splits.items()}
    found = cached(
        cache,
        f"{name}-{digest(root, files, size, modalities, unpaired)}",
        lambda folder: {"unpaired": unpaired, **_build(folder, root, splits, size, cache)},
        lambda meta: _mended(root, meta["unreadable"]),
    )
    images = {
        split: tuple(found.arrays[f"{split}-{i}"] for i in range(count))
        for split, count in modalities.items()
    }
    return Decoded(images, found.meta["unreadable"])


def _mended(root: Path, unreadable: Mapping[str, str]) -> bool:
    """Whether a file that could not be read now can, its time being the same (permissions)."""
    if not unreadable:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = _decode_rows(root, 8, [(File(path, 0, 0),) for path in unreadable])[1]
    return len(again) < len(unreadable)


def _build(
    folder: Path, root: Path, splits: Mapping[str, Sequence[Row]], size: int | None, cache: Path
) -> Meta:
    """Decode everything into ``folder``."""
    unreadable: dict[str, str] = {}
    total = sum(map(len, splits.values()))
    sizes = [file.size for rows in splits.values() for row in rows for file in row]
    with (
        warnings.catch_warnings(),
        _thread_pool(statistics.fmean(sizes)) as pool,
        progress(total, f"decoding {total} images of {root}") as update,
    ):
        warnings.simplefilter("ignore")  # Pillow's remarks on odd files, one for each
        size = size or _own_size(pool, root, list(itertools.chain.from_iterable(splits.values())))
        work = functools.partial(_decode_rows, root, size)
        for split, rows in splits.items():
            lost: dict[str, str] = {}
            with contextlib.ExitStack() as stack:
                paths = [folder / f"{split}-{i}.npy" for i in range(len(rows[0]))]
                arrays = [stack.enter_context(ArrayFile(path, cache)) for path in paths]
                for part, (blocks, bad) in zip(
                    _chunks(rows), _in_order(pool, work, _chunks(rows)), strict=True
                ):
                    lost.update(bad)
                    for array, block in zip(arrays, blocks, strict=True):
                        array.append(block)
                    update(len(part))
            if not arrays[0].count:
                raise UserError(
                    f"data.root={root}: no image for {split} can be read: {listed(lost)}; mend or "
                    "replace some, or remove them all",
                    f"no image for {split} can be read",
                )
            unreadable.update(lost)
    return {"root": str(root.resolve()), "size": size, "unreadable": unreadable}


def listed(files: Mapping[str, str]) -> str:
    """The first few files with their reasons, and how many more there are."""
    return few([f"{path} ({reason})" for path, reason in files.items()], NAMED)


def few(texts: Sequence[str], most: int) -> str:
    """The first of some texts, and how many more there are."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal, one plain line elsewhere; gives the function that moves it on."""
    if sys.stderr.isatty():
        with tqdm(total=total, desc=what, unit=" images") as bar:
            yield bar.update
    else:
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield lambda count: None


# The cache -----------------------------------------------------------------------------------


class ArrayFile:
    """A ``.npy`` file that grows by blocks along its first axis.

    Not a writable memory map: on a full disk that ends the process with a signal, not an error.
    """

    def __init__(self, path: Path, cache: Path) -> None:
        self.cache = cache
        self.count = 0
        self.like: Array | None = None
        with writing(cache):
            self.file = path.open("wb")

    def __enter__(self) -> ArrayFile:
        return self

    def append(self, block: Array) -> None:
        """Write ``block`` behind what is there."""
        with writing(self.cache):
            if self.like is None:
                self.like = block[:0]
                self.file.write(self._header())
            self.file.write(np.ascontiguousarray(block).data)
            self.count += len(block)

    def _header(self) -> bytes:
        """Always of the same length: numpy leaves room in it for the first axis to grow."""
        assert self.like is not None
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header,
            {
                "descr": np.lib.format.dtype_to_descr(self.like.dtype),
                "fortran_order": False,
                "shape": (self.count, *self.like.shape[1:]),
            },
        )
        return header.getvalue()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with writing(self.cache), self.file:
            if kind is None and self.like is not None:
                self.file.seek(0)
                self.file.write(self._header())
                self.file.flush()
                os.fsync(self.file.fileno())  # some disks only now say that they are full


@contextlib.contextmanager
def writing(cache: Path) -> Iterator[None]:
    """Turn what goes wrong while writing below ``cache`` into a line for the user."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else f"cannot write there ({error.strerror or error})"
        raise UserError(
            f"data.cache={cache}: {reason}; set data.cache to a folder "
            f"{'on a disk with room' if full else 'that you may write to'}",
            f"its cache: {'the disk is full' if full else 'cannot be written'}",
        ) from None


@dataclass(frozen=True)
class Cached:
    """What a cache folder holds; the arrays are read only when used."""

    arrays: dict[str, Array]
    meta: Meta


def cached(
    cache: Path,
    name: str,
    build: Callable[[Path], Meta],
    stale: Callable[[Meta], bool] = lambda meta: False,
) -> Cached:
    """The cache folder ``name``; ``build`` fills a new one if it is missing, damaged or stale."""
    folder = cache / name
    found = _open(folder)
    if found and not stale(found.meta):
        return found
    with replacing(folder, cache) as new:
        meta = build(new)
        names = sorted(path.stem for path in new.glob("*.npy"))
        with writing(cache):
            (new / "meta.json").write_text(json.dumps({**meta, "arrays": names}, indent=1))
        # Opened before it is moved: whatever another process does to the folder then, it stays.
        built = _open(new)
    assert built is not None
    return built


def _open(folder: Path) -> Cached | None:
    """What the folder holds, or none if anything is missing or cut short."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in meta["arrays"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        return None
    return Cached(arrays, meta)


@contextlib.contextmanager
def replacing(folder: Path, cache: Path) -> Iterator[Path]:
    """A new empty folder that takes the place of ``folder`` if all goes well."""
    new = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}")
    old = new.with_name(f"{new.name}.old")
    with writing(cache):
        new.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new.mkdir(mode=0o700)  # private images, decoded: for no one else on this machine
    try:
        yield new
        with writing(cache):
            _move(new, folder, old)
    finally:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)


def _move(new: Path, folder: Path, old: Path) -> None:
    """Rename ``new`` to ``folder``; what is there goes to ``old`` first."""
    for _ in range(10):  # another process may put its own there in between
        with contextlib.suppress(FileNotFoundError):
            folder.rename(old)
        try:
            new.rename(folder)
            return
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(old, ignore_errors=True)
