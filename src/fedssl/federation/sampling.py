"""The clients of a round, and the number of images that each needs."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedssl.config import Config
from fedssl.data.random import choose, key
from fedssl.federation.algorithm import Algorithm
from fedssl.util.errors import UserError, refuse
from fedssl.util.text import name_client


def cohort_size(config: Config, clients: int) -> int:
    """Return how many clients take part in a round: all, if there are fewer than asked for."""
    cohort = config.cohort
    size = min(cohort.size or clients, clients)
    if cohort.fraction is not None:
        size = max(1, round(cohort.fraction * clients))
    few = f"a round has only {size} clients"
    refuse(config, (cohort.minimum > size, "cohort.minimum", few, f"Use at most {size}."))
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


def check_client_sizes(
    algorithm: Algorithm, sizes: NDArray[np.int64], names: Sequence[str] = ()
) -> None:
    """Refuse clients and batches with too few images (the dashes in the DCCO paper's Table 1)."""
    needed, batch = algorithm.minimum_images, algorithm.params.batch
    method, loss = algorithm.params.name, algorithm.objective.params.name
    compared = min(needed, algorithm.objective.min_samples)
    if batch is not None and batch < compared:
        raise UserError(
            f"objective.name={loss} compares at least {compared} images",
            key="algorithm.batch",
            value=batch,
            fix=f"Set algorithm.batch={compared} or more.",
        )
    smallest = int(np.argmin(sizes))
    if sizes[smallest] < needed:
        raise UserError(
            f"{name_client(names, smallest)} holds {sizes[smallest]} image(s), and with "
            f"objective.name={loss} every client needs at least {needed}",
            key="algorithm.name",
            value=method,
            fix=f"Leave such clients out with partition.minimum={needed}, or use larger ones.",
        )
