"""Predicting rotations (Gidaris et al. 2018): which of four ways was the image turned?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.config import ObjectiveParams
from fedssl.models.norms import Norm
from fedssl.objectives.base import Objective
from fedssl.objectives.batch import Memory
from fedssl.util.errors import UserError

ROTATIONS = 4  # by 0, 90, 180 and 270 degrees, counter-clockwise


class Rotation(Objective):
    """A linear classifier on the encoder names the rotation; all four are one batch (section 3).

    The view is turned after its augmentation. One that itself turns images far (``augment.rotate``)
    leaves nothing to tell.
    """

    inputs = 1
    joint = True

    @dataclass(frozen=True)
    class Params(ObjectiveParams):
        """No keys of its own."""

    def check_images(self, height: int, width: int) -> None:
        """Turned by 90 degrees, an image must keep its shape."""
        if height != width:
            raise UserError(
                f"objective.name={self.params.name}: turns images by 90 degrees, and these have "
                f"{height} by {width} pixels; use square images (data.size, data.halves=false)"
            )

    def present(self, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The view as it is, and turned once, twice and three times (section 3.2)."""
        return tuple(torch.rot90(views[0], turns, (2, 3)) for turns in range(ROTATIONS))

    def head(self, features: int, norm: Norm, classes: int) -> nn.Module:
        """The classifier of rotations."""
        return nn.Linear(features, ROTATIONS)

    def loss(
        self, encodings: tuple[Tensor, ...], labels: Tensor | None, memory: Memory | None = None
    ) -> Tensor:
        """The mean cross-entropy over images and their rotations (section 3.1)."""
        turns = torch.arange(ROTATIONS, device=encodings[0].device)
        return F.cross_entropy(torch.cat(encodings), turns.repeat_interleave(len(encodings[0])))
