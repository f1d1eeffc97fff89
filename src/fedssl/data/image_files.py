"""Image files in a folder: found by extension, and identified without reading them."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from fedssl.util.errors import UserError, shorten

LAYOUT = 1  # of a cache folder and of how pixels are made; a new number leaves old folders unused


class File(NamedTuple):
    """An image file: its path below the data root, and what shows that it has changed."""

    path: str
    size: int
    mtime: int


Place = tuple[int, int]  # the device and the number of a folder
Row = tuple[File, ...]  # one sample: a file for each modality


@functools.cache
def image_extensions() -> frozenset[str]:
    """Return the file name endings of the formats that Pillow reads."""
    Image.preinit()  # the usual formats first, or every JPEG is tried as several rare ones before
    # Pillow reads MPO as a kind of JPEG, so that name has no opener of its own.
    extensions = Image.registered_extensions().items()
    return frozenset(end for end, kind in extensions if kind in Image.OPEN or kind == "MPO")


def find_images(
    root: Path, below: str = "", key: str = "data.root"
) -> tuple[list[File], list[str]]:
    """Find image files and folders at any depth of ``root/below``, as sorted paths below ``root``.

    Errors name ``key``.
    """
    files: list[File] = []
    folders: list[str] = []
    try:
        _scan(root, below, files, folders)
    except OSError as error:
        place = shorten(str(error.filename or root / below))
        raise UserError(
            f"cannot list {place} ({error.strerror})",
            "cannot list a folder",
            key=key,
            value=root,
            fix="Make it readable, or move it away.",
        ) from None
    except _ReachedTwiceError as error:
        raise UserError(
            f"{error}, so its images would count twice",
            "links lead to a folder twice, so its images would count twice",
            key=key,
            value=root,
            fix="Remove a link.",
        ) from None
    return sorted(files), sorted(folders)


class _ReachedTwiceError(Exception):
    """Links lead to one folder in two ways, which in a chain doubles the images at each step."""


def _scan(root: Path, below: str, files: list[File], folders: list[str]) -> None:
    """Collect files and folders below ``root/below``; a link back to a folder above is skipped."""
    seen: dict[Place, tuple[str, bool]] = {}  # with its path, and whether links lead there
    # Folders to list, with the folders above them: not by recursion, which has a limit.
    waiting: list[tuple[str, tuple[Place, ...], bool]] = [(below, (), False)]
    while waiting:
        path, above, is_linked = waiting.pop()
        status = (root / path).stat()
        place = (status.st_dev, status.st_ino)
        if path != below:
            folders.append(path)
        if place in above:
            continue
        before, was_linked = seen.setdefault(place, (path, is_linked))
        if before != path and (is_linked or was_linked):
            raise _ReachedTwiceError(f"{before} and {path} are the same folder")
        with os.scandir(root / path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                name = f"{path}/{entry.name}" if path else entry.name
                if entry.is_dir():
                    linked = is_linked or entry.is_symlink()
                    waiting.append((name, (*above, place), linked))
                elif os.path.splitext(entry.name)[1].lower() in image_extensions():  # noqa: PTH122
                    # A link to nothing is an image that cannot be read; a pipe is no image.
                    if entry.is_file():
                        status = entry.stat()
                        files.append(File(name, status.st_size, status.st_mtime_ns))
                    elif entry.is_symlink():
                        files.append(File(name, 0, 0))


def digest_files(root: Path, files: Iterable[File], *settings: object) -> str:
    """Return a digest that changes with any path, size or time of the files, or with ``settings``.

    The root is part of it because unpacked archives often share names, sizes and times.
    """
    lines = itertools.chain(
        (repr((LAYOUT, str(root.resolve()), settings)),),
        (f"{path}\0{size}\0{mtime}" for path, size, mtime in files),
    )
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:24]


def digest_names(rows: Iterable[Row]) -> str:
    """Return a digest of paths and sizes in this order, the same wherever the files lie.

    Times are left out because a copy does not keep them. So a file that is replaced by another of
    the same name and length is not noticed.
    """
    lines = (f"{path}\0{size}" for row in rows for path, size, _ in row)
    text = "\n".join(lines).encode(errors="surrogateescape")
    return hashlib.blake2b(text, digest_size=16).hexdigest()
