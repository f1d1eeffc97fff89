"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fedssl.errors import UserError


def save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file so that a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    try:
        save_file(tensors, new, metadata)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.replace(path)
    except (SafetensorError, OSError) as error:
        new.unlink(missing_ok=True)
        raise UserError(
            f"{path}: cannot be written ({error}); make room, then continue with --resume. "
            "The last good checkpoint is kept"
        ) from None


def write_json(path: Path, content: Any) -> None:
    """Numbers and names, for people and programs."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
