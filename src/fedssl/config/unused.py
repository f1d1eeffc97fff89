"""Keys that have no effect given the values of others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from fedssl.config.assemble import build, flat, to_tree, with_algorithm
from fedssl.config.merge import NO_MOMENTUM, keys_of_other_engines, with_values
from fedssl.config.schema import Config, Engine, Evaluate, Tree
from fedssl.config.sweeps import combinations
from fedssl.config.variants import VARIANTS, variant
from fedssl.util.errors import UserError

FILES = ("folder", "paired", "tiny-imagenet")  # data sets that are files of images
AT_SITES = "does nothing at real sites; use it in a simulation"


def check_used(*runs: Config, given: Collection[str] | None = None) -> None:
    """Refuse a key that is changed and acts in none of these runs: its user would believe it does.

    For new runs only: one that an older version began with such a key can go on and be judged. Of
    the latter, those that are ``given`` for judging it.
    """
    unused = find_idle_in_all(runs)
    for run in runs:
        names = {section: {"name": getattr(run, section).name} for section in VARIANTS}
        standard, values, idle = flat(to_tree(build(names))), flat(to_tree(run)), find_idle(run)
        for key in (key for key in idle if key in unused and key in values):
            if values[key] != standard[key] and (given is None or key in given):
                default = "null" if standard[key] is None else standard[key]
                raise UserError(f"{key}={show(values[key])}: {idle[key]}, or leave it at {default}")


def show(value: Any) -> str:
    """A value as a word has it."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def find_idle_in_all(runs: Sequence[Config]) -> dict[str, str]:
    """Keys that some of these runs have and none looks at, and what would make them act."""
    known = [(find_idle(run), flat(to_tree(run))) for run in runs]
    acting = {key for idle, values in known for key in values.keys() - idle.keys()}
    return {key: why for idle, _ in known for key, why in idle.items() if key not in acting}


def drop_unused(tree: Tree, recipe: Tree, given: Collection[str]) -> Tree:
    """``tree`` without what acted in ``recipe``, acts no longer, and is not ``given``."""
    for key in find_unused(tree).keys() - find_unused(recipe).keys() - set(given):
        section, _, name = key.partition(".")
        if name in (tree.get(section) or {}):
            tree = {**tree, section: {k: v for k, v in tree[section].items() if k != name}}
    return tree


def find_unused(tree: Tree) -> dict[str, str]:
    """Keys that act in none of a recipe's runs; none of what cannot run: whoever builds it says."""
    try:
        return find_idle_in_all([build(with_values(tree, own)) for own in combinations(tree)])
    except UserError:
        return {}


def find_idle(config: Config) -> dict[str, str]:
    """Keys that nothing looks at beside the others, and what would make them act."""
    found: dict[str, str] = {}
    if config.privacy.noise is None:
        why = "does nothing without noise; add privacy.noise, as in privacy.noise=4"
        found |= dict.fromkeys(("privacy.clip", "privacy.most_samples", "privacy.delta"), why)
    elif config.checkpoint.seconds:  # 0 says as much
        found["checkpoint.seconds"] = "with privacy.noise there is one after every round; use 0"
    if not config.privacy.secure:
        found["privacy.threshold"] = "does nothing without secure sums; add privacy.secure=true"
    if config.cohort.average not in ("trimmed", "krum"):
        found["cohort.hostile"] = (
            f"does nothing with cohort.average={config.cohort.average}; use cohort.average=trimmed "
            "or krum"
        )
    for side, rule in (("server", config.server.optimizer), ("client", config.client.optimizer)):
        if rule in NO_MOMENTUM:
            found[f"{side}.momentum"] = (
                f"does nothing with {side}.optimizer={rule}; use {side}.optimizer=sgd or lars"
            )
    if "client.momentum" not in found and _one_step(config):
        found["client.momentum"] = (
            "does nothing with one local step, as clients' optimizers start anew every round; add "
            "algorithm.local_steps=2 or more"
        )
    for section in VARIANTS:
        own = getattr(config, section).idle_keys()
        found |= {f"{section}.{key}": why for key, why in own.items()}
    found |= _idle_judging(config.evaluate)
    return found | _idle_images(config) | _idle_engine(config.engine)


def _one_step(config: Config) -> bool:
    """Whether no client's optimizer takes a second step, in baselines neither.

    What somebody's own algorithm does with it is not known.
    """
    runs = (config, *(with_algorithm(config, name) for name in config.evaluate.baselines))
    return all(
        run.algorithm.name in VARIANTS["algorithm"]
        and run.algorithm.one_step(variant("algorithm", run.algorithm.name).pools_data)
        for run in runs
    )


def _idle_judging(evaluate: Evaluate) -> dict[str, str]:
    """Of evaluations that there are not, and of protocols that are not asked for."""
    found: dict[str, str] = {}
    if not evaluate.every:
        found["evaluate.monitor"] = (
            "does nothing without evaluations between rounds; add evaluate.every, as in "
            "evaluate.every=10"
        )
    watched = (evaluate.monitor or ()) if evaluate.every else ()
    named = {spec.partition("@")[0] for spec in (*(evaluate.protocols or ()), *watched)}
    if "semi" not in named:
        found["evaluate.head"] = (
            "does nothing without semi; add it to evaluate.protocols, as in semi@10%"
        )
    return found


def _idle_images(config: Config) -> dict[str, str]:
    """Of data sets and encoders of other kinds, and of partitions where clients are real sites."""
    found: dict[str, str] = {}
    if config.data.name not in FILES:
        why = f"does nothing with data.name={config.data.name}, which has no files of images"
        found["data.corrupt"] = f"{why}; it is for data.name={', '.join(FILES)}"
    if config.encoder.name != "vit-tiny":
        found["encoder.patch"] = (
            f"does nothing with encoder.name={config.encoder.name}; use encoder.name=vit-tiny"
        )
    if config.engine.sites is not None:
        found |= dict.fromkeys(("partition.fraction", "partition.level"), AT_SITES)
    return found


def _idle_engine(engine: Engine) -> dict[str, str]:
    """Of the other engine, and of simulations where clients are real sites."""
    found = {
        f"engine.{key}": f"does nothing with engine.name={engine.name}; use engine.name={other}"
        for key, other in keys_of_other_engines(engine.name).items()
    }
    if engine.name == "local":
        found["engine.sites"] = (
            "a simulation has no sites; write an app for them with fedssl deploy init"
        )
    elif engine.sites is not None:
        found["engine.workers"] = AT_SITES
        if engine.compile == "on":  # off says as much
            found["engine.compile"] = AT_SITES
    return found
