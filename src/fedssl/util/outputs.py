"""What a command writes: refused before any work, and there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from fedssl.util.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_page(path: Path, option: str) -> None:
    """A page replaces what has its name: no image and no file of a run may have it."""
    if path.suffix.lower() not in (".html", ".htm") and not path.is_dir():
        raise UserError(
            f"{option} {path}: a page is an HTML file; use a name such as {path.stem}.html"
        )


@contextlib.contextmanager
def replacing(path: Path, option: str, private: bool = False) -> Iterator[Path]:
    """An empty file beside ``path`` that takes its place if all goes well.

    ``option`` is what the user named it with; a ``private`` file only its owner can read.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        new.touch(mode=0o600 if private else 0o666, exist_ok=False)
    except OSError as error:
        raise _refused(path, option, error) from None
    try:
        yield new
        new.replace(path)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise UserError(f"{option} {path}: the disk is full; make room, then try again") from None
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def write_text(path: Path, text: str, option: str, private: bool = False) -> None:
    """A small file; a ``private`` one only its owner can read."""
    with replacing(path, option, private) as new:
        new.write_text(text, encoding="utf-8")


def folder(path: Path, option: str) -> Path:
    """A folder to write into, made if it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(path, option, error) from None
    return path


def _refused(path: Path, option: str, error: OSError) -> UserError:
    return UserError(
        f"{option} {path}: cannot be written ({error.strerror}); name another place, or make the "
        "folder writable"
    )
