"""A run's folder, read: for reports, exports, and for people in Python."""

from __future__ import annotations

import html
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedssl import config
from fedssl.config import Config, Tree, plugins
from fedssl.runs import metrics
from fedssl.util.errors import UserError

if TYPE_CHECKING:
    import pandas

    from fedssl.encoder.load import ImageEncoder


LOCK = "lock"  # a file in a run's folder, or a sweep's, held by the process that is at work
BESIDE = ("sweep.yaml", "table.jsonl", "report.html", LOCK)  # files in a folder of runs


class Run:
    """A run's folder, finished or not, of this version or of an older one.

    >>> Run("runs/a").summary["knn_top1"]  # doctest: +SKIP
    >>> Run("runs/a").evaluate("knn", "linear@500")  # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "config.yaml").is_file():
            raise UserError(
                f"{self.path}: holds no run (no config.yaml in it); give the folder that "
                "`fedssl run --out` wrote"
            )

    def __repr__(self) -> str:
        state = "finished" if self.finished else "not finished"
        return f"Run({str(self.path)!r}: {state}, {self.rounds} rounds)"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @cached_property
    def tree(self) -> Tree:
        """``config.yaml`` as it stands there."""
        return config.read_yaml(self.path / "config.yaml")

    @cached_property
    def config(self) -> Config | None:
        """Its configuration; none where this version of fedssl does not take it: ``problem``."""
        return self._built[0]

    @property
    def problem(self) -> str | None:
        """Why ``config`` is not to be had: the run is of another version, or files are missing."""
        return self._built[1]

    @cached_property
    def _built(self) -> tuple[Config | None, str | None]:
        try:
            return config.build(self.tree), None
        except UserError as error:
            return None, str(error)

    @property
    def settings(self) -> Config:
        """Its configuration, where there must be one."""
        if self.config is None:
            raise UserError(f"{self.path}: its config.yaml cannot be used here: {self.problem}")
        return self.config

    @cached_property
    def summary(self) -> dict[str, Any]:
        """``summary.json``; empty before the run has ended."""
        return self._json("summary.json", {})

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return bool(self.summary)

    @cached_property
    def clients(self) -> list[dict[str, Any]]:
        """``clients.json``: number, name and samples of each client."""
        return self._json("clients.json", [])

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines of ``metrics.jsonl``, one a round; none before the first has ended."""
        yield from metrics.read(self.path)

    @cached_property
    def rounds(self) -> int:
        """How many rounds are done."""
        return max((line["round"] for line in self.lines()), default=0)

    @property
    def metrics(self) -> pandas.DataFrame:
        """``metrics.jsonl``, a row a round; a column of nested numbers is ``exchanges.train.up``.

        Needs pandas (the extra ``frames``).
        """
        frame = _pandas("Run.metrics").DataFrame([config.flatten(line) for line in self.lines()])
        return frame.set_index("round") if len(frame) else frame

    @cached_property
    def encoder(self) -> ImageEncoder:
        """What was trained, with its preprocessing: ``fedssl.load_encoder`` of this run."""
        from fedssl.encoder.load import load_encoder

        return load_encoder(self.path)

    def evaluate(self, *protocols: str | Iterable[str], **keys: Any) -> pandas.DataFrame:
        """Judge it again, as ``fedssl evaluate`` does: a row a model, a column a measure.

        Protocols are names, or a list of them; without any by those of the run. Keys are those of
        ``fedssl.train``, of ``evaluate`` and ``data``: ``evaluate__k=5``. Needs pandas (the extra
        ``frames``).
        """
        from fedssl.runs.api import dotted

        frames = _pandas("Run.evaluate")
        lists = [[given] if isinstance(given, str) else given for given in protocols]
        named = {"evaluate.protocols": [name for names in lists for name in names]} if lists else {}
        values = {**named, **dotted(keys)}
        words = [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()]

        from fedssl.runs.reevaluate import evaluate

        return frames.DataFrame.from_dict(evaluate(self.path, words), orient="index")

    def _repr_html_(self) -> str:
        """A notebook's view: what it is, and how good."""
        result = section(self.summary, "result")
        shown = {
            "run": str(self.path),
            "algorithm": plugins.short_name(str(section(self.tree, "algorithm").get("name", ""))),
            "objective": plugins.short_name(str(section(self.tree, "objective").get("name", ""))),
            "rounds": f"{self.rounds}{'' if self.finished else ', not finished'}",
            **{str(k): f"{v:.2f}" for k, v in result.items() if metrics.is_number(v)},
        }
        rows = (
            f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in shown.items()
        )
        return f"<table>{''.join(rows)}</table>"

    @property
    def baselines(self) -> list[Run]:
        """The runs that ``evaluate.baselines`` left beside it."""
        return [Run(p.parent) for p in sorted(self.path.glob("baselines/*/config.yaml"))]

    def _json(self, name: str, otherwise: Any) -> Any:
        return read_json(self.path / name, otherwise)


def read_json(path: Path, otherwise: Any) -> Any:
    """What a file holds, of the type of ``otherwise``, which stands for a missing one."""
    if not path.is_file():
        return otherwise
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(found, type(otherwise)):
        wanted = "keys and values" if isinstance(otherwise, dict) else "a list"
        said = json.dumps(found)[:40]
        raise UserError(f"{path}: holds {said}, not {wanted}; is it of another version?")
    return found


def section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part with keys of its own; in a file of another version it may be something else."""
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def opened(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in these folders; a folder of runs (a sweep's, a table's) stands for all in it.

    Files that fedssl leaves beside runs are passed over, for ``runs/sweep/*`` names them too.
    """
    found: list[Run] = []
    folders = [p for p in paths if Path(p).name not in BESIDE or not Path(p).is_file()]
    for given in folders or paths:
        if given == "":
            raise UserError('"": an empty name is no run; give the folder that a run wrote')
        path = Path(given)
        below = [
            file.parent
            for depth in range(1, 5)  # runs/reproduce/fedema/table3/ROW/COLUMN
            for file in sorted(path.glob("*/" * depth + "config.yaml"))
            if "baselines" not in file.relative_to(path).parts
        ]
        alone = (path / "config.yaml").is_file() or not below
        found += [Run(path)] if alone else map(Run, below)
    return found


def _pandas(what: str) -> Any:
    try:
        return importlib.import_module("pandas")
    except ImportError:
        raise UserError(f"{what}: needs pandas; pip install 'fedssl[frames]'") from None
