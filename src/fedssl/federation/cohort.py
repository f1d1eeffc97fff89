"""The clients of one round, and the two ways to ask them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedssl.federation.aggregate import Aggregator, TooFewReplies, Weight
from fedssl.federation.traffic import Argument, Traffic
from fedssl.util.trees import NothingToAverage, Tree, count_bytes

if TYPE_CHECKING:
    from fedssl.federation.algorithm import Algorithm


class Cohort(ABC):
    """The clients of one round. Engines differ in how they ask clients, not in these rules.

    A reply that does not come is not in the mean. A client that did not answer one exchange is not
    asked in the next. With fewer than ``minimum`` replies the round is skipped.
    """

    def __init__(
        self,
        ids: NDArray[np.int64],
        algorithm: Algorithm,
        minimum: int,
        counts_traffic: bool = True,
        aggregator: Aggregator | None = None,
    ) -> None:
        self.ids = np.sort(ids)
        self.algorithm = algorithm
        self.minimum = minimum
        self.aggregator = aggregator or Aggregator()
        self.traffic = Traffic(counts_traffic)
        self.missing = 0  # replies that did not come or did not count
        self.faults: dict[int, str] = {}  # why a client's reply did not count

    @abstractmethod
    def ask(
        self, task: str, payload: tuple[Argument, ...], weight: Weight | None
    ) -> Iterator[tuple[NDArray[np.int64], float, Any]]:
        """Run ``task`` on the clients in ``self.ids``, in ascending order.

        Yields clients, their weight, and their contribution to a mean (without a ``weight``: their
        reply as it is); clients without a reply are not yielded. In a mean by samples the engine
        may answer for several clients at once with their mean reply, where that is ``exact``.
        """

    def ask_log(self, task: str) -> Iterator[tuple[NDArray[np.int64], float, Any]]:
        """As :meth:`ask`, for numbers of the clients' states that only the log needs."""
        return self.ask(task, (), None)

    def mean(self, task: str, *payload: Any, weight: Weight = "samples") -> Any:
        """The mean of the clients' replies (by samples, or uniform), and nothing else."""
        self.algorithm.check_asked(task, "means", payload)
        arguments = as_arguments(payload)
        answered: list[NDArray[np.int64]] = []

        def weighted() -> Iterator[tuple[float, Tree]]:
            for ids, share, reply in self.ask(task, arguments, weight):
                answered.append(ids)
                self.traffic.count_up(task, self._reply_bytes(reply) * len(ids))
                yield share, reply

        result: Tree | None = None
        lost: TooFewReplies | None = None
        try:
            result = self.aggregator.combine(task, weighted())
        except NothingToAverage:
            pass
        except TooFewReplies as error:
            lost = error
        replied = np.concatenate(answered) if answered else self.ids[:0]
        self._close(task, arguments, replied, lost)
        return result

    def gather(self, task: str, *payload: Any, log: bool = False) -> dict[int, Any]:
        """Each client's own reply: for algorithms that route things between clients.

        With ``log`` it is declared to be for the log only: the task reads single numbers of the
        client's state and changes nothing. Where clients are to be seen only in sums, nobody is
        asked.
        """
        self.algorithm.check_asked(task, "logs" if log else "gathers", () if log else payload)
        arguments, replies = as_arguments(payload), dict[int, Any]()
        if log and not self.aggregator.allows_client_logs:
            return replies
        asked = self.ask_log(task) if log else self.ask(task, arguments, None)
        for ids, _, reply in asked:
            replies[int(ids[0])] = reply
            self.traffic.count_up(task, self._reply_bytes(reply))
        answered = np.array(sorted(replies), dtype=np.int64)
        if log:  # a line that does not come takes nobody out of the round
            self._count(task, arguments, answered)
        else:
            self._close(task, arguments, answered)
        return replies

    def _close(
        self,
        task: str,
        payload: tuple[Argument, ...],
        answered: NDArray[np.int64],
        lost: TooFewReplies | None = None,
    ) -> None:
        """Count what was sent, drop who did not answer, and stop if too few are left.

        Where the replies gave no mean, the reason is that of ``lost``.
        """
        self._count(task, payload, answered)
        self.missing += len(self.ids) - len(answered)
        self.ids = answered
        if lost is not None:
            raise lost
        if len(answered) < self.minimum:
            raise TooFewReplies(
                f"{len(answered)} replies to {task}, fewer than cohort.minimum={self.minimum}"
            )

    def _reached(self) -> NDArray[np.int64]:
        """Who got what was asked last: all, unless messages can be lost."""
        return self.ids

    def _count(self, task: str, payload: tuple[Argument, ...], answered: NDArray[np.int64]) -> None:
        reached = self._reached().tolist()
        self.traffic.count_payload(task, payload, reached)
        self.traffic.count_clients(task, answered.tolist(), reached)

    def _reply_bytes(self, reply: Tree) -> int:
        """Bytes of one reply as it travels."""
        return count_bytes(reply)


def as_arguments(payload: tuple[Any, ...]) -> tuple[Argument, ...]:
    """Wrap the values of a payload that are the same for every client."""
    return tuple(item if isinstance(item, Argument) else Argument(item) for item in payload)
