"""Sweeps: keys with a list of values where one is expected."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Iterator
from typing import Any

from fedssl.config.keys import Recipe, key_types
from fedssl.config.merge import dropped_keys
from fedssl.config.schema import Config
from fedssl.config.variants import DEFAULT_NAMES, VARIANTS, key_types_under
from fedssl.util.errors import UserError

MOST_RUNS = 10_000  # of a sweep


def find_sweep(tree: Recipe) -> dict[str, list[Any]]:
    """Return the keys with several values: a list, or a list of lists if the key takes a list."""
    swept: dict[str, list[Any]] = {}
    for section, given in tree.items():
        kinds = section_types(section, given)
        nested = {f"{section}.{k}": v for k, v in given.items()} if isinstance(given, dict) else {}
        for key, value in (nested or {section: given}).items():
            if not isinstance(value, list) or not value or key not in kinds:
                continue
            if not _takes_list(kinds[key]) or all(isinstance(item, list) for item in value):
                swept[key] = value
    return swept


def combine_values(tree: Recipe) -> Iterator[dict[str, Any]]:
    """Yield each combination of a sweep's values by key, or one empty mapping without a sweep."""
    lists = find_sweep(tree)
    count = math.prod(map(len, lists.values()))
    if count > MOST_RUNS:
        key = max(lists, key=lambda key: len(lists[key]))
        problem, fix = (
            f"a sweep of {count:,} runs",
            f"Give fewer values: at most {MOST_RUNS:,} runs.",
        )
        raise UserError(problem, key=key, value=lists[key], fix=fix)
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def section_types(section: str, given: Any) -> dict[str, Any]:
    """Return the types of a section's keys by their full names."""
    kind = key_types(Config).get(section)
    if section in VARIANTS and isinstance(given, dict):
        fields = key_types_under(section, given.get("name", DEFAULT_NAMES[section]))
    elif dataclasses.is_dataclass(kind):
        fields = key_types(kind)
    else:
        return {section: kind}
    return {f"{section}.{key}": kind for key, kind in fields.items()}


def find_omissions(recipe: Recipe, tree: Recipe) -> Iterator[str]:
    """Yield a warning for each key that some runs of a sweep over names do without."""
    for section, default in DEFAULT_NAMES.items():
        both = (each.get(section) for each in (tree, recipe))
        given, before = (keys if isinstance(keys, dict) else {} for keys in both)
        names = given.get("name")
        if not isinstance(names, list):
            continue
        for key, value in given.items():
            without = [str(name) for name in names if key not in key_types_under(section, name)]
            if without:
                yield f"{section}.{key}={value}: left out for {', '.join(without)}"
        base, lost = (
            before.get("name", default),
            dropped_keys(section, before, given) - given.keys(),
        )
        if lost and base in names:
            keys = ", ".join(f"{section}.{key}={before[key]}" for key in sorted(lost))
            yield f"{section}.name={names}: the recipe's {keys} is left out, for {base} too"


def _takes_list(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple or any(map(_takes_list, typing.get_args(kind)))
