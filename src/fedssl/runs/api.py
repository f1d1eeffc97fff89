"""fedssl from Python: ``fedssl.train`` is ``fedssl run``, and gives the run as an object."""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedssl import config
from fedssl.config import Tree
from fedssl.runs.record import Run
from fedssl.util.errors import UserError, resume_hint
from fedssl.util.tuning import shorten_thread_waits

_FRESH: set[Path] = set()  # folders that were made for runs that had not started yet


def train(
    recipe: str | Path | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    **overrides: Any,
) -> Run:
    """Train, judge, and leave a run's folder, as ``fedssl run`` does.

    ``recipe`` is a name, a file, or the keys themselves (``{"extends": "default", "rounds": 5}``);
    none: the digits demonstration. Overrides are keys with two underscores for a dot. Without
    ``out`` the folder is a new one in ``runs/``. With ``resume`` the run in ``out`` goes on, by its
    own configuration if no recipe is given. A mistake is a :class:`fedssl.util.errors.UserError`.

    >>> run = fedssl.train("default", rounds=5, algorithm__name="fedavg")  # doctest: +SKIP
    >>> run.metrics["loss"].plot()  # doctest: +SKIP
    """
    shorten_thread_waits()
    if resume and out is None:
        raise UserError("resume=True: say which run with out=…")
    if out == "":  # which Path takes for the current folder
        raise UserError('out="": an empty name; give one, or "." for the folder that you are in')
    name, tree = recipe_of(recipe, Path(out) if resume and out is not None else None)
    tree = config.with_values(tree, dotted(overrides))
    for key, values in config.find_sweep(tree).items():
        raise UserError(
            f"{key}={values}: several values are for fedssl run on the command line; call "
            "fedssl.train once for each"
        )
    settings = config.build(tree)
    folder = fresh_folder(name) if out is None else Path(out)

    from fedssl import report
    from fedssl.runs import run

    again = f"continue with fedssl.train(out={str(folder)!r}, resume=True)"
    try:
        with resume_hint(f"Then {again}."):
            run.run(settings, folder, resume)
    except run.Interrupted:
        raise KeyboardInterrupt(f"stopped; {again}") from None
    report.write_page_or_warn(folder)
    return Run(folder)


def recipe_of(
    recipe: str | Path | Mapping[str, Any] | None, resumed: Path | None
) -> tuple[str, Tree]:
    """A recipe's name and its keys; without one, those of the run that is ``resumed``."""
    if recipe is None and resumed is not None and (resumed / "config.yaml").exists():
        return "run", config.read_yaml(resumed / "config.yaml")
    if isinstance(recipe, Mapping):
        own = dict(recipe)
        base = own.pop("extends", None)
        if base is None:
            return "own", config.with_values({}, own)
        return "own", config.with_values(config.read_recipe(str(base)), own)
    name = None if recipe is None else str(recipe)
    return name or "default", config.read_recipe(name)


def dotted(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as they are in recipes: ``algorithm__name`` is ``algorithm.name``."""
    return {name.replace("__", "."): value for name, value in keys.items()}


def fresh_folder(name: str) -> Path:
    """A new folder in ``runs/``, named after a recipe and the time.

    It is made at once, so that nobody else who starts in this second takes it.
    """
    # Of a path only the file's own name; of what ships, and of a table's cell, all of it.
    path, yaml, cell = name.partition(".yaml")
    label = (Path(path).name + cell if yaml else path).replace("/", "-")
    stem = Path("runs") / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
    out, number = stem, 2
    while not _made(out):
        out, number = stem.with_name(f"{stem.name}-{number}"), number + 1
    _FRESH.add(out.absolute())
    atexit.register(give_back, out.absolute())
    return out


def _made(folder: Path) -> bool:
    """Make a folder; not, if it is there already."""
    try:
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir()
    except FileExistsError:
        if folder.parent.is_dir():
            return False
        raise UserError(f"{folder.parent}: is no folder; name one for the run") from None
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); name another folder for the run"
        ) from None
    return True


def give_back(folder: Path) -> None:
    """Remove a fresh folder if nothing came into it, and ``runs/`` if there is no other."""
    if folder.absolute() in _FRESH:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
            folder.parent.rmdir()
