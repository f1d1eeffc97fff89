"""What the Siamese methods share (FedEMA paper, section 3.2 and Figure 8).

Two views go through an online network; what they are compared with comes from a target network. The
loss of a batch sees four encodings: the online network's of both views, then the targets' of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.config import key
from fedssl.models.network import mlp
from fedssl.models.norms import Norm
from fedssl.objectives.base import Dual, ProjectorParams
from fedssl.util.errors import UserError


@dataclass(frozen=True)
class PredictorParams(ProjectorParams):
    """Keys of SimSiam and BYOL; the defaults are the FedEMA paper's (appendix B.2)."""

    projector: tuple[int, ...] = key(
        (4096, 2048), ge=1, nonempty=True, help="Widths of the projector's layers."
    )
    predictor: tuple[int, ...] | Literal["off"] | None = key(
        None,
        ge=1,
        nonempty=True,
        help="Widths of the predictor's layers. `off`: no predictor (FedEMA, Figure 2). `null`: as "
        "`objective.projector`.",
    )
    stop_gradient: bool = key(
        True, help="Treat targets as constants. `false`: the ablation of FedEMA, Figure 2."
    )

    def __post_init__(self) -> None:
        if isinstance(self.predictor, tuple) and self.predictor[-1] != self.projector[-1]:
            raise UserError(
                "does not end with the width of the projector, whose outputs it predicts",
                key="objective.predictor",
                value=self.predictor,
                fix=f"Let it end with {self.projector[-1]}.",
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
