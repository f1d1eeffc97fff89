"""A table of a paper as one file: a recipe for every cell that the paper has.

    extends: fedema/_base
    table: FedEMA Table 3                   # the paper's name for it
    about: FedEMA beside other methods
    measure: linear_top1                    # what the numbers are; a column may name its own
    rounds: 100                             # as all keys of a recipe: holds for the whole table
    columns:
      cifar10-iid: {title: CIFAR-10 IID, partition: {name: iid, clients: 5}}
      cifar10-noniid: {title: CIFAR-10 non-IID}
    rows:
      fedbyol:
        title: FedBYOL
        paper: [84.29 ± 0.18, 79.44 ± 0.99]
      centralized:
        algorithm: {name: centralized}
        cells: {cifar10-iid: {seed: 1}}     # keys of one cell
        paper: [90.46, -]

Later layers win: the table's keys, the column's, the row's, the cell's. ``paper`` has an entry for
each column: a number, ``{measure: number, note: text}``, ``-`` where the paper has no such cell, or
``~`` where it has one and prints no number; no ``paper`` means ``~`` everywhere. ``note`` (of
the table, a column or a row) is a remark on the paper's numbers, or on why there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedssl.util.errors import UserError

Tree = dict[str, Any]
_OWN = {"table", "measure", "note", "columns", "rows", "title", "paper", "cells"}
_UNPRINTED = "the figure prints no number"


def is_table(tree: Mapping[str, Any]) -> bool:
    """Whether a file holds a table of recipes rather than one recipe."""
    return "rows" in tree


@dataclass(frozen=True)
class Table:
    """A table's file, checked; ``file`` is its name in messages."""

    file: str
    tree: Tree
    columns: dict[str, Tree]
    rows: dict[str, Tree]

    @classmethod
    def read(cls, file: str, tree: Tree) -> Table:
        """Refuse what has no cells, or more numbers than columns."""
        columns, rows = _parts(file, tree, "columns"), _parts(file, tree, "rows")
        for name, row in rows.items():
            entries = row.get("paper")
            if entries is not None and (
                not isinstance(entries, list) or len(entries) != len(columns)
            ):
                raise UserError(
                    f"{file}: rows.{name}.paper={entries}: expected a list of {len(columns)}, one "
                    "for each column; `-` where the paper has no such cell"
                )
            own = row.get("cells") or {}
            if not isinstance(own, dict) or not all(isinstance(v, dict) for v in own.values()):
                raise UserError(
                    f"{file}: rows.{name}.cells: expected columns with keys and values below them"
                )
            for column in own:
                if str(column) not in columns:
                    raise UserError(
                        f"{file}: rows.{name}.cells.{column}: no such column; "
                        f"choose one of {', '.join(columns)}"
                    )
        return cls(file, tree, columns, rows)

    @property
    def title(self) -> str:
        """What the paper calls it."""
        return str(self.tree.get("table", self.file))

    @property
    def about(self) -> str:
        """What it compares."""
        return str(self.tree.get("about", ""))

    def cells(self) -> list[str]:
        """``row/column`` of every cell that the paper has."""
        return [f"{r}/{c}" for r in self.rows for c in self.columns if self._entry(r, c) != "-"]

    def layers(self, cell: str) -> list[Tree]:
        """The trees that make a cell's recipe, each to be merged over those before it."""
        row, column = cell.split("/")
        own = {str(k): v for k, v in (self.rows[row].get("cells") or {}).items()}
        return [
            *(_keys(tree) for tree in (self.tree, self.columns[column], self.rows[row])),
            own.get(column) or {},
            {"paper": self._published(row, column)},
        ]

    def _entry(self, row: str, column: str) -> Any:
        entries = self.rows[row].get("paper")
        return None if entries is None else entries[list(self.columns).index(column)]

    def _published(self, row: str, column: str) -> Tree:
        """The recipe's ``paper``: which cell it is, its numbers, and remarks on them."""
        parts = (self.rows[row], self.columns[column])
        titles = [str(p.get("title", n)) for n, p in zip((row, column), parts, strict=True)]
        measure = next((p["measure"] for p in (*parts, self.tree) if "measure" in p), None)
        where = f"{self.file}: rows.{row}.paper, column {column}"
        results, notes = _numbers(self._entry(row, column), measure, where)
        if notes == [_UNPRINTED] and any("note" in p for p in parts):
            notes = []  # they say why
        notes += [str(p["note"]) for p in (*parts, self.tree) if "note" in p]
        paper: Tree = {"row": ", ".join([self.title, *titles])}
        if results:
            paper["results"] = results
        if notes:
            paper["note"] = "; ".join(notes)
        return paper


def _parts(file: str, tree: Tree, name: str) -> dict[str, Tree]:
    """The rows or the columns, by name."""
    parts = tree.get(name)
    if not isinstance(parts, dict) or not parts:
        raise UserError(f"{file}: {name}: expected names with keys and values below them")
    for part, keys in parts.items():
        bad = "/" in str(part) or str(part) in (".", "..")  # it names a folder of runs
        if bad or not isinstance(keys or {}, dict):
            raise UserError(f"{file}: {name}.{part}: expected a name without / and keys below it")
    return {str(part): keys or {} for part, keys in parts.items()}


def _keys(tree: Tree) -> Tree:
    return {key: value for key, value in tree.items() if key not in _OWN}


def _numbers(entry: Any, measure: Any, where: str) -> tuple[dict[str, float], list[str]]:
    """Results and remarks of one entry of ``paper``."""
    if entry is None:
        return {}, [_UNPRINTED]
    if isinstance(entry, dict):
        notes = [str(entry["note"])] if "note" in entry else []
        return {k: v for k, v in entry.items() if k != "note"}, notes
    number, spread, by = str(entry).partition("±")
    if measure is None:
        raise UserError(f"{where}: a number of what? give the table a measure, as in linear_top1")
    try:
        return {str(measure): float(number)}, [f"± {by.strip()}"] if spread else []
    except ValueError:
        raise UserError(f"{where}: {entry}: expected a number, as in 84.29 ± 0.18") from None
