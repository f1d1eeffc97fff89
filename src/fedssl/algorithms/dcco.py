"""Distributed cross correlation optimization (DCCO paper, section 3.3 and Figure 2)."""

from __future__ import annotations

from torch import Tensor

from fedssl.config import AlgorithmParams
from fedssl.federation.algorithm import Algorithm, is_one_plain_step, wrong_objective
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.task import Reply, client_task
from fedssl.objectives.base import Objective
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.moments import Centre, MomentObjective, Moments
from fedssl.training.trainer import Trainer
from fedssl.util.trees import Tree


def _centre_like(dcco: DCCO, trainer: Trainer) -> Reply:
    return dict(dcco.objective.centre(dcco.two_encodings(trainer.initial)))


def _moments_like(dcco: DCCO, trainer: Trainer) -> Reply:
    encodings = dcco.two_encodings(trainer.initial)
    return dict(dcco.objective.moments(encodings, dcco.objective.centre(encodings)))


def _few_images(dcco: DCCO) -> int:
    """Return up to how many images the moments can reveal each encoding.

    This holds while there are at least as many moments as numbers in the encodings. Two views of N
    images have 2 N d numbers. There are d² + 4 d moments, or 2 d² + 3 d different ones with both
    views' own products. If the moments leave a rotation open, the network closes it: a ReLU before
    its last layer makes many of that layer's inputs 0 and none negative (docs/privacy.md).
    """
    width = dcco.objective.params.projector[-1]
    return width + 1 if dcco.objective.within_tower else width // 2 + 2


class DCCO(Algorithm):
    """Large-batch statistics from small clients.

    Clients send the moments of their encodings. The server returns the moments of the whole cohort.
    Each client then descends the large-batch loss through its own samples only. With one local
    step, a round equals a centralized step on the union of the cohort's samples (appendix A).
    """

    objective: MomentObjective
    minimum_images = 1  # statistics are over the whole cohort

    def __init__(self, params: AlgorithmParams, objective: Objective) -> None:
        if not isinstance(objective, MomentObjective):
            raise wrong_objective(
                objective,
                "dcco shares moments of encodings, and this loss is not a function of them",
                "Use objective.name=cco or vicreg, or algorithm.name=fedavg.",
            )
        super().__init__(params, objective)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Exchange moments, then updates; the first round also finds the moments' centre."""
        if "centre" not in server.state:
            width = self.objective.params.projector[-1]
            origin = {name: server.model.new_zeros(width) for name in ("f", "g")}
            asks = self.asks_for_centre(server.config.privacy.secure)
            server.state["centre"] = cohort.mean(self.locate, server.model) if asks else origin
        centre = server.state["centre"]
        moments = cohort.mean(self.encode, server.model, centre)
        update = cohort.mean(self.descend, server.model, centre, moments)
        server.apply(update)
        if not self.is_bounded:
            server.state["centre"] = {name: centre[name] + moments[name] for name in centre}

    @property
    def is_bounded(self) -> bool:
        """True if encodings have a bounded norm; their moments are then taken about the origin."""
        return self.objective.params.bound is not None

    def asks_for_centre(self, secure: bool) -> bool:
        """Return whether the first round asks clients for their mean encodings.

        Secure sums start at the origin. Two sums of the same encodings would reveal those of a
        client that drops out in between.
        """
        return not (self.is_bounded or secure)

    @client_task(
        seen="mean",
        reveals="statistics",
        reply=_centre_like,
        few_images=_few_images,
        when=asks_for_centre,
        stateless=True,
    )
    def locate(self, client: Client, model: Tensor) -> Tree:
        """The client's mean encodings, in the first round."""
        return client.mean(model, lambda encoded: self.objective.centre(encoded.encodings))

    @client_task(
        seen="mean",
        reveals="statistics",
        reply=_moments_like,
        bound=lambda dcco: dcco.objective.moments_bound,
        few_images=_few_images,
        stateless=True,
    )
    def encode(self, client: Client, model: Tensor, centre: Centre) -> Tree:
        """Means of the client's encodings and of their products, over its samples in the round.

        ⟨⟩_k of Eq. 3.
        """
        return client.mean(model, lambda encoded: self.objective.moments(encoded.encodings, centre))

    @client_task(seen="mean", reveals="update", stateless=True)
    def descend(self, client: Client, model: Tensor, centre: Centre, moments: Moments) -> Reply:
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

        return client.train(model, loss)

    def exact_on_union(self, trainer: Trainer) -> bool:
        """Return whether appendix A applies."""
        return is_one_plain_step(trainer)

    def two_encodings(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return encodings of two samples, for their shape."""
        return (like.new_zeros(2, self.objective.params.projector[-1]),) * 2
