"""Personal models beside the global one (the second paper's Algorithm 1; Ditto, Li et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedssl.algorithms.fedavg import FedAvg
from fedssl.config import key
from fedssl.federation.algorithm import Result
from fedssl.federation.client import Client
from fedssl.federation.server import Server
from fedssl.federation.task import Reply, client_task
from fedssl.training.optim import Pull
from fedssl.training.trainer import State, Trainer


class Ditto(FedAvg):
    """FedAvg with a personal model v_k of each client, trained on l_k(v) + λ/2 ‖v − w‖² (Eq. 9).

    The global model does not depend on λ. With λ = 0 the personal models equal those of clients
    that train alone (``standalone`` with a server that only adds the change). A personal model has
    its own target network and memory.
    """

    result = Result("personal", uses_initial=True)

    @dataclass(frozen=True)
    class Params(FedAvg.Params):
        """Keys of Ditto."""

        lambda_: float = key(
            0.1, ge=0, help="λ, the strength of the pull of personal models to the global one."
        )

    params: Params

    @client_task(seen="mean", reveals="update", trains=2)
    def train(self, client: Client, model: Tensor) -> Reply:
        """The global model's change; the personal model stays."""
        self.personalize(client, client.full_weights(model))
        return super().train(client, model)

    def personalize(self, client: Client, anchor: Tensor) -> None:
        """Train the personal model: v ← v − η ∇h(v; w) for the round's local steps."""
        state = dict(client.state.get("personal", {}))
        start = state.get("weights", client.trainer.initial)
        pull = Pull(self.params.lambda_, anchor) if self.params.lambda_ else None
        state["weights"] = client.train_from(start, state, pull=pull).weights
        client.state["personal"] = state

    def personal_weights(self, server: Server, state: State) -> Tensor | None:
        """Return v_k."""
        return state.get("personal", {}).get("weights")

    def exact_on_union(self, trainer: Trainer) -> bool:
        """Return ``False``: every client has a model of its own."""
        return False
