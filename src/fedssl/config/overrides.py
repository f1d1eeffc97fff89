"""Override a recipe with the ``key=value`` words of a command line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedssl.config.assemble import build
from fedssl.config.keys import Tree
from fedssl.config.merge import with_values
from fedssl.config.recipe_files import suggest_command
from fedssl.config.schema import Config
from fedssl.util.errors import UserError


def resolve(recipe: Tree, words: Sequence[str] = ()) -> Config:
    """A complete configuration from a recipe and the ``key=value`` words that override it."""
    return build(merged(recipe, words))


def merged(recipe: Tree, words: Sequence[str]) -> Tree:
    """A recipe with the ``key=value`` words that override it, as a tree."""
    return changed(recipe, dict(map(_split, words)))


def changed(recipe: Tree, values: Mapping[str, Any]) -> Tree:
    """A recipe with other values of some keys; what these switch off goes back to its default."""
    return with_values(recipe, values)


def _split(word: str) -> tuple[str, Any]:
    if not word:  # of a shell's variable that is not set
        raise UserError('"": empty, where key=value is expected, as in rounds=100')
    name, equals, text = word.partition("=")
    if not equals and Path(word).is_dir():
        raise UserError(f"{word}: a folder, where key=value is expected; {suggest_command(word)}")
    if not equals or not name:
        raise UserError(f"{word}: expected key=value, as in rounds=100")
    if not text.strip():  # of a shell's variable that is not set
        raise UserError(f"{word}: has no value; give one, or {name}=null for none")
    return name, _read(text)


class _Words(yaml.SafeLoader):
    """Reads whole numbers and dates only as they would be written; in a list they may be names."""

    def written(self, node: yaml.ScalarNode) -> Any:
        """``7`` is a number, ``007``, ``2024_01`` and ``2024-01-31`` are text."""
        return int(node.value) if re.fullmatch("0|-?[1-9][0-9]*", node.value) else node.value


for _kind in ("int", "timestamp"):
    _Words.add_constructor(f"tag:yaml.org,2002:{_kind}", _Words.written)


def _read(text: str) -> Any:
    """A word's value: what YAML reads, unless that says something else than the text.

    A folder called ``2024_01``, ``2024-01-31`` or ``photos #2`` keeps its name.
    """
    try:
        value = yaml.load(text, _Words)
    except (yaml.YAMLError, ValueError):  # the latter: of numbers that there are not
        return text.strip()
    if isinstance(value, bool) or text.lstrip()[:1] in ("[", "{", '"', "'"):
        return value
    if value is None:
        return None if text.strip() in ("~", "null", "Null", "NULL") else text.strip()
    if isinstance(value, float) and not math.isfinite(value):  # .inf, which only YAML reads
        return value
    return value if str(value) == text.strip() else text.strip()
