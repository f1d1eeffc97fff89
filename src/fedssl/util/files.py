"""Write files that a reader sees whole or not at all, and explain errors of the disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedssl.util.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LONGEST = 255  # bytes of a folder's name, on most file systems


@contextlib.contextmanager
def replace_file(path: Path, private: bool = False) -> Iterator[Path]:
    """Yield an empty file that takes the place of ``path`` if all goes well.

    Only its owner can read a ``private`` file.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        new.unlink(missing_ok=True)  # left by a killed process
        new.touch(mode=0o600 if private else 0o666)
        yield new
        new.replace(path)
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a small file."""
    with replace_file(path) as new:
        new.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write numbers and names, for people and programs."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def save_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], can_resume: bool = True
) -> None:
    """Write a safetensors file, and wait until it is on the disk."""
    from safetensors import SafetensorError  # imported with torch, which takes a second
    from safetensors.torch import save_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path, private=True) as new:
            save_file(_with_own_memory(tensors), new, metadata)
            with new.open("rb") as file:
                os.fsync(file.fileno())
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be written ({error})",
            "a file cannot be written; make room",
            fix="Make room. What was saved before is kept." if can_resume else "Make room.",
            can_resume=can_resume,
        ) from None


def _with_own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory with another, as the format demands."""
    places: set[int] = set()
    copies = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        copies[name] = tensor.clone() if place in places else tensor
        places.add(place)
    return copies


@contextlib.contextmanager
def explain_write_errors(key: str, path: Path, public: str | None = None) -> Iterator[None]:
    """Turn errors of the disk into one line about ``path``, which the option ``key`` named."""
    try:
        yield
    except OSError as error:
        raise _explain(key, path, error, public) from None


def _explain(key: str, path: Path, error: OSError, public: str | None = None) -> UserError:
    fix = "Make room" if error.errno in FULL else "Make the folder writable"
    problem = f"cannot be written ({error.strerror})"
    return UserError(problem, public, key=key, value=path, fix=f"{fix}, or choose another place.")


@contextlib.contextmanager
def replace_output(path: Path, key: str, private: bool = False) -> Iterator[Path]:
    """Replace a file that the option ``key`` named; refuse it before any work is done."""
    with contextlib.ExitStack() as stack:
        with explain_write_errors(key, path):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            new = stack.enter_context(replace_file(path, private))
        try:
            yield new
        except OSError as error:
            if error.errno not in FULL:  # not about this file
                raise
            raise _explain(key, path, error) from None


def write_output(path: Path, text: str, key: str) -> None:
    """Write a small file that the option ``key`` named."""
    with replace_output(path, key) as new:
        new.write_text(text, encoding="utf-8")


def make_output_folder(path: Path, key: str) -> None:
    """Make a folder that the option ``key`` named, unless it exists."""
    with explain_write_errors(key, path):
        path.mkdir(parents=True, exist_ok=True)


def check_suffix(path: Path, key: str, *suffixes: str) -> None:
    """Check the ending of an output file's name, because it replaces what has its name."""
    if path.suffix.lower() not in suffixes and not path.is_dir():
        fix = f"Use a name such as {path.stem}{suffixes[0]}."
        raise UserError(f"not a {suffixes[0]} file", key=key, value=path, fix=fix)
