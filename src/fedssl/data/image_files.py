"""Image files in a folder: found by extension, and identified without reading them."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from fedssl.data import dicom
from fedssl.util.errors import UserError, shorten

LAYOUT = 1  # of a cache folder and of how pixels are made; a new number leaves old folders unused


class File(NamedTuple):
    """An image file: its path below the data root, and what shows that it has changed.

    An image in a file with many has the path of that file (``holder``), and the number of its
    frame, row or first byte there.
    """

    path: str
    size: int
    mtime: int
    holder: str = ""
    number: int | None = None


Place = tuple[int, int]  # the device and the number of a folder
Row = tuple[File, ...]  # one sample: a file for each modality


@functools.cache
def image_extensions() -> frozenset[str]:
    """Return the file name endings of the formats that Pillow reads, and of DICOM."""
    Image.preinit()  # the usual formats first, or every JPEG is tried as several rare ones before
    # Pillow reads MPO as a kind of JPEG, so that name has no opener of its own.
    extensions = Image.registered_extensions().items()
    known = (end for end, kind in extensions if kind in Image.OPEN or kind == "MPO")
    return frozenset((*known, *dicom.ENDINGS))


def find_images(
    root: Path, below: str = "", key: str = "data.root", endings: frozenset[str] | None = None
) -> tuple[list[File], list[str]]:
    """Find image files and folders at any depth of ``root/below``, as sorted paths below ``root``.

    With ``endings``, find the files with these endings. Errors name ``key``.
    """
    endings = endings or image_extensions()
    files: list[File] = []
    folders: list[str] = []
    try:
        _scan(root, below, endings, files, folders)
    except OSError as error:
        place = shorten(str(error.filename or root / below))
        raise UserError(
            f"cannot list {place} ({error.strerror})",
            "cannot list a folder",
            key=key,
            value=root,
            fix="Make it readable, or move it away.",
        ) from None
    except _MultipliedError as error:
        problem = "links multiply images: they lead"
        raise UserError(
            f"{problem} to {shorten(str(error))} in more ways than there are links",
            f"{problem} to a folder in more ways than there are links",
            key=key,
            value=root,
            fix="Remove links in folders that links lead to.",
        ) from None
    return sorted(files), sorted(folders)


class _MultipliedError(Exception):
    """Links lead to links, so that a chain of 16 folders may hold 65,535 images."""


def _scan(
    root: Path, below: str, endings: frozenset[str], files: list[File], folders: list[str]
) -> None:
    """Collect files and folders below ``root/below``; a link back to a folder above is skipped."""
    visits, links = Counter[Place](), set[Place]()
    # Folders to list, with the folders above them: not by recursion, which has a limit.
    waiting: list[tuple[str, tuple[Place, ...]]] = [(below, ())]
    while waiting:
        path, above = waiting.pop()
        place = _place((root / path).stat())
        if path != below:
            folders.append(path)
        if place in above:
            continue
        visits[place] += 1
        if visits[place] > 1 + len(links):  # clients that share it have a link each
            raise _MultipliedError(root / path)
        with os.scandir(root / path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                name = f"{path}/{entry.name}" if path else entry.name
                if entry.is_dir():
                    if entry.is_symlink():
                        links.add(_place(entry.stat(follow_symlinks=False)))
                    waiting.append((name, (*above, place)))
                elif os.path.splitext(entry.name)[1].lower() in endings:  # noqa: PTH122
                    # A link to nothing is an image that cannot be read; a pipe is no image.
                    if entry.is_file():
                        status = entry.stat()
                        files.append(File(name, status.st_size, status.st_mtime_ns))
                    elif entry.is_symlink():
                        files.append(File(name, 0, 0))


def _place(status: os.stat_result) -> Place:
    return status.st_dev, status.st_ino


def digest_files(root: Path, files: Iterable[File], *settings: object) -> str:
    """Return a digest that changes with any path, size or time of the files, or with ``settings``.

    The root is part of it because unpacked archives often share names, sizes and times.
    """
    lines = itertools.chain(
        (repr((LAYOUT, str(root.resolve()), settings)),),
        (f"{file.path}\0{file.size}\0{file.mtime}" for file in files),
    )
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:24]


def digest_names(rows: Iterable[Row]) -> str:
    """Return a digest of paths and sizes in this order, the same wherever the files lie.

    Times are left out because a copy does not keep them. So a file that is replaced by another of
    the same name and length is not noticed.
    """
    lines = (f"{file.path}\0{file.size}" for row in rows for file in row)
    text = "\n".join(lines).encode(errors="surrogateescape")
    return hashlib.blake2b(text, digest_size=16).hexdigest()
