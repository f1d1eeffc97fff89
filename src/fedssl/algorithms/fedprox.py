"""FedAvg with a proximal term (FedProx, Li et al. 2020; Dec-SSL paper, appendix B.9)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedssl.algorithms.fedavg import FedAvg
from fedssl.config import key
from fedssl.federation.algorithm import Result
from fedssl.federation.client import Client
from fedssl.federation.task import Reply, client_task
from fedssl.training.optim import Pull
from fedssl.training.trainer import State

LOCAL = "local"  # the place of a client's local model in its state


def _local_model(fedprox: FedProx, state: State) -> dict[str, Tensor]:
    """Return the local model of a client that took part in the last round."""
    return {LOCAL: state[LOCAL]} if LOCAL in state else {}


class FedProx(FedAvg):
    """FedAvg in which a client trains on l_k(w) + μ/2 ‖w − w_received‖².

    Normalization layers that stay with a client (``norm_policy=local``) are held to where they are
    at the start of the round. A first step feels no pull, so cohorts merge as in FedAvg.

    In the last round a client keeps its local model after training, for ``per-client`` to evaluate
    as ``local`` beside the global one (PerFCL, Tables II and III). Clients of a merged cohort have
    no local models.
    """

    result = Result(further=_local_model)

    @dataclass(frozen=True)
    class Params(FedAvg.Params):
        """Keys of FedProx. The default is our reading."""

        mu: float = key(
            0.01, ge=0, help="μ, the strength of the pull of local models to the global one."
        )

    params: Params

    @client_task(seen="mean", reveals="update")
    def train(self, client: Client, model: Tensor) -> Reply:
        """The change that local training makes; at μ = 0 that of FedAvg."""
        if self.replaces_target:
            client.state.pop("target", None)
        start = client.full_weights(model)
        pull = Pull(self.params.mu, start) if self.params.mu else None
        trained = client.train_from(start, client.state, pull=pull)
        if client.round + 1 == client.trainer.config.rounds:
            client.state[LOCAL] = trained.weights
        return client.reply(trained, model)
