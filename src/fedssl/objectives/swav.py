"""SwAV (Caron et al. 2020): predict a view's cluster from the other view."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.config import key
from fedssl.models.network import Backbone, Heads
from fedssl.models.norms import Norm
from fedssl.objectives.base import (
    Encodings,
    Networks,
    ProjectorObjective,
    ProjectorParams,
    projector_key,
)
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.memory import Memory, Queue


class SwAV(ProjectorObjective):
    """Swapped prediction: each view's code is the target of the others' (section 3).

    Small views (multi-crop, section 3.2, ``augment.small``) predict the codes of both views and
    have none. All views of one size are one batch to batch norm, as in the paper's pseudo-code
    (A.1). Prototypes are averaged like any other layer; queues stay with their client. Our reading:
    prototypes are scaled to length 1 inside the step, so that gradients know of it, where the paper
    does so between steps; and two towers have prototypes of their own, which the swapped prediction
    aligns.
    """

    min_samples = 2
    joint = True
    takes_small = True

    @dataclass(frozen=True)
    class Params(ProjectorParams):
        """Keys of SwAV.

        Temperature, ε and iterations are SwAV's; the projector ends as in the CCL paper (section
        6). Our reading: its hidden layer, and K, 3 times the classes of CIFAR-100, as SwAV has 3000
        for ImageNet. A loss that stays at log K means that all samples have the same code. Then
        lower ``objective.epsilon``, for example to 0.02, or ``client.lr``.
        """

        projector: tuple[int, ...] = projector_key(512, 128)
        prototypes: tuple[int, ...] = key(
            (300,),
            ge=2,
            le=1_000_000,
            nonempty=True,
            help="K, the number of prototypes of each set. The loss is the mean over sets.",
        )
        temperature: float = key(0.1, gt=0, help="Temperature of the softmax over prototypes.")
        epsilon: float = key(
            0.05, gt=0, help="ε: larger values spread an image over more prototypes."
        )
        iterations: int = key(
            3, ge=1, le=1000, help="Sinkhorn iterations, which balance the prototypes."
        )
        queue: int = key(
            0,
            ge=0,
            le=1_000_000,
            help="Earlier projections of each view that codes are computed with, for batches much "
            "smaller than K. 0: none.",
        )

    params: Params

    def heads(self, encoder: Backbone, norm: Norm, classes: int) -> Heads:
        """Return the projector, and the prototypes of all sets as predictor."""
        width, count = self.params.projector[-1], sum(self.params.prototypes)
        prototypes = Prototypes(width, count, bias=False)
        return super().heads(encoder, norm, classes)._replace(predictor=prototypes)

    @property
    def memory(self) -> Memory:
        """A queue for each view."""
        if not self.params.queue:
            return Memory()
        return Queue(self.params.queue, self.params.projector[-1], per_view=True)

    def encode(
        self, networks: Networks, views: tuple[Tensor, ...], state: Tensor | None
    ) -> Encodings:
        """Return the scores of all views and of the queues, then both views' projections."""
        projections = networks.online(views)
        queues = networks.memory["queue"].unbind() if networks.memory else ()
        return networks.online.predict(projections + queues) + projections[:2]

    def loss(self, batch: EncodedBatch) -> Tensor:
        """Return the mean cross-entropy of each view's code and the other views' scores.

        This is Eq. 2, or with small views that of section 3.2, averaged over sets of prototypes.
        """
        full = batch.memory["seen"] >= self.params.queue if batch.memory else None
        count = len(batch.encodings) - (4 if batch.memory else 2)
        scores = (e.split(self.params.prototypes, dim=1) for e in batch.encodings[:-2])
        losses = []
        for each in zip(*scores, strict=True):
            views, queues = each[:count], list(each[count:])
            for k, queue in ((1, queues[1:]), (0, queues[:1])):
                code = self.codes(views[k], queue, full)
                losses += [self._cross_entropy(v, code) for i, v in enumerate(views) if i != k]
        return torch.stack(losses).mean()

    def codes(self, scores: Tensor, queue: list[Tensor], full: Tensor | None) -> Tensor:
        """Return the batch's codes, balanced over batch and queue together if that is full."""
        rows, counts = torch.cat((scores, *queue)), None
        if full is not None:
            # No branch on its value: the host would wait for it, and a compiled step would break.
            counts = full | (torch.arange(len(rows), device=rows.device) < len(scores))
        return sinkhorn(rows, self.params.epsilon, self.params.iterations, counts)[: len(scores)]

    def _cross_entropy(self, scores: Tensor, code: Tensor) -> Tensor:
        return -(code * F.log_softmax(scores / self.params.temperature, dim=1)).sum(1).mean()


class Prototypes(nn.Linear):
    """The scores zᵀc: cosines of projections with each prototype (section 3.1)."""

    def forward(self, projections: Tensor) -> Tensor:
        """Compute in float32 at least: codes magnify bfloat16's rounding by 1/ε."""
        with torch.autocast(projections.device.type, enabled=False):
            z = F.normalize(projections.to(self.weight.dtype), dim=1)
            return F.linear(z, F.normalize(self.weight, dim=1))


@torch.no_grad()
def sinkhorn(
    scores: Tensor, epsilon: float, iterations: int, counts: Tensor | None = None
) -> Tensor:
    """Return the codes Q* of Eq. 5: each sample's sum to 1, prototypes get nearly equal shares.

    Samples outside ``counts`` are left out. In logarithms, since exp(1/ε) soon overflows.
    """
    logs = scores / epsilon
    for _ in range(iterations):
        counted = logs if counts is None else logs.masked_fill(~counts[:, None], -torch.inf)
        logs = logs - torch.logsumexp(counted, dim=0, keepdim=True)
        logs = logs - torch.logsumexp(logs, dim=1, keepdim=True)
    return logs.exp()
