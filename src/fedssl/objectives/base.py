"""What every objective has: a head, a loss of encodings, and for some, a loss of moments."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn

from fedssl.config import Encoder, ObjectiveParams, key
from fedssl.models.network import Network, mlp
from fedssl.models.norms import Norm
from fedssl.objectives.batch import Loss, Memory

if TYPE_CHECKING:
    from fedssl.federation.client import Client

Moments = dict[str, Tensor]
Centre = dict[str, Tensor]


class Objective(ABC):
    """A loss of the encodings F and G ``[N, d]`` of one client's batch."""

    Params: ClassVar[type[ObjectiveParams]]
    minimum: ClassVar[int] = 1  # samples without which the loss is not defined
    inputs: ClassVar[int] = 2  # how many views or modalities it looks at
    needs_labels: ClassVar[bool] = False
    siamese: ClassVar[bool] = False  # whether the loss sees targets too, after the encodings
    joint: ClassVar[bool] = False  # whether all inputs are one batch to batch norm
    of_batches: ClassVar[bool] = True  # whether a batch is all that the loss needs; else ``local``

    def __init__(self, params: ObjectiveParams) -> None:
        self.params = params

    @property
    def momentum(self) -> float | None:
        """Of a target network that follows the online one step by step; none: there is no such."""
        return None

    @property
    def stop_gradient(self) -> bool:
        """Whether targets are constants to the gradient."""
        return True

    def predictor(self, norm: Norm) -> nn.Module | None:
        """What the online network has on top of the head, if anything."""
        return None

    def memory(self, like: Tensor) -> Memory:
        """What a client remembers between steps and rounds, before its first one."""
        return {}

    def remember(self, memory: Memory, encodings: tuple[Tensor, ...]) -> None:
        """Take a step's encodings into the memory, in place."""
        return

    def check_images(self, height: int, width: int) -> None:
        """Refuse images that the task cannot be made of."""
        return

    def present(self, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the network sees: the views, or what a task makes of them."""
        return views

    def project(
        self, network: Network, inputs: tuple[Tensor, ...], state: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The network's projections; random numbers of a sample's own come from its ``state``."""
        return cast("tuple[Tensor, ...]", network(inputs))

    def recall(self, memory: Memory) -> tuple[Tensor, ...]:
        """Projections out of the memory that go through the predictor too, after the batch's."""
        return ()

    def local(self, client: Client, start: Tensor) -> Loss | None:
        """The loss of one client's round from ``start``, where it looks beyond the batch.

        It may use the network before the first step: training loads ``start`` after it.
        """
        return None

    def head_for(
        self, encoder: Encoder, channels: int, features: int, norm: Norm, classes: int
    ) -> nn.Module:
        """The head on this encoder, for images of so many channels."""
        return self.head(features, norm, classes)

    @abstractmethod
    def head(self, features: int, norm: Norm, classes: int) -> nn.Module:
        """The head between encoder and loss."""

    @abstractmethod
    def loss(
        self, encodings: tuple[Tensor, ...], labels: Tensor | None, memory: Memory | None = None
    ) -> Tensor:
        """The loss of one batch: a pure function."""


@dataclass(frozen=True)
class ProjectorParams(ObjectiveParams):
    """Keys of objectives with a projector."""

    projector: tuple[int, ...] = key(
        (1024, 1024, 1024), ge=1, nonempty=True, help="Widths of the projector's layers."
    )


@dataclass(frozen=True)
class MomentParams(ProjectorParams):
    """Keys of objectives that see encodings through their moments."""

    bound: float | None = key(
        None,
        gt=0,
        kw_only=True,
        help="L2 norm to which encodings are scaled down before moments are taken. `null`: none.",
    )


class Dual(Objective):
    """An objective of two encodings behind a projector."""

    Params: ClassVar[type[ObjectiveParams]] = ProjectorParams
    params: ProjectorParams

    def head(self, features: int, norm: Norm, classes: int) -> nn.Module:
        """The projector (DCCO paper, section 4.2)."""
        return mlp(features, self.params.projector, norm)


class MomentObjective(Dual):
    """An objective that sees encodings only through their moments, so that clients can share these.

    Moments are taken about a ``centre`` that every client shares. Correlations and covariances do
    not depend on it; with a centre near the mean, ⟨F²⟩ − ⟨F⟩² does not cancel in float32. Bounded
    encodings need none: it is the origin.
    """

    Params: ClassVar[type[ObjectiveParams]] = MomentParams
    params: MomentParams

    minimum = 2
    within_tower: ClassVar[bool] = False  # whether each tower's own covariance is needed

    def centre(self, encodings: tuple[Tensor, ...]) -> Centre:
        """The batch's own means, as a constant; the origin if encodings are bounded."""
        f, g = encodings
        if self.params.bound is not None:
            return {"f": torch.zeros_like(f[0]), "g": torch.zeros_like(g[0])}
        return {"f": f.detach().mean(0), "g": g.detach().mean(0)}

    def moments(self, encodings: tuple[Tensor, ...], centre: Centre) -> Moments:
        """⟨F⟩, ⟨G⟩, ⟨F²⟩, ⟨G²⟩ and ⟨FG⟩ of Eq. 3, about the centre."""
        f, g = self.bounded(encodings[0]), self.bounded(encodings[1])
        f, g = f - centre["f"], g - centre["g"]
        n = len(f)
        moments = {"f": f.mean(0), "g": g.mean(0), "fg": f.T @ g / n}
        if self.within_tower:
            return moments | {"ff": f.T @ f / n, "gg": g.T @ g / n}
        return moments | {"f2": f.square().mean(0), "g2": g.square().mean(0)}

    def bounded(self, encodings: Tensor) -> Tensor:
        """F · min(1, B/‖F‖) for each sample, if there is a bound."""
        bound = self.params.bound
        if bound is None:
            return encodings
        # In this form the gradient at F = 0 is defined.
        return encodings * (bound / encodings.norm(dim=1, keepdim=True).clamp_min(bound))

    @property
    def moments_bound(self) -> float | None:
        """The L2 norm that the moments of no batch exceed, all five as one vector: √(2B² + 3B⁴).

        A mean is no longer than its longest term, so one sample with ‖F‖, ‖G‖ ≤ B is enough:
        F and G have at most B each; F Gᵀ, F Fᵀ and G Gᵀ have ‖F‖‖G‖ ≤ B² (Frobenius); and F², G²
        are the diagonals of the latter two.
        """
        b = self.params.bound
        return None if b is None else math.sqrt(2 * b**2 + 3 * b**4)

    @abstractmethod
    def loss_of(self, moments: Moments, centre: Centre) -> Tensor:
        """The loss as a function of moments."""

    def loss(
        self, encodings: tuple[Tensor, ...], labels: Tensor | None, memory: Memory | None = None
    ) -> Tensor:
        """The loss of a batch from its own moments."""
        centre = self.centre(encodings)
        return self.loss_of(self.moments(encodings, centre), centre)


def off_diagonal_square(matrix: Tensor) -> Tensor:
    """The sum of the squares off the diagonal."""
    return matrix.square().sum() - torch.diagonal(matrix).square().sum()
