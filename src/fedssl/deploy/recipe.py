"""Adapt a recipe to real sites, and check everything that can be checked without them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedssl import config as configuration
from fedssl.config import Config, plugins
from fedssl.data.dataset import Dataset, Groups
from fedssl.data.load import load_dataset
from fedssl.deploy.estimate import Traffic, estimate_traffic
from fedssl.deploy.introduction import Introduction, empty_dataset
from fedssl.federation.algorithm import build_algorithm
from fedssl.federation.sampling import cohort_size
from fedssl.privacy.aggregators import build_aggregator
from fedssl.runs.build import assemble
from fedssl.runs.split import public_images
from fedssl.runs.validate import check_deployment
from fedssl.util.errors import UserError

MANY = 1024  # images, of a site of which nothing is known
# A recipe's keys of simulations, where they are not what sites have anyway, and why they go.
SIMULATED = {
    "partition": (
        {"source": "labels", "fraction": 1.0, "level": "client"},
        "sites have their own data, which nobody divides or alters",
    ),
    "engine": ({"workers": 2, "compile": "auto"}, "it is for simulations"),
}


def adapt_recipe(recipe: str, words: Sequence[str]) -> Config:
    """The recipe as a deployment has it: each site is one client, and its data is its own."""
    for word in words:
        name, _, value = word.partition("=")
        if name in ("data.name", "partition.name") and value != "folder":
            raise UserError(
                f"{word}: each site is one client with a folder of images of its own; leave it out"
            )
        if name == "engine.name" and value != "flower":
            raise UserError(f"{word}: a deployment runs on Flower; leave it out")
    given = {word.partition("=")[0] for word in words}
    if "=" in recipe:
        raise UserError(f"{recipe}: expected a recipe's name before it, such as folder or default")
    fixed = ["data.name=folder", "partition.name=folder", "engine.name=flower"]
    # A recipe's own root is where one machine finds all clients; here it is the server's images.
    fixed += [] if "data.root" in given else ["data.root=null"]
    # Baselines would be trained at all sites, one after another.
    fixed += [] if "evaluate.baselines" in given else ["evaluate.baselines=[]"]
    config = configuration.resolve(_for_sites(recipe), [*words, *fixed])
    if config.engine.sites is None:
        raise UserError("engine.sites: say how many sites take part, as in engine.sites=3")
    data = config.data
    levels = tuple(level for level in data.levels or () if level != "client") or None
    root, cache = _absolute(data.root), _absolute(data.cache)
    own = dataclasses.replace(data, levels=levels, root=root, cache=cache)
    encoder = dataclasses.replace(config.encoder, init=_absolute(config.encoder.init))
    return dataclasses.replace(config, data=own, encoder=encoder)


def _for_sites(recipe: str) -> configuration.Recipe:
    """A recipe without what it has for simulations alone; where that is something, it is said."""
    tree = configuration.read_recipe(recipe)
    for section, (plain, why) in SIMULATED.items():
        given = tree.get(section) or {}
        for key in (key for key, value in plain.items() if given.get(key, value) != value):
            said = f"{recipe}: {section}.{key}={given[key]} is left out: {why}"
            print(f"fedssl: {said}", file=sys.stderr)
        tree = {**tree, section: {k: v for k, v in given.items() if k not in plain}}
    return tree


def _absolute(path: str | None) -> str | None:
    """The server's program starts in another folder."""
    return None if path is None else str(Path(path).expanduser().absolute())


def check_recipe(config: Config) -> Traffic | None:
    """Refuse now what would be refused when all sites are waiting; what a site moves in a round."""
    count, cohort = config.engine.sites, config.cohort
    assert count is not None
    if cohort.size is not None and cohort.size > count:
        raise UserError(
            f"cohort.size={cohort.size}: more than engine.sites={count}; add cohort.size={count}, "
            "or cohort.size=null for all of them"
        )
    objective = configuration.variant("objective", config.objective.name)(config.objective)
    kind = configuration.variant("algorithm", config.algorithm.name)
    if kind.pools_data:
        raise UserError(
            f"algorithm.name={config.algorithm.name}: has all data in one place, so there is "
            "nothing to deploy; use another algorithm"
        )
    if not kind.result.has_global:
        raise UserError(
            f"algorithm.name={config.algorithm.name}: has no global model, so the server would end "
            "with nothing; use another algorithm"
        )
    if config.algorithm.norm_policy == "local":
        raise UserError(
            "algorithm.norm_policy=local: normalization layers never leave the sites, so the "
            "server's encoder would have untrained ones; use average or reset"
        )
    check_initial_weights(config)
    if config.data.root is None:
        check_public_images(config, None)
    check_deployment(config)
    if config.evaluate.drift:
        raise UserError(
            "evaluate.drift=true: compares clients' models, and these never come to the server "
            "whole; leave it out"
        )
    build_aggregator(config, kind(config.algorithm, objective), count, cohort_size(config, count))
    with plugins.translate_errors():
        return _rehearse(config, count)


def _rehearse(config: Config, count: int) -> Traffic | None:
    """Build what the server will, as far as it is known here what images there will be."""
    data, encoder, many = config.data, config.encoder, MANY
    if data.root is not None and Path(data.root).exists():
        dataset = load_dataset(data, config.seed)
        check_public_images(config, dataset)
    else:
        if data.root is not None:  # this machine may not be the server
            text = f"data.root={data.root}: no such folder here; the server needs it"
            print(f"fedssl: {text}", file=sys.stderr)
        if data.size is None or data.halves:
            return None
        # Of the channels that most images have; given weights may be for others.
        encoder = dataclasses.replace(encoder, init=None)
        classes = ("a", "b") if build_algorithm(config).objective.needs_labels else ()
        site = Introduction("0", "site", many, (3,), data.size, data.size, classes)
        dataset = empty_dataset(site)
    groups = Groups(np.zeros(count * many, dtype=np.int64), np.arange(count + 1) * many)
    known = dataclasses.replace(config, encoder=encoder, device="cpu")
    bare = dataclasses.replace(known, encoder=dataclasses.replace(encoder, init=None))
    return estimate_traffic(
        assemble(known, dataset, groups), lambda: assemble(bare, dataset, groups, weights=False)
    )


def check_initial_weights(config: Config) -> None:
    """The server has the weights; what sites start from by themselves, they would lack."""
    init, algorithm = config.encoder.init, config.algorithm
    if init is None:
        return
    if not Path(init).exists():
        raise UserError(f"encoder.init={init}: no such file or folder; the server needs it here")
    for key, value in (("name", "ditto"), ("norm_policy", "reset")):
        if getattr(algorithm, key) == value:
            raise UserError(
                f"encoder.init={init} with algorithm.{key}={value}: sites start from the same "
                "weights by themselves, and do not have that file; leave it out"
            )


def check_public_images(config: Config, dataset: Dataset | None) -> None:
    """The server has the images that it is to show to the sites."""
    wanted = getattr(config.algorithm, "public", 0)
    held = 0 if dataset is None else len(public_images(config, dataset))
    if held < wanted:
        raise UserError(
            f"algorithm.public={wanted}: images of the server's own, which the sites get to see, "
            f"and it has {held}; name a folder with more in data.root, or set algorithm.align=0 "
            "and algorithm.public=0"
        )
