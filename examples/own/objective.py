"""Two views of an image are to have the same direction, and different images different ones."""

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from fedssl.config import key
from fedssl.objectives.base import ProjectorObjective, ProjectorParams
from fedssl.objectives.batch import EncodedBatch


class Uniform(ProjectorObjective):
    """Alignment and uniformity on the sphere (Wang and Isola 2020)."""

    min_samples = 2  # the smallest batch that the loss is defined for

    @dataclass(frozen=True)
    class Params(ProjectorParams):
        """Keys of this objective, beside those of every objective with a projector."""

        weight: float = key(1.0, ge=0, help="Weight of uniformity beside alignment.")

    def loss(self, batch: EncodedBatch) -> torch.Tensor:
        """Return a pure function of the batch's encodings, one tensor [N, d] for each view."""
        f, g = (normalize(e, dim=1) for e in batch.encodings)
        n = len(f)
        # Of two unit vectors |a - b|² is 2 - 2ab, and each is at distance 0 from itself.
        close = [((4 * e @ e.T - 4).exp().sum() - n) / (n * n - n) for e in (f, g)]
        apart = torch.stack(close).log().mean()
        return (f - g).square().sum(1).mean() + self.params.weight * apart
