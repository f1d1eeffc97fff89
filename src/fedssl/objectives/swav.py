"""SwAV (Caron et al. 2020): a view's cluster is told from the other view."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.config import key
from fedssl.models.norms import Norm
from fedssl.objectives.base import Dual, ProjectorParams
from fedssl.objectives.batch import Memory


class SwAV(Dual):
    """Swapped prediction: each view's code is the target of the other's (section 3).

    Both views are one batch to batch norm, as in the paper's pseudo-code (A.1). Prototypes are
    averaged like any other layer; queues stay with their client. Our reading: prototypes are scaled
    to length 1 inside the step, so that gradients know of it, where the paper does so between
    steps; and two towers have prototypes of their own, which the swapped prediction aligns.
    """

    minimum = 2
    siamese = True
    joint = True

    @dataclass(frozen=True)
    class Params(ProjectorParams):
        """Keys of SwAV.

        Temperature, ε and iterations are SwAV's; the projector ends as in the CCL paper (section
        6). Our reading: its hidden layer, and K, 3 times the classes of CIFAR-100, as SwAV has 3000
        for ImageNet. A loss that stays at log K means that all samples have the same code. Then
        lower ``objective.epsilon``, for example to 0.02, or ``client.lr``.
        """

        projector: tuple[int, ...] = key(
            (512, 128), ge=1, nonempty=True, help="Widths of the projector's layers."
        )
        prototypes: tuple[int, ...] = key(
            (300,),
            ge=2,
            nonempty=True,
            help="K, the number of prototypes of each set. The loss is the mean over sets.",
        )
        temperature: float = key(0.1, gt=0, help="Temperature.")
        epsilon: float = key(0.05, gt=0, help="ε, the smoothness of the codes.")
        iterations: int = key(3, ge=1, help="Sinkhorn iterations.")
        queue: int = key(
            0,
            ge=0,
            help="Earlier projections of each view that codes are computed with, for batches much "
            "smaller than K. 0: none.",
        )

    params: Params

    def predictor(self, norm: Norm) -> nn.Module:
        """The prototypes of all sets."""
        return Prototypes(self.params.projector[-1], sum(self.params.prototypes), bias=False)

    def memory(self, like: Tensor) -> Memory:
        """An empty queue for each view; ``seen`` counts the samples that ever entered."""
        if not self.params.queue:
            return {}
        return {
            "queue": like.new_zeros(2, self.params.queue, self.params.projector[-1]),
            "seen": torch.zeros((), dtype=torch.int64, device=like.device),
        }

    def recall(self, memory: Memory) -> tuple[Tensor, ...]:
        """The queues, to be scored by the prototypes as they are now."""
        return memory["queue"].unbind() if memory else ()

    def loss(
        self, encodings: tuple[Tensor, ...], labels: Tensor | None, memory: Memory | None = None
    ) -> Tensor:
        """The mean over views and sets of prototypes of the cross-entropy of Eq. 2."""
        full = memory["seen"] >= self.params.queue if memory else None
        sets = zip(*(e.split(self.params.prototypes, dim=1) for e in encodings[:-2]), strict=True)
        losses = []
        for first, second, *queues in sets:
            code1, code2 = self.codes(first, queues[:1], full), self.codes(second, queues[1:], full)
            losses += [self._told(first, code2), self._told(second, code1)]
        return torch.stack(losses).mean()

    def codes(self, scores: Tensor, queue: list[Tensor], full: Tensor | None) -> Tensor:
        """The batch's codes, balanced over batch and queue together if that is full."""
        rows, counts = torch.cat((scores, *queue)), None
        if full is not None:
            # Not a branch on what it holds: the host would wait for it, and a compiled step break.
            counts = full | (torch.arange(len(rows), device=rows.device) < len(scores))
        return sinkhorn(rows, self.params.epsilon, self.params.iterations, counts)[: len(scores)]

    def _told(self, scores: Tensor, code: Tensor) -> Tensor:
        return -(code * F.log_softmax(scores / self.params.temperature, dim=1)).sum(1).mean()

    def remember(self, memory: Memory, encodings: tuple[Tensor, ...]) -> None:
        """Each view's projections enter its queue; the oldest leave."""
        if not memory:
            return
        new = F.normalize(torch.stack(encodings[-2:]).detach(), dim=2)
        queue, seen = memory["queue"], memory["seen"]
        samples, places = new.shape[1], queue.shape[1]
        skipped = max(0, samples - places)  # by a batch larger than the queue
        arrival = torch.arange(skipped, samples, device=queue.device) + seen
        queue.index_copy_(1, arrival % places, new[:, skipped:].to(queue.dtype))
        seen += samples


class Prototypes(nn.Linear):
    """Scores zᵀc: the cosines of projections with each prototype (section 3.1)."""

    def forward(self, projections: Tensor) -> Tensor:
        """In float32 at least: codes magnify by 1/ε what bfloat16 would round."""
        with torch.autocast(projections.device.type, enabled=False):
            z = F.normalize(projections.to(self.weight.dtype), dim=1)
            return F.linear(z, F.normalize(self.weight, dim=1))


@torch.no_grad()
def sinkhorn(
    scores: Tensor, epsilon: float, iterations: int, counts: Tensor | None = None
) -> Tensor:
    """The codes Q* of Eq. 5: each sample's sum to 1, and all prototypes get nearly the same.

    Samples that do not count share in nothing. In logarithms: exp(1/ε) soon overflows.
    """
    logs = scores / epsilon
    for _ in range(iterations):
        counted = logs if counts is None else logs.masked_fill(~counts[:, None], -torch.inf)
        logs = logs - torch.logsumexp(counted, dim=0, keepdim=True)
        logs = logs - torch.logsumexp(logs, dim=1, keepdim=True)
    return logs.exp()
