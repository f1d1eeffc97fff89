"""Cache of decoded images: folders of memory-mapped ``.npy`` files and a ``meta.json``.

A cache folder is written beside its final place and renamed, so it is complete or absent, whatever
other processes write at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedssl.util.errors import UserError
from fedssl.util.files import explain_write_errors, write_text
from fedssl.util.text import printable

Array = NDArray[Any]
Meta = dict[str, Any]


@dataclass(frozen=True)
class Cached:
    """Content of a cache folder; arrays are read only when they are used."""

    arrays: dict[str, Array]
    meta: Meta


def load_or_build(
    cache: Path,
    name: str,
    build: Callable[[Path], Meta],
    is_stale: Callable[[Meta], bool] = lambda meta: False,
) -> Cached:
    """Open the cache folder ``name``; ``build`` fills it if it is missing, damaged or stale."""
    folder = cache / name
    cached = _open(folder)
    if cached and not is_stale(cached.meta):
        return cached
    with replace_folder(folder, cache) as new:
        meta = {**build(new), "arrays": [path.stem for path in new.glob("*.npy")]}
        # As ASCII: names of images need not be UTF-8.
        write_text(new / "meta.json", json.dumps(meta, indent=2) + "\n")
        # Opened before it is moved, so that it stays whatever another process does to the folder.
        built = _open(new)
    assert built is not None
    return built


def _open(folder: Path) -> Cached | None:
    """Open a cache folder; return ``None`` if anything is missing or cut short."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in meta["arrays"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        return None
    return Cached(arrays, meta)


@contextlib.contextmanager
def replace_folder(folder: Path, cache: Path) -> Iterator[Path]:
    """Yield a new empty folder that takes the place of ``folder`` if the block succeeds.

    Errors of the disk name ``cache``, also in the block unless they are about another file.
    """
    new = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}")
    old = new.with_name(f"{new.name}.old")
    with explain_write_errors("data.cache", cache, "the cache cannot be written"):
        new.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new.mkdir(mode=0o700)  # decoded private images are for no one else on this machine
        try:
            with _name_other_files(new):
                yield new
            with contextlib.suppress(FileNotFoundError):
                folder.rename(old)
            try:
                new.rename(folder)
            except OSError:
                if not folder.exists():  # else another process has just put its own there
                    raise
        finally:
            for left in (new, old):
                shutil.rmtree(left, ignore_errors=True)


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
        file.flush()
        os.fsync(file.fileno())  # some disks report only now that they are full
