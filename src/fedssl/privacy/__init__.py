"""What a server may learn of its clients: plain, robust and noisy means, and secure sums."""

from __future__ import annotations

from fedssl.algorithms.base import Algorithm, Average
from fedssl.config import Config
from fedssl.errors import UserError


def average(config: Config, algorithm: Algorithm, clients: int, cohort: int) -> Average:
    """How replies are averaged, with ``cohort`` of ``clients`` clients in a round."""
    check(config, algorithm)
    if config.privacy.noise is not None:
        from fedssl.privacy.noise import Noisy

        return Noisy(config, algorithm, clients, cohort)
    if config.cohort.average != "mean":
        from fedssl.privacy.robust import Robust

        return Robust(config.cohort, cohort)
    return Average()


def check(config: Config, algorithm: Algorithm) -> None:
    """Refuse combinations in which one promise breaks another."""
    privacy, rule = config.privacy, config.cohort.average
    asked = "privacy.secure=true" if privacy.secure else f"privacy.noise={privacy.noise}"
    if not privacy.secure and privacy.noise is None:
        return
    if rule != "mean":
        raise UserError(
            f"cohort.average={rule} with {asked}: "
            + (
                "a robust mean compares the clients' replies, which a secure sum never shows"
                if privacy.secure
                else "the noise is made for a sum in which every client's share is bounded"
            )
            + "; use cohort.average=mean, or leave the other out"
        )
    if algorithm.gathers:
        raise UserError(
            f"algorithm.name={algorithm.params.name} with {asked}: its server sees each client's "
            f"own reply ({', '.join(algorithm.gathers)}), not only sums; use another algorithm"
        )
    if algorithm.pools_data:
        raise UserError(
            f"algorithm.name={algorithm.params.name} with {asked}: it has all data in one place; "
            "use another algorithm, or leave it out"
        )
    if privacy.secure and config.engine.name == "local":
        raise UserError(
            "privacy.secure=true with engine.name=local: one process holds every client, so "
            "nothing would be secret; use engine.name=flower"
        )
