"""fedssl from Python: ``train`` is ``fedssl run``, and returns the run as an object."""

from __future__ import annotations

import html
import importlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedssl import config
from fedssl.config import Recipe, plugins
from fedssl.runs.folder import make_folder, read_recipe
from fedssl.runs.metrics import is_number
from fedssl.runs.reader import RunReader, section
from fedssl.util.errors import UserError, resume_hint
from fedssl.util.tuning import shorten_thread_waits

if TYPE_CHECKING:
    import pandas

    from fedssl.encoder.load import ImageEncoder


class Run(RunReader):
    """A run's folder, finished or not.

    >>> Run("runs/a").summary["knn_top1"]  # doctest: +SKIP
    >>> Run("runs/a").evaluate("knn", "linear@500")  # doctest: +SKIP
    """

    @property
    def metrics(self) -> pandas.DataFrame:
        """The rounds of ``metrics.jsonl``; nested numbers are columns such as
        ``exchanges.train.up``.

        Needs pandas (the extra ``frames``).
        """
        frame = _pandas("Run.metrics").DataFrame([config.flatten(line) for line in self.lines()])
        return frame.set_index("round") if len(frame) else frame

    @cached_property
    def encoder(self) -> ImageEncoder:
        """The trained encoder with its preprocessing, as ``fedssl.load_encoder`` returns it."""
        from fedssl.encoder.load import load_encoder

        return load_encoder(self.path)

    def evaluate(self, *protocols: str | Iterable[str], **keys: Any) -> pandas.DataFrame:
        """Evaluate the run again, as ``fedssl evaluate`` does: a row for each model.

        ``protocols`` are names, or a list of them; by default those of the run. ``keys`` are those
        of ``fedssl.train``, of ``evaluate`` and ``data``: ``evaluate__k=5``. Needs pandas (the
        extra ``frames``).
        """
        from fedssl.runs.reevaluate import evaluate

        frames = _pandas("Run.evaluate")
        lists = [[given] if isinstance(given, str) else given for given in protocols]
        named = {"evaluate.protocols": [name for names in lists for name in names]} if lists else {}
        values = {**named, **_dotted(keys)}
        words = [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()]
        return frames.DataFrame.from_dict(evaluate(self.path, words), orient="index")

    def _repr_html_(self) -> str:
        """Show the run in a notebook."""
        result = section(self.summary, "result")
        shown = {
            "run": str(self.path),
            "algorithm": plugins.short_name(str(section(self.tree, "algorithm").get("name", ""))),
            "objective": plugins.short_name(str(section(self.tree, "objective").get("name", ""))),
            "rounds": f"{self.rounds}{'' if self.finished else ', not finished'}",
            **{str(k): f"{v:.2f}" for k, v in result.items() if is_number(v)},
        }
        rows = (
            f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in shown.items()
        )
        return f"<table>{''.join(rows)}</table>"


def train(
    recipe: str | Path | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    **overrides: Any,
) -> Run:
    """Train, evaluate, and leave a run's folder, as ``fedssl run`` does.

    ``recipe`` is a name, a file, or the keys themselves (``{"extends": "default", "rounds": 5}``);
    by default the digits demonstration. Overrides are keys with two underscores for a dot. Without
    ``out`` the folder is a new one in ``runs/``. With ``resume`` the run in ``out`` goes on, by its
    own configuration if no recipe is given. A mistake is a :class:`fedssl.util.errors.UserError`.

    >>> run = fedssl.train("default", rounds=5, algorithm__name="fedavg")  # doctest: +SKIP
    >>> run.metrics["loss"].plot()  # doctest: +SKIP
    """
    shorten_thread_waits()
    if resume and out is None:
        raise UserError("the run's folder is missing", key="resume", value=resume, fix="Give out.")
    if out == "":  # which Path takes for the current folder
        raise UserError("out is an empty name", fix='Give a name, or "." for this folder.')
    name, tree = _read_recipe(recipe, Path(out) if resume and out is not None else None)
    words = _dotted(overrides)
    for key, values in config.find_sweep(config.with_values(tree, words)).items():
        fix = "Call fedssl.train once for each, or use fedssl run."
        raise UserError("a list of values is a sweep", key=key, value=values, fix=fix)
    settings = config.resolve(tree, words)
    folder = make_folder(name) if out is None else Path(out)

    from fedssl import report
    from fedssl.runs import loop

    again = f"continue with fedssl.train(out={str(folder)!r}, resume=True)"
    try:
        with resume_hint(f"Then {again}."):
            loop.run(settings, folder, resume)
    except loop.Interrupted:
        raise KeyboardInterrupt(f"stopped; {again}") from None
    report.write_page_or_warn(folder)
    return Run(folder)


def _read_recipe(
    recipe: str | Path | Mapping[str, Any] | None, resumed: Path | None
) -> tuple[str, Recipe]:
    """Return a recipe's name and keys; without one, those of the run that is resumed."""
    if not isinstance(recipe, Mapping):
        return read_recipe(None if recipe is None else str(recipe), resumed)
    keys = dict(recipe)
    base = keys.pop("extends", None)
    if base is None:
        return "own", config.with_values({}, keys)
    return "own", config.with_values(config.read_recipe(str(base)), keys)


def _dotted(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys as recipes have them: ``algorithm__name`` is ``algorithm.name``."""
    return {name.replace("__", "."): value for name, value in keys.items()}


def _pandas(name: str) -> Any:
    try:
        return importlib.import_module("pandas")
    except ImportError:
        raise UserError(f"{name} needs pandas", fix="pip install 'fedssl[frames]'") from None
