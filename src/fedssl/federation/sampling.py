"""The clients of a round."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from fedssl.config import Config
from fedssl.data.random import choose, key
from fedssl.util.errors import UserError


def cohort_size(config: Config, clients: int) -> int:
    """Return how many clients take part in a round, or refuse impossible numbers."""
    cohort = config.cohort
    if cohort.size is not None and cohort.size > clients:
        raise UserError(
            f"there are only {clients} clients",
            key="cohort.size",
            value=cohort.size,
            fix=f"Use at most {clients}.",
        )
    size = cohort.size or clients
    if cohort.fraction is not None:
        size = max(1, round(cohort.fraction * clients))
    if cohort.minimum > size:
        raise UserError(
            f"a round has only {size} clients",
            key="cohort.minimum",
            value=cohort.minimum,
            fix=f"Use at most {size}.",
        )
    return size


def draw_cohort(config: Config, clients: int, round: int) -> NDArray[np.int64]:
    """Draw the clients of a round.

    Noise for privacy counts on a draw that nobody can predict, so it is secret there.
    """
    size = cohort_size(config, clients)
    if config.privacy.noise is not None:
        drawn = secrets.SystemRandom().sample(range(clients), size)
        return np.array(sorted(drawn), dtype=np.int64)
    return choose(key(config.seed, "cohort", round), clients, size)
