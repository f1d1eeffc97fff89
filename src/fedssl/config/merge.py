"""Merge trees of keys: what a layer replaces and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedssl.config.convert import key_types
from fedssl.config.schema import Tree
from fedssl.config.variants import BASE_PARAMS, VARIANTS, as_names, key_types_under
from fedssl.util import plugins
from fedssl.util.errors import UserError

ALTERNATIVES = (("local_steps", "local_epochs"), ("size", "fraction"))  # one replaces the other
NO_MOMENTUM = ("adam", "adamw")  # rules that have none
OF_ENGINE = {  # keys that one engine alone looks at
    "local": ("chunk",),
    "flower": ("workers", "timeout", "updates", "max_norm", "sites"),
}


def keys_of_other_engines(engine: str) -> dict[str, str]:
    """Keys that do nothing with an engine, and the one that looks at each."""
    return {key: other for other, keys in OF_ENGINE.items() if other != engine for key in keys}


def with_values(tree: Tree, values: Mapping[str, Any]) -> Tree:
    """A recipe with other values of some keys."""
    overrides: Tree = {}
    for name, value in values.items():
        _put(overrides, name, value)
    return merge(tree, overrides)


def _put(tree: Tree, name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UserError(f"{name}: {section} already has a value, so it has no keys")
    tree[last] = value


def merge(recipe: Tree, overrides: Tree) -> Tree:
    """Overrides win; a new name, rule or engine keeps only keys that mean the same under each."""
    tree = dict(recipe)
    for section, value in overrides.items():
        base = tree.get(section)
        if not isinstance(value, dict) or not isinstance(base, dict):
            tree[section] = value
            continue
        if section in VARIANTS and _renamed(base, value):
            dropped = dropped_keys(section, base, value)
            base = {k: v for k, v in base.items() if k not in dropped}
        if value.get("optimizer") in NO_MOMENTUM:
            base = {k: v for k, v in base.items() if k != "momentum"}
        if section == "engine" and isinstance(value.get("name"), str):
            base = {k: v for k, v in base.items() if k not in keys_of_other_engines(value["name"])}
        for pair in ALTERNATIVES:
            if set(pair) & value.keys():
                base = {k: v for k, v in base.items() if k not in pair}
        tree[section] = {**base, **value}
    return tree


def _renamed(base: Tree, value: Tree) -> bool:
    """Whether ``value`` has another name; a file's may be written in several ways."""
    before, after = base.get("name"), value.get("name", base.get("name"))
    return plugins.settled(str(before)) != plugins.settled(str(after))


def dropped_keys(section: str, base: Tree, value: Tree) -> set[str]:
    """Keys that mean something else, or nothing, under the name in ``value``."""
    before, after = base.get("name"), value["name"]
    old, new = ({plugins.settled(str(n)) for n in as_names(name)} for name in (before, after))
    if isinstance(before, list) and (new <= old or old <= new):
        # A run of a sweep, or a longer one: what is beside its names is for all that have the key.
        return key_types_under(section, before).keys() - key_types_under(section, after).keys()
    return base.keys() - key_types(BASE_PARAMS[section]).keys()
