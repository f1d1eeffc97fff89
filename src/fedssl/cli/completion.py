"""What a shell completes: recipes, keys, and the values of keys with a choice; without torch.

Keys of objectives, algorithms and partitions are read from the source text, as importing their
classes would take seconds: those of all that fedssl has, whichever is named.
"""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from fedssl import config

SOURCES = {
    "algorithm": "algorithms/*.py",
    "objective": "objectives/*.py",
    "partition": "data/partition.py",
}


def words(prefix: str, **_: Any) -> list[str]:
    """For ``RECIPE key=value …``."""
    return [*recipes(prefix), *keys(prefix)] if "=" not in prefix else keys(prefix)


def recipes(prefix: str = "", **_: Any) -> list[str]:
    """Recipes, and the tables that they are cells of."""
    found = config.list_recipes()
    tables = {name.rpartition("/")[0].rpartition("/")[0] for name in found if name.count("/") > 2}
    return [name for name in (*found, *sorted(tables)) if name.startswith(prefix)]


def keys(prefix: str, **_: Any) -> list[str]:
    """``key=`` for a beginning of it, and ``key=value`` where there is a choice."""
    start, equals, _value = prefix.partition("=")
    if equals:
        # Classes may share a key, each with choices of its own.
        every = [f"{key}={choice}" for key, own in _known(start) if key == start for choice in own]
        return [word for word in dict.fromkeys(every) if word.startswith(prefix)]
    return [f"{key}=" for key in dict(_known(start)) if key.startswith(prefix)]


def judging(prefix: str, **_: Any) -> list[str]:
    """Keys of ``fedssl evaluate``."""
    kept = ("evaluate.", "data.", "device=")
    return [word for word in keys(prefix) if word.startswith(kept)]


def _known(start: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Keys whose section may begin so, each with its choices."""
    for section, kind in config.key_types(config.Config).items():
        if not section.startswith(start.partition(".")[0]):
            continue
        if section in SOURCES:
            yield f"{section}.name", tuple(config.VARIANTS[section])
            yield from _written(section)
            kind = config.SourceParams if section == "partition" else config.BASE_PARAMS[section]
        if not dataclasses.is_dataclass(kind):
            yield section, _choices(kind)
            continue
        for key, own in config.key_types(kind).items():
            if section not in SOURCES or key != "name":
                yield f"{section}.{key}", _choices(own)


def _choices(kind: Any) -> tuple[str, ...]:
    """The values that a type lets one choose of."""
    if kind is bool:
        return ("true", "false")
    if typing.get_origin(kind) is Literal:
        return tuple(map(str, typing.get_args(kind)))
    return tuple(choice for own in typing.get_args(kind) for choice in _choices(own))


def _written(section: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Keys of a section's own classes, as their ``Params`` are written."""
    for path in sorted(Path(__file__).parents[1].glob(SOURCES[section])):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Params"):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        yield f"{section}.{item.target.id.rstrip('_')}", _noted(item.annotation)


def _noted(annotation: ast.expr) -> tuple[str, ...]:
    """As :func:`_choices`, of a type that is only written."""
    found: list[str] = []
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name) and node.id == "bool":
            found += ("true", "false")
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            found += map(str, ast.literal_eval(f"({ast.unparse(node.slice).strip('()')},)"))
    return tuple(found)
