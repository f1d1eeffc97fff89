"""Find recipes by name or path and read their YAML files."""

from __future__ import annotations

import copy
import functools
import re
import typing
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from fedssl.config.catalogue import DataName, EncoderName
from fedssl.config.keys import Recipe
from fedssl.config.merge import check_size, merge, suggest_command
from fedssl.config.recipe_tables import Table
from fedssl.config.variants import VARIANTS
from fedssl.util.errors import UserError, suggest

LIST = "`fedssl recipes` lists them."
DEFAULT = "default"  # the recipe where none is named
PARTS = {  # names that a user may give in the place of a recipe
    **VARIANTS,
    "data": typing.get_args(DataName),
    "encoder": typing.get_args(EncoderName),
}
_ROOT = Path(__file__).parent / "recipes"


def list_recipes(prefix: str = "") -> list[str]:
    """Return the names of fedssl's recipes, or of those whose names may begin so.

    A file that holds a table has a recipe for each cell: ``table/row/column``. Files that start
    with an underscore are only there to be extended.
    """
    return [
        recipe
        for name, path in _list_files().items()
        if "/_" not in f"/{name}" and (name.startswith(prefix) or prefix.startswith(name))
        for recipe in _recipes_in(name, path)
    ]


def match_recipes(pattern: str) -> list[str]:
    """Return recipes by name, by their table or folder, or by a pattern such as ``a/*/b``.

    A user's table is given by its path: ``mine.yaml``, ``mine.yaml/row``. Earlier names of recipes
    match too; the names of today are returned.
    """
    file, path, _ = _locate(pattern)
    is_users = path is not None and path not in _list_files().values()
    names = _recipes_in(file, path) if is_users and path is not None else list_recipes()
    below = pattern.rstrip("/") + "/"
    matches = [n for n in names if n == pattern or n.startswith(below) or fnmatchcase(n, pattern)]
    matches = matches or [new for old, new in _list_renamed().items() if fnmatchcase(old, pattern)]
    if not matches:
        prefixes = {parent for n in names for parent in (n, *map(str, Path(n).parents))}
        hint = suggest(pattern, sorted(prefixes))
        raise UserError(f"no recipe has this name{hint}", key="recipe", value=pattern, fix=LIST)
    return matches


def find_table(name: str) -> Table | None:
    """Return the table with this name or with this cell, or ``None`` for a file of one recipe."""
    file, path, _ = _locate(name)
    return None if path is None else _read_table(file, path)


@functools.cache
def _list_renamed() -> Mapping[str, str]:
    """Return earlier names of recipes, with those of today."""
    return read_yaml(_ROOT / "_renamed.yaml")


@functools.cache
def _list_files() -> dict[str, Path]:
    """Return all files by name: those without a folder first, and table2 before table10."""
    files = {p.relative_to(_ROOT).with_suffix("").as_posix(): p for p in _ROOT.rglob("*.yaml")}

    def place(name: str) -> tuple[bool, list[tuple[int, str]]]:
        parts = re.findall(r"(\d*)(\D*)", name)
        return "/" in name, [(int(number or 0), text) for number, text in parts]

    return {name: files[name] for name in sorted(files, key=place)}


def _recipes_in(file: str, path: Path) -> list[str]:
    table = _read_table(file, path)
    return [file] if table is None else [f"{file}/{cell}" for cell in table.cells()]


def _read_table(file: str, path: Path) -> Table | None:
    return Table.read(file, _read_once(path, path.stat().st_mtime_ns))


@functools.lru_cache(maxsize=256)
def _read_once(path: Path, changed: int) -> Recipe:
    """Return a file's content, which callers must not change: each cell reads its table's file."""
    return read_yaml(path)


def _locate(name: str) -> tuple[str, Path | None, str]:
    """Return name and path (``None`` without a file) of a recipe's file, and its cell there."""
    files, parts = _list_files(), name.split("/")
    for end in range(len(parts), max(0, len(parts) - 3), -1):
        file = "/".join(parts[:end])
        path = files.get(file.removesuffix(".yaml")) or Path(file)
        if path.is_file():
            return file, path, "/".join(parts[end:])
    renamed = _list_renamed().get(name.removesuffix(".yaml"))
    return (name, None, "") if renamed is None else _locate(renamed)


def read_recipe(name: str | None, extended_by: tuple[str, ...] = ()) -> Recipe:
    """Read a recipe by name or by path, with the recipe that it ``extends``.

    ``None`` is the default recipe.
    """
    name = DEFAULT if name is None else name
    if name in extended_by:
        chain = " → ".join((*extended_by, name))
        raise UserError(f"extends itself ({chain})", key="recipe", value=name)
    tree, *layers = _read_layers(name)
    base = tree.pop("extends", None)
    start = {} if base is None else read_recipe(str(base), (*extended_by, name))
    return functools.reduce(merge, [tree, *layers], start)


def _read_layers(name: str) -> list[Recipe]:
    """Return the content of a recipe's file, in the order in which it is merged."""

    def refuse(problem: str, fix: str) -> UserError:
        return UserError(problem, key="recipe", value=name or '""', fix=fix)

    file, path, cell = _locate(name)
    table = None if path is None else _read_table(file, path)
    if path is None and name and Path(name).is_dir():
        raise refuse("a folder, not a recipe", suggest_command(name))
    if path is None or (cell and (table is None or cell not in table.cells())):
        meant = [f"{section}.name={name}" for section in PARTS if name in PARTS[section]]
        fix = f"Write {' or '.join(meant)}." if meant else LIST
        raise refuse(f"no such recipe or file{suggest(name, list_recipes())}", fix)
    if table is None:
        return [copy.deepcopy(_read_once(path, path.stat().st_mtime_ns))]
    if not cell:
        first = f"{file}/{table.cells()[0]}"
        fix = f"Name one, such as {first}, or run them all with `fedssl reproduce {file}`."
        raise refuse(f"a table of {len(table.cells())} recipes", fix)
    return copy.deepcopy(table.layers(cell))


class _Loader(yaml.SafeLoader):
    """Refuses a key that a file has twice, where YAML takes the last one silently."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Check the keys as they are written, before others are merged in (``<<``)."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ValueError(f"line {line}: {key.value} is in line {lines[key.value]} already")
            lines[key.value] = line
        return node


def read_yaml(path: Path) -> Recipe:
    """Read a YAML file that holds keys and values."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
        check_size(tree)
    except RecursionError:
        fix = "Write `rounds: 100`, for example."
        raise UserError(f"{path}: nested too deeply", fix=fix) from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: not keys and values", fix="Write `rounds: 100`, for example.")
    return tree
