"""The local engine: this process, this device, merged wherever that is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedssl.data.dataset import Groups
from fedssl.engines.base import Engine
from fedssl.engines.remote.codec import MalformedError, check_like, describe_tree
from fedssl.engines.remote.states import States
from fedssl.federation.aggregate import Aggregator, Weight
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import learning_rates
from fedssl.federation.traffic import Argument
from fedssl.training.pool import TrainerPool
from fedssl.training.trainer import State, Trainer
from fedssl.util.errors import UserError

Answer = tuple[NDArray[np.int64], Client, Any]  # who, as a client that has answered, and the reply


class LocalEngine(Engine):
    """Runs every client's work through one network.

    Where the algorithm says that a merged cohort gives exactly the clients' mean, the cohort goes
    through the network as one batch, or as several if ``engine.chunk`` images are exceeded.
    """

    def __init__(
        self,
        trainer: Trainer,
        algorithm: Algorithm,
        groups: Groups,
        aggregator: Aggregator | None = None,
    ) -> None:
        super().__init__(trainer, algorithm, groups, aggregator)
        self.states: States = States(trainer.device)
        self.pool = TrainerPool(trainer) if trainer.device.type == "cuda" else None
        asked = trainer.config.engine.merge == "auto"
        self.merges = asked and self.aggregator.allows_merging and algorithm.exact_on_union(trainer)
        self._expected: set[str] = set()  # tasks whose reply was as the algorithm says

    def rest(self) -> None:
        """Other networks and compiled steps."""
        self.pool = None
        self.trainer.compiled_steps.clear()

    def check_reply(self, task: str, reply: Any) -> None:
        """The first reply to a task is what other engines would take: here one is told earlier."""
        if task in self._expected:
            return
        algorithm = self.algorithm
        like = algorithm.reply_like(task, self.trainer)
        try:
            check_like(describe_tree(reply), like, varying=task in algorithm.varying)
        except MalformedError as error:
            where = f"algorithm.name={algorithm.params.name}: {task} returned"
            raise UserError(f"{where}: {error} (as its reply_like says)") from None
        self._expected.add(task)

    def cohort(self, ids: NDArray[np.int64], round: int) -> LocalCohort:
        """The clients of one round."""
        return LocalCohort(self, ids, round)

    def client(
        self,
        ids: NDArray[np.int64],
        round: int,
        remember: bool,
        numbers: bool = False,
        trainer: Trainer | None = None,
    ) -> Client:
        """One client, or several merged into one (which has no state of its own)."""
        members, sizes = self.groups.select(ids)
        state: State = {}
        if len(ids) == 1:
            state = self.states.numbers(int(ids[0])) if numbers else self.states[int(ids[0])]
        _, lr = learning_rates(self.trainer.config, round)
        return Client(trainer or self.trainer, members, ids, sizes, round, lr, state, remember)


class LocalCohort(Cohort):
    """A cohort whose clients all live in this process."""

    def __init__(self, engine: LocalEngine, ids: NDArray[np.int64], round: int) -> None:
        config = engine.trainer.config
        counts = not engine.algorithm.pools_data
        super().__init__(ids, engine.algorithm, config.cohort.minimum, counts, engine.aggregator)
        self.engine = engine
        self.round = round
        self._merged: Client | None = None

    def ask(
        self, task: str, payload: tuple[Argument, ...], weight: Weight | None
    ) -> Iterator[tuple[NDArray[np.int64], float, Any]]:
        """Client by client, several side by side, or the whole cohort at once."""
        same = not any(item.differs for item in payload)
        merge = weight == "samples" and self.engine.merges and same
        pool = self.engine.pool
        if not merge and pool is not None and pool.is_ready(task) and len(self.ids) > 1:
            answers = self._side_by_side(pool, task, payload)
        else:
            answers = self._one_by_one(task, payload, merge)
        for ids, client, reply in answers:
            share = 1.0
            self.engine.check_reply(task, reply)
            if len(ids) == 1:
                self.algorithm.check_state("client", client.state)
                self.engine.states[int(ids[0])] = client.state
            if weight is not None:
                share, reply = self.aggregator.contribute(task, client.weight, reply, weight)
            yield ids, share, reply

    def _one_by_one(
        self, task: str, payload: tuple[Argument, ...], merge: bool
    ) -> Iterator[Answer]:
        fits = self.engine.trainer.batches.size or 0
        for ids, client in self._clients(merge):
            yield ids, client, self._answer(task, payload, client)
            if self.engine.pool is not None and client.samples >= fits:
                self.engine.pool.mark_ready(task)

    def _side_by_side(
        self, pool: TrainerPool, task: str, payload: tuple[Argument, ...]
    ) -> Iterator[Answer]:
        def job(ids: NDArray[np.int64]) -> Callable[[Trainer], Answer]:
            def do(trainer: Trainer) -> Answer:
                client = self.engine.client(ids, self.round, remember=False, trainer=trainer)
                return ids, client, self._answer(task, payload, client)

            return do

        width = pool.width(len(self.ids))
        for start in range(0, len(self.ids), width):
            jobs = [
                job(self.ids[k : k + 1]) for k in range(start, min(start + width, len(self.ids)))
            ]
            yield from pool.run(jobs)

    def _answer(self, task: str, payload: tuple[Argument, ...], client: Client) -> Any:
        arguments = (item.of(client.id) for item in payload)
        return getattr(self.engine.algorithm, task)(client, *arguments)

    def ask_log(self, task: str) -> Iterator[tuple[NDArray[np.int64], float, Any]]:
        """Without bringing whole states to the device and back."""
        function = getattr(self.engine.algorithm, task)
        for ids in np.split(self.ids, len(self.ids)):
            client = self.engine.client(ids, self.round, remember=False, numbers=True)
            yield ids, 1.0, function(client)

    def _clients(self, merge: bool) -> Iterator[tuple[NDArray[np.int64], Client]]:
        chunks = self._chunks() if merge else np.split(self.ids, len(self.ids))
        if merge and len(chunks) == 1:
            # One merged client for all exchanges of the round: it remembers its forward pass.
            if self._merged is None:
                self._merged = self.engine.client(self.ids, self.round, remember=True)
            yield self.ids, self._merged
            return
        for ids, following in zip(chunks, [*chunks[1:], self.ids[:0]], strict=True):
            client = self.engine.client(ids, self.round, remember=False)
            if len(following) == 1:  # its state is brought while this one trains
                self.engine.states.prefetch(int(following[0]))
            yield ids, client

    def _chunks(self) -> list[NDArray[np.int64]]:
        """Consecutive clients with at most ``engine.chunk`` images; a client is never cut."""
        sizes, limit = self.engine.groups.sizes[self.ids], self.engine.trainer.config.engine.chunk
        if sizes.sum() <= limit:
            return [self.ids]
        cuts, images = [], 0
        for i, size in enumerate(sizes):
            if images and images + size > limit:
                cuts.append(i)
                images = 0
            images += int(size)
        return np.split(self.ids, cuts)
