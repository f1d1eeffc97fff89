"""The engine of clients elsewhere, which are reached through a transport such as Flower."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedssl.engines.base import Engine
from fedssl.engines.remote.cohort import RemoteCohort
from fedssl.engines.remote.disk_states import History, ReadOnlyStates
from fedssl.engines.remote.messages import Reply, Request

MOST_REFUSALS = 3  # rounds in a row with false replies, after which a client is left out
STATES = Path("checkpoint") / "states"  # of a simulation's clients


class Transport(Protocol):
    """Sends messages to nodes. A node is a process that stands for one or more clients."""

    def place(self, clients: list[int]) -> dict[int, int]:
        """Return the node of each client that can be reached now."""

    def send(
        self, requests: Mapping[int, Request], timeout: float
    ) -> dict[int, dict[int, Reply] | str]:
        """Return each node's replies by client, or why there are none.

        A node that does not answer in time is left out.
        """


@dataclass(eq=False, repr=False)
class RemoteEngine(Engine):
    """Asks clients through messages; only their replies come here."""

    def __post_init__(self) -> None:
        """Begin the run's first attempt."""
        self.transport: Transport | None = None
        self._latest: RemoteCohort | None = None
        self._refusals: dict[int, int] = {}  # by client, rounds in a row
        self.identities: dict[int, bytes] = {}  # public keys of clients, from secure sums
        self.attempt = secrets.token_hex(4)
        self.states: ReadOnlyStates = ReadOnlyStates(History((self.attempt,), (0,), 0))

    @property
    def history(self) -> History:
        """The run's attempts."""
        return self.states.history

    def cohort(self, ids: NDArray[np.int64], round: int) -> RemoteCohort:
        """Return the clients of one round."""
        self.states.round = round
        self._count_refusals()
        self._latest = RemoteCohort(self, ids, round)
        return self._latest

    @property
    def left_out(self) -> dict[int, str]:
        """The clients that are not asked any more, and why."""
        reason = f"its replies were refused in {MOST_REFUSALS} rounds in a row"
        return {k: reason for k, times in self._refusals.items() if times >= MOST_REFUSALS}

    def _count_refusals(self) -> None:
        """Count the rounds in a row in which a client's replies were refused.

        If that happens to half of the clients, the fault may be in what they were sent.
        """
        latest = self._latest
        if latest is None or 2 * len(latest.refused) >= len(latest.asked):
            return
        for client in set(latest.asked) - self.left_out.keys():
            times = self._refusals.get(client, 0)
            self._refusals[client] = times + 1 if client in latest.refused else 0

    def open(self, out: Path) -> None:
        """Keep the states of simulated clients in the run's folder."""
        self.states.folder = out / STATES

    def notes(self) -> dict[str, str]:
        """Return which attempt did which rounds, and the clients' keys, for the checkpoint."""
        keys = {client: key.decode() for client, key in self.identities.items()}
        attempts = [self.history.names, self.history.starts]
        return {"attempts": json.dumps(attempts), "identities": json.dumps(keys)}

    def resume(self, notes: Mapping[str, str], round: int) -> None:
        """Start a new attempt at the checkpoint's round."""
        names, starts = json.loads(notes.get("attempts", "[[], []]"))
        keys = json.loads(notes.get("identities", "{}"))
        self.identities = {int(client): key.encode() for client, key in keys.items()}
        self.states.history = History((*names, self.attempt), (*starts, round), round)
        self.states.round = round
        for client in self.states:  # those of a simulation: a damaged one is an error now
            self.states.on_host(client)

    def committed(self, round: int) -> None:
        """Let clients forget the states from before the checkpoint."""
        self.states.history = replace(self.history, committed=round)
