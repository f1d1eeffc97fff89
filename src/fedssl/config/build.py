"""Build a checked configuration from a tree of keys, and turn it back into one."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fedssl.config import plugins
from fedssl.config.catalogue import OWN_DATA
from fedssl.config.keys import Recipe, convert_section, key_fields, key_types, path_keys
from fedssl.config.merge import merge
from fedssl.config.schema import Config
from fedssl.config.variants import BASE_PARAMS, DEFAULT_NAMES, variant
from fedssl.util.errors import UserError, format_value

STORED = 8 / 7  # of the size of a view: 256 pixels for 224


def build(tree: Recipe) -> Config:
    """Return a configuration with checked values and all defaults."""
    sections: Recipe = {}
    for section, default in DEFAULT_NAMES.items():
        given = {} if tree.get(section) is None else tree[section]
        kind: Any = BASE_PARAMS[section]
        if isinstance(given, Mapping):
            kind = variant(section, str(given.get("name", default))).Params
        sections[section] = convert_section(kind, given, section)
    _check_top_level(tree, sections)
    config = _complete(convert_section(Config, {**tree, **sections}, ""))
    _check(config)
    for section in DEFAULT_NAMES:
        getattr(config, section).check(config)
    return rename_plugins(config, plugins.make_absolute)


def _complete(config: Config) -> Config:
    """Fill in how images are stored, which depends on the size of a view."""
    data, view = config.data, config.augment.size
    if data.shape is None:
        data = replace(data, shape="square" if view is None else "whole")
    is_own = data.name in OWN_DATA or plugins.is_own(data.name)
    if data.size is None and data.shape == "whole" and view is not None and is_own:
        data = replace(data, size=round(view * STORED))
    return replace(config, data=data)


def find_keys(name: str, sections: Mapping[str, Any] = BASE_PARAMS) -> list[str]:
    """Return the full names of the keys that end with a name.

    That of ``lr`` is ``client.lr``, and that of ``epochs`` is ``algorithm.local_epochs``.
    """
    kinds = {**key_types(Config), **sections}
    keys = [(section, section) for section in kinds] + [
        (f"{section}.{key}", key)
        for section, kind in kinds.items()
        if dataclasses.is_dataclass(kind)
        for key in key_fields(kind)
    ]
    same = [full for full, key in keys if key == name]
    return same or [full for full, key in keys if key.endswith(f"_{name}")]


def _check_top_level(tree: Recipe, sections: Mapping[str, Any]) -> None:
    """Name the full keys that a user may mean who leaves the section out."""
    for name in tree.keys() - key_types(Config).keys():
        if found := find_keys(name, sections):
            value = tree[name]
            fix = f"Write {' or '.join(f'{key}={format_value(value)}' for key in found)}."
            raise UserError("unknown key", key=name, value=value, fix=fix)


def with_absolute_paths(config: Config) -> Config:
    """Return the configuration with absolute paths, as a run's folder keeps it."""
    if config.engine.sites is not None:
        return config  # in a deployment a path is for machines that are elsewhere
    for name in path_keys(config):
        section, _, key = name.partition(".")
        values = getattr(config, section)
        path = getattr(values, key)
        if path is not None:
            path = os.path.realpath(Path(path).expanduser())
            config = replace(config, **{section: replace(values, **{key: path})})
    return config


def rename_plugins(config: Config, rename: Callable[[str], str]) -> Config:
    """Return the configuration with other names of its parts and protocols."""

    def each(specs: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if specs is None else tuple(map(rename, specs))

    sections: dict[str, Any] = {}  # an app's first file is the algorithm
    for section in ("algorithm", "objective", "partition", "encoder", "augment", "data"):
        params = getattr(config, section)
        sections[section] = replace(params, name=rename(params.name))
    protocols, monitor = each(config.evaluate.protocols), each(config.evaluate.monitor)
    evaluate = replace(config.evaluate, protocols=protocols, monitor=monitor)
    return replace(config, evaluate=evaluate, **sections)


def to_tree(config: Any) -> Recipe:
    """Return the configuration as nested plain mappings, as in ``config.yaml``."""
    tree: Recipe = {}
    for name, field in key_fields(config).items():
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = to_tree(value)
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        tree[name] = value
    return tree


def dump(config: Config) -> str:
    """Return the configuration as YAML."""
    return yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True)


