"""Objectives that are functions of the moments of encodings."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedssl.config import ObjectiveParams, Recipe, key
from fedssl.objectives.base import Encodings, ProjectorObjective, ProjectorParams
from fedssl.objectives.batch import EncodedBatch

Moments = dict[str, Tensor]
Centre = dict[str, Tensor]


@dataclass(frozen=True)
class MomentParams(ProjectorParams):
    """Keys of objectives that see encodings through their moments."""

    recommended: ClassVar[Recipe] = {"algorithm": {"name": "dcco"}}

    bound: float | None = key(
        None,
        gt=0,
        kw_only=True,
        help="Largest L2 norm of an encoding; longer ones are scaled down. Differential privacy "
        "needs it. `null`: no limit.",
    )


class MomentObjective(ProjectorObjective):
    """An objective that sees encodings only through their moments, so that clients can share these.

    Moments are taken about a ``centre`` that every client shares. Correlations and covariances do
    not depend on it; with a centre near the mean, ⟨F²⟩ − ⟨F⟩² does not cancel in float32. Bounded
    encodings have the origin as their centre.
    """

    Params: ClassVar[type[ObjectiveParams]] = MomentParams
    params: MomentParams

    min_samples = 2
    within_tower: ClassVar[bool] = False  # whether each tower's own covariance is needed

    def centre(self, encodings: Encodings) -> Centre:
        """Return the batch's means, as a constant; the origin if encodings are bounded."""
        f, g = encodings
        if self.params.bound is not None:
            return {"f": torch.zeros_like(f[0]), "g": torch.zeros_like(g[0])}
        return {"f": f.detach().mean(0), "g": g.detach().mean(0)}

    def moments(self, encodings: Encodings, centre: Centre) -> Moments:
        """Return ⟨F⟩, ⟨G⟩, ⟨F²⟩, ⟨G²⟩ and ⟨FG⟩ of Eq. 3, about the centre."""
        f, g = self.bounded(encodings[0]), self.bounded(encodings[1])
        f, g = f - centre["f"], g - centre["g"]
        n = len(f)
        moments = {"f": f.mean(0), "g": g.mean(0), "fg": f.T @ g / n}
        if self.within_tower:
            return moments | {"ff": f.T @ f / n, "gg": g.T @ g / n}
        return moments | {"f2": f.square().mean(0), "g2": g.square().mean(0)}

    def bounded(self, encodings: Tensor) -> Tensor:
        """Scale each encoding by min(1, B/‖F‖), if there is a bound B."""
        bound = self.params.bound
        if bound is None:
            return encodings
        # In this form the gradient at F = 0 is defined.
        return encodings * (bound / encodings.norm(dim=1, keepdim=True).clamp_min(bound))

    @property
    def moments_bound(self) -> float | None:
        """The largest L2 norm of a batch's moments, all five as one vector: √(2B² + 3B⁴).

        A mean is no longer than its longest term, so one sample with ‖F‖, ‖G‖ ≤ B is enough:
        F and G have at most B each; F Gᵀ, F Fᵀ and G Gᵀ have ‖F‖‖G‖ ≤ B² (Frobenius); and F², G²
        are the diagonals of the latter two.
        """
        b = self.params.bound
        return None if b is None else math.sqrt(2 * b**2 + 3 * b**4)

    @abstractmethod
    def loss_of(self, moments: Moments, centre: Centre) -> Tensor:
        """Return the loss as a function of moments."""

    def loss(self, batch: EncodedBatch) -> Tensor:
        """Return the loss of a batch from its own moments."""
        centre = self.centre(batch.encodings)
        return self.loss_of(self.moments(batch.encodings, centre), centre)


def off_diagonal_square(matrix: Tensor) -> Tensor:
    """Return the sum of the squares off the diagonal."""
    return matrix.square().sum() - torch.diagonal(matrix).square().sum()
