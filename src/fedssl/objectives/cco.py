"""Cross correlation optimization (Barlow Twins), DCCO paper, Eq. 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedssl.config import key
from fedssl.objectives.moments import (
    Centre,
    MomentObjective,
    MomentParams,
    Moments,
    off_diagonal_square,
)

VARIANCE_FLOOR = 1e-6


class CCO(MomentObjective):
    """Matching components of F and G correlate, others do not.

    >>> cco = CCO(CCO.Params("cco"))
    >>> f = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
    >>> cco.loss(EncodedBatch((f, f)))
    tensor(0.)
    """

    @dataclass(frozen=True)
    class Params(MomentParams):
        """Keys of CCO."""

        lambda_: float = key(
            20.0, ge=0, help="λ, the weight of decorrelation (20 in the paper, section 4.3)."
        )

    params: Params

    def loss_of(self, moments: Moments, centre: Centre) -> Tensor:
        """Return the loss of Eq. 1."""
        c = correlation(moments)
        diagonal = torch.diagonal(c)
        off = off_diagonal_square(c) / max(1, len(diagonal) - 1)
        return (1 - diagonal).square().sum() + self.params.lambda_ * off


def correlation(moments: Moments) -> Tensor:
    """Return C of Eq. 2. Variances have a floor: a constant component correlates with nothing."""
    f, g = moments["f"], moments["g"]
    variance_f = (moments["f2"] - f.square()).clamp_min(VARIANCE_FLOOR)
    variance_g = (moments["g2"] - g.square()).clamp_min(VARIANCE_FLOOR)
    covariance = moments["fg"] - torch.outer(f, g)
    return covariance * variance_f.rsqrt()[:, None] * variance_g.rsqrt()
