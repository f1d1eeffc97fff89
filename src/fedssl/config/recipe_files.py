"""Find recipes by name or path and read their YAML files."""

from __future__ import annotations

import copy
import functools
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from fedssl.config import grid
from fedssl.config.keys import Tree
from fedssl.config.merge import merge
from fedssl.util.errors import UserError, go_on, suggest


def recipes() -> dict[str, Path]:
    """The recipes that ship and their files (those that start with an underscore are for others).

    A file that holds a table (``fedssl.config.grid``) has a recipe for each cell:
    ``table/row/column``.
    """
    found: dict[str, Path] = {}
    for name, path in _shipped().items():
        if "/_" not in name:
            found |= dict.fromkeys(_names(name, path), path)
    return found


def matching(pattern: str) -> list[str]:
    """Recipes by name, by the table or folder that they are in, or by a pattern such as ``a/*/b``.

    A table's file that does not ship is given by its path: ``mine.yaml``, ``mine.yaml/row``.
    """
    file, path, _ = _locate(pattern)
    own = path is not None and path not in _shipped().values()
    names = _names(file, path) if own and path is not None else list(recipes())
    below = pattern.rstrip("/") + "/"
    found = [n for n in names if n == pattern or n.startswith(below) or fnmatchcase(n, pattern)]
    if not found:
        shown = pattern or '""'
        known = {parent for n in names for parent in (n, *map(str, Path(n).parents))}
        raise UserError(
            f"{shown}: no recipe has this name{suggest(pattern, sorted(known))}; "
            "`fedssl recipes` lists what ships"
        )
    return found


def table(name: str) -> grid.Table | None:
    """The table that a name means or that a recipe is a cell of; none: it is a file of its own."""
    file, path, _ = _locate(name)
    return None if path is None else _table(file, path)


@functools.cache
def _shipped() -> dict[str, Path]:
    """Every file, by name: those without a folder first, and table2 before table10."""
    root = Path(__file__).parent / "recipes"
    files = {p.relative_to(root).with_suffix("").as_posix(): p for p in root.rglob("*.yaml")}

    def place(name: str) -> tuple[bool, list[tuple[int, str]]]:
        parts = re.findall(r"(\d*)(\D*)", name)
        return "/" in name, [(int(number or 0), text) for number, text in parts]

    return {name: files[name] for name in sorted(files, key=place)}


def _names(file: str, path: Path) -> list[str]:
    """The recipes in a file."""
    cells = _table(file, path)
    return [file] if cells is None else [f"{file}/{cell}" for cell in cells.cells()]


def _table(file: str, path: Path) -> grid.Table | None:
    tree = _read_once(path, path.stat().st_mtime_ns)
    return grid.Table.read(file, tree) if grid.is_table(tree) else None


@functools.lru_cache(maxsize=256)
def _read_once(path: Path, changed: int) -> Tree:
    """A recipe's file, which is not to be changed: a table is asked for once for each cell."""
    return read_yaml(path)


def _locate(name: str) -> tuple[str, Path | None, str]:
    """Name and path of the file that a recipe is in (none: there is none), and its cell there."""
    shipped, parts = _shipped(), name.split("/")
    for end in range(len(parts), max(0, len(parts) - 3), -1):
        file = "/".join(parts[:end])
        path = shipped.get(file.removesuffix(".yaml")) or Path(file)
        if path.is_file():
            return file, path, "/".join(parts[end:])
    return name, None, ""


def read_recipe(name: str | None, extended_by: tuple[str, ...] = ()) -> Tree:
    """A shipped recipe by name, or a YAML file by path; none: the default run.

    A recipe that ``extends`` another holds only what differs.
    """
    name = "default" if name is None else name
    if not name:  # of a shell's variable that is not set
        raise UserError('recipe "": an empty name; give one, or leave it out for the default')
    if name in extended_by:
        raise UserError(f"recipe {name}: extends itself ({' → '.join((*extended_by, name))})")
    tree, *layers = _layers(name)
    base = tree.pop("extends", None)
    start = {} if base is None else read_recipe(str(base), (*extended_by, name))
    return functools.reduce(merge, [tree, *layers], start)


def _layers(name: str) -> list[Tree]:
    """What a recipe's own file says, in the order in which it is merged."""
    file, path, cell = _locate(name)
    cells = None if path is None else _table(file, path)
    if path is None and Path(name).is_dir():
        raise UserError(f"recipe {name}: a folder, not a recipe; {suggest_command(name)}")
    if path is None or (cell and (cells is None or cell not in cells.cells())):
        raise UserError(
            f"recipe {name}: no such recipe or file{suggest(name, recipes())}; "
            "`fedssl recipes` lists what ships"
        )
    if cells is None:
        return [copy.deepcopy(_read_once(path, path.stat().st_mtime_ns))]
    if not cell:
        raise UserError(
            f"recipe {name}: a table of {len(cells.cells())} recipes; name one, as in "
            f"{file}/{cells.cells()[0]}, or run them all with `fedssl reproduce {file}`"
        )
    return copy.deepcopy(cells.layers(cell))


class _Once(yaml.SafeLoader):
    """Takes a key once; of two, YAML takes the last without a word."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Where keys still stand as they are written, before others are merged in (``<<``)."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                first = lines[key.value]
                raise UserError(
                    f"line {line}: {key.value} stands in line {first} already; leave one out"
                )
            lines[key.value] = line
        return node


def read_yaml(path: Path) -> Tree:
    """A YAML file that holds keys and values."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Once) or {}
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected keys and values, as in `rounds: 100`")
    return tree


def suggest_command(folder: str) -> str:
    """What someone may want who gives a folder where none is expected."""
    if any((Path(folder) / name).is_file() for name in ("config.yaml", "sweep.yaml")):
        return f"to go on with the run in it: {go_on(folder)}"
    return f"for your own images: fedssl run folder data.root={folder}"
