"""FedAvg whose server keeps a moving mean of the clients' changes (FedAvgM)."""

from dataclasses import dataclass

import torch

from fedssl.config import AlgorithmParams, key
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.task import client_task


class Momentum(Algorithm):
    """Both halves of the method: the server's round, and a task of the clients."""

    @dataclass(frozen=True)
    class Params(AlgorithmParams):
        """Keys of FedAvgM."""

        momentum: float = key(0.9, ge=0, lt=1, help="Share of the last round's step in this one.")

    def round(self, server: Server, cohort: Cohort) -> None:
        """The server's half: it sees only the mean of the clients' changes."""
        update = cohort.mean(self.train, server.model)
        before = server.state.get("velocity", torch.zeros_like(update["change"]))
        velocity = self.params.momentum * before + update["change"]
        server.state["velocity"] = velocity  # in the checkpoint, so that a resume has it
        server.apply({**update, "change": velocity})

    @client_task(seen="mean", reveals="update")
    def train(self, client: Client, model: torch.Tensor) -> dict[str, torch.Tensor]:
        """A client's half: the change that its training makes."""
        return client.train(model)
