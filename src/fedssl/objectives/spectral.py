"""The spectral contrastive loss (HaoChen et al. 2021) as a function of means over samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fedssl.config import key
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.moments import (
    BoundedParams,
    Centre,
    MomentObjective,
    Moments,
    scale_down,
)


class Spectral(MomentObjective):
    """Two views of an image have a large product, and different images a small squared product.

    The mean of squared products over all pairs of images is ‖R‖², where R = ⟨F Fᵀ + G Gᵀ⟩ / 2 is
    the correlation matrix of the encodings. So the loss is −2 ⟨F · G⟩ + ‖R‖².
    """

    @dataclass(frozen=True)
    class Params(BoundedParams):
        """Keys of the spectral contrastive loss."""

        bound: float | None = key(
            math.sqrt(2),
            gt=0,
            kw_only=True,
            help="Largest L2 norm of an encoding, √μ in the FedSC paper; longer ones are scaled "
            "down. `null`: no limit.",
        )

    params: Params

    def moments(self, batch: EncodedBatch, centre: Centre) -> Moments:
        """Return the correlation matrix R."""
        f, g = (scale_down(encodings, self.params.bound) for encodings in batch.encodings)
        return {"r": (f.T @ f + g.T @ g) / (2 * len(f))}

    def loss_of(self, moments: Moments, centre: Centre) -> Tensor:
        """Return ‖R‖²."""
        return moments["r"].square().sum()

    def separate_loss(self, batch: EncodedBatch) -> Tensor:
        """Return −2 ⟨F · G⟩."""
        f, g = (scale_down(encodings, self.params.bound) for encodings in batch.encodings)
        return -2 * (f * g).sum(1).mean()

    @property
    def moments_bound(self) -> float | None:
        """B², since F Fᵀ and G Gᵀ of an image have at most this norm (Frobenius)."""
        return None if self.params.bound is None else self.params.bound**2

    @property
    def few_images(self) -> int:
        """Images up to which R can reveal each encoding: it has d (d + 1) / 2 different numbers."""
        return (self.params.projector[-1] + 1) // 4
