"""Choose the aggregator that a configuration asks for."""

from __future__ import annotations

from fedssl.config import Config
from fedssl.federation.aggregate import Aggregator
from fedssl.federation.algorithm import Algorithm
from fedssl.privacy import checks


class SumsOnly(Aggregator):
    """The plain mean where the server sees sums only, and so no client's numbers for the log."""

    allows_client_logs = False


def build_aggregator(config: Config, algorithm: Algorithm, clients: int, cohort: int) -> Aggregator:
    """Check ``privacy.*`` and ``cohort.average``; build the mean of ``cohort`` of ``clients``."""
    checks.check_protection(config, algorithm)
    if config.privacy.secure:
        checks.check_secure_cohort(cohort)
        checks.check_secure_packages()
    if config.privacy.noise is not None:
        from fedssl.privacy.noise import Noisy

        return Noisy(config, algorithm, clients, cohort)
    if config.cohort.average != "mean":
        from fedssl.privacy.robust import Robust

        return Robust(config.cohort, cohort)
    return SumsOnly() if config.privacy.secure else Aggregator()
