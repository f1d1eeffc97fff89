"""Personal models beside the global one (the second paper's Algorithm 1; Ditto, Li et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedssl.algorithms.fedavg import FedAvg
from fedssl.config import key
from fedssl.federation.algorithm import Result
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.task import Reply, client_task
from fedssl.training.optim import Pull
from fedssl.training.trainer import State, Trainer
from fedssl.util.errors import UserError

PERSONAL = "personal"  # the place of v_k in a client's state


def _models_of_further_weights(ditto: Ditto, state: State) -> dict[str, Tensor]:
    """Return v_k for each further λ."""
    names = ditto.weights_of_pull.keys() - {PERSONAL}
    return {name: state[name]["weights"] for name in sorted(names & state.keys())}


class Ditto(FedAvg):
    """FedAvg with a personal model v_k of each client, trained on l_k(v) + λ/2 ‖v − w‖² (Eq. 9).

    The global model does not depend on λ, so one run serves several values (``also``). With λ = 0
    the personal models equal those of clients that train alone (``standalone`` with a server that
    only adds the change). A personal model has its own target network and memory.
    """

    result = Result("personal", uses_initial=True, further=_models_of_further_weights)

    @dataclass(frozen=True)
    class Params(FedAvg.Params):
        """Keys of Ditto."""

        lambda_: float = key(
            0.1, ge=0, help="λ, the strength of the pull of personal models to the global one."
        )
        also: tuple[float, ...] = key(
            (),
            ge=0,
            help="Further values of λ. For each, clients train another personal model beside the "
            "same global one, and `per-client` evaluates it as `lambda-…`.",
        )

        def __post_init__(self) -> None:
            if len({f"{v:g}" for v in (*self.also, self.lambda_)}) <= len(self.also):
                raise UserError(
                    "has a value twice, or that of algorithm.lambda",
                    key="algorithm.also",
                    value=list(self.also),
                    fix="Give each value of λ once.",
                )

    params: Params

    @property
    def weights_of_pull(self) -> dict[str, float]:
        """The values of λ by the name of their personal models in a client's state."""
        return {PERSONAL: self.params.lambda_, **{f"lambda-{v:g}": v for v in self.params.also}}

    def round(self, server: Server, cohort: Cohort) -> None:
        """Average the clients' changes of the global model, as in FedAvg."""
        super().round(server, cohort)
        cohort.passes += len(self.params.also)

    @client_task(seen="mean", reveals="update", trains=2)
    def train(self, client: Client, model: Tensor) -> Reply:
        """The global model's change; the personal model stays."""
        self.personalize(client, client.full_weights(model))
        return super().train(client, model)

    def personalize(self, client: Client, anchor: Tensor) -> None:
        """Train each personal model: v ← v − η ∇h(v; w) for the round's local steps."""
        for name, weight in self.weights_of_pull.items():
            state = dict(client.state.get(name, {}))
            start = state.get("weights", client.trainer.initial)
            pull = Pull(weight, anchor) if weight else None
            state["weights"] = client.train_from(start, state, pull=pull).weights
            client.state[name] = state

    def personal_weights(self, server: Server, state: State) -> Tensor | None:
        """Return v_k."""
        return state.get(PERSONAL, {}).get("weights")

    def exact_on_union(self, trainer: Trainer) -> bool:
        """Return ``False``: every client has a model of its own."""
        return False
