"""An own loss that is a function of means, whose statistics DCCO's clients share."""

import torch
from torch.nn.functional import normalize

from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.moments import Centre, MomentObjective, Moments


class CodingRate(MomentObjective):
    """Encodings of length 1 in all directions, and views that agree (EMP-SSL, Tong et al. 2023)."""

    moments_bound = 1.0  # L2 norm of what a client shares, so that privacy.noise may be used

    def moments(self, batch: EncodedBatch, centre: Centre) -> Moments:
        """Return what clients share: means over images."""
        f, g = (normalize(views, dim=1) for views in batch.encodings)
        return {"zz": (f.T @ f + g.T @ g) / (2 * len(f))}

    def loss_of(self, moments: Moments, centre: Centre) -> torch.Tensor:
        """Return minus the coding rate, a function of these means."""
        zz = moments["zz"]
        return -torch.logdet(torch.eye(len(zz)).to(zz) + len(zz) / 0.2 * zz) / 2

    def separate_loss(self, batch: EncodedBatch) -> torch.Tensor:
        """Return the rest of the loss, itself a mean over images, which nobody needs to share."""
        f, g = (normalize(views, dim=1) for views in batch.encodings)
        return -20 * (f * g).sum(1).mean()
