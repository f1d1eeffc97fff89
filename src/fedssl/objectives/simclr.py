"""The contrastive loss of SimCLR (Chen et al. 2020): NT-Xent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.errors import UserError
from fedssl.objectives.base import Dual, Memory, ProjectorParams


class SimCLR(Dual):
    """Each encoding picks its partner out of all others of its own client's batch."""

    minimum = 2

    @dataclass(frozen=True)
    class Params(ProjectorParams):
        """Temperature 0.1 as in the DCCO paper, section 4.3."""

        projector: tuple[int, ...] = (256, 256, 128)
        temperature: float = 0.1

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.temperature <= 0:
                raise UserError(f"objective.temperature={self.temperature}: must be above 0")

    params: Params

    def loss(
        self, encodings: tuple[Tensor, ...], labels: Tensor | None, memory: Memory | None = None
    ) -> Tensor:
        """The mean over both directions of −log softmax of the partner's similarity."""
        z = F.normalize(torch.cat(encodings), dim=1)
        similarity = z @ z.T / self.params.temperature
        own = torch.eye(len(z), dtype=torch.bool, device=z.device)
        others = torch.logsumexp(similarity.masked_fill(own, -torch.inf), dim=1)
        partner = torch.diagonal(similarity.roll(len(encodings[0]), dims=0))
        return (others - partner).mean()
