"""Cache of decoded images: folders of memory-mapped ``.npy`` files and a ``meta.json``.

A cache folder is written beside its final place and renamed. So it is complete or absent, whatever
other processes write at the same time. ``meta.json`` holds digests of the arrays and of itself,
which are checked once in each process. A damaged folder is written again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedssl.data.stored import StoredArray
from fedssl.util.errors import UserError
from fedssl.util.files import explain_write_errors, make_folders, sync, write_text
from fedssl.util.seals import DamagedError
from fedssl.util.status import say
from fedssl.util.text import format_bytes, printable

STRAY = re.compile(r"\..+\.\d+-[0-9a-f]{8}(\.old)?")  # folders that are not in place yet
BLOCK = 1 << 24  # bytes of a file that one checksum is of

Array = NDArray[Any]
Meta = dict[str, Any]


@dataclass(frozen=True)
class Cached:
    """Content of a cache folder: open files, whose pixels are read when they are used."""

    arrays: dict[str, StoredArray]
    meta: Meta


def load_or_build(
    cache: Path,
    name: str,
    build: Callable[[Path], Meta],
    is_stale: Callable[[Meta], bool] = lambda meta: False,
) -> Cached:
    """Open the cache folder ``name``; ``build`` fills it if it is missing, damaged or stale."""
    folder = cache / name
    _remove_strays(cache)
    try:
        cached = _open(folder)
    except DamagedError as error:
        say(f"fedssl: {error} is damaged, so these images are decoded again")
        cached = None
    if cached and not is_stale(cached.meta):
        return cached
    with replace_folder(folder, cache) as new:
        meta = build(new)
        arrays = {path.stem: _checksum(path) for path in sorted(new.glob("*.npy"))}
        content = {"meta": meta, "arrays": arrays}
        sealed = {**content, "sha256": _digest(content)}
        # As ASCII: names of images need not be UTF-8.
        write_text(new / "meta.json", json.dumps(sealed, indent=2) + "\n")
        # Opened before it is moved, so that it stays whatever another process does to the folder.
        built = _open(new)
    assert built is not None
    return built


def _open(folder: Path) -> Cached | None:
    """Open a cache folder; return ``None`` if it is missing, cut short, or of another version.

    Raise ``DamagedError`` if a file is complete and not as it was written.
    """
    try:
        content = json.loads((folder / "meta.json").read_text())
        digest = content.pop("sha256")
        paths = {name: folder / f"{name}.npy" for name in content["arrays"]}
        arrays = {name: StoredArray(path) for name, path in paths.items()}
        if digest != _digest(content):
            raise DamagedError(folder / "meta.json")
        for name, path in paths.items():
            if _checksum(path) != content["arrays"][name]:
                raise DamagedError(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        return None
    return Cached(arrays, content["meta"])


def _digest(content: Meta) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    status = path.stat()
    return _compute_checksum(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.cache
def _compute_checksum(path: Path, *unchanged: int) -> str:
    """Return CRC-32 of a file's blocks, once while its status is unchanged.

    That is several times as fast as SHA-256, and no less safe here: both show damage, and neither
    stops somebody who can write ``meta.json`` too.
    """
    block, sums = memoryview(bytearray(BLOCK)), list[str]()
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            sums.append(f"{zlib.crc32(block[:count]):08x}")
    return "".join(sums)


@contextlib.contextmanager
def replace_folder(folder: Path, cache: Path) -> Iterator[Path]:
    """Yield a new empty folder that takes the place of ``folder`` if the block succeeds.

    Errors of the disk name ``cache``, also in the block unless they are about another file.
    """
    with explain_write_errors("data.cache", cache, "the cache cannot be written"):
        make_folders(folder.parent, 0o700)
        _remove_strays(folder.parent)
        new, lock = _make_locked_folder(folder)
        old = new.with_name(f"{new.name}.old")
        try:
            with _name_other_files(new):
                yield new
            for path in (*new.rglob("*"), new):
                sync(path)
            with contextlib.suppress(FileNotFoundError):
                folder.rename(old)
            try:
                new.rename(folder)
            except OSError:
                if not folder.exists():  # else another process has just put its own there
                    raise
            sync(folder.parent)
        finally:
            for left in (new, old):
                shutil.rmtree(left, ignore_errors=True)
            os.close(lock)


def _make_locked_folder(folder: Path) -> tuple[Path, int]:
    """Make a folder beside another one; return it with the descriptor that keeps its lock."""
    while True:
        new = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}")
        new.mkdir(mode=0o700)  # decoded private images are for no one else on this machine
        with contextlib.suppress(FileNotFoundError):  # taken for one that a killed process left
            number = os.open(new, os.O_RDONLY)
            with contextlib.suppress(OSError):  # some network disks have no locks
                fcntl.flock(number, fcntl.LOCK_EX)
            if new.exists():
                return new, number
            os.close(number)


def _remove_strays(parent: Path) -> None:
    """Remove the folders that killed processes left in ``parent``; those at work lock theirs."""
    for stray in parent.glob(".*"):
        if STRAY.fullmatch(stray.name):
            with contextlib.suppress(OSError):
                number = os.open(stray, os.O_RDONLY)
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(stray, ignore_errors=True)
                finally:
                    os.close(number)


@contextlib.contextmanager
def _name_other_files(new: Path) -> Iterator[None]:
    """Turn an error about a file that is not in the folder ``new`` into one line that names it."""
    try:
        yield
    except OSError as error:
        if error.filename is None or Path(os.fsdecode(error.filename)).is_relative_to(new):
            raise
        problem = f"{printable(error.filename)} cannot be read ({error.strerror})"
        fix = "Replace the file, or change its permissions."
        raise UserError(problem, "a file with images cannot be read", fix=fix) from None


def check_room(folder: Path, needed: int) -> None:
    """Raise the error of a full disk now if so many bytes will not fit."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        text = f"{format_bytes(needed)} needed, {format_bytes(free)} free"
        raise OSError(errno.ENOSPC, text, str(folder))


@contextlib.contextmanager
def grow_array(path: Path) -> Iterator[Callable[[Array], None]]:
    """Write a ``.npy`` file; yield a function that appends a block along its first axis.

    Not a writable memory map: on a full disk that ends the process with a signal, not an error.
    """
    header: dict[str, Any] = {}

    def append(block: Array) -> None:
        if not header:
            header.update(np.lib.format.header_data_from_array_1_0(block[:0]))
            np.lib.format.write_array_header_1_0(file, header)
        file.write(np.ascontiguousarray(block).data)
        header["shape"] = (header["shape"][0] + len(block), *block.shape[1:])

    with path.open("wb") as file:
        yield append
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, header)  # has room for the first axis to grow
