"""Estimate the bytes that a site moves, in two rounds in which nobody trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedssl.engines.remote.cohort import RemoteCohort
from fedssl.engines.remote.engine import RemoteEngine
from fedssl.federation.aggregate import Aggregator
from fedssl.federation.cohort import Answer, Cohort
from fedssl.federation.task import ClientTask
from fedssl.federation.traffic import Argument
from fedssl.privacy.aggregators import SumsOnly
from fedssl.runs.build import Experiment
from fedssl.util.trees import Tree


@dataclass(frozen=True)
class Traffic:
    """The bytes of one site in a round, by task: tensors only, without Flower's overhead."""

    up: dict[str, int]
    down: dict[str, int]
    first: dict[str, int]  # up, for tasks of a run's first round only


def estimate_traffic(
    experiment: Experiment, without_weights: Callable[[], Experiment]
) -> Traffic | None:
    """Return the bytes that a site sends and receives; ``None`` if they cannot be estimated.

    An experiment without weights is tried first. It takes no memory, however many sites there are,
    but it has no values, which some algorithms read. The server's ``experiment`` is tried next,
    with zeros in place of replies. A user's algorithm may fail on both.
    """
    for build in (without_weights, lambda: experiment):
        try:
            return _count_rounds(build())
        except Exception:  # from torch or a user's algorithm; the estimate is optional
            continue
    return None


def _count_rounds(experiment: Experiment) -> Traffic:
    """Run a first round of all sites and a second one of one site.

    From the second round on, the server has replies to pass on.
    """
    engine, server, algorithm = experiment.engine, experiment.server, experiment.algorithm
    assert isinstance(engine, RemoteEngine)
    sites = np.arange(len(engine.groups))
    first, second = _IdleCohort(engine, sites, 0), _IdleCohort(engine, sites[:1], 1)
    for number, cohort in enumerate((first, second)):
        server.round = number
        algorithm.round(server, cohort)
    up, down = second.traffic.up, second.traffic.down
    only = {task: count // len(sites) for task, count in first.traffic.up.items() if task not in up}
    return Traffic(dict(up), dict(down), only)


class _IdleCohort(RemoteCohort):
    """Sites that answer at once, with zeros."""

    def __init__(self, engine: RemoteEngine, ids: NDArray[np.int64], round: int) -> None:
        super().__init__(engine, ids, round)
        self.minimum, self.dropout = 0, 0.0
        # No noise, which one site's weight might not outweigh.
        self.aggregator = Aggregator() if engine.aggregator.allows_client_logs else SumsOnly()
        self.responded = self.ids.tolist()

    def ask(self, task: ClientTask, payload: tuple[Argument, ...]) -> Iterator[Answer]:
        """Yield replies of the right shapes."""
        reply = _zeros(task.expected_reply(self.engine.algorithm, self.engine.trainer))
        if task.seen == "mean":
            reply = self.engine.aggregator.contribute(task.name, 1, reply, self.weight)[1]
        for client in self.ids:
            yield np.array([client]), 1.0, reply

    def _mean(self, task: ClientTask, payload: tuple[Argument, ...]) -> Tree | None:
        """Average without secure sums: zeros hold no secret."""
        return Cohort._mean(self, task, payload)

    def _reply_bytes(self, reply: Tree) -> int:
        """Count the bytes of a reply; in a secure sum those of the masked vector, without keys."""
        if not self.engine.trainer.config.privacy.secure:
            return super()._reply_bytes(reply)
        from fedssl.privacy import secure

        return 8 * secure.size(reply)


def _zeros(tree: Tree) -> Tree:
    """Return zeros of the same shapes that share one number's memory."""
    if isinstance(tree, Tensor):
        return tree.new_zeros(()).expand(tree.shape)
    return {name: _zeros(child) for name, child in tree.items()}
