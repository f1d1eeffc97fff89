"""Cross correlation optimization (Barlow Twins), DCCO paper, Eq. 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedssl.config import key
from fedssl.objectives.moments import (
    BoundedParams,
    Centre,
    Moments,
    SecondMomentObjective,
    off_diagonal_square,
)

RELATIVE_FLOOR = 1e-6  # of the mean variance
SMALLEST = 1e-20  # the variance of constant encodings, so that they correlate with nothing


class CCO(SecondMomentObjective):
    """Matching components of F and G correlate, others do not.

    >>> cco = CCO(CCO.Params("cco"))
    >>> f = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
    >>> cco.loss(EncodedBatch((f, f)))
    tensor(0.)
    """

    @dataclass(frozen=True)
    class Params(BoundedParams):
        """Keys of CCO."""

        lambda_: float = key(
            20.0, ge=0, help="λ, the weight of the decorrelation term (20 in the DCCO paper)."
        )

    params: Params

    def loss_of(self, moments: Moments, centre: Centre) -> Tensor:
        """Return the loss of Eq. 1."""
        c = correlation(moments)
        diagonal = torch.diagonal(c)
        off = off_diagonal_square(c) / max(1, len(diagonal) - 1)
        return (1 - diagonal).square().sum() + self.params.lambda_ * off


def correlation(moments: Moments) -> Tensor:
    """Return C of Eq. 2, which does not depend on the scale of the encodings.

    A component that is constant beside the others correlates with nothing.
    """
    f, g = moments["f"], moments["g"]
    covariance = moments["fg"] - torch.outer(f, g)
    inverse_f = _inverse_deviation(f, moments["f2"])
    inverse_g = _inverse_deviation(g, moments["g2"])
    return covariance * inverse_f[:, None] * inverse_g


def _inverse_deviation(mean: Tensor, mean_square: Tensor) -> Tensor:
    variance = mean_square - mean.square()
    floor = RELATIVE_FLOOR * variance.detach().clamp_min(0).mean()
    return variance.clamp_min(floor.clamp_min(SMALLEST)).rsqrt()
