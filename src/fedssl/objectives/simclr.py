"""The contrastive loss of SimCLR (Chen et al. 2020): NT-Xent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.config import ObjectiveParams, key
from fedssl.objectives.base import WIDEST, Encodings, ProjectorObjective, ProjectorParams
from fedssl.objectives.batch import EncodedBatch

PRESETS = {"dcco": ((256, 256, 128), 0.1), "fedema": ((4096, 2048), 0.07)}


class SimCLR(ProjectorObjective):
    """Each encoding must pick its partner among all others of its client's batch."""

    min_samples = 2

    @dataclass(frozen=True)
    class Params(ProjectorParams):
        """Keys of SimCLR."""

        preset: Literal["dcco", "fedema"] = key(
            "dcco",
            help="Projector and temperature of the DCCO paper (section 4.3) or of FedEMA (B.2).",
        )
        projector: tuple[int, ...] = key(
            (), ge=1, le=WIDEST, help="Widths of the projector's layers. `[]`: as the preset says."
        )
        temperature: float | None = key(None, gt=0, help="Temperature. `null`: as the preset says.")
        joint: bool = key(
            False,
            help="Batch normalization takes both views as one batch, as in FedEMA's program. "
            "`false`: each view has its own statistics.",
        )

        def __post_init__(self) -> None:
            projector, temperature = PRESETS[self.preset]
            object.__setattr__(self, "projector", self.projector or projector)
            if self.temperature is None:
                object.__setattr__(self, "temperature", temperature)

    params: Params

    def __init__(self, params: ObjectiveParams) -> None:
        super().__init__(params)
        self.joint = self.params.joint

    @property
    def temperature(self) -> float:
        """The temperature, from the key or the preset."""
        assert self.params.temperature is not None
        return self.params.temperature

    def loss(self, batch: EncodedBatch) -> Tensor:
        """Return NT-Xent of the batch alone."""
        return self.contrast(batch.encodings)

    def contrast(self, encodings: Encodings, negatives: Tensor | None = None) -> Tensor:
        """Return the mean over both directions of −log softmax of the partner's similarity.

        ``negatives`` (of length 1) count for every encoding like the others of the batch.
        """
        z = F.normalize(torch.cat(encodings), dim=1)
        similarity = z @ z.T / self.temperature
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        others = similarity.masked_fill(itself, -torch.inf)
        if negatives is not None:
            others = torch.cat((others, z @ negatives.T / self.temperature), dim=1)
        partner = torch.diagonal(similarity.roll(len(encodings[0]), dims=0))
        return (torch.logsumexp(others, dim=1) - partner).mean()
