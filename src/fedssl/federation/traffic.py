"""Count the bytes that a round moves between server and clients, by exchange."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedssl.util.trees import count_bytes, leaves

UNCOUNTED = ""


@dataclass(frozen=True)
class Argument:
    """One argument of a task: the same for all clients, or one value for each.

    Its bytes count towards the exchange that asks for the task, or towards ``exchange``. What only
    a simulation sends, for its log, does not count (``UNCOUNTED``).
    """

    value: Any
    differs: bool = False  # ``value`` maps a client's number to what this client gets
    exchange: str | None = None

    def of(self, client: int) -> Any:
        """Return what a client gets."""
        return self.value[client] if self.differs else self.value


def per_client(values: Mapping[int, Any], exchange: str | None = None) -> Argument:
    """Give each client its own value: ``cohort.gather("task", per_client({3: bank}))``."""
    return Argument(values, True, exchange)


def count_as(exchange: str, value: Any) -> Argument:
    """Count the bytes of an argument, the same for all clients, towards another exchange."""
    return Argument(value, False, exchange)


class Traffic:
    """Bytes over all clients, by exchange, with the clients that sent or received them."""

    def __init__(self, counts: bool = True) -> None:
        self.up: dict[str, int] = defaultdict(int)
        self.down: dict[str, int] = defaultdict(int)
        self.replied: dict[str, set[int]] = defaultdict(set)
        self.reached: dict[str, set[int]] = defaultdict(set)
        self._counts = counts
        self._sent: list[Tensor] = []

    def count_clients(self, exchange: str, replied: Iterable[int], reached: Iterable[int]) -> None:
        """Note which clients an exchange reached, and which of them replied."""
        if self._counts:
            self.down[exchange] += 0
            self.replied[exchange].update(replied)
            self.reached[exchange].update(reached)

    def count_up(self, exchange: str, count: int) -> None:
        """Add bytes that clients sent."""
        if self._counts:
            self.up[exchange] += count

    def count_down(self, exchange: str, count: int) -> None:
        """Add bytes that the server sent."""
        if self._counts:
            self.down[exchange] += count

    def count_payload(
        self, exchange: str, payload: Sequence[Argument], clients: Sequence[int]
    ) -> None:
        """Add the bytes of a task's arguments, which were sent to these clients.

        A tensor that clients already have from this round is not sent again.
        """
        for item in payload:
            if item.exchange == UNCOUNTED:
                continue
            count = self._argument_bytes(item, clients)
            if item.exchange is None:
                self.count_down(exchange, count)
            elif count:
                self.count_down(item.exchange, count)
                self.count_clients(item.exchange, (), clients)

    def by_exchange(self) -> dict[str, dict[str, int]]:
        """Return the bytes of each exchange, and how many clients they came from or went to."""
        return {
            exchange: {
                "up": self.up[exchange],
                "down": down,
                "replied": len(self.replied[exchange]),
                "reached": len(self.reached[exchange]),
            }
            for exchange, down in self.down.items()
        }

    def _argument_bytes(self, item: Argument, clients: Sequence[int]) -> int:
        if item.differs:
            return sum(count_bytes(item.of(client)) for client in clients)
        total = 0
        for leaf in leaves(item.value):
            if not any(leaf is sent for sent in self._sent):
                self._sent.append(leaf)
                total += count_bytes(leaf) * len(clients)
        return total
