"""Standalone training: each client alone, the lower bound of the papers' tables."""

from __future__ import annotations

from torch import Tensor

from fedssl.federation.algorithm import Algorithm, Result
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server, apply_update, learning_rates
from fedssl.federation.task import Reply, client_task
from fedssl.training import optim
from fedssl.training.trainer import State


class Standalone(Algorithm):
    """Every client is its own server, with the same start and the same rules.

    The result is each client's own model. Clients send only their loss, for the log. Nothing is
    averaged, so ``norm_policy`` has no effect.
    """

    result = Result("personal", has_global=False, uses_initial=True)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Ask clients to train; no model is exchanged."""
        server.log["loss"] = cohort.mean(self.train)["loss"]

    @client_task(seen="mean", reveals="loss")
    def train(self, client: Client) -> Reply:
        """The loss of one round of its own training; the model stays with it."""
        trainer, rule = client.trainer, client.trainer.config.server
        if "weights" not in client.state:
            client.state["weights"] = trainer.initial
            client.state["rule"] = optim.start(rule, trainer.flat.params)
        weights = client.state["weights"]
        trained = client.train_from(weights, client.state)
        client.state["weights"] = apply_update(
            rule,
            client.state.get("rule", {}),  # files keep no empty trees
            weights,
            trained.change,
            learning_rates(trainer.config, client.round)[0],
            trainer.flat,
        )
        return {"loss": trained.loss}

    def personal_weights(self, server: Server, state: State) -> Tensor | None:
        """Return the client's own model."""
        return state.get("weights")
