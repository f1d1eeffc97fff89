"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

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
