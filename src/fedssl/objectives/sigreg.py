"""SIGReg, the loss of LeJEPA (Balestriero and LeCun 2025), as a function of means over samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.config import key
from fedssl.data.random import mix, normal
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.moments import Centre, MomentObjective, MomentParams, Moments

# The trapezoidal rule with 17 knots on [−5, 5] (LeJEPA, section 6.1) is symmetric, and at t = 0
# every characteristic function is 1. So the knots above 0 are enough, each with twice its weight.
SPACING = 5.0 / 8
KNOTS = tuple(SPACING * k for k in range(1, 9))
NORMAL = tuple(math.exp(-t * t / 2) for t in KNOTS)  # the characteristic function of N(0, 1)
WEIGHTS = (*(2 * SPACING * w for w in NORMAL[:-1]), SPACING * NORMAL[-1])
# Moments are scaled by ⁴√w: noise that is equal on all of them then changes the loss least.
SCALES = tuple(w**0.25 for w in WEIGHTS)


class SIGReg(MomentObjective):
    """Encodings follow the standard normal distribution, and the views of an image agree.

    The Epps-Pulley statistic compares the empirical characteristic function ⟨exp(i t a·z)⟩ with
    that of the standard normal on random unit vectors a, the slices. These are drawn anew in every
    round, the same for all clients. Small views (``augment.small``) are compared with the mean of
    the first two and have a statistic of their own.
    """

    takes_small = True
    draws = True

    @dataclass(frozen=True)
    class Params(MomentParams):
        """Keys of SIGReg."""

        lambda_: float = key(
            0.05, ge=0, le=1, help="λ, the weight of normality; 1 − λ is that of agreeing views."
        )
        slices: int = key(
            1024,
            ge=1,
            help="Number of random directions. A client of DCCO sends 16 numbers for each of them "
            "and each view.",
        )
        samples: int = key(
            128,
            ge=1,
            help="N, the factor of the Epps-Pulley statistic. It is a constant, because clients do "
            "not know how many images a round has.",
        )

    params: Params

    def moments(self, batch: EncodedBatch, centre: Centre) -> Moments:
        """Return the characteristic functions on the slices, of each view."""
        slices = self.slices(batch)
        knots = slices.new_tensor(KNOTS)
        scales = slices.new_tensor(SCALES) / math.sqrt(len(batch.encodings) * self.params.slices)
        waves = []
        for encodings in batch.encodings:
            angles = (encodings @ slices)[:, :, None] * knots
            waves.append(torch.stack((angles.cos().mean(0), angles.sin().mean(0))))
        return {"cf": torch.stack(waves) * scales}

    def loss_of(self, moments: Moments, centre: Centre) -> Tensor:
        """Return λ N ∫ |⟨exp(i t a·z)⟩ − exp(−t²/2)|² exp(−t²/2) dt, averaged over a and views."""
        cf = moments["cf"]
        scales = cf.new_tensor(SCALES) / math.sqrt(len(cf) * self.params.slices)
        target = torch.stack((scales * cf.new_tensor(NORMAL), torch.zeros_like(scales)))
        difference = (cf - target[:, None]).square() @ cf.new_tensor(WEIGHTS).sqrt()
        return self.params.lambda_ * self.params.samples * difference.sum()

    def separate_loss(self, batch: EncodedBatch) -> Tensor:
        """Return (1 − λ) times the mean squared distance to the mean of the first two views."""
        views = torch.stack(batch.encodings)
        distance = F.mse_loss(views, views[: self.views].mean(0).expand_as(views))
        return (1 - self.params.lambda_) * distance

    def slices(self, batch: EncodedBatch) -> Tensor:
        """Return the round's unit vectors, one per column."""
        one = batch.encodings[0]
        rows = torch.arange(one.shape[1], device=one.device)
        state = rows if batch.draw is None else mix(batch.draw, rows)
        drawn = normal(state, self.params.slices)
        return F.normalize(drawn.to(one.dtype), dim=0)

    @property
    def moments_bound(self) -> float:
        """√Σ√w: for one sample cos² + sin² = 1 at each knot, and scales² sum up to Σ√w."""
        return math.sqrt(math.fsum(scale**2 for scale in SCALES))

    @property
    def few_images(self) -> int:
        """Images up to which the moments can reveal each encoding.

        With fewer slices than components they reveal its projections.
        """
        width = self.params.projector[-1]
        return 2 * len(KNOTS) * max(self.params.slices, width) // width
