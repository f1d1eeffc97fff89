"""Resolve a recipe and the user's words, and fill in what the named parts recommend.

The settings of a run come from four places. Later ones win:

1. the defaults of the keys,
2. the settings that the parts recommend (``recommended`` of an algorithm, an objective or a
   partition; :mod:`fedssl.config.catalogue` for data sets and encoders; then
   :mod:`fedssl.config.preprocessing` for the weights that an encoder starts from; at last
   ``fit`` of a recipe, which suits the user's data),
3. the recipe,
4. the user's words.

So a recipe that only names parts gets all settings from them, and a paper's recipe, which sets
values, keeps these when a word names another part. There is one exception. If a value of a recipe
contradicts a word, it gives way to the recommended one, and a line says so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedssl.config.build import build, flatten, to_tree
from fedssl.config.catalogue import ENCODERS, recommend_for_data
from fedssl.config.images import Data, Encoder
from fedssl.config.keys import Recipe, key_types
from fedssl.config.merge import merge, read_words, with_values
from fedssl.config.preprocessing import recommend_for_weights
from fedssl.config.schema import Config
from fedssl.config.sweeps import find_sweep
from fedssl.config.variants import BASE_PARAMS, DEFAULT_NAMES, VARIANTS, key_types_under, variant
from fedssl.util.errors import UserError, format_value

Words = Sequence[str] | Mapping[str, Any]
FIT = "fit"  # of a recipe: settings for the user's data, which higher packages fill in

# The parts that recommend settings. Later ones win: only the data set knows of its labels.
_PARTS = {"encoder": Encoder.name, **DEFAULT_NAMES, "data": Data.name}
_ORDER = ("encoder", "objective", "algorithm", "partition", "data")
_TITLES = {"server": "optimizer", "client": "optimizer"}  # other sections have a ``name``


def resolve(recipe: Recipe, words: Words = ()) -> Config:
    """Build a configuration from a recipe and the words that override it; print what gave way."""
    resolution = Resolution(recipe, words)
    for note in resolution.notes():
        print(f"fedssl: {note}", file=sys.stderr)
    return resolution.config


@dataclass
class Resolution:
    """A configuration, and where each of its values comes from.

    ``named`` are keys of the recipe that are the user's words, too: those of a sweep.
    """

    recipe: Recipe
    words: Words = ()
    named: Collection[str] = ()
    config: Config = field(init=False)
    sources: dict[str, str] = field(init=False)
    """Key → the part that recommends its value, ``recipe`` or ``word``; others have defaults."""

    def __post_init__(self) -> None:
        self.given = read_words(self.words)
        self.named = {*self.named, *self.given}
        self._refused: list[tuple[str, Any, str]] = []  # key, value and problem
        recipe = self.recipe
        while True:
            explicit = with_values(_without(recipe, FIT), self.given)
            layers = list(self._list_recommendations(explicit))
            named = {section: {"name": name} for section, name in self._names.items()}
            tree = functools.reduce(merge, [named, *(layer for _, layer in layers)])
            try:
                self.config = build(merge(tree, explicit))
                break
            except UserError as error:
                recipe = self._give_way(error, recipe, tree)
        self.sources = {key: part for part, layer in layers for key in flatten(layer)}
        self.sources |= dict.fromkeys(flatten(explicit), "recipe")
        self.sources |= dict.fromkeys(self.named, "word")

    def notes(self) -> Iterator[str]:
        """List the values that gave way to a word, one line for each reason."""
        values = flatten(to_tree(self.config))
        for reason in dict.fromkeys(reason for _, _, reason in self._refused):
            keys = [(key, old) for key, old, why in self._refused if why == reason]
            new = " ".join(f"{key}={format_value(values.get(key))}" for key, _ in keys)
            old = ", ".join(format_value(old) for _, old in keys)
            yield f"{new} in place of {old}: {reason}."

    def explain(self, recipe: Config) -> Iterator[tuple[str, str, str, str]]:
        """Yield key, value, the recipe's value and the source of each value that words changed."""
        before = flatten(to_tree(recipe))
        for key, value in flatten(to_tree(self.config)).items():
            source = self.sources.get(key, "default")
            if before.get(key, value if source == "default" else ...) != value:
                old = format_value(before[key]) if key in before else ""
                yield key, format_value(value), old, source

    def _resolve_without_words(self) -> Resolution:
        merged = self.named - self.given.keys()
        return Resolution(functools.reduce(_without, merged, self.recipe))

    def _list_recommendations(self, explicit: Recipe) -> Iterator[tuple[str, Recipe]]:
        """Yield each part, as ``section.name=value``, with what it recommends beside ``explicit``.

        Recommendations may name further parts, so names are looked up until they stay the same.
        """
        names, fit = dict[str, str](), _keys(self.recipe, FIT)
        for _ in _ORDER:
            layers = [self._find_recommended(section, names) for section in names] + [fit]
            tree = functools.reduce(_overlay, [*layers, explicit])
            found = {s: self._choose_name(s, explicit, layers) for s in _ORDER}
            if found == names:
                break
            names = found
        self._names = {section: names[section] for section in VARIANTS}
        for section, name in names.items():
            layer = self._find_recommended(section, names)
            yield f"{section}.name={name}", _select(layer, tree, names)
        fit = _select(self._without_refused(fit), tree, names)
        weights = {**_keys(fit, "encoder"), **_keys(explicit, "encoder")}
        source, layer = recommend_for_weights(weights, names["encoder"])
        yield source, self._without_refused(layer)
        yield "your sites", fit

    def _choose_name(self, section: str, explicit: Recipe, layers: Sequence[Recipe]) -> str:
        """Return the explicit name, or the recommended one that has the keys that are given."""
        given = _keys(explicit, section)
        if "name" in given:
            return str(given["name"])
        names = [_keys(layer, section).get("name") for layer in reversed(layers)]
        names = [*filter(None, names), _PARTS[section]]
        if section in VARIANTS and not given.keys() <= key_types_under(section, names[0]).keys():
            if self.named:  # the recipe without words has a name too
                names.append(self._resolve_without_words()._names[section])
            fitting = (n for n in names if given.keys() <= key_types_under(section, n).keys())
            return str(next(fitting, names[0]))
        return str(names[0])

    def _find_recommended(self, section: str, names: Mapping[str, str]) -> Recipe:
        """Return what a part recommends beside parts with these names, except refused values."""
        if section in VARIANTS:
            given = variant(section, names[section]).Params.recommended
        elif section == "data":
            given = recommend_for_data(names[section])
        else:
            given = ENCODERS.get(names[section], {})
        layer: Recipe = {}
        for key, value in given.items():
            part, condition, name = key.partition(".name=")
            if not condition or names.get(part) == name:
                layer = _overlay(layer, value if condition else {key: value})
        return self._without_refused(layer)

    def _without_refused(self, layer: Recipe) -> Recipe:
        refused = [(key, value) for key, value, _ in self._refused]
        kept = {k: v for k, v in flatten(layer).items() if (k, v) not in refused}
        return with_values({}, kept)

    def _give_way(self, error: UserError, recipe: Recipe, recommended: Recipe) -> Recipe:
        """Return the recipe without the value that contradicts a word, or raise the error."""
        pair = [key for key in (error.key, error.against) if key and key not in self.named]
        for tree in (recommended, recipe) if self.named else ():
            for key in pair:
                value, is_set = _look_up(tree, key)
                if (key, value, error.problem) in self._refused:  # a default, which does not go
                    continue
                if is_set and not (tree is recommended and _look_up(recipe, key)[1]):
                    is_sweep = bool(find_sweep(self.recipe)) or self.named != self.given.keys()
                    if tree is recipe and not is_sweep:
                        Resolution(self.recipe)  # one that contradicts itself is refused
                    self._refused.append((key, value, error.problem))
                    return recipe if tree is recommended else _without(recipe, key)
        raise error


