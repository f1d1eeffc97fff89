"""Rotation prediction (Gidaris et al. 2018): tell which of four ways an image was turned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.models.network import Backbone, Heads
from fedssl.models.norms import Norm
from fedssl.objectives.base import Encodings, Networks, Objective
from fedssl.objectives.batch import EncodedBatch

ROTATIONS = 4  # by 0, 90, 180 and 270 degrees, counter-clockwise


class Rotation(Objective):
    """A linear classifier of the rotation; all four rotations are one batch (section 3).

    The view is turned after its augmentation. An augmentation that turns images far
    (``augment.rotate``) makes the task impossible.
    """

    views = 1
    joint = True

    def heads(self, encoder: Backbone, norm: Norm, classes: int) -> Heads:
        """Return the classifier of rotations."""
        return Heads(nn.Linear(encoder.features, ROTATIONS))

    def encode(
        self, networks: Networks, views: tuple[Tensor, ...], state: Tensor | None
    ) -> Encodings:
        """Return the logits of the view, and of the view turned once, twice and three times.

        Its shape must not give the rotation away, so that only its central square is turned.
        """
        height, width = views[0].shape[2:]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        square = views[0][:, :, top : top + side, left : left + side]
        return networks.online(
            tuple(torch.rot90(square, turns, (2, 3)) for turns in range(ROTATIONS))
        )

    def loss(self, batch: EncodedBatch) -> Tensor:
        """Return the mean cross-entropy over images and their rotations (section 3.1)."""
        logits = torch.cat(batch.encodings)
        turns = torch.arange(ROTATIONS, device=logits.device)
        return F.cross_entropy(logits, turns.repeat_interleave(len(batch.encodings[0])))
