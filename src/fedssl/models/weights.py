"""Where an encoder's weights are: in a run's folder, in an export's, or in a file of their own."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from fedssl.util.errors import UserError
from fedssl.util.text import shorten_list

NOTE = "encoder.json"
SUFFIXES = ("", "-second")  # of a tower's file


def place(path: Path, key: str = "") -> Path:
    """A folder that holds one model under a name of its own, as of a client, stands for it.

    ``key`` is what the path was given by, for an error's line.
    """
    check_readable(path, key)
    known = (NOTE, "config.json", "config.yaml", "encoder.safetensors", "model.safetensors")
    if not path.is_dir() or any((path / name).exists() for name in known):
        return path
    found = sorted(path.glob("*.safetensors"))
    seconds = [tower_file(file, 1) for file in found]
    models = [file for file in found if file not in seconds]
    if len(models) > 1:
        names = shorten_list([model.name for model in models], 5)
        raise UserError(f"{key}{path}: holds {len(models)} models; name the file of one: {names}")
    return place(models[0], key) if models else path


def tower_file(path: Path, tower: int = 0) -> Path:
    """A tower's weights, in a folder or beside the first tower's file."""
    if path.is_dir():
        own, hub = (path / f"{name}.safetensors" for name in ("encoder", "model"))
        path = hub if hub.exists() and not own.exists() else own
    return path.with_name(f"{path.stem}{SUFFIXES[tower]}{path.suffix}")


def check_readable(path: Path, key: str = "") -> None:
    """Say it as it is: safetensors calls a file that may not be read one that is not there."""
    if path.exists() and not os.access(path, os.R_OK | os.X_OK * path.is_dir()):
        raise UserError(f"{key}{path}: cannot be read; change its permissions")


def load_weights(encoder: nn.Module, file: Path, where: str) -> None:
    """Put the tensors of a safetensors file into an encoder; ``where`` is who named the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.is_file():
        raise UserError(
            f"{where}: no such file; give encoder.safetensors, or the folder of a run or an export"
        )
    try:
        state = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{where}: not a safetensors file ({error})") from None
    own = encoder.state_dict()
    for name, tensor in own.items():
        if name not in state or state[name].shape != tensor.shape:
            found = tuple(state[name].shape) if name in state else "nothing"
            raise UserError(
                f"{where}: it has {found} for {name} where this encoder has "
                f"{tuple(tensor.shape)}; use the same encoder.name, encoder.norm and channels"
            )
    # Names and shapes were checked; torch would add batch norm's counter, which ours do not have.
    encoder.load_state_dict({name: state[name] for name in own}, strict=False)
