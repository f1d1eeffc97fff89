"""Cross-entropy with labels, the comparison in every table of the papers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.models.network import Backbone, Heads
from fedssl.models.norms import Norm
from fedssl.objectives.base import Objective
from fedssl.objectives.batch import EncodedBatch


class Supervised(Objective):
    """A linear classifier on the encoder, trained with it."""

    views = 1
    needs_labels = True

    def heads(self, encoder: Backbone, norm: Norm, classes: int) -> Heads:
        """Return the classifier."""
        return Heads(nn.Linear(encoder.features, classes))

    def loss(self, batch: EncodedBatch) -> Tensor:
        """Return the mean cross-entropy."""
        assert batch.labels is not None
        return F.cross_entropy(batch.encodings[0], batch.labels)
