"""A run's folder, read: for reports, exports, and for people in Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from fedssl import config, metrics
from fedssl.config import Config, Tree
from fedssl.errors import UserError


class Run:
    """A run's folder, finished or not, of this version or of an older one.

    >>> Run("runs/a").summary["knn_top1"]  # doctest: +SKIP
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
            raise UserError(f"{self.path}: config.yaml is of another version: {self.problem}")
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
        if (self.path / metrics.FILE).is_file():
            yield from metrics.read(self.path)

    @cached_property
    def rounds(self) -> int:
        """How many rounds are done."""
        return max((line["round"] for line in self.lines()), default=0)

    @property
    def baselines(self) -> list[Run]:
        """The runs that ``evaluate.baselines`` left beside it."""
        return [Run(p.parent) for p in sorted(self.path.glob("baselines/*/config.yaml"))]

    def _json(self, name: str, otherwise: Any) -> Any:
        path = self.path / name
        if not path.is_file():
            return otherwise
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: not readable as JSON ({error})") from None
