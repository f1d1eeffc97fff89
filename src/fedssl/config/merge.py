"""Merge trees of keys, and override them with the ``key=value`` words of a command line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedssl.config import plugins
from fedssl.config.keys import Recipe, facts_of, key_types
from fedssl.config.schema import Config
from fedssl.config.variants import BASE_PARAMS, VARIANTS, as_names, key_types_under
from fedssl.util.errors import UserError, format_resume

MOST_LEVELS, MOST_VALUES = 20, 100_000  # of a recipe


def with_values(tree: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return a recipe with other values of some keys."""
    overrides: Recipe = {}
    for name, value in values.items():
        _put(overrides, name, value)
    return merge(tree, overrides)


def _put(tree: Recipe, name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UserError(f"{section} already has a value, so it has no keys", key=name)
    tree[last] = value


def merge(recipe: Recipe, overrides: Recipe) -> Recipe:
    """Merge overrides over a recipe.

    A new name, update rule or engine drops the recipe's keys that mean nothing there, and a new
    value drops that of the key that it excludes.
    """
    tree = dict(recipe)
    for section, value in overrides.items():
        base = tree.get(section)
        if not isinstance(value, dict) or not isinstance(base, dict):
            tree[section] = value
            continue
        is_renamed = section in VARIANTS and _is_renamed(base, value)
        dropped = dropped_keys(section, base, value) if is_renamed else set()
        kind = key_types(Config).get(section)
        for key, fact in facts_of(kind).items() if dataclasses.is_dataclass(kind) else ():
            needed, _, allowed = fact.needs.partition("=")
            given = value.get(needed)
            if allowed and isinstance(given, str) and given not in allowed.split("|"):
                dropped.add(key)
            if fact.instead_of and {key, fact.instead_of} & value.keys():
                dropped |= {key, fact.instead_of}
        tree[section] = {**{k: v for k, v in base.items() if k not in dropped}, **value}
    return tree


def _is_renamed(base: Recipe, value: Recipe) -> bool:
    """Return whether ``value`` has another name; a file's may be written in several ways."""
    before, after = base.get("name"), value.get("name", base.get("name"))
    return plugins.make_absolute(str(before)) != plugins.make_absolute(str(after))


def dropped_keys(section: str, base: Recipe, value: Recipe) -> set[str]:
    """Return the keys that mean something else, or nothing, under the name in ``value``."""
    before, after = base.get("name"), value["name"]
    old, new = ({plugins.make_absolute(str(n)) for n in as_names(name)} for name in (before, after))
    if isinstance(before, list) and (new <= old or old <= new):
        # A run of a sweep, or a longer one: what is beside its names is for all that have the key.
        return key_types_under(section, before).keys() - key_types_under(section, after).keys()
    return base.keys() - key_types(BASE_PARAMS[section]).keys()


def apply_words(recipe: Recipe, words: Sequence[str]) -> Recipe:
    """Return a recipe with the keys of ``key=value`` words."""
    return with_values(recipe, read_words(words))


def read_words(words: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``key=value`` words by key."""
    return dict(words) if isinstance(words, Mapping) else dict(map(_split_word, words))


def _split_word(word: str) -> tuple[str, Any]:
    name, equals, text = word.partition("=")
    if not equals and word and Path(word).is_dir():
        raise UserError(f"{word}: a folder is not key=value. {suggest_command(word)}")
    if not equals or not name:  # also of a shell's variable that is not set
        raise UserError(f'"{word}" is not key=value', fix="Write rounds=100, for example.")
    if not text.strip():
        fix = f"Give a value, or {name}=null for none."
        raise UserError("no value", key=name, value="", fix=fix)
    return name, _read_value(text)


def check_size(value: Any) -> None:
    """Raise ``ValueError`` if a value of YAML is nested too deeply, or very large with aliases."""
    sizes: dict[int, int] = {}

    def count(node: Any, depth: int) -> int:
        if depth > MOST_LEVELS:
            raise ValueError(f"more than {MOST_LEVELS} levels")
        if not isinstance(node, dict | list):
            return 1
        if id(node) not in sizes:
            children = node.values() if isinstance(node, dict) else node
            sizes[id(node)] = sum(count(child, depth + 1) for child in children)
        return sizes[id(node)]

    if count(value, 0) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")


def suggest_command(folder: str) -> str:
    """Return a sentence with the command that a user may want who gives a folder."""
    if any((Path(folder) / name).is_file() for name in ("config.yaml", "sweep.yaml")):
        return f"To continue the run in it: {format_resume(folder)}"
    return f"For your own images: fedssl run folder data.root={folder}"


class _Loader(yaml.SafeLoader):
    """Reads a whole number only if it is written as one; in a list it may be a name."""

    def read_number(self, node: yaml.ScalarNode) -> Any:
        """Return ``7`` as a number, and ``007``, ``2024_01`` and ``2024-01-31`` as text."""
        return int(node.value) if re.fullmatch("0|-?[1-9][0-9]*", node.value) else node.value


for _kind in ("int", "timestamp"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.read_number)


def _read_value(text: str) -> Any:
    """Return what YAML reads, unless that is not what the text says.

    A folder called ``2024_01``, ``2024-01-31`` or ``photos #2`` keeps its name.
    """
    text = text.strip()
    try:
        value = yaml.load(text, _Loader)
        check_size(value)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: no such date, or too large
        return text
    if isinstance(value, bool) or text in ("~", "null", "Null", "NULL", ".inf"):
        return value
    if text[0] in "[{\"'":  # a list, a mapping or a quoted text
        return value
    return value if str(value) == text else text
