"""Write files that a reader sees whole or not at all, and explain errors of the disk.

Every file is written under another name, forced to the disk, and moved into place; then its folder
is forced to the disk. So neither a kill nor a power cut leaves half of a file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedssl.util.errors import UserError
from fedssl.util.seals import DamagedError, check_tensors, make_room, seal_tensors

if TYPE_CHECKING:
    from torch import Tensor

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LONGEST = 255  # bytes of a folder's name, on most file systems
STRAY = ".*.new"  # files that a killed process left behind


@contextlib.contextmanager
def replace_file(path: Path, private: bool = False, exclusive: bool = False) -> Iterator[Path]:
    """Yield an empty file that takes the place of ``path`` if all goes well.

    Only its owner can read a ``private`` file. An ``exclusive`` one must not exist before.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        new.unlink(missing_ok=True)  # left by a killed process
        new.touch(mode=0o600 if private else 0o666)
        yield new
        sync(new)
        if exclusive:
            _move_to_free_place(new, path)
        else:
            new.replace(path)
        sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def _move_to_free_place(new: Path, path: Path) -> None:
    """Move a file where none is, or raise ``FileExistsError``."""
    try:
        path.hardlink_to(new)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        new.replace(path)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    try:
        number = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder that may be written to and not listed
        return
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a disk that cannot do this
            raise
    finally:
        os.close(number)


def make_folders(path: Path, mode: int = 0o777) -> None:
    """Make a folder and those above it, unless they exist, and wait until they are on the disk."""
    try:
        path.mkdir(mode)
    except FileNotFoundError:
        if path == path.parent:
            raise
        make_folders(path.parent)
        path.mkdir(mode, exist_ok=True)
    except OSError:  # it exists, or the disk is read-only
        if not path.is_dir():
            raise
        return
    sync(path.parent)


def remove_strays(folders: Iterable[Path], age: float = 0) -> None:
    """Remove the files that a killed process had not moved into place in these folders.

    Files that changed less than ``age`` seconds ago stay: another process may be writing them.
    """
    for stray in (stray for folder in folders for stray in folder.glob(STRAY)):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - stray.stat().st_mtime >= age:
                stray.unlink()


def append_line(path: Path, line: str, durable: bool = True) -> None:
    """Append a line to a file; a ``durable`` one is on the disk when this returns."""
    is_new = durable and not path.exists()
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if is_new:
        sync(path.parent)


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Wait until no other process holds this lock file, then hold it."""
    import fcntl

    make_folders(path.parent, 0o700)
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_text(path: Path, text: str, exclusive: bool = False) -> None:
    """Write a small file."""
    with replace_file(path, exclusive=exclusive) as new:
        new.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write numbers and names, for people and programs; each item of a list has its line."""
    if isinstance(content, list):  # of a million clients, perhaps
        text = ",\n".join(json.dumps(item, ensure_ascii=False) for item in content)
        write_text(path, f"[\n{text}\n]\n")
    else:
        write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def save_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], can_resume: bool = True
) -> str:
    """Write a safetensors file with a seal; return the seal."""
    from safetensors import SafetensorError  # imported with torch, which takes a second
    from safetensors.torch import save  # not save_file, which leaves files when it is killed

    try:
        seal, parts = seal_tensors(save(_with_own_memory(tensors), make_room(metadata)))
        make_folders(path.parent)
        with replace_file(path, private=True) as new, new.open("wb") as file:
            file.writelines(parts)
        return seal
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be written ({error})",
            "a file cannot be written; make room",
            fix="Make room. What was saved before is kept." if can_resume else "Make room.",
            can_resume=can_resume,
        ) from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file that ``save_tensors`` wrote, if it is as it was written."""
    from safetensors.torch import load_file

    try:
        if check_tensors(path):
            return load_file(path)
    except DamagedError:
        pass
    raise UserError(f"{path} is damaged", "a file is damaged", fix="Put back a copy of it.")


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
        make_folders(path)


def check_suffix(path: Path, key: str, *suffixes: str) -> None:
    """Check the ending of an output file's name, because it replaces what has its name."""
    if path.suffix.lower() not in suffixes and not path.is_dir():
        fix = f"Use a name such as {path.stem}{suffixes[0]}."
        raise UserError(f"not a {suffixes[0]} file", key=key, value=path, fix=fix)
