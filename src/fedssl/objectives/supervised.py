"""Cross-entropy with labels: the comparison that every table of the papers has."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.config import ObjectiveParams
from fedssl.models.norms import Norm
from fedssl.objectives.base import Objective
from fedssl.objectives.batch import Memory


class Supervised(Objective):
    """A linear classifier on the encoder, trained with it."""

    inputs = 1
    needs_labels = True

    @dataclass(frozen=True)
    class Params(ObjectiveParams):
        """No keys of its own."""

    def head(self, features: int, norm: Norm, classes: int) -> nn.Module:
        """The classifier."""
        return nn.Linear(features, classes)

    def loss(
        self, encodings: tuple[Tensor, ...], labels: Tensor | None, memory: Memory | None = None
    ) -> Tensor:
        """The mean cross-entropy."""
        assert labels is not None
        return F.cross_entropy(encodings[0], labels)
