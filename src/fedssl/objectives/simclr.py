"""The contrastive loss of SimCLR (Chen et al. 2020): NT-Xent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.objectives.base import Dual, Memory, ProjectorParams
from fedssl.util.errors import UserError

PRESETS = {"dcco": ((256, 256, 128), 0.1), "fedema": ((4096, 2048), 0.07)}


class SimCLR(Dual):
    """Each encoding picks its partner out of all others of its own client's batch."""

    minimum = 2

    @dataclass(frozen=True)
    class Params(ProjectorParams):
        """``preset``: the DCCO paper's head and temperature (section 4.3), or FedEMA's (B.2)."""

        preset: Literal["dcco", "fedema"] = "dcco"
        projector: tuple[int, ...] = ()  # none given: the preset's
        temperature: float | None = None  # likewise

        def __post_init__(self) -> None:
            projector, temperature = PRESETS[self.preset]
            object.__setattr__(self, "projector", self.projector or projector)
            if self.temperature is None:
                object.__setattr__(self, "temperature", temperature)
            super().__post_init__()
            if not self.temperature:
                raise UserError(f"objective.temperature={self.temperature}: must be above 0")

    params: Params

    @property
    def temperature(self) -> float:
        """As given, or the preset's."""
        assert self.params.temperature is not None
        return self.params.temperature

    def loss(
        self, encodings: tuple[Tensor, ...], labels: Tensor | None, memory: Memory | None = None
    ) -> Tensor:
        """NT-Xent of the batch alone."""
        return self.contrast(encodings)

    def contrast(self, encodings: tuple[Tensor, ...], negatives: Tensor | None = None) -> Tensor:
        """The mean over both directions of −log softmax of the partner's similarity.

        ``negatives`` (of length 1) are to every encoding what the others of the batch are.
        """
        z = F.normalize(torch.cat(encodings), dim=1)
        similarity = z @ z.T / self.temperature
        own = torch.eye(len(z), dtype=torch.bool, device=z.device)
        others = similarity.masked_fill(own, -torch.inf)
        if negatives is not None:
            others = torch.cat((others, z @ negatives.T / self.temperature), dim=1)
        partner = torch.diagonal(similarity.roll(len(encodings[0]), dims=0))
        return (torch.logsumexp(others, dim=1) - partner).mean()
