"""Control variates against client drift (SCAFFOLD, Karimireddy et al. 2020, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedssl.config import AlgorithmParams, Config, Recipe
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.task import Reply, client_task, update_like
from fedssl.training.optim import Pull
from fedssl.training.trainer import Trainer
from fedssl.util.errors import UserError


def _reply_like(scaffold: Scaffold, trainer: Trainer) -> Reply:
    return update_like(trainer) | {"control": trainer.flat.params}


class Scaffold(Algorithm):
    """Local steps that follow the mean of all clients' gradients, not only the client's own.

    A client keeps c_k, the mean gradient of its last round. The server keeps c, the mean of all
    clients' c_k. Each local step adds c − c_k to the gradient. All clients weigh the same.
    """

    weight = "uniform"

    @dataclass(frozen=True)
    class Params(AlgorithmParams):
        """Keys of SCAFFOLD: those of every algorithm."""

        recommended: ClassVar[Recipe] = {
            **AlgorithmParams.recommended,
            "client": {"optimizer": "sgd", "lr": 0.05},
        }

        def check(self, config: Config) -> None:
            """Refuse settings in which the change of a round is not a sum of gradients."""
            problem = "scaffold computes gradients from a client's change, which takes plain SGD"
            fix = "Use client.optimizer=sgd client.momentum=0."
            rule, name = config.client, "algorithm.name"
            if rule.optimizer != "sgd":
                key, value = "client.optimizer", rule.optimizer
                raise UserError(problem, key=key, value=value, fix=fix, against=name)
            if rule.momentum:
                key = "client.momentum"
                raise UserError(problem, key=key, value=rule.momentum, fix=fix, against=name)
            if self.norm_policy == "local":
                raise UserError(
                    "scaffold corrects all layers by the other clients' gradients",
                    key="algorithm.norm_policy",
                    value="local",
                    fix="Use average or reset.",
                    against=name,
                )

    def round(self, server: Server, cohort: Cohort) -> None:
        """Average the clients' changes, and the changes of their control variates."""
        control = server.state.get("control")
        if control is None:
            control = torch.zeros_like(server.model[: server.flat.parameter_count])
        reply = cohort.mean(self.train, server.model, control)
        server.apply(reply)
        share = len(cohort.ids) / max(len(server.client_names), len(cohort.ids))
        server.state["control"] = control + share * reply["control"]

    @client_task(seen="mean", reveals="update", reply=_reply_like)
    def train(self, client: Client, model: Tensor, control: Tensor) -> Reply:
        """The changes of the model and of c_k by local training (option II)."""
        start = client.full_weights(model)
        own = client.state.get("control", torch.zeros_like(control))
        correction = Pull(1.0, own - control, is_constant=True)
        trained = client.train_from(start, client.state, pull=correction)
        mean_step = trained.change[: len(control)] / (client.steps * client.lr)
        client.state["control"] = own - control - mean_step
        reply = client.reply(trained, model)
        return reply | {"control": client.state["control"] - own}
