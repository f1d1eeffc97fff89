"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fedssl.util.errors import UserError
from fedssl.util.outputs import FULL

LONGEST = 255  # bytes of a folder's name, wherever one is likely to be


@contextlib.contextmanager
def writing(where: str) -> Iterator[None]:
    """What the disk refuses of a run's folder is one line."""
    try:
        yield
    except OSError as error:
        fix = "make room" if error.errno in FULL else "make it writable"
        raise UserError(
            f"{where}: cannot be written ({error.strerror}); {fix}, or choose another folder"
        ) from None


def save(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], can_resume: bool = True
) -> None:
    """Write a safetensors file so that a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    try:
        save_file(_apart(tensors), new, metadata)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.replace(path)
    except (SafetensorError, OSError) as error:
        new.unlink(missing_ok=True)
        raise UserError(
            f"{path}: cannot be written ({error})",
            "a file cannot be written; make room",
            fix="Make room. What was saved before is kept." if can_resume else "Make room.",
            can_resume=can_resume,
        ) from None


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each with memory of its own, as the format wants it: one may be a part of another."""
    places: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in places else tensor
        places.add(place)
    return found


def write_json(path: Path, content: Any) -> None:
    """Numbers and names, for people and programs."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
