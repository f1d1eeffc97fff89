"""Adapt a recipe to real sites, and check everything that can be checked without them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedssl import config as configuration
from fedssl.config import Config, plugins
from fedssl.config.resolve import FIT
from fedssl.data.dataset import Dataset, Groups
from fedssl.data.load import load_dataset
from fedssl.deploy.estimate import Traffic, estimate_traffic
from fedssl.deploy.introduction import Introduction, empty_dataset
from fedssl.federation.algorithm import build_algorithm
from fedssl.federation.sampling import cohort_size
from fedssl.privacy.aggregators import build_aggregator
from fedssl.runs.build import assemble
from fedssl.runs.fit import fit_recipe
from fedssl.runs.split import public_images
from fedssl.runs.validate import check_deployment
from fedssl.util.errors import UserError, refuse

ASSUMED_IMAGES = 1024  # of a site before it has introduced itself
# Keys of a recipe that concern simulations, with their defaults, and why they are left out.
SIMULATION_KEYS = {
    "partition": (
        {"source": "labels", "fraction": 1.0, "seed": None, "level": "client"},
        "sites keep their own data, which is neither divided nor altered",
    ),
    "engine": ({"workers": 2, "compile": "auto"}, "it is for simulations"),
}
# Keys that a deployment sets: their only values, and why.
FIXED = {
    "data.name": ("folder", "each site is one client with its own folder of images"),
    "partition.name": ("folder", "each site is one client with its own folder of images"),
    "engine.name": ("flower", "a deployment runs on Flower"),
}


def adapt_recipe(recipe: str, words: Sequence[str]) -> Config:
    """Return a recipe's configuration for real sites, each of which is one client."""
    if "=" in recipe:
        raise UserError(
            f"{recipe}: expected the name of a recipe first",
            fix="Name one before the keys, such as folder or default.",
        )
    given = dict(word.split("=", 1) for word in words if "=" in word)
    for key, (value, reason) in FIXED.items():
        if given.get(key, value) != value:
            raise UserError(reason, key=key, value=given[key], fix="Leave it out.")
    fixed = [f"{key}={value}" for key, (value, _) in FIXED.items()]
    tree = fit_recipe(_drop_simulation_keys(recipe), words, is_deployed=True)
    # A recipe's data.root holds all clients' images. Here it is for the server's own.
    fixed += [] if "data.root" in given and FIT not in tree else ["data.root=null"]
    # Baselines would be trained at all sites, one after another.
    fixed += [] if "evaluate.baselines" in given else ["evaluate.baselines=[]"]
    config = configuration.resolve(tree, [*words, *fixed])
    if config.engine.sites is None:
        raise UserError(
            "the number of sites is not set",
            key="engine.sites",
            fix="Set it, for example engine.sites=3.",
        )
    data, encoder = config.data, config.encoder
    levels = tuple(level for level in data.levels or () if level != "client") or None
    root, cache, init = map(_absolute, (data.root, data.cache, encoder.init))
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, levels=levels, root=root, cache=cache),
        encoder=dataclasses.replace(encoder, init=init),
    )


def _drop_simulation_keys(recipe: str) -> configuration.Recipe:
    """Read a recipe without its keys for simulations; print those that had another value."""
    tree = configuration.read_recipe(recipe)
    for section, (defaults, reason) in SIMULATION_KEYS.items():
        given = tree.get(section) or {}
        for key, default in defaults.items():
            if given.get(key, default) != default:
                line = f"{recipe}: {section}.{key}={given[key]} is left out: {reason}"
                print(f"fedssl: {line}", file=sys.stderr)
        tree = {**tree, section: {k: v for k, v in given.items() if k not in defaults}}
    return tree


def _absolute(path: str | None) -> str | None:
    """Return an absolute path: the server's program starts in another folder."""
    return None if path is None else str(Path(path).expanduser().absolute())


def check_recipe(config: Config) -> Traffic | None:
    """Refuse now what would fail when all sites are waiting; return a round's traffic, if known."""
    sites, algorithm = config.engine.sites, build_algorithm(config)
    assert sites is not None
    cohort = cohort_size(config, sites)
    other, leave = "Use another algorithm.", "Leave it out."
    local_norms = config.algorithm.norm_policy == "local"
    untrained = "the server's encoder would have untrained normalization layers"
    no_model = not algorithm.result.has_global
    refuse(
        config,
        (algorithm.pools_data, "algorithm.name", "has all data in one place", other),
        (no_model, "algorithm.name", "leaves no model on the server", other),
        (local_norms, "algorithm.norm_policy", untrained, "Use average or reset."),
        (config.evaluate.drift, "evaluate.drift", "the server sees no client's model", leave),
    )
    check_deployment(config)
    check_initial_weights(config)
    if config.data.root is None:
        check_public_images(config, None)
    build_aggregator(config, algorithm, sites, cohort)
    with plugins.translate_errors():
        return _estimate(config, sites)


def _estimate(config: Config, sites: int) -> Traffic | None:
    """Build what the server will, as far as the images are known, and estimate the traffic."""
    data, encoder, many = config.data, config.encoder, ASSUMED_IMAGES
    if data.root is not None and Path(data.root).exists():
        dataset = load_dataset(data, config.split_seed)
        check_public_images(config, dataset)
    else:
        if data.root is not None:  # this machine may not be the server
            line = f"data.root={data.root}: no such folder here. The server needs it."
            print(f"fedssl: {line}", file=sys.stderr)
        if data.size is None or data.halves:
            return None
        # Most images have three channels; the given weights may be for others.
        encoder = dataclasses.replace(encoder, init=None, pretrained=False)
        classes = ("a", "b") if build_algorithm(config).objective.needs_labels else ()
        site = Introduction("0", "site", many, (3,), data.size, data.size, classes)
        dataset = empty_dataset(site)
    groups = Groups(np.zeros(sites * many, dtype=np.int64), np.arange(sites + 1) * many)
    estimated = dataclasses.replace(config, encoder=encoder, device="cpu")
    bare = dataclasses.replace(
        estimated, encoder=dataclasses.replace(encoder, init=None, pretrained=False)
    )
    return estimate_traffic(
        assemble(estimated, dataset, groups), lambda: assemble(bare, dataset, groups, weights=False)
    )


def check_initial_weights(config: Config) -> None:
    """Check that the server has the weights of ``encoder.init``, and that sites can have them."""
    init, params = config.encoder.init, config.algorithm
    if init is None:
        return
    uses_initial = configuration.variant("algorithm", params.name).result.uses_initial
    reasons = {
        f"algorithm.name={params.name}": uses_initial,
        f"algorithm.norm_policy={params.norm_policy}": params.norm_policy == "reset",
    }
    word = next((word for word, holds in reasons.items() if holds), "")
    missing = "no such file or folder on the server"
    no_copy = f"with {word} each site would need all of these weights"
    is_needed = bool(word)
    refuse(
        config,
        (not Path(init).exists(), "encoder.init", missing, "Correct the path."),
        (is_needed, "encoder.init", no_copy, "Leave it out."),
    )


def check_public_images(config: Config, dataset: Dataset | None) -> None:
    """Check that the server has the images that it shows to the sites."""
    wanted = getattr(config.algorithm, "public", 0)
    available = 0 if dataset is None else len(public_images(config, dataset))
    problem = f"the server shows so many of its own images to the sites, and has {available}"
    fix = (
        "Set data.root to a folder with more images, or set algorithm.align=0 and "
        "algorithm.public=0."
    )
    refuse(config, (available < wanted, "algorithm.public", problem, fix))
