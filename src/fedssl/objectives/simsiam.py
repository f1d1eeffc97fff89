"""SimSiam (Chen and He 2021): the network is its own target."""

from __future__ import annotations

from torch import Tensor

from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.siamese import Predictive, PredictorParams, cosine


class SimSiam(Predictive):
    """Predict the other view's projection, which is a constant to the gradient (Algorithm 1)."""

    Params = PredictorParams

    def loss(self, batch: EncodedBatch) -> Tensor:
        """Return minus the mean cosine over both directions."""
        p1, p2, z1, z2 = batch.encodings
        if self.params.stop_gradient:
            z1, z2 = z1.detach(), z2.detach()
        return -(cosine(p1, z2) + cosine(p2, z1)) / 2
