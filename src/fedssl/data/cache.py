"""Cache of decoded images: folders of memory-mapped ``.npy`` files and a ``meta.json``.

A cache folder is written beside its final place and renamed, so it is complete or absent, whatever
other processes write at the same time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedssl.util.files import explain_write_errors, write_json

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
        meta = build(new)
        names = sorted(path.stem for path in new.glob("*.npy"))
        with _writing(cache):
            write_json(new / "meta.json", {**meta, "arrays": names})
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


def _writing(cache: Path) -> contextlib.AbstractContextManager[None]:
    return explain_write_errors("data.cache", cache, "the cache cannot be written")


@contextlib.contextmanager
def replace_folder(folder: Path, cache: Path) -> Iterator[Path]:
    """Yield a new empty folder that takes the place of ``folder`` if the block succeeds."""
    new = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}")
    old = new.with_name(f"{new.name}.old")
    with _writing(cache):
        new.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new.mkdir(mode=0o700)  # decoded private images are for no one else on this machine
    try:
        yield new
        with _writing(cache):
            _move(new, folder, old)
    finally:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)


def _move(new: Path, folder: Path, old: Path) -> None:
    """Rename ``new`` to ``folder``, after moving what is there to ``old``."""
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


class ArrayFile:
    """A ``.npy`` file that grows by blocks along its first axis.

    Not a writable memory map: on a full disk that ends the process with a signal, not an error.
    """

    def __init__(self, path: Path, cache: Path) -> None:
        self.cache = cache
        self.count = 0
        self.like: Array | None = None
        with _writing(cache):
            self.file = path.open("wb")

    def __enter__(self) -> ArrayFile:
        return self

    def append(self, block: Array) -> None:
        """Write ``block`` behind the blocks before it."""
        with _writing(self.cache):
            if self.like is None:
                self.like = block[:0]
                self.file.write(self._header())
            self.file.write(np.ascontiguousarray(block).data)
            self.count += len(block)

    def _header(self) -> bytes:
        """Format the header; numpy leaves room in it for the first axis to grow."""
        assert self.like is not None
        header = io.BytesIO()
        fields = np.lib.format.header_data_from_array_1_0(self.like)
        fields["shape"] = (self.count, *self.like.shape[1:])
        np.lib.format.write_array_header_1_0(header, fields)
        return header.getvalue()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _writing(self.cache), self.file:
            if kind is None and self.like is not None:
                self.file.seek(0)
                self.file.write(self._header())
                self.file.flush()
                os.fsync(self.file.fileno())  # some disks report only now that they are full
