"""Complete recipes, keys and values in a shell, without importing torch.

Keys of objectives, algorithms and partitions are read from the source text, because importing their
classes takes seconds. All of them are offered, whichever class is chosen.
"""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from fedssl import config


def words(prefix: str, **_: Any) -> list[str]:
    """Complete ``RECIPE key=value …``."""
    return [*recipes(prefix), *keys(prefix)] if "=" not in prefix else keys(prefix)


def recipes(prefix: str = "", **_: Any) -> list[str]:
    """Complete the name of a recipe or of a table."""
    names = config.list_recipes(prefix)
    tables = {name.rpartition("/")[0].rpartition("/")[0] for name in names if name.count("/") > 2}
    return [name for name in (*names, *sorted(tables)) if name.startswith(prefix)]


def keys(prefix: str, **_: Any) -> list[str]:
    """Complete ``key=``, and ``key=value`` where there is a choice."""
    start, equals, _value = prefix.partition("=")
    if equals:
        # Classes may share a key, with different choices.
        every = [f"{key}={choice}" for key, choices in _list_keys(start) for choice in choices]
        return [word for word in dict.fromkeys(every) if word.startswith(prefix)]
    return [f"{key}=" for key in dict(_list_keys(start)) if key.startswith(prefix)]


def evaluation_keys(prefix: str, **_: Any) -> list[str]:
    """Complete the keys of ``fedssl evaluate``."""
    return [word for word in keys(prefix) if word.startswith(("evaluate.", "data.", "device="))]


def _list_keys(start: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the keys of the sections that begin like ``start``, each with its choices."""
    for section, kind in config.key_types(config.Config).items():
        if not section.startswith(start.partition(".")[0]):
            continue
        if section in config.VARIANTS:
            yield f"{section}.name", tuple(config.VARIANTS[section])
            yield from _read_keys(section)
            kind = config.SourceParams if section == "partition" else config.BASE_PARAMS[section]
        if not dataclasses.is_dataclass(kind):
            yield section, _choices(kind)
            continue
        for key, type_ in config.key_types(kind).items():
            if section not in config.VARIANTS or key != "name":
                yield f"{section}.{key}", _choices(type_)


def _choices(kind: Any) -> tuple[str, ...]:
    """Return the values between which a type lets the user choose."""
    if kind is bool:
        return ("true", "false")
    if typing.get_origin(kind) is Literal:
        return tuple(map(str, typing.get_args(kind)))
    return tuple(choice for part in typing.get_args(kind) for choice in _choices(part))


def _read_keys(section: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the keys in the source of a section's ``Params`` classes."""
    folders = {place.split(".")[1] for place in config.VARIANTS[section].values()}
    package = Path(__file__).parents[1]
    for path in sorted(path for folder in folders for path in (package / folder).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "Params(" not in text:  # parsing takes most of the time
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Params"):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        annotation = ast.unparse(item.annotation)
                        if annotation.startswith("ClassVar"):  # no key
                            continue
                        kind = eval(annotation, {"Literal": Literal})
                        yield f"{section}.{item.target.id.rstrip('_')}", _choices(kind)
