"""Objectives that are functions of means over samples, which clients can share."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedssl.config import ObjectiveParams, Recipe, key
from fedssl.objectives.base import ProjectorObjective, ProjectorParams
from fedssl.objectives.batch import EncodedBatch

Moments = dict[str, Tensor]
Centre = dict[str, Tensor]


@dataclass(frozen=True)
class MomentParams(ProjectorParams):
    """Keys of objectives that are functions of means over samples."""

    recommended: ClassVar[Recipe] = {"algorithm": {"name": "dcco"}}


class MomentObjective(ProjectorObjective):
    """A function of means over samples, so that clients can share these (docs/papers/moments.md).

    A subclass needs :meth:`moments` and :meth:`loss_of`; the other members have defaults.
    """

    Params: ClassVar[type[ObjectiveParams]] = MomentParams
    params: MomentParams

    min_samples = 2

    @abstractmethod
    def moments(self, batch: EncodedBatch, centre: Centre) -> Moments:
        """Return the means over the batch's samples that the loss is a function of."""

    @abstractmethod
    def loss_of(self, moments: Moments, centre: Centre) -> Tensor:
        """Return the loss as a function of moments."""

    def separate_loss(self, batch: EncodedBatch) -> Tensor | float:
        """Return the part of the loss that is itself a mean over samples, which nobody shares."""
        return 0.0

    def loss(self, batch: EncodedBatch) -> Tensor:
        """Return the loss of a batch from its own moments."""
        centre = self.centre(batch)
        return self.loss_of(self.moments(batch, centre), centre) + self.separate_loss(batch)

    @property
    def is_centred(self) -> bool:
        """True if moments are about a centre that follows the encodings."""
        return False

    def centre(self, batch: EncodedBatch) -> Centre:
        """Return what the batch's moments are about, as a constant: here nothing."""
        return {}

    def track(self, moments: Moments) -> Tensor:
        """Return the moments that later local steps of DCCO may not move too far: here all."""
        return torch.cat([moment.flatten() for moment in moments.values()])

    @property
    def moments_bound(self) -> float | None:
        """The largest L2 norm of a batch's moments, all as one vector, if there is one."""
        return None

    @property
    def few_images(self) -> int:
        """Up to how many images the moments can reveal each encoding.

        This holds while there are at least as many moments as numbers in the encodings. If the
        moments leave a rotation open, the network closes it: a ReLU before its last layer makes
        many of that layer's inputs 0 and none negative (docs/privacy-details.md).
        """
        one = torch.zeros(1, self.params.projector[-1])
        batch = EncodedBatch((one,) * self.views)
        moments = self.moments(batch, self.centre(batch))
        return sum(moment.numel() for moment in moments.values()) // (self.views * one.numel())


@dataclass(frozen=True)
class BoundedParams(MomentParams):
    """Keys of objectives whose moments have a bound only if encodings have one."""

    bound: float | None = key(
        None,
        gt=0,
        kw_only=True,
        help="Largest L2 norm of an encoding; longer ones are scaled down. Differential privacy "
        "needs it. `null`: no limit.",
    )


class SecondMomentObjective(MomentObjective):
    """An objective of the means, squares and products of two views' encodings.

    Moments are taken about a ``centre`` that every client shares. Correlations and covariances do
    not depend on it; with a centre near the mean, ⟨F²⟩ − ⟨F⟩² does not cancel in float32. Bounded
    encodings have the origin as their centre.
    """

    Params: ClassVar[type[ObjectiveParams]] = BoundedParams
    params: BoundedParams

    within_tower: ClassVar[bool] = False  # whether each tower's own covariance is needed

    @property
    def is_centred(self) -> bool:
        """True unless encodings are bounded."""
        return self.params.bound is None

    def centre(self, batch: EncodedBatch) -> Centre:
        """Return the batch's means, as a constant; the origin if encodings are bounded."""
        f, g = batch.encodings
        if not self.is_centred:
            return {"f": torch.zeros_like(f[0]), "g": torch.zeros_like(g[0])}
        return {"f": f.detach().mean(0), "g": g.detach().mean(0)}

    def moments(self, batch: EncodedBatch, centre: Centre) -> Moments:
        """Return ⟨F⟩, ⟨G⟩, ⟨F²⟩, ⟨G²⟩ and ⟨FG⟩ of Eq. 3, about the centre."""
        f, g = (self.bounded(encodings) for encodings in batch.encodings)
        f, g = f - centre["f"], g - centre["g"]
        n = len(f)
        moments = {"f": f.mean(0), "g": g.mean(0), "fg": f.T @ g / n}
        if self.within_tower:
            return moments | {"ff": f.T @ f / n, "gg": g.T @ g / n}
        return moments | {"f2": f.square().mean(0), "g2": g.square().mean(0)}

    def track(self, moments: Moments) -> Tensor:
        """Return ⟨FG⟩."""
        return moments["fg"]

    def bounded(self, encodings: Tensor) -> Tensor:
        """Scale each encoding by min(1, B/‖F‖), if there is a bound B."""
        return scale_down(encodings, self.params.bound)

    @property
    def moments_bound(self) -> float | None:
        """The largest L2 norm of a batch's moments, all five as one vector: √(2B² + 3B⁴).

        A mean is no longer than its longest term, so one sample with ‖F‖, ‖G‖ ≤ B is enough:
        F and G have at most B each; F Gᵀ, F Fᵀ and G Gᵀ have ‖F‖‖G‖ ≤ B² (Frobenius); and F², G²
        are the diagonals of the latter two.
        """
        b = self.params.bound
        return None if b is None else math.sqrt(2 * b**2 + 3 * b**4)

    @property
    def few_images(self) -> int:
        """Images up to which the moments can reveal each encoding (see ``DCCO``).

        With both views' own products, d² − d of the 3 d² + 2 d moments come twice.
        """
        width = self.params.projector[-1]
        return width + 1 if self.within_tower else width // 2 + 2


def scale_down(encodings: Tensor, bound: float | None) -> Tensor:
    """Scale each encoding by min(1, B/‖F‖), if there is a bound B."""
    if bound is None:
        return encodings
    # In this form the gradient at F = 0 is defined.
    return encodings * (bound / encodings.norm(dim=1, keepdim=True).clamp_min(bound))


def off_diagonal_square(matrix: Tensor) -> Tensor:
    """Return the sum of the squares off the diagonal."""
    return matrix.square().sum() - torch.diagonal(matrix).square().sum()
