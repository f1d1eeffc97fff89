"""The local engine: this process, this device, merged wherever that is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedssl.data.random import key
from fedssl.engines.base import Engine
from fedssl.engines.host_states import HostStates
from fedssl.engines.remote.codec import MalformedError, check_like, describe_tree
from fedssl.federation.aggregate import count_samples
from fedssl.federation.client import Client
from fedssl.federation.cohort import Answer, Cohort
from fedssl.federation.server import learning_rates
from fedssl.federation.task import ClientTask
from fedssl.federation.traffic import Argument
from fedssl.training.pool import TrainerPool
from fedssl.training.trainer import State, Trainer
from fedssl.util.errors import UserError

Payload = tuple[Argument, ...]
Worked = tuple[NDArray[np.int64], Client, Any]  # clients, acting as one, and their reply


@dataclass(eq=False, repr=False)
class LocalEngine(Engine):
    """Run every client's work through one network.

    Where the algorithm says that a merged cohort gives exactly the clients' mean, the cohort goes
    through the network as one batch, or as several of at most ``engine.chunk`` images.
    """

    def __post_init__(self) -> None:
        """Decide whether cohorts are merged."""
        trainer = self.trainer
        self.states: HostStates = HostStates(trainer.device)
        self.pool = TrainerPool(trainer) if trainer.device.type == "cuda" else None
        wanted = trainer.config.engine.merge == "auto" and self.aggregator.allows_merging
        self.merges = wanted and self.algorithm.exact_on_union(trainer)
        self._checked: set[str] = set()  # tasks whose first reply was as declared

    def rest(self) -> None:
        """Give back other networks and compiled steps."""
        self.pool = None
        self.trainer.compiled_steps.clear()

    def check_reply(self, task: ClientTask, reply: Any) -> None:
        """Refuse a first reply that is not as declared: other engines would refuse it too."""
        if task.name in self._checked:
            return
        like = task.expected_reply(self.algorithm, self.trainer)
        try:
            check_like(describe_tree(reply), like, varying=task.reveals == "features")
        except MalformedError as error:
            raise UserError(
                f"{task.name} returned: {error}",
                key="algorithm.name",
                value=self.algorithm.params.name,
                fix="Return what @client_task declares, or declare it with reply=….",
            ) from None
        self._checked.add(task.name)

    def cohort(self, ids: NDArray[np.int64], round: int) -> LocalCohort:
        """Return the clients of one round."""
        return LocalCohort(self, ids, round)

    def client(
        self,
        ids: NDArray[np.int64],
        round: int,
        remember: bool,
        numbers: bool = False,
        trainer: Trainer | None = None,
    ) -> Client:
        """Return one client, or several merged into one (which has no state of its own)."""
        members, sizes = self.groups.select(ids)
        state: State = {}
        if len(ids) == 1:
            state = self.states.numbers(int(ids[0])) if numbers else self.states[int(ids[0])]
        _, lr = learning_rates(self.trainer.config, round)
        return Client(trainer or self.trainer, members, ids, sizes, round, lr, state, remember)


class LocalCohort(Cohort):
    """A cohort whose clients all live in this process."""

    def __init__(self, engine: LocalEngine, ids: NDArray[np.int64], round: int) -> None:
        algorithm, config = engine.algorithm, engine.trainer.config
        super().__init__(
            ids,
            config.cohort.minimum,
            algorithm.weight,
            engine.aggregator,
            counts_traffic=not algorithm.pools_data,
            dropout=config.cohort.dropout,
            draw=key(config.seed, "dropout", round),
        )
        self.engine = engine
        self.round = round
        self._merged: Client | None = None

    def ask(self, task: ClientTask, payload: Payload) -> Iterator[Answer]:
        """Ask client by client, several side by side, or the whole cohort at once."""
        if task.is_logged:  # without bringing whole states to the device and back
            for ids in np.split(self.ids, len(self.ids)):
                client = self.engine.client(ids, self.round, remember=False, numbers=True)
                yield ids, 1.0, self._run(task, (), client)
            return
        for ids, client, reply in self._work(task, payload):
            share = 1.0
            self.engine.check_reply(task, reply)
            if len(ids) == 1:
                self.engine.algorithm.check_state("client", client.state)
                self.engine.states[int(ids[0])] = client.state
            if task.seen == "mean":
                samples = count_samples(self.weight, client.trainer.batches, client.samples)
                share, reply = self.aggregator.contribute(task.name, samples, reply, self.weight)
            yield ids, share, reply

    def _work(self, task: ClientTask, payload: Payload) -> Iterator[Worked]:
        same = not any(item.differs for item in payload)
        averaged = task.seen == "mean" and self.weight != "uniform"
        merge, pool = averaged and self.engine.merges and same, self.engine.pool
        if not merge and pool is not None and pool.is_ready(task.name) and len(self.ids) > 1:
            yield from self._side_by_side(pool, task, payload)
        else:
            yield from self._one_by_one(task, payload, merge)

    def _one_by_one(self, task: ClientTask, payload: Payload, merge: bool) -> Iterator[Worked]:
        batch = self.engine.trainer.batches.size or 0
        for ids, client in self._clients(merge):
            with self.engine.trainer.tuned():
                reply = self._run(task, payload, client)
            yield ids, client, reply
            if self.engine.pool is not None and client.samples >= batch:
                self.engine.pool.mark_ready(task.name)

    def _side_by_side(
        self, pool: TrainerPool, task: ClientTask, payload: Payload
    ) -> Iterator[Worked]:
        def job(ids: NDArray[np.int64]) -> Callable[[Trainer], Worked]:
            def work(trainer: Trainer) -> Worked:
                client = self.engine.client(ids, self.round, remember=False, trainer=trainer)
                return ids, client, self._run(task, payload, client)

            return work

        width = pool.width(len(self.ids))
        for start in range(0, len(self.ids), width):
            ends = range(start + 1, min(start + width, len(self.ids)) + 1)
            yield from pool.run([job(self.ids[end - 1 : end]) for end in ends])

    def _run(self, task: ClientTask, payload: Payload, client: Client) -> Any:
        arguments = (item.of(client.id) for item in payload)
        return getattr(self.engine.algorithm, task.name)(client, *arguments)

    def _clients(self, merge: bool) -> Iterator[tuple[NDArray[np.int64], Client]]:
        chunks = self._chunks() if merge else np.split(self.ids, len(self.ids))
        if merge and len(chunks) == 1:
            # One merged client for all exchanges of the round: it remembers its forward pass.
            if self._merged is None or len(self._merged.sizes) != len(self.ids):
                self._merged = self.engine.client(self.ids, self.round, remember=True)
            yield self.ids, self._merged
            return
        for ids, following in zip(chunks, [*chunks[1:], self.ids[:0]], strict=True):
            client = self.engine.client(ids, self.round, remember=False)
            if len(following) == 1:  # its state is brought while this one trains
                self.engine.states.prefetch(int(following[0]))
            yield ids, client

    def _chunks(self) -> list[NDArray[np.int64]]:
        """Split the cohort into consecutive clients with at most ``engine.chunk`` images."""
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
