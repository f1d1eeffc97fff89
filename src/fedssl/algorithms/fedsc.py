"""FedSC (Jing et al., ICML 2024): clients share the correlation matrices of their encodings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from fedssl.config import AlgorithmParams, Config, Recipe, key
from fedssl.federation.algorithm import Algorithm, require_objective
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.task import Reply, client_task
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.moments import Moments
from fedssl.objectives.spectral import Spectral
from fedssl.training.trainer import Trainer
from fedssl.util.trees import Tree


def _matrix_like(fedsc: FedSC, trainer: Trainer) -> Reply:
    width = fedsc.objective.params.projector[-1]
    return {"r": trainer.initial.new_zeros(width, width)}


class FedSC(Algorithm):
    """Federated averaging of the spectral contrastive loss, with contrast between clients.

    At the start of a round client k sends R_k, the correlation matrix of its encodings, and the
    server returns the mean of the round's M clients. In its local steps the client descends
    −2 ⟨F · G⟩_k + α ‖R_k‖² + 2 (1 − α) tr(R_k R_others), where R_others is the mean of the other
    clients' matrices as they were sent. With α = 1/M the first step's mean gradient is that of
    −2 ⟨F · G⟩ + ‖R‖² on all clients' images (docs/papers/moments.md).
    """

    @dataclass(frozen=True)
    class Params(AlgorithmParams):
        """Keys of FedSC."""

        recommended: ClassVar[Recipe] = {
            **AlgorithmParams.recommended,
            "objective": {"name": "spectral"},
        }

        alpha_start: float = key(
            1.0,
            ge=0,
            le=1,
            kw_only=True,
            help="α in round 1: the weight of the client's own images.",
        )
        alpha: float | None = key(
            None,
            ge=0,
            le=1,
            kw_only=True,
            help="α after the last round; between them it changes linearly. `null`: one over the "
            "number of clients in the round.",
        )

        def check(self, config: Config) -> None:
            """Refuse losses without a correlation matrix."""
            problem = "fedsc shares correlation matrices, and this loss has none"
            fix = "Use objective.name=spectral, or algorithm.name=fedavg."
            require_objective(config, Spectral, problem, fix)

    params: Params
    objective: Spectral
    minimum_images = 1  # the contrast is also with other clients
    weight = "uniform"  # the mean of the others follows from the mean of all

    def round(self, server: Server, cohort: Cohort) -> None:
        """Exchange correlation matrices, then updates."""
        matrix = cohort.mean(self.correlate, server.model)["r"]
        clients, progress = len(cohort.ids), server.round / server.config.rounds
        end = 1 / clients if self.params.alpha is None else self.params.alpha
        alpha = self.params.alpha_start + (end - self.params.alpha_start) * progress
        numbers = torch.tensor([alpha, clients], dtype=torch.float64)
        server.apply(cohort.mean(self.train, server.model, matrix, numbers))

    @client_task(
        seen="mean",
        reveals="statistics",
        reply=_matrix_like,
        bound=lambda fedsc: fedsc.objective.moments_bound,
        few_images=lambda fedsc: fedsc.objective.few_images,
        stateless=True,
    )
    def correlate(self, client: Client, model: Tensor) -> Tree:
        """The correlation matrix of the client's encodings, over its images in the round."""
        return client.mean(model, lambda batch: self.objective.moments(batch, {}))

    @client_task(seen="mean", reveals="update", stateless=True)
    def train(self, client: Client, model: Tensor, matrix: Tensor, numbers: Tensor) -> Reply:
        """The change that local training makes, in contrast to the other clients' images."""
        alpha, clients = numbers.tolist()
        sent = cast(Moments, self.correlate(client, model))["r"].detach()
        others = (clients * matrix - sent) / max(1, clients - 1)

        def loss(batch: EncodedBatch) -> Tensor:
            own = self.objective.moments(batch, {})["r"]
            contrast = alpha * own.square().sum() + 2 * (1 - alpha) * (own * others).sum()
            return self.objective.separate_loss(batch) + contrast

        return client.train(model, loss)
