"""A file that holds a paper's table: a recipe for every cell that the paper has.

    extends: fedema/_base
    table: FedEMA Table 3                   # the paper's name for it
    about: FedEMA beside other methods
    measure: linear_top1                    # of the numbers; a column may name its own
    rounds: 100                             # like all keys of a recipe: for the whole table
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
``~`` where it has one and prints no number. No ``paper`` means ``~`` everywhere. ``note`` (of the
table, a column or a row) is a remark on the paper's numbers, or on why there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedssl.config.keys import Recipe
from fedssl.util.errors import UserError

_NOT_IN_RECIPES = {"table", "measure", "note", "columns", "rows", "title", "paper", "cells"}
_UNPRINTED = "the figure prints no number"


@dataclass(frozen=True)
class Table:
    """A checked file; ``file`` is its name in messages."""

    file: str
    tree: Recipe
    columns: dict[str, Recipe]
    rows: dict[str, Recipe]

    @classmethod
    def read(cls, file: str, tree: Recipe) -> Table | None:
        """Return the table, or ``None`` if the file holds one recipe."""
        if "rows" not in tree:
            return None
        columns, rows = _read_parts(file, tree, "columns"), _read_parts(file, tree, "rows")
        for name, row in rows.items():
            _check_row(f"{file}: rows.{name}", row, columns)
        return cls(file, tree, columns, rows)

    @property
    def title(self) -> str:
        """The paper's name for the table."""
        return str(self.tree.get("table", self.file))

    @property
    def about(self) -> str:
        """The table's description."""
        return str(self.tree.get("about", ""))

    def cells(self) -> list[str]:
        """Return ``row/column`` of every cell that the paper has."""
        return [f"{r}/{c}" for r in self.rows for c in self.columns if self._entry(r, c) != "-"]

    def layers(self, cell: str) -> list[Recipe]:
        """Return the trees that make a cell's recipe, each to be merged over those before it."""
        row, column = cell.split("/")
        cells = {str(k): v for k, v in (self.rows[row].get("cells") or {}).items()}
        trees = (self.tree, self.columns[column], self.rows[row])
        keys = [{k: v for k, v in tree.items() if k not in _NOT_IN_RECIPES} for tree in trees]
        return [*keys, cells.get(column) or {}, {"paper": self._published(row, column)}]

    def _entry(self, row: str, column: str) -> Any:
        entries = self.rows[row].get("paper")
        return None if entries is None else entries[list(self.columns).index(column)]

    def _published(self, row: str, column: str) -> Recipe:
        """Return the recipe's ``paper``: its cell, the cell's numbers, and remarks on them."""
        parts = (self.rows[row], self.columns[column])
        titles = [str(p.get("title", n)) for n, p in zip((row, column), parts, strict=True)]
        measure = next((p["measure"] for p in (*parts, self.tree) if "measure" in p), None)
        place = f"{self.file}: rows.{row}.paper, column {column}"
        results, notes = _read_numbers(self._entry(row, column), measure, place)
        if notes == [_UNPRINTED] and any("note" in p for p in parts):
            notes = []  # they say why
        notes += [str(p["note"]) for p in (*parts, self.tree) if "note" in p]
        paper: Recipe = {"row": ", ".join([self.title, *titles])}
        if results:
            paper["results"] = results
        if notes:
            paper["note"] = "; ".join(notes)
        return paper


def _read_parts(file: str, tree: Recipe, name: str) -> dict[str, Recipe]:
    """Return the rows or the columns by name. A name is part of a run's folder."""
    parts = tree.get(name)
    if not _is_tree(parts) or not parts or any("/" in str(part) for part in parts):
        raise UserError("not names without / and keys below them", key=f"{file}: {name}")
    return {str(part): keys or {} for part, keys in parts.items()}


def _check_row(place: str, row: Recipe, columns: Mapping[str, Recipe]) -> None:
    entries, cells = row.get("paper"), row.get("cells") or {}
    if entries is not None and (not isinstance(entries, list) or len(entries) != len(columns)):
        fix = f"Give a list of {len(columns)}, one for each column, with - for a missing cell."
        raise UserError("not one number per column", key=f"{place}.paper", value=entries, fix=fix)
    if not _is_tree(cells) or not set(map(str, cells)) <= columns.keys():
        fix = f"Use the columns {', '.join(columns)}."
        raise UserError("not columns with keys below them", key=f"{place}.cells", fix=fix)


def _is_tree(given: Any) -> bool:
    """Return whether these are names with keys, or nothing, below each."""
    return isinstance(given, dict) and all(isinstance(keys or {}, dict) for keys in given.values())


def _read_numbers(entry: Any, measure: Any, place: str) -> tuple[dict[str, float], list[str]]:
    """Return the results and the remarks of one entry of ``paper``."""
    if entry is None:
        return {}, [_UNPRINTED]
    if isinstance(entry, dict):
        notes = [str(entry["note"])] if "note" in entry else []
        return {k: v for k, v in entry.items() if k != "note"}, notes
    number, spread, by = str(entry).partition("±")
    if measure is None:
        fix = "Give the table a measure, such as linear_top1."
        raise UserError("a number without a measure", key=place, fix=fix)
    try:
        return {str(measure): float(number)}, [f"± {by.strip()}"] if spread else []
    except ValueError:
        fix = "Give a number, such as 84.29 ± 0.18."
        raise UserError("not a number", key=place, value=entry, fix=fix) from None
