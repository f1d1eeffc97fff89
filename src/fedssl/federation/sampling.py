"""The number of clients in a round."""

from __future__ import annotations

from fedssl.config import Config
from fedssl.util.errors import UserError


def cohort_size(config: Config, clients: int) -> int:
    """Return how many clients take part in a round, or refuse impossible numbers."""
    cohort = config.cohort
    if cohort.size is not None and cohort.size > clients:
        raise UserError(
            f"cohort.size={cohort.size}: the partition has only {clients} clients; "
            f"take at most {clients}"
        )
    size = cohort.size or clients
    if cohort.fraction is not None:
        size = max(1, round(cohort.fraction * clients))
    if cohort.minimum > size:
        raise UserError(f"cohort.minimum={cohort.minimum}: more than the {size} clients of a round")
    return size
