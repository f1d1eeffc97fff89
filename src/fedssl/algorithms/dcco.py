"""Distributed cross correlation optimization (DCCO paper, section 3.3 and Figure 2)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedssl.config import AlgorithmParams
from fedssl.federation.algorithm import Algorithm, one_plain_step
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.objectives.base import Objective
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.moments import Centre, MomentObjective, Moments
from fedssl.training.trainer import Trainer
from fedssl.util.errors import UserError
from fedssl.util.trees import Tree


class DCCO(Algorithm):
    """Large-batch statistics from small clients.

    Clients send the moments of their encodings; the server returns the moments of the whole cohort;
    each client descends the large-batch loss through its own samples only. With one local step a
    round equals a centralized step on the union of the cohort's samples (appendix A).
    """

    objective: MomentObjective
    compiles = "off"
    means = ("locate", "encode", "descend")
    statistics = ("locate", "encode")

    def __init__(self, params: AlgorithmParams, objective: Objective) -> None:
        if not isinstance(objective, MomentObjective):
            raise UserError(
                f"objective.name={objective.params.name}: dcco shares moments of encodings, and "
                "this loss is not a function of them; use objective.name=cco or vicreg, "
                "or algorithm.name=fedavg"
            )
        super().__init__(params, objective)

    def smallest_client(self) -> int:
        """One sample is enough: statistics are the cohort's."""
        return 1

    def round(self, server: Server, cohort: Cohort) -> None:
        """Two exchanges; the first round also finds the centre that moments are taken about.

        Bounded encodings have the origin for it, which nobody has to be asked for. Secure sums
        start there too: two sums of the same encodings would tell of a client that drops out
        between them.
        """
        bounded = self.objective.params.bound is not None
        if "centre" not in server.state:
            located = "locate" in self.asked(server.config.privacy.secure)
            server.state["centre"] = (
                cohort.mean("locate", server.model) if located else self._origin(server.model)
            )
        centre: Any = server.state["centre"]
        moments = cohort.mean("encode", server.model, centre)
        update = cohort.mean("descend", server.model, centre, moments)
        server.apply(update)
        if not bounded:
            server.state["centre"] = {name: centre[name] + moments[name] for name in centre}

    def asked(self, secure: bool) -> tuple[str, ...]:
        """Not for a centre that is the origin."""
        bounded = self.objective.params.bound is not None
        return self.means[1:] if bounded or secure else self.means

    def _origin(self, like: Tensor) -> Centre:
        return {name: like.new_zeros(self.objective.params.projector[-1]) for name in ("f", "g")}

    def locate(self, client: Client, weights: Tensor) -> Tree:
        """The client's mean encodings, in the first round."""
        return client.mean(weights, lambda encoded: self.objective.centre(encoded.encodings))

    def encode(self, client: Client, weights: Tensor, centre: Centre) -> Tree:
        """Means of the client's encodings and of their products, over its samples in the round.

        ⟨⟩_k of Eq. 3.
        """
        return client.mean(
            weights, lambda encoded: self.objective.moments(encoded.encodings, centre)
        )

    def descend(
        self, client: Client, weights: Tensor, centre: Centre, moments: Moments
    ) -> dict[str, Tree]:
        """The change of the network's weights that local training makes.

        On ⟨⟩_C = ⟨⟩_k + sg(⟨⟩_A − ⟨⟩_k) at every step.
        """

        def loss(encoded: EncodedBatch) -> Tensor:
            local = self.objective.moments(encoded.encodings, centre)
            # Summed in this order the value is exactly ⟨⟩_A, however far ⟨⟩_k has moved.
            combined = {
                name: moments[name] + (local[name] - local[name].detach()) for name in local
            }
            return self.objective.loss_of(combined, centre)

        return client.train(weights, loss)

    def reply_like(self, task: str, trainer: Trainer) -> dict[str, Tree]:
        """Moments have the width of the projector."""
        if task == "descend":
            return super().reply_like(task, trainer)
        encodings = (trainer.initial.new_zeros(2, self.objective.params.projector[-1]),) * 2
        centre = self.objective.centre(encodings)
        both = centre if task == "locate" else self.objective.moments(encodings, centre)
        return dict(both)

    def bound(self, task: str) -> float | None:
        """Moments of bounded encodings are bounded."""
        return self.objective.moments_bound if task == "encode" else None

    def exact_on_union(self, trainer: Trainer) -> bool:
        """Appendix A."""
        return one_plain_step(trainer)