def _overlay(tree: Recipe, layer: Recipe) -> Recipe:
    """Merge section by section without dropping keys: enough to find names."""
    merged = dict(tree)
    for section, value in layer.items():
        both = isinstance(value, dict) and isinstance(tree.get(section), dict)
        merged[section] = {**tree[section], **value} if both else value
    return merged


def _keys(tree: Recipe, section: str) -> Recipe:
    """Return the keys of a section; none where it is missing or no section, which is reported."""
    found = tree.get(section)
    return found if isinstance(found, dict) else {}


def _select(layer: Recipe, tree: Recipe, names: Mapping[str, str]) -> Recipe:
    """Return what holds of a part's recommendations beside the names in ``tree``.

    Keys beside a name are meant for that name only. Keys that the named part lacks are left out.
    """
    selected: Recipe = {}
    for section, value in layer.items():
        if not isinstance(value, dict):
            selected[section] = value
            continue
        title = _TITLES.get(section, "name")
        chosen = names.get(section, _keys(tree, section).get(title))
        if value.get(title, chosen) != chosen:
            continue
        if section in VARIANTS:
            known = key_types_under(section, names[section])
            value = {k: v for k, v in value.items() if k in known}
        selected[section] = value
    return selected


def _look_up(tree: Recipe, key: str) -> tuple[Any, bool]:
    value: Any = tree
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return None, False
        value = value[part]
    return value, True


def _without(recipe: Recipe, key: str) -> Recipe:
    """Return a recipe without a key; without a name, also without the keys that belong to it."""
    section, _, name = key.partition(".")
    if not _look_up(recipe, key)[1]:
        return recipe
    if not name:
        return {k: v for k, v in recipe.items() if k != section}
    dropped = {name}
    if name == "name" and section in VARIANTS:
        dropped |= recipe[section].keys() - key_types(BASE_PARAMS[section]).keys()
    kept = {k: v for k, v in recipe[section].items() if k not in dropped}
    return {**recipe, section: kept}
