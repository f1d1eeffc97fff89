"""Refuse combinations of keys in which one promise breaks another."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from dataclasses import replace

from fedssl.config import Config
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.sampling import cohort_size
from fedssl.federation.task import ClientTask
from fedssl.util.errors import UserError, refuse

FEWEST = 3  # clients in a secure sum: in a sum of two, each knows the other's part
OTHER = "Use another algorithm."


def survivors_needed(share: float, clients: int) -> int:
    """Return how many clients of a secure sum must answer: at least three, and over half.

    Every site checks this number. ``privacy.threshold`` is above one half.
    """
    return max(FEWEST, math.ceil(share * clients))


def smallest_sum(config: Config, clients: int) -> int:
    """Return how few clients a round's first secure sum may cover.

    ``cohort.minimum`` does not count: it is looked at when the server has the sum.
    """
    return survivors_needed(config.privacy.threshold, cohort_size(config, clients))


def allows_secure_sums(config: Config, algorithm: Algorithm, clients: int | None) -> bool:
    """Return whether secure sums could be switched on; ``clients`` is ``None`` if not known."""
    engine, privacy = replace(config.engine, name="flower"), replace(config.privacy, secure=True)
    secure = replace(config, engine=engine, privacy=privacy)
    try:
        check_protection(secure, algorithm)
        if clients is not None:
            check_secure_cohort(cohort_size(config, clients))
    except UserError:
        return False
    return True


def check_protection(config: Config, algorithm: Algorithm) -> None:
    """Refuse a robust mean, noise or secure sums where they would not protect."""
    privacy = config.privacy
    if config.cohort.average != "mean":
        _check_robust(config, algorithm)
    if privacy.noise is not None:
        _check_sums(config, algorithm, "privacy.noise")
        _check_noise(config, algorithm)
    if privacy.secure:
        _check_sums(config, algorithm, "privacy.secure")
        _check_secure(config, algorithm)


def check_secure_cohort(cohort: int) -> None:
    """Refuse secure sums that hide nothing."""
    if cohort < FEWEST:
        raise UserError(
            f"a round has {cohort} clients, and in a sum of two each knows the other's part",
            key="privacy.secure",
            value=True,
            fix=f"Use at least {FEWEST} clients per round.",
        )


def check_secure_packages() -> None:
    """Refuse secure sums without the packages that compute them."""
    if not all(map(importlib.util.find_spec, ("cryptography", "Crypto"))):
        raise UserError(
            "the packages cryptography and pycryptodome are not installed",
            key="privacy.secure",
            value=True,
            fix="Run pip install 'fedssl[flower]'.",
        )


def _check_robust(config: Config, algorithm: Algorithm) -> None:
    name, gathered = algorithm.params.name, _names(algorithm.asked(False, "each"))
    has_mean = algorithm.result.has_global and not algorithm.pools_data
    has_noise = config.privacy.noise is not None
    key, fix = "cohort.average", "Use cohort.average=mean."
    passed_on = f"the server of {name} passes on each client's {gathered}, not a mean"
    compared = "it compares the clients' replies, which secure sums hide"
    unbounded = "noise is made for a sum in which every client's part is bounded"
    refuse(
        config,
        (not has_mean, key, f"algorithm.name={name} averages no clients' models", fix),
        (gathered, key, passed_on, fix),
        (config.privacy.secure, key, compared, fix),
        (has_noise, key, unbounded, fix),
    )


def _check_sums(config: Config, algorithm: Algorithm, key: str) -> None:
    """Refuse algorithms that show the server more than sums."""
    name, gathered = algorithm.params.name, _names(algorithm.asked(config.privacy.secure, "each"))
    seen = f"the server of {name} sees each client's reply to {gathered}"
    refuse(
        config,
        (gathered, key, seen, OTHER),
        (algorithm.pools_data, key, f"{name} has all data in one place", OTHER),
        (
            config.engine.updates == "fp16",
            "engine.updates",
            f"{key} needs updates at full precision",
            "Use engine.updates=full.",
        ),
    )


def _check_secure(config: Config, algorithm: Algorithm) -> None:
    tasks = algorithm.asked(True, "mean")
    exposed = _names(task for task in tasks if not task.sums_hide(algorithm))
    has_clusters = hasattr(algorithm.params, "clusters")
    refuse(
        config,
        (
            config.engine.name == "local",
            "engine.name",
            "one process holds every client, so nothing would be secret",
            "Use engine.name=flower, or privacy.secure=false.",
        ),
        (
            exposed,
            "privacy.secure",
            f"{exposed} sums groups of clients, and a group may be one client",
            "Use algorithm.clusters=1, or another algorithm." if has_clusters else OTHER,
        ),
        (
            config.engine.max_norm is not None,
            "engine.max_norm",
            "under secure sums the server sees no client's change, so it can refuse none",
            "Set engine.max_norm=null, or privacy.secure=false.",
        ),
    )


def _check_noise(config: Config, algorithm: Algorithm) -> None:
    """Refuse noise where a release would be without a bound, or would not be counted."""
    name = algorithm.params.name
    statistics = [task for task in algorithm.asked() if task.reveals == "statistics"]
    refuse(
        config,
        (
            config.evaluate.baselines,
            "evaluate.baselines",
            "baselines train on the same clients again, and ε counts one run",
            "Set evaluate.baselines=[].",
        ),
        (
            config.evaluate.drift,
            "evaluate.drift",
            "logs each client's distance to the global model, without noise",
            "Set evaluate.drift=false.",
        ),
        (
            not algorithm.result.has_global,
            "privacy.noise",
            f"algorithm.name={name} shares nothing that noise could protect",
            "Set privacy.noise=null.",
        ),
        (
            config.algorithm.norm_policy == "local",
            "algorithm.norm_policy",
            "the exported encoder would have the mean of the clients' layers, without noise",
            "Use algorithm.norm_policy=average or reset.",
        ),
        (
            any(task.bound(algorithm) is None for task in statistics),
            "privacy.noise",
            f"the statistics of {_names(statistics)} have no bound for noise to be scaled to",
            "Set objective.bound=1, or use objective.name=sigreg.",
        ),
        (
            algorithm.weight == "uniform" and config.privacy.most_samples > 1,
            "privacy.most_samples",
            f"all clients count alike with algorithm.name={name}, so more noise protects nothing",
            "Use privacy.most_samples=1.",
        ),
    )


def _names(tasks: Iterable[ClientTask]) -> str:
    return ", ".join(task.name for task in tasks)
