"""FedAvg whose server keeps a moving mean of the clients' changes (FedAvgM)."""

from dataclasses import dataclass

import torch

from fedssl.config import AlgorithmParams
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.util.errors import UserError


class Momentum(Algorithm):
    """Both halves of the method: what the server does in a round, and what a client answers."""

    @dataclass(frozen=True)
    class Params(AlgorithmParams):
        """``momentum``: how much of the last round's step goes into this one."""

        momentum: float = 0.9

        def __post_init__(self) -> None:
            if not 0 <= self.momentum < 1:
                raise UserError(f"algorithm.momentum={self.momentum}: must be from 0 to below 1")

    def round(self, server: Server, cohort: Cohort) -> None:
        """The server's half: it sees only the mean of the clients' changes."""
        update = cohort.mean("train", server.model)
        before = server.state.get("velocity", torch.zeros_like(update["change"]))
        velocity = self.params.momentum * before + update["change"]
        server.state["velocity"] = velocity  # in the checkpoint, so that a resume has it
        server.apply({**update, "change": velocity})

    def train(self, client: Client, received: torch.Tensor) -> dict[str, torch.Tensor]:
        """A client's half: the change that its own training makes."""
        return client.train(received)
