"""The clients of one round, and the two ways to ask them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedssl.data.random import mix, uniform
from fedssl.federation.aggregate import Aggregator, TooFewReplies, Weight
from fedssl.federation.task import ClientTask, get_task
from fedssl.federation.traffic import Argument, Traffic
from fedssl.util.trees import NothingToAverage, Tree, count_bytes

Task = Callable[..., Any]  # a method of an algorithm, declared with @client_task
Answer = tuple[NDArray[np.int64], float, Any]  # clients, their weight, and their reply


class Cohort(ABC):
    """The clients of one round. Engines differ in how they ask clients, not in these rules.

    A reply that does not come is not in the mean. A client that did not answer one exchange is not
    asked in the next. With fewer than ``minimum`` replies the round is skipped. ``dropout``
    simulates this: before each exchange every client leaves the round with that probability.
    """

    def __init__(
        self,
        ids: NDArray[np.int64],
        minimum: int,
        weight: Weight = "samples",
        aggregator: Aggregator | None = None,
        counts_traffic: bool = True,
        dropout: float = 0.0,
        draw: int = 0,
    ) -> None:
        self.ids = np.sort(ids)
        self.minimum = minimum
        self.dropout = dropout
        self.draw = draw  # state of the random numbers of ``dropout``
        self.weight: Weight = weight
        self.aggregator = aggregator or Aggregator()
        self.traffic = Traffic(counts_traffic)
        self.missing = 0  # replies that did not come or did not count
        self.faults: dict[int, str] = {}  # by client, why its reply did not count
        self.passes = 0  # how often the round has trained on the clients' images

    def mean(self, task: Task, *payload: Any) -> Any:
        """Return the mean of the clients' replies; the server learns nothing else."""
        declared = get_task(task, "mean", payload)
        self._drop_out(declared)
        return self._mean(declared, as_arguments(payload))

    def gather(self, task: Task, *payload: Any) -> dict[int, Any]:
        """Return each client's reply, for algorithms that route things between clients.

        Nobody is asked for numbers for the log if the server may see clients only in sums.
        """
        declared = get_task(task, "gather", payload)
        if not declared.is_logged:
            self._drop_out(declared)
        return self._gather(declared, as_arguments(payload))

    @abstractmethod
    def ask(self, task: ClientTask, payload: tuple[Argument, ...]) -> Iterator[Answer]:
        """Run a task on the clients in ``self.ids``, in ascending order.

        Yields clients, their weight, and what they send; clients without a reply are not yielded.
        In a mean the engine may answer for several clients at once with their mean reply, if the
        algorithm says that this is exact.
        """

    def _drop_out(self, task: ClientTask) -> None:
        """Let clients leave before an exchange, drawn alike on every engine."""
        if self.dropout:
            self.draw = mix(self.draw, 1)
            drawn = uniform(mix(self.draw, torch.from_numpy(self.ids)), 1)[:, 0].numpy()
            self._keep(task, self.ids[drawn >= self.dropout])

    def _mean(self, task: ClientTask, payload: tuple[Argument, ...]) -> Tree | None:
        answered: list[NDArray[np.int64]] = []

        def weighted() -> Iterator[tuple[float, Tree]]:
            for ids, share, reply in self.ask(task, payload):
                answered.append(ids)
                self.traffic.count_up(task.name, self._reply_bytes(reply) * len(ids))
                yield share, reply

        result: Tree | None = None
        failure: TooFewReplies | None = None
        try:
            result = self.aggregator.combine(task.name, weighted())
        except NothingToAverage:
            pass
        except TooFewReplies as error:
            failure = error
        replied = np.concatenate(answered) if answered else self.ids[:0]
        self._close(task, payload, replied, failure)
        return result

    def _gather(self, task: ClientTask, payload: tuple[Argument, ...]) -> dict[int, Any]:
        replies: dict[int, Any] = {}
        if task.is_logged and not self.aggregator.allows_client_logs:
            return replies
        for ids, _, reply in self.ask(task, payload):
            replies[int(ids[0])] = reply
            if task.seen != "simulation":
                self.traffic.count_up(task.name, self._reply_bytes(reply))
        answered = np.array(sorted(replies), dtype=np.int64)
        if task.seen == "log":  # a client whose numbers do not come stays in the round
            self._count(task, payload, answered)
        elif task.seen == "each":
            self._close(task, payload, answered)
        return replies

    def _close(
        self,
        task: ClientTask,
        payload: tuple[Argument, ...],
        answered: NDArray[np.int64],
        failure: TooFewReplies | None = None,
    ) -> None:
        """End an exchange: count its bytes, drop clients that did not answer, and may stop."""
        self._count(task, payload, answered)
        self.passes += task.trains or 0
        self._keep(task, answered, failure)

    def _keep(
        self, task: ClientTask, answered: NDArray[np.int64], failure: TooFewReplies | None = None
    ) -> None:
        """Go on with the clients that answer, unless these are too few."""
        self.missing += len(self.ids) - len(answered)
        self.ids = answered
        if failure is not None:
            raise failure
        if len(answered) < self.minimum:
            raise TooFewReplies(
                f"{len(answered)} replies to {task.name}, fewer than cohort.minimum={self.minimum}"
            )

    def _reached(self) -> NDArray[np.int64]:
        """Return the clients that got the last message: all, unless messages can be lost."""
        return self.ids

    def _count(
        self, task: ClientTask, payload: tuple[Argument, ...], answered: NDArray[np.int64]
    ) -> None:
        reached = self._reached().tolist()
        self.traffic.count_payload(task.name, payload, reached)
        self.traffic.count_clients(task.name, answered.tolist(), reached)

    def _reply_bytes(self, reply: Tree) -> int:
        """Return the bytes of one reply as it travels."""
        return count_bytes(reply)


def as_arguments(payload: tuple[Any, ...]) -> tuple[Argument, ...]:
    """Wrap the values of a payload that are the same for every client."""
    return tuple(item if isinstance(item, Argument) else Argument(item) for item in payload)
