"""Federated averaging of a loss within each client: the FedSSL framework (FedEMA, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedssl.config import AlgorithmParams, Config, key, variant
from fedssl.federation.algorithm import Algorithm, is_one_plain_step
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.task import Reply, client_task
from fedssl.objectives.base import Objective
from fedssl.training.trainer import Trainer
from fedssl.util.errors import UserError


class FedAvg(Algorithm):
    """The framework's three operations, whatever the objective.

    Local training: with the objective's own loss, target network and memory. Upload: the online
    network (encoder, head and predictor, where there is one); never the target network or the
    memory. Aggregation: the mean by samples, or with ``weight=uniform`` of all alike. Update: the
    client replaces its online network, or with ``replace=both`` its target network too.
    """

    @dataclass(frozen=True)
    class Params(AlgorithmParams):
        """Keys of FedAvg."""

        replace: Literal["online", "both"] = key(
            "online",
            help="Networks of a client that the global one replaces: the online network, or the "
            "target network too (FedEMA, Tables 2 and 9).",
        )
        weight: Literal["samples", "uniform"] = key(
            "samples",
            help="Weights of clients in the average: their number of samples, or equal weights "
            "(Dec-SSL, section 2).",
        )

        def check(self, config: Config) -> None:
            """Refuse to replace a target network that there is not."""
            loss = variant("objective", config.objective.name)(config.objective)
            if self.replace == "both" and loss.memory.target is None:
                raise UserError(
                    f"objective.name={config.objective.name} has no target network of its own",
                    key="algorithm.replace",
                    value="both",
                    fix="Use replace=online, or objective.name=byol or moco.",
                    against="objective.name",
                )

    params: Params

    def __init__(self, params: AlgorithmParams, objective: Objective) -> None:
        super().__init__(params, objective)
        self.weight = self.params.weight

    @property
    def replaces_target(self) -> bool:
        """True if a client's target network starts every round from the global network."""
        return self.params.replace == "both"

    def round(self, server: Server, cohort: Cohort) -> None:
        """Send the model, and apply the mean of the clients' changes."""
        server.apply(cohort.mean(self.train, server.model))

    @client_task(seen="mean", reveals="update", stateless=True)
    def train(self, client: Client, model: Tensor) -> Reply:
        """The change that local training makes."""
        if self.replaces_target:
            client.state.pop("target", None)
        return client.train(model)

    def exact_on_union(self, trainer: Trainer) -> bool:
        """Return whether clients can share passes; ``mean_over_clients`` keeps losses apart."""
        return self.weight == "samples" and is_one_plain_step(trainer)
