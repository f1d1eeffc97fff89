"""Assemble a checked configuration from a tree, and turn it back into one."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedssl.config.convert import check_known, convert, key_types
from fedssl.config.merge import merge
from fedssl.config.schema import (
    MOST_THREADS,
    AlgorithmParams,
    Cohort,
    Config,
    Encoder,
    Evaluate,
    Privacy,
    SourceParams,
    Tree,
)
from fedssl.config.variants import DEFAULT_NAMES, VARIANTS, params_class, variant
from fedssl.util import plugins
from fedssl.util.errors import UserError


def build(tree: Tree) -> Config:
    """Check every key and type of a nested mapping and fill in the defaults."""
    values: Tree = {}
    fields = key_types(Config)
    for name, value in tree.items():
        check_known(name, fields, "")
        if name in VARIANTS:
            continue
        values[name] = convert(fields[name], value, name)
    for section in VARIANTS:
        given = tree.get(section)
        if given is None:
            given = {}
        if not isinstance(given, dict):
            raise UserError(f"{section}={given}: expected keys such as {section}.name=…")
        name = plugins.settled(str(given.get("name", DEFAULT_NAMES[section])))
        values[section] = convert(params_class(section, name), {**given, "name": name}, section)
    config = Config(**values)
    config = dataclasses.replace(config, evaluate=renamed(config.evaluate, plugins.settled))
    _check(config)
    return config


def placed(config: Config) -> Config:
    """The same with paths that mean the same from any folder, as a run's folder keeps them."""
    if config.engine.sites is not None:
        return config  # in a deployment a path is for machines that are elsewhere
    partition = config.partition
    if isinstance(partition, SourceParams):
        partition = dataclasses.replace(partition, encoder=_absolute(partition.encoder))
    return dataclasses.replace(
        config,
        partition=partition,
        data=dataclasses.replace(
            config.data, root=_absolute(config.data.root), cache=_absolute(config.data.cache)
        ),
        encoder=dataclasses.replace(config.encoder, init=_absolute(config.encoder.init)),
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.realpath(Path(path).expanduser())


def renamed(evaluate: Evaluate, name: Callable[[str], str]) -> Evaluate:
    """The same with other names of the protocols."""

    def each(specs: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if specs is None else tuple(map(name, specs))

    return dataclasses.replace(
        evaluate, protocols=each(evaluate.protocols), monitor=each(evaluate.monitor)
    )


def to_tree(config: Any) -> Tree:
    """The nested plain mapping of a configuration: what ``config.yaml`` holds."""
    tree: Tree = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            value = to_tree(value)
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        tree[item.name.rstrip("_")] = value
    return tree


def dump(config: Config) -> str:
    """The configuration as YAML."""
    return yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True)


def flat(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value and prefix + name != "paper":
            out.update(flat(value, f"{prefix}{name}."))
        else:
            out[prefix + name] = value
    return out


def without_public(algorithm: AlgorithmParams) -> AlgorithmParams:
    """The same algorithm where there are no public images, for judging only."""
    return dataclasses.replace(algorithm, public=0, align=0.0)  # type: ignore[call-arg]


def with_algorithm(config: Config, name: str) -> Config:
    """The same run under another algorithm (its own keys keep their defaults)."""
    tree = merge(to_tree(config), {"algorithm": {"name": name}})
    tree["evaluate"]["baselines"] = []
    return build(tree)


# What numbers must be, where they are given.
_POSITIVE = (
    *("algorithm.local_steps", "algorithm.local_epochs", "algorithm.batch"),
    *("cohort.size", "cohort.minimum", "data.size", "data.labels"),
    *("engine.chunk", "engine.threads", "engine.workers", "engine.timeout"),
    *("engine.max_norm", "engine.sites", "encoder.groups", "encoder.patch"),
    *("evaluate.size", "evaluate.k", "evaluate.temperature", "server.lr", "client.lr"),
    *("privacy.noise", "privacy.moments_noise", "privacy.clip", "privacy.most_samples"),
)
_NOT_NEGATIVE = (
    *("rounds", "seed", "cohort.hostile", "evaluate.every", "checkpoint.seconds"),
    *("server.weight_decay", "client.weight_decay"),
)


def _check(config: Config) -> None:
    """What can be said without looking at the data."""
    values = flat(to_tree(config))
    for name in _POSITIVE:
        if values[name] is not None and not 0 < values[name] < math.inf:
            raise UserError(f"{name}={values[name]}: must be above 0 and finite")
    for name in _NOT_NEGATIVE:
        if values[name] < 0:
            raise UserError(f"{name}={values[name]}: must not be negative")
    for name in ("server.momentum", "client.momentum"):
        if not 0 <= values[name] < 1:
            raise UserError(f"{name}={values[name]}: must be at least 0 and below 1")
    if config.engine.threads > MOST_THREADS:  # far more crash the process
        raise UserError(f"engine.threads={config.engine.threads}: must be at most {MOST_THREADS}")
    _check_rounds(config.algorithm, config.cohort)
    _check_privacy(config.privacy)
    _check_judging(config.evaluate, config.encoder)
    if not isinstance(config.paper.get("results", {}), Mapping):
        raise UserError(f"paper.results={config.paper['results']}: expected keys and values")


def _check_rounds(algorithm: AlgorithmParams, cohort: Cohort) -> None:
    """How long clients train, and how many of them."""
    if algorithm.local_steps is not None and algorithm.local_epochs is not None:
        raise UserError(
            f"algorithm.local_steps={algorithm.local_steps} and "
            f"algorithm.local_epochs={algorithm.local_epochs}: give one of the two"
        )
    if cohort.size is not None and cohort.fraction is not None:
        raise UserError(
            f"cohort.size={cohort.size} and cohort.fraction={cohort.fraction}: give one of the two"
        )
    if cohort.fraction is not None and not 0 < cohort.fraction <= 1:
        raise UserError(f"cohort.fraction={cohort.fraction}: must be above 0 and at most 1")
    if cohort.size is not None and cohort.minimum > cohort.size:
        raise UserError(
            f"cohort.minimum={cohort.minimum}: more than cohort.size={cohort.size}; "
            "no round could ever count"
        )


def _check_privacy(privacy: Privacy) -> None:
    if not 0 < privacy.delta < 1:
        raise UserError(f"privacy.delta={privacy.delta}: must be above 0 and below 1")
    if not 0.5 < privacy.threshold <= 1:
        raise UserError(f"privacy.threshold={privacy.threshold}: must be above 0.5 and at most 1")
    if privacy.moments_noise is not None and privacy.noise is None:
        raise UserError(
            f"privacy.moments_noise={privacy.moments_noise}: without privacy.noise the updates "
            "would tell what the moments keep; set privacy.noise too"
        )


def _check_judging(evaluate: Evaluate, encoder: Encoder) -> None:
    """By what, at which size, and beside which baselines."""
    if evaluate.protocols == ():
        raise UserError("evaluate.protocols=[]: name at least one, such as knn")
    patch, size = encoder.patch, evaluate.size
    if encoder.name == "vit-tiny" and size is not None and size % patch:
        raise UserError(f"encoder.patch={patch}: does not divide evaluate.size={size}; change one")
    for name in evaluate.baselines:
        if ":" in name:  # a baseline's folder has its name
            raise UserError(
                f"evaluate.baselines={name}: takes names only; make it algorithm.name, and put "
                "what it is compared with here"
            )
        variant("algorithm", name, "evaluate.baselines")
