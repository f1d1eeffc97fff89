"""What the Siamese methods share (FedEMA paper, section 3.2 and Figure 8).

Two views go through an online network; what they are compared with comes from a target network. The
loss of a batch sees four encodings: the online network's of both views, then the targets' of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.models.network import mlp
from fedssl.models.norms import Norm
from fedssl.objectives.base import Dual, ProjectorParams
from fedssl.util.errors import UserError


@dataclass(frozen=True)
class PredictorParams(ProjectorParams):
    """Keys of SimSiam and BYOL; the defaults are the FedEMA paper's (appendix B.2).

    The predictor has the projector's widths unless it is given its own. ``predictor=off`` and
    ``stop_gradient=false`` are the ablations of its Figure 2.
    """

    projector: tuple[int, ...] = (4096, 2048)
    predictor: tuple[int, ...] | Literal["off"] | None = None
    stop_gradient: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.predictor is None or self.predictor == "off":
            return
        if not self.predictor or min(self.predictor) < 1:
            raise UserError(
                f"objective.predictor={list(self.predictor)}: expected the widths of its layers, "
                "as in [4096, 2048], or off"
            )
        if self.predictor[-1] != self.projector[-1]:
            raise UserError(
                f"objective.predictor={list(self.predictor)}: predicts what the projector gives, "
                f"so it must end with {self.projector[-1]}, as objective.projector does"
            )


class Predictive(Dual):
    """A predictor on the online network tells the target's encoding of the other view."""

    siamese = True
    Params: ClassVar[type[ProjectorParams]] = PredictorParams
    params: PredictorParams

    @property
    def stop_gradient(self) -> bool:
        """Whether targets are constants."""
        return self.params.stop_gradient

    def predictor(self, norm: Norm) -> nn.Module | None:
        """Appendix B.2."""
        widths = self.params.predictor
        if widths == "off":
            return None
        return mlp(self.params.projector[-1], widths or self.params.projector, norm)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """The mean cosine of matching rows."""
    return F.cosine_similarity(a, b, dim=1).mean()
