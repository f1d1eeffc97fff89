"""The files of an encoder's weights: in a run's folder, in an export's, or alone."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from fedssl.config.preprocessing import NOTE
from fedssl.util.errors import UserError
from fedssl.util.text import shorten_list

SUFFIXES = ("", "-second")  # of a tower's file


def find_model(path: Path, key: str | None = None) -> Path:
    """Return the folder or file of one model; a folder that holds only one stands for it.

    ``key`` is the configuration key that gave the path.
    """
    check_readable(path, key)
    complete = (NOTE, "config.json", "config.yaml", "encoder.safetensors", "model.safetensors")
    if not path.is_dir() or any((path / name).exists() for name in complete):
        return path
    files = sorted(path.glob("*.safetensors"))
    seconds = [tower_file(file, 1) for file in files]
    models = [file for file in files if file not in seconds]
    if len(models) > 1:
        names = shorten_list([model.name for model in models], 5)
        raise _error(f"holds {len(models)} models", path, key, f"Name one of the files: {names}.")
    return find_model(models[0], key) if models else path


def tower_file(path: Path, tower: int = 0) -> Path:
    """Return the file of a tower's weights, in a folder or beside the first tower's file."""
    if path.is_dir():
        ours, hub = (path / f"{name}.safetensors" for name in ("encoder", "model"))
        path = hub if hub.exists() and not ours.exists() else ours
    return path.with_name(f"{path.stem}{SUFFIXES[tower]}{path.suffix}")


def check_readable(path: Path, key: str | None = None) -> None:
    """Check the permissions: safetensors reports an unreadable file as missing."""
    if path.exists() and not os.access(path, os.R_OK | os.X_OK * path.is_dir()):
        raise _error("cannot be read", path, key, "Change its permissions.")


def load_weights(encoder: nn.Module, file: Path, key: str | None = None, given: str = "") -> None:
    """Load a safetensors file into an encoder; ``key`` was set to ``given``."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from fedssl.util.seals import DamagedError, check_tensors

    given = given or str(file)
    if not file.is_file():
        fix = "Give encoder.safetensors, or the folder of a run or an export."
        raise _error("no such file", given, key, fix)
    try:
        check_tensors(file)
        state = load_file(file)
    except DamagedError:
        fix = "Put back a copy of it, or write it again."
        raise _error("damaged", given, key, fix) from None
    except (SafetensorError, OSError) as error:
        fix = "Give the encoder.safetensors of a run or an export."
        raise _error(f"not a safetensors file ({error})", given, key, fix) from None
    expected = encoder.state_dict()
    for name, tensor in expected.items():
        if name not in state or state[name].shape != tensor.shape:
            has = f"has {tuple(state[name].shape)}" if name in state else "has nothing"
            raise _error(
                f"{has} for {name}, and this encoder needs {tuple(tensor.shape)}",
                given,
                key,
                "Use the same encoder.name, encoder.norm and channels.",
            )
    # Names and shapes are checked; strict loading would want batch norm's counters, too.
    encoder.load_state_dict({name: state[name] for name in expected}, strict=False)


def _error(problem: str, given: Path | str, key: str | None, fix: str) -> UserError:
    if key is None:
        return UserError(problem, key=str(given), fix=fix)
    return UserError(problem, key=key, value=given, fix=fix)
