"""Siamese objectives (FedEMA paper, section 3.2 and Figure 8).

Both views go through an online network, and are compared with the targets of a target network. The
loss of a batch gets four encodings: the online network's of both views, then the targets of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from fedssl.config import Recipe, key
from fedssl.models.network import Backbone, Heads, mlp
from fedssl.models.norms import Norm
from fedssl.objectives.base import (
    WIDEST,
    Encodings,
    Networks,
    ProjectorObjective,
    ProjectorParams,
    projector_key,
)
from fedssl.util.errors import UserError


@dataclass(frozen=True)
class PredictorParams(ProjectorParams):
    """Keys of SimSiam and BYOL; the defaults are the FedEMA paper's (appendix B.2)."""

    # Without batch norm the encodings of small batches tend to become equal.
    recommended: ClassVar[Recipe] = {
        **ProjectorParams.recommended,
        "encoder": {"norm": "batch"},
    }

    projector: tuple[int, ...] = projector_key(4096, 2048)
    predictor: tuple[int, ...] | Literal["off"] | None = key(
        None,
        ge=1,
        le=WIDEST,
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


class Siamese(ProjectorObjective):
    """An objective that compares both views with targets.

    Without a target network the targets are the network's own projections.
    """

    def encode(
        self, networks: Networks, views: tuple[Tensor, ...], state: Tensor | None
    ) -> Encodings:
        """Return both views' predictions, then both views' targets."""
        projections = networks.online(views)
        predictions = networks.online.predict(projections)
        targets = projections if networks.target is None else networks.target(views)
        return predictions + targets


class Predictive(Siamese):
    """A Siamese objective whose online network predicts the targets."""

    Params: ClassVar[type[ProjectorParams]] = PredictorParams
    params: PredictorParams

    def heads(self, encoder: Backbone, norm: Norm, classes: int) -> Heads:
        """Return the projector, and the predictor (appendix B.2)."""
        heads = super().heads(encoder, norm, classes)
        widths = self.params.predictor or self.params.projector
        if widths == "off":
            return heads
        return heads._replace(predictor=mlp(self.params.projector[-1], widths, norm))


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean cosine of matching rows."""
    return F.cosine_similarity(a, b, dim=1).mean()
