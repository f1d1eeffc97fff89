"""Standalone training: each client alone, the lower bound of the papers' tables."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from fedssl.federation.algorithm import Algorithm
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server, apply_update, learning_rates
from fedssl.training import optim
from fedssl.training.trainer import Trainer
from fedssl.util.trees import Tree


class Standalone(Algorithm):
    """Every client is its own server: same start, same rules, nothing shared but a loss to log.

    The result is each client's own model. Nothing is averaged, so ``norm_policy`` has no say.
    """

    judges = "personal"
    has_global = False
    personal = ("weights",)

    def round(self, server: Server, cohort: Cohort) -> None:
        """No model is exchanged."""
        server.log["loss"] = cohort.mean("train")["loss"]

    def reply_like(self, task: str, trainer: Trainer) -> dict[str, Tree]:
        """Nothing but the loss."""
        return {"loss": trainer.initial.new_zeros(())}

    def train(self, client: Client) -> dict[str, Tree]:
        """The loss of one round of its own training; the model stays with it."""
        trainer, rule = client.trainer, client.trainer.config.server
        if "weights" not in client.state:
            start = optim.start(rule, trainer.flat.params)
            client.state |= {"weights": trainer.initial, "rule": cast("dict[str, Tree]", start)}
        weights = cast(Tensor, client.state["weights"])
        trained = client.train_from(weights, client.state)
        client.state["weights"] = apply_update(
            rule,
            cast(optim.State, client.state.get("rule", {})),  # files keep no empty trees
            weights,
            trained.change,
            learning_rates(trainer.config, client.round)[0],
            trainer.flat,
        )
        return {"loss": trained.loss}
