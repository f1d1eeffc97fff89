"""The local engine: this process, this device, merged wherever that is exact."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedssl.algorithms.base import Algorithm, Cohort, PerClient, learning_rates
from fedssl.client import Client, Workspace
from fedssl.data.dataset import Groups
from fedssl.trees import Tree


class LocalEngine:
    """Runs every client's work through one network.

    Where the algorithm says that a merged cohort gives exactly the clients' mean, the cohort goes
    through the network as one batch, or as several if ``engine.chunk`` images are exceeded.
    """

    def __init__(self, work: Workspace, algorithm: Algorithm, groups: Groups) -> None:
        self.work = work
        self.algorithm = algorithm
        self.groups = groups
        self.states: dict[int, dict[str, Tree]] = defaultdict(dict)
        asked = work.config.engine.merge == "auto"
        self.merges = asked and algorithm.exact_on_union(work)

    def cohort(self, ids: NDArray[np.int64], round: int) -> LocalCohort:
        """The clients of one round."""
        return LocalCohort(self, ids, round)

    def client(self, ids: NDArray[np.int64], round: int, remember: bool) -> Client:
        """One client, or several merged into one (which has no state of its own)."""
        members, sizes = self.groups.select(ids)
        state = self.states[int(ids[0])] if len(ids) == 1 else {}
        _, lr = learning_rates(self.work.config, round)
        return Client(self.work, members, ids, sizes, round, lr, state, remember)


class LocalCohort(Cohort):
    """A cohort whose clients all live in this process."""

    def __init__(self, engine: LocalEngine, ids: NDArray[np.int64], round: int) -> None:
        config = engine.work.config
        super().__init__(ids, config.cohort.minimum, not engine.algorithm.pools_data)
        self.engine = engine
        self.round = round
        self._merged: Client | None = None

    def ask(
        self, task: str, payload: tuple[Any, ...], merge: bool
    ) -> Iterator[tuple[NDArray[np.int64], int, Any]]:
        """Client by client, or the whole cohort at once."""
        function = getattr(self.engine.algorithm, task)
        merge = merge and self.engine.merges and not any(isinstance(p, PerClient) for p in payload)
        for ids, client in self._clients(merge):
            own = (p.values[int(ids[0])] if isinstance(p, PerClient) else p for p in payload)
            yield ids, client.weight, function(client, *own)

    def _clients(self, merge: bool) -> Iterator[tuple[NDArray[np.int64], Client]]:
        chunks = self._chunks() if merge else np.split(self.ids, len(self.ids))
        if merge and len(chunks) == 1:
            # One merged client for all exchanges of the round: it remembers its forward pass.
            if self._merged is None:
                self._merged = self.engine.client(self.ids, self.round, remember=True)
            yield self.ids, self._merged
            return
        for ids in chunks:
            yield ids, self.engine.client(ids, self.round, remember=False)

    def _chunks(self) -> list[NDArray[np.int64]]:
        """Consecutive clients with at most ``engine.chunk`` images; a client is never cut."""
        sizes, limit = self.engine.groups.sizes[self.ids], self.engine.work.config.engine.chunk
        cuts, images = [], 0
        for i, size in enumerate(sizes):
            if images and images + size > limit:
                cuts.append(i)
                images = 0
            images += int(size)
        return np.split(self.ids, cuts)
