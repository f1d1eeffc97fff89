"""Refuse combinations of keys in which one promise breaks another."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

from fedssl.config import Config
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.sampling import cohort_size
from fedssl.federation.task import ClientTask
from fedssl.util.errors import UserError

FEWEST = 3  # clients in a secure sum: in a sum of two, each knows the other's part


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
        _check_sums(config, algorithm, "privacy.noise", privacy.noise)
        _check_noise(config, algorithm)
    if privacy.secure:
        _check_sums(config, algorithm, "privacy.secure", True)
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
    rule, name, problem = config.cohort.average, algorithm.params.name, None
    if algorithm.pools_data or not algorithm.result.has_global:
        problem = f"algorithm.name={name} averages no clients' models"
    elif gathered := algorithm.asked(False, "each"):
        tasks = _names(gathered)
        problem = f"the server of {name} passes on each client's {tasks}, not a mean"
    elif config.privacy.secure:
        problem = "it compares the clients' replies, which secure sums hide"
    elif config.privacy.noise is not None:
        problem = "noise is made for a sum in which every client's part is bounded"
    if problem is not None:
        raise UserError(problem, key="cohort.average", value=rule, fix="Use cohort.average=mean.")


def _check_sums(config: Config, algorithm: Algorithm, key: str, value: object) -> None:
    """Refuse algorithms that show the server more than sums."""
    name = algorithm.params.name
    if gathered := algorithm.asked(config.privacy.secure, "each"):
        raise UserError(
            f"the server of {name} sees each client's reply to {_names(gathered)}",
            key=key,
            value=value,
            fix="Use another algorithm.",
        )
    if algorithm.pools_data:
        raise UserError(
            f"{name} has all data in one place", key=key, value=value, fix="Use another algorithm."
        )
    if config.engine.updates == "fp16":
        raise UserError(
            f"{key} needs updates at full precision",
            key="engine.updates",
            value="fp16",
            fix="Use engine.updates=full.",
        )


def _check_secure(config: Config, algorithm: Algorithm) -> None:
    if config.engine.name == "local":
        raise UserError(
            "one process holds every client, so nothing would be secret",
            key="engine.name",
            value="local",
            fix="Use engine.name=flower, or privacy.secure=false.",
        )
    exposed = [task for task in algorithm.asked(True, "mean") if not task.sums_hide(algorithm)]
    if exposed:
        raise UserError(
            f"{_names(exposed)} sums groups of clients, and a group may be one client",
            key="privacy.secure",
            value=True,
            fix="Use algorithm.clusters=1, or another algorithm."
            if hasattr(algorithm.params, "clusters")
            else "Use another algorithm.",
        )
    if config.engine.max_norm is not None:
        raise UserError(
            "under secure sums the server sees no client's change, so it can refuse none",
            key="engine.max_norm",
            value=config.engine.max_norm,
            fix="Set engine.max_norm=null, or privacy.secure=false.",
        )


def _check_noise(config: Config, algorithm: Algorithm) -> None:
    """Refuse noise where a release would be without a bound, or would not be counted."""
    noise, name, tasks = config.privacy.noise, algorithm.params.name, algorithm.asked()
    if config.evaluate.baselines:
        raise UserError(
            "baselines train on the same clients again, and ε counts one run",
            key="evaluate.baselines",
            value=list(config.evaluate.baselines),
            fix="Set evaluate.baselines=[].",
        )
    if config.evaluate.drift:
        raise UserError(
            "logs each client's distance to the global model, without noise",
            key="evaluate.drift",
            value=True,
            fix="Set evaluate.drift=false.",
        )
    if not algorithm.result.has_global:
        raise UserError(
            f"algorithm.name={name} shares nothing that noise could protect",
            key="privacy.noise",
            value=noise,
            fix="Set privacy.noise=null.",
        )
    if config.algorithm.norm_policy == "local":
        raise UserError(
            "the exported encoder would have the mean of the clients' layers, without noise",
            key="algorithm.norm_policy",
            value="local",
            fix="Use algorithm.norm_policy=average or reset.",
        )
    statistics = [task for task in tasks if task.reveals == "statistics"]
    if any(task.bound(algorithm) is None for task in statistics):
        raise UserError(
            f"the statistics of {_names(statistics)} have no bound for noise to be scaled to",
            key="privacy.noise",
            value=noise,
            fix="Set objective.bound=1.",
        )
    if algorithm.weight == "uniform" and config.privacy.most_samples > 1:
        raise UserError(
            f"all clients count alike with algorithm.name={name}, so more noise protects nothing",
            key="privacy.most_samples",
            value=config.privacy.most_samples,
            fix="Use privacy.most_samples=1.",
        )


def _names(tasks: list[ClientTask]) -> str:
    return ", ".join(task.name for task in tasks)
