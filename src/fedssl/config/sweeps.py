"""Sweeps: keys with a list of values where one is expected."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterator
from typing import Any

from fedssl.config.keys import Tree, key_types
from fedssl.config.merge import dropped_keys
from fedssl.config.schema import Config
from fedssl.config.variants import DEFAULT_NAMES, VARIANTS, key_types_under


def swept(tree: Tree) -> dict[str, list[Any]]:
    """Keys with a list of values where one is expected (``fedssl.runs.sweep``).

    Of a key that takes a list itself, a list of lists.
    """
    found: dict[str, list[Any]] = {}
    for section, given in tree.items():
        kinds = section_types(section, given)
        nested = {f"{section}.{k}": v for k, v in given.items()} if isinstance(given, dict) else {}
        for key, value in (nested or {section: given}).items():
            if not isinstance(value, list) or not value or key not in kinds:
                continue
            if not _takes_list(kinds[key]) or all(isinstance(item, list) for item in value):
                found[key] = value
    return found


def combinations(tree: Tree) -> Iterator[dict[str, Any]]:
    """Each combination of the values in a recipe's lists, by key; one empty where it has none."""
    lists = swept(tree)
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def section_types(section: str, given: Any) -> dict[str, Any]:
    """The types of a section's keys, by their full names."""
    kind = key_types(Config).get(section)
    if section in VARIANTS and isinstance(given, dict):
        fields = key_types_under(section, given.get("name", DEFAULT_NAMES[section]))
    elif dataclasses.is_dataclass(kind):
        fields = key_types(kind)
    else:
        return {section: kind}
    return {f"{section}.{key}": own for key, own in fields.items()}


def left_out(recipe: Tree, tree: Tree) -> Iterator[str]:
    """What runs of a sweep over names go without, of the keys in ``tree`` and of its ``recipe``."""
    for section, default in DEFAULT_NAMES.items():
        both = (each.get(section) for each in (tree, recipe))
        given, before = (keys if isinstance(keys, dict) else {} for keys in both)
        names = given.get("name")
        if not isinstance(names, list):
            continue
        for key, value in given.items():
            without = [str(name) for name in names if key not in key_types_under(section, name)]
            if without:
                yield f"{section}.{key}={value}: not for {', '.join(without)}: no such key there"
        own, lost = before.get("name", default), dropped_keys(section, before, given) - given.keys()
        if lost and own in names:
            keys = ", ".join(f"{section}.{key}={before[key]}" for key in sorted(lost))
            yield f"{section}.name={names}: leaves out the recipe's {keys}, for {own} too"


def _takes_list(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple or any(map(_takes_list, typing.get_args(kind)))
