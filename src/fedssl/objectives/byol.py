"""BYOL (Grill et al. 2020): the target network follows the online one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedssl.config import key
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.memory import Memory, Target
from fedssl.objectives.siamese import Predictive, PredictorParams, cosine


class BYOL(Predictive):
    """Predict the target network's projection of the other view (Eq. 5 of the second paper)."""

    @dataclass(frozen=True)
    class Params(PredictorParams):
        """Keys of BYOL."""

        momentum: float = key(
            0.99,
            ge=0,
            le=1,
            help="Share of its weights that the target network keeps in a step. 1: it never "
            "changes (FedEMA, without EMA).",
        )

    params: Params

    @property
    def memory(self) -> Memory:
        """The target network; its momentum is m of FedEMA's Algorithm 1, line 22."""
        return Memory(Target(self.params.momentum, learns=not self.params.stop_gradient))

    def loss(self, batch: EncodedBatch) -> Tensor:
        """Return the sum of both directions' 2 − 2 cos."""
        p1, p2, t1, t2 = batch.encodings
        return 4 - 2 * (cosine(p1, t2) + cosine(p2, t1))
