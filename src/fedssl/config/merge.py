"""Merge trees of keys: what a layer replaces and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedssl.config import plugins
from fedssl.config.keys import Key, Tree, facts_of, key_types
from fedssl.config.schema import Config
from fedssl.config.variants import BASE_PARAMS, VARIANTS, as_names, key_types_under
from fedssl.util.errors import UserError

ALTERNATIVES = (("local_steps", "local_epochs"), ("size", "fraction"))  # one replaces the other


def with_values(tree: Tree, values: Mapping[str, Any]) -> Tree:
    """Return a recipe with other values of some keys."""
    overrides: Tree = {}
    for name, value in values.items():
        _put(overrides, name, value)
    return merge(tree, overrides)


def _put(tree: Tree, name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UserError(f"{section} already has a value, so it has no keys", key=name)
    tree[last] = value


def merge(recipe: Tree, overrides: Tree) -> Tree:
    """Merge overrides over a recipe.

    A new name, update rule or engine drops the recipe's keys that mean nothing there.
    """
    tree = dict(recipe)
    for section, value in overrides.items():
        base = tree.get(section)
        if not isinstance(value, dict) or not isinstance(base, dict):
            tree[section] = value
            continue
        if section in VARIANTS and _is_renamed(base, value):
            dropped = dropped_keys(section, base, value)
        else:
            dropped = {key for key in base if _is_dropped(section, key, value)}
        for pair in ALTERNATIVES:
            if set(pair) & value.keys():
                dropped |= set(pair)
        tree[section] = {**{k: v for k, v in base.items() if k not in dropped}, **value}
    return tree


def _is_dropped(section: str, key: str, value: Tree) -> bool:
    """Return whether a new value of the key that another one needs makes that one pointless."""
    fact = facts_of(key_types(Config).get(section)).get(key, Key())
    needed, _, values = fact.needs.partition("=")
    given = value.get(needed)
    return bool(values) and isinstance(given, str) and given not in values.split("|")


def _is_renamed(base: Tree, value: Tree) -> bool:
    """Return whether ``value`` has another name; a file's may be written in several ways."""
    before, after = base.get("name"), value.get("name", base.get("name"))
    return plugins.make_absolute(str(before)) != plugins.make_absolute(str(after))


def dropped_keys(section: str, base: Tree, value: Tree) -> set[str]:
    """Return the keys that mean something else, or nothing, under the name in ``value``."""
    before, after = base.get("name"), value["name"]
    old, new = ({plugins.make_absolute(str(n)) for n in as_names(name)} for name in (before, after))
    if isinstance(before, list) and (new <= old or old <= new):
        # A run of a sweep, or a longer one: what is beside its names is for all that have the key.
        return key_types_under(section, before).keys() - key_types_under(section, after).keys()
    return base.keys() - key_types(BASE_PARAMS[section]).keys()
