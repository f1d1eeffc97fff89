"""Variance-invariance-covariance regularization (Bardes et al. 2022) as a function of moments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.config import key
from fedssl.objectives.moments import (
    BoundedParams,
    Centre,
    Moments,
    SecondMomentObjective,
    off_diagonal_square,
)


class VICReg(SecondMomentObjective):
    """Keep each component's spread, bring the two views together, decorrelate the components.

    Variances divide by N, not N − 1: only then are they means that clients can average.
    """

    within_tower = True

    @dataclass(frozen=True)
    class Params(BoundedParams):
        """Keys of VICReg."""

        lambda_: float = key(25.0, ge=0, help="λ, the weight of the distance between two views.")
        mu: float = key(25.0, ge=0, help="μ, the weight of variance, which prevents collapse.")
        nu: float = key(1.0, ge=0, help="ν, the weight of covariance, which decorrelates.")

    params: Params

    def loss_of(self, moments: Moments, centre: Centre) -> Tensor:
        """Return λ s(Z, Z′) + μ [v(Z) + v(Z′)]/2 + ν [c(Z) + c(Z′)], means over components."""
        f, g = moments["f"], moments["g"]
        cov_f = moments["ff"] - torch.outer(f, f)
        cov_g = moments["gg"] - torch.outer(g, g)
        var_f, var_g = torch.diagonal(cov_f), torch.diagonal(cov_g)
        shared = torch.diagonal(moments["fg"]) - f * g
        apart = (f + centre["f"] - g - centre["g"]).square()
        invariance = (apart + var_f + var_g - 2 * shared).mean()
        variance = (_hinge(var_f) + _hinge(var_g)) / 2
        covariance = (off_diagonal_square(cov_f) + off_diagonal_square(cov_g)) / len(f)
        p = self.params
        return p.lambda_ * invariance + p.mu * variance + p.nu * covariance


def _hinge(variance: Tensor) -> Tensor:
    return F.relu(1 - torch.sqrt(variance.clamp_min(0) + 1e-4)).mean()
