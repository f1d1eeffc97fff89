"""Read a run's folder, finished or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from fedssl import config
from fedssl.config import Config, Recipe
from fedssl.runs import metrics
from fedssl.util.errors import UserError
from fedssl.util.seals import DamagedError, check_text

LOCK = "lock"  # a file in a run's folder, or a sweep's, held by the process that is at work
BESIDE = ("sweep.yaml", "table.jsonl", "report.html", LOCK)  # files in a folder of runs


class RunReader:
    """A run's folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "config.yaml").is_file():
            fix = "Give the folder that `fedssl run --out` wrote."
            raise UserError(f"{self.path} holds no run: it has no config.yaml", fix=fix)

    def __repr__(self) -> str:
        state = "finished" if self.finished else "not finished"
        return f"{type(self).__name__}({str(self.path)!r}: {state}, {self.rounds} rounds)"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @cached_property
    def tree(self) -> Recipe:
        """The contents of ``config.yaml``."""
        return read_keys(self.path / "config.yaml")

    @cached_property
    def settings(self) -> Config:
        """The configuration, or an error if this version of fedssl refuses it."""
        try:
            return config.build(self.tree)
        except UserError as error:
            problem = f"{self.path / 'config.yaml'} cannot be used: {error}"
            raise UserError(problem, fix="Use the version of fedssl that wrote it.") from None

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The contents of ``summary.json``; empty before the run has ended."""
        return self.read_json("summary.json", {})

    @property
    def finished(self) -> bool:
        """True if the run has ended."""
        return bool(self.summary)

    @property
    def clients(self) -> list[dict[str, Any]]:
        """Number, name and samples of each client. Not kept: there may be a million."""
        rows = self.read_json("clients.json", [])
        for number, row in enumerate(rows, 1):
            if not _is_client(row):
                problem = f"{self.path / 'clients.json'}: entry {number} is not that of a client"
                raise UserError(problem, fix="Put back a copy of the file.")
        return rows

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of ``metrics.jsonl``, one a round."""
        yield from metrics.read(self.path)

    @cached_property
    def rounds(self) -> int:
        """The number of rounds so far."""
        return max((line["round"] for line in self.lines()), default=0)

    @property
    def baselines(self) -> list[Self]:
        """The runs that ``evaluate.baselines`` left beside this one."""
        return [type(self)(p.parent) for p in sorted(self.path.glob("baselines/*/config.yaml"))]

    def read_json(self, name: str, default: Any) -> Any:
        """Return the contents of a file in the folder."""
        return read_json(self.path / name, default)


def read_json(path: Path, default: Any) -> Any:
    """Return a file's contents, of the type of ``default``, which stands for a missing file."""
    if not path.is_file():
        return default
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        fix = "Put back a copy of the file."
        raise UserError(f"{path} is not JSON ({error})", fix=fix) from None
    if not isinstance(content, type(default)):
        expected = "keys and values" if isinstance(default, dict) else "a list"
        problem = f"{path} holds {json.dumps(content)[:40]}, not {expected}"
        raise UserError(problem, fix="Use the version of fedssl that wrote it.")
    return content


def _is_client(row: Any) -> bool:
    kinds = {"client": int, "name": str, "samples": int}
    return isinstance(row, dict) and all(type(row.get(k)) is kind for k, kind in kinds.items())


def read_keys(path: Path, is_resumed: bool = False) -> Recipe:
    """Read the configuration of a run or sweep, which must be as it was written.

    A run of an earlier version has no seal. It can be read, and not resumed.
    """
    problem = ""
    try:
        if not check_text(path.read_bytes()) and is_resumed:
            problem = "is cut, or another version of fedssl wrote it"
    except DamagedError:
        problem = "is not as fedssl wrote it"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if problem:
        fix = "Put it back as it was, or delete it if there is a checkpoint, which has a copy."
        raise UserError(f"{path} {problem}", fix=fix)
    return config.read_yaml(path)


def section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a tree; empty if it is missing or no mapping."""
    value = tree.get(name)
    return value if isinstance(value, Mapping) else {}


def find_runs(paths: Sequence[str | Path]) -> list[RunReader]:
    """Return the runs in these folders; a folder of runs stands for all in it.

    Files that fedssl leaves beside runs are skipped, because ``runs/sweep/*`` names them too.
    """
    runs: list[RunReader] = []
    folders = [p for p in paths if Path(p).name not in BESIDE or not Path(p).is_file()]
    for given in folders or paths:
        if given == "":
            raise UserError("an empty name is no run", fix="Give the folder that a run wrote.")
        path = Path(given)
        below = [
            file.parent
            for depth in range(1, 5)  # runs/reproduce/fedema/table3/ROW/COLUMN
            for file in sorted(path.glob("*/" * depth + "config.yaml"))
            if "baselines" not in file.relative_to(path).parts
        ]
        is_run = (path / "config.yaml").is_file() or not below
        runs += [RunReader(path)] if is_run else map(RunReader, below)
    return runs
