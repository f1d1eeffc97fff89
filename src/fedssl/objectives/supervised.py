"""Cross-entropy with labels, the comparison in every table of the papers."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.config import ObjectiveParams
from fedssl.models.network import Backbone, Heads
from fedssl.models.norms import Norm
from fedssl.objectives.base import Encodings, Objective
from fedssl.objectives.memory import Tensors


class Supervised(Objective):
    """A linear classifier on the encoder, trained with it."""

    views = 1
    needs_labels = True

    @dataclass(frozen=True)
    class Params(ObjectiveParams):
        """No keys of its own."""

    def heads(self, encoder: Backbone, norm: Norm, classes: int) -> Heads:
        """Return the classifier."""
        return Heads(nn.Linear(encoder.features, classes))

    def loss(
        self, encodings: Encodings, labels: Tensor | None, memory: Tensors | None = None
    ) -> Tensor:
        """Return the mean cross-entropy."""
        assert labels is not None
        return F.cross_entropy(encodings[0], labels)
