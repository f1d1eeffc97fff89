"""Run one round: the only code that does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedssl.federation.aggregate import TooFewReplies
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.traffic import Traffic


@dataclass(frozen=True)
class RoundResult:
    """The outcome of one round. Tensors may still be computed on the GPU: reading them waits."""

    number: int  # counted from 1
    asked: NDArray[np.int64]  # clients
    answered: NDArray[np.int64]  # clients that replied to every exchange
    missing: int  # replies that did not come or did not count
    faults: dict[int, str]  # by client, why its reply did not count
    skipped: str | None  # why the round was skipped, the model unchanged
    traffic: Traffic
    passes: int  # how often the round trained on the images of clients that answered
    log: dict[str, Tensor]  # "loss" is among them unless it stays with the clients
    client_log: dict[str, dict[int, float | None]]
    warnings: list[str]

    @property
    def loss(self) -> Tensor | None:
        """The clients' mean loss, if the round counted and the loss left them."""
        return None if self.skipped is not None else self.log.get("loss")


def run_round(algorithm: Algorithm, server: Server, cohort: Cohort) -> RoundResult:
    """Run the algorithm's round with this cohort; with too few replies it is skipped."""
    server.clear_log()
    asked, skipped = cohort.ids, None
    try:
        algorithm.round(server, cohort)
    except TooFewReplies as reason:
        skipped = str(reason)
    algorithm.check_state("server", server.state)
    server.round += 1
    return RoundResult(
        number=server.round,
        asked=asked,
        answered=cohort.ids,
        missing=cohort.missing,
        faults=dict(sorted(cohort.faults.items())),
        skipped=skipped,
        traffic=cohort.traffic,
        passes=cohort.passes,
        log=dict(server.log),
        client_log=dict(server.client_log),
        warnings=list(server.warnings),
    )