def flatten(tree: Recipe, prefix: str = "") -> dict[str, Any]:
    """Return ``{"a.b": 1}`` for ``{"a": {"b": 1}}``."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value and prefix + name != "paper":
            out.update(flatten(value, f"{prefix}{name}."))
        else:
            out[prefix + name] = value
    return out


def with_algorithm(config: Config, name: str) -> Config:
    """Return the same run with another algorithm, whose keys have their defaults."""
    tree = merge(to_tree(config), {"algorithm": {"name": name}})
    tree["evaluate"]["baselines"] = []
    return build(tree)


def _check(config: Config) -> None:
    """Check the keys that depend on one another, as far as that needs no images."""
    cohort, privacy, encoder = config.cohort, config.privacy, config.encoder
    clients = getattr(config.partition, "clients", None)
    if clients is not None and cohort.size is not None and cohort.size > clients:
        problem, fix = f"there are only {clients} clients", f"Use at most {clients}."
        raise UserError(problem, key="cohort.size", value=cohort.size, fix=fix)
    if cohort.size is not None and cohort.minimum > cohort.size:
        problem = f"more than cohort.size={cohort.size}, so no round could count"
        fix = f"Use at most {cohort.size}."
        raise UserError(problem, key="cohort.minimum", value=cohort.minimum, fix=fix)
    if privacy.moments_noise is not None and privacy.noise is None:
        problem, fix = "updates without noise reveal the moments", "Set privacy.noise too."
        raise UserError(problem, key="privacy.moments_noise", value=privacy.moments_noise, fix=fix)
    _check_sizes(config)
    small, loss = config.augment.small, config.objective.name
    if small and not variant("objective", loss).takes_small:
        problem, fix = f"objective {loss} takes no small views", "Use objective.name=swav."
        against = "objective.name"
        raise UserError(problem, key="augment.small", value=small, fix=fix, against=against)
    patch, size = encoder.patch, config.evaluate.size
    if encoder.name == "vit-tiny" and size is not None and size % patch:
        problem = f"does not divide evaluate.size={size}"
        fix = f"Use evaluate.size={max(1, size // patch) * patch}."
        raise UserError(problem, key="encoder.patch", value=patch, fix=fix)
    for name in config.evaluate.baselines:
        key = "evaluate.baselines"
        if ":" in name:  # a baseline's folder has its name
            fix = "Make it algorithm.name, and compare it with baselines by name."
            raise UserError("a file cannot be a baseline", key=key, value=name, fix=fix)
        variant("algorithm", name, key)
    results = config.paper.get("results", {})
    if not isinstance(results, Mapping):
        fix = "Give a measure and a number, such as {linear_top1: 84.3}."
        raise UserError("not keys and values", key="paper.results", value=results, fix=fix)


def _check_sizes(config: Config) -> None:
    """Check that images are stored as views and modalities need them."""
    data, view = config.data, config.augment.size
    is_whole = data.shape == "whole"
    if is_whole and data.name in OWN_DATA and (data.size or math.inf) < (view or 0):
        problem = f"smaller than a view (augment.size={view})"
        fix = f"Use data.size={round((view or 0) * STORED)}, or data.shape=square."
        raise UserError(problem, key="data.size", value=data.size, fix=fix, against="augment.size")
    if data.halves and (is_whole or view is not None):
        problem, fix = "halves are those of square images", "Leave augment.size and data.shape out."
        raise UserError(problem, key="data.halves", value=True, fix=fix)
    source = getattr(config.partition, "source", "labels")
    if is_whole and source in ("rotation", "style"):
        problem, fix = "alters square images", "Set data.shape=square."
        raise UserError(problem, key="partition.source", value=source, fix=fix)
