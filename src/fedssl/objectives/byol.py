"""BYOL (Grill et al. 2020): the target network follows the online one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedssl.objectives.base import Memory, check_momentum
from fedssl.objectives.siamese import Predictive, PredictorParams, cosine


class BYOL(Predictive):
    """Predict the target network's projection of the other view (Eq. 5 of the second paper)."""

    @dataclass(frozen=True)
    class Params(PredictorParams):
        """``momentum`` of the target; at 1 it never follows: the paper's "without EMA"."""

        momentum: float = 0.99

        def __post_init__(self) -> None:
            super().__post_init__()
            check_momentum(self.momentum)

    params: Params

    @property
    def momentum(self) -> float:
        """m of FedEMA's Algorithm 1, line 22."""
        return self.params.momentum

    def loss(
        self, encodings: tuple[Tensor, ...], labels: Tensor | None, memory: Memory | None = None
    ) -> Tensor:
        """The sum of both directions' 2 − 2 cos."""
        p1, p2, t1, t2 = encodings
        return 4 - 2 * (cosine(p1, t2) + cosine(p2, t1))
