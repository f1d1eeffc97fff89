"""Divergence-aware exponential moving average updates (FedEMA paper, section 4, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedssl.algorithms.divergence import DivergenceAware, DivergenceParams, mix
from fedssl.algorithms.fedu import require_predictor
from fedssl.config import AlgorithmParams, Config, Recipe, key
from fedssl.federation.algorithm import Suits
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.task import client_task
from fedssl.util.errors import UserError


class FedEMA(DivergenceAware):
    """Clients start a round at μ · own + (1 − μ) · global, with μ = min(λ_k · divergence, 1).

    The autoscaler sets λ_k = τ / (the client's first divergence), so that its first such update
    has μ = τ. The paper's server computes λ_k right after the client's first round; here the client
    does, so that the server sees no client's own network. With ``drift`` that is the same; with
    ``distance`` too, unless the client sits out the round after its first: then λ_k comes from the
    global network of the round in which it returns. A client that was not in the round before
    starts from the global network, target network included (lines 13 and 14).
    """

    @dataclass(frozen=True)
    class Params(DivergenceParams):
        """Keys of FedEMA."""

        recommended: ClassVar[Recipe] = {
            **AlgorithmParams.recommended,
            "objective": {"name": "byol"},
        }

        lambda_: float | Literal["auto"] = key(
            "auto",
            ge=0,
            help="λ, the scale of the divergence. `auto`: each client finds its own from "
            "`algorithm.tau`.",
        )
        tau: float = key(
            0.7,
            ge=0,
            le=1,
            needs="lambda=auto",
            help="τ, the value of μ in a client's first update.",
        )
        decay: tuple[float, ...] | None = key(
            None,
            ge=0,
            le=1,
            nonempty=True,
            help="Constant μ, instead of `algorithm.lambda`: one value, or one for the encoder and "
            "one for the predictor (Figure 10b).",
        )
        parts: Literal["both", "encoder", "predictor"] = key(
            "both", help="Networks that the moving average applies to (Figure 5)."
        )

        def __post_init__(self) -> None:
            if self.decay is not None and len(self.decay) > 2:
                raise UserError(
                    "more than two values",
                    key="algorithm.decay",
                    value=self.decay,
                    fix="Give one value, or one for the encoder and one for the predictor.",
                )
            if self.decay is not None and self.lambda_ != "auto":
                raise UserError(
                    f"given together with algorithm.lambda={self.lambda_}",
                    key="algorithm.decay",
                    value=self.decay,
                    fix="Give one of the two.",
                )

        def check(self, config: Config) -> None:
            """Refuse an objective without the part that the moving average applies to."""
            if self.parts == "predictor":
                require_predictor(config, "algorithm.parts", "predictor")

    params: Params
    suits = Suits("for few sites with many images each", most_sites=32, fewest_images=1000)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Average and log; warn if clients no longer share anything."""
        super().round(server, cohort)
        names = {"both": ("mu", "mu_predictor"), "encoder": ("mu",), "predictor": ("mu_predictor",)}
        logged = (server.client_log.get(name, {}) for name in names[self.params.parts])
        measures = [mu for each in logged for mu in each.values()]
        stuck = bool(measures) and all(mu == 1 for mu in measures)
        rounds = int(server.state.get("stuck", 0)) + 1
        server.state = {"stuck": torch.tensor(float(rounds))} if stuck else {}
        if stuck and rounds == 2:
            server.warn(
                "μ is 1 for every client, twice in a row: what it acts on is not shared any more; "
                + ("use algorithm.divergence=drift, or " * (self.params.divergence == "distance"))
                + "lower algorithm.decay, algorithm.lambda or algorithm.tau"
            )

    def start(self, client: Client, network: Tensor) -> Tensor:
        """Eq. 1 and 2; buffers are the global network's."""
        divergence = self.divergence(client, network)
        if divergence is not None:
            client.state.setdefault("first", divergence.clone())
        last = client.state.get("trained")
        if divergence is None or last is None or int(last) != client.round - 1:
            client.state.pop("target", None)
            client.state |= {"mu": torch.tensor(0.0), "mu_predictor": torch.tensor(0.0)}
            client.state.pop("divergence", None)
            return network
        mu = self.mu(client, float(divergence))
        for name, value in zip(("mu", "mu_predictor"), mu, strict=True):
            client.state[name] = torch.tensor(value, dtype=torch.float64)
        client.state["divergence"] = divergence
        return mix(client, network, *mu)

    def mu(self, client: Client, divergence: float) -> tuple[float, float]:
        """Eq. 3, for the encoder and for the predictor."""
        p = self.params
        if p.decay is not None:
            both = (p.decay[0], p.decay[-1])
        elif p.lambda_ == "auto":
            # τ/d₁ · d, in this order: at the first divergence d₁ it is τ to the last bit.
            first = float(client.state["first"])
            both = (min(p.tau * (divergence / first), 1.0) if first else 0.0,) * 2
        else:
            both = (min(p.lambda_ * divergence, 1.0),) * 2
        return both[0] * (p.parts != "predictor"), both[1] * (p.parts != "encoder")

    @client_task(seen="log", reveals="numbers", reply=("mu", "mu_predictor", "divergence"))
    def report(self, client: Client) -> dict[str, Tensor]:
        """μ, that of the predictor, and the divergence that they came from."""
        return client.numbers("mu", "mu_predictor", "divergence")
