"""FedU (Zhuang et al. 2021): BYOL whose predictor is replaced only while a client stays near."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedssl.algorithms.divergence import DivergenceAware, DivergenceParams, mix
from fedssl.config import AlgorithmParams, Config, Recipe, key
from fedssl.federation.client import Client
from fedssl.federation.task import client_task
from fedssl.util.errors import UserError


class FedU(DivergenceAware):
    """The global encoder replaces the online one; the predictor goes by the divergence.

    A client whose divergence reaches the threshold keeps its own predictor. The target network
    stays with the client.
    """

    @dataclass(frozen=True)
    class Params(DivergenceParams):
        """Keys of FedU."""

        recommended: ClassVar[Recipe] = {
            **AlgorithmParams.recommended,
            "objective": {"name": "byol"},
        }

        threshold: float = key(
            0.4,
            ge=0,
            finite=False,
            help="Divergence from which a client keeps its predictor (reference implementation).",
        )

        def check(self, config: Config) -> None:
            """Refuse an objective without a predictor."""
            require_predictor(config, "algorithm.name", "fedu")

    params: Params

    def start(self, client: Client, network: Tensor) -> Tensor:
        """Keep the client's predictor, or take the global one."""
        divergence = self.divergence(client, network)
        client.state["kept_predictor"] = torch.tensor(0.0)
        if divergence is None:
            return network
        client.state["divergence"] = divergence
        if float(divergence) < self.params.threshold:
            return network
        client.state["kept_predictor"] = torch.tensor(1.0)
        return mix(client, network, encoder=0, predictor=1)

    @client_task(seen="log", reveals="numbers", reply=("divergence", "kept_predictor"))
    def report(self, client: Client) -> dict[str, Tensor]:
        """The divergence, and whether the client kept its own predictor."""
        return client.numbers("divergence", "kept_predictor")


def require_predictor(config: Config, key: str, value: str) -> None:
    """Refuse an objective without a predictor, or with its predictor switched off."""
    if getattr(config.objective, "predictor", "off") == "off":
        raise UserError(
            f"needs a predictor, and objective.name={config.objective.name} has none",
            key=key,
            value=value,
            fix="Use objective.name=byol or simsiam, with a predictor.",
            against="objective.name",
        )
