"""Momentum contrast (He et al. 2020, Chen et al. 2020b): negatives from a queue of earlier keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.config import key
from fedssl.objectives.base import Dual, ProjectorParams
from fedssl.objectives.batch import Memory

TEMPERATURES = {1: 0.07, 2: 0.2}


class MoCo(Dual):
    """Each query picks its own key out of the queue's; both views are query once (symmetric)."""

    siamese = True

    @dataclass(frozen=True)
    class Params(ProjectorParams):
        """Keys of MoCo; the defaults are those of the FedEMA paper."""

        projector: tuple[int, ...] = key(
            (4096, 2048), ge=1, nonempty=True, help="Widths of the projector's layers."
        )
        version: Literal[1, 2] = key(
            2,
            help="Version of MoCo, which sets the temperature. Their augmentations are "
            "`augment.name=moco-v1` and `augment.name=fedema`.",
        )
        temperature: float | None = key(
            None, gt=0, help="Temperature. `null`: 0.07 for version 1, 0.2 for version 2."
        )
        momentum: float = key(0.99, ge=0, le=1, help="Momentum of the key network.")
        queue: int = key(4096, ge=1, help="Number of negatives that the queue holds.")

    params: Params

    @property
    def momentum(self) -> float:
        """Of the key network."""
        return self.params.momentum

    @property
    def temperature(self) -> float:
        """As given, or the version's."""
        given = self.params.temperature
        return TEMPERATURES[self.params.version] if given is None else given

    def memory(self, like: Tensor) -> Memory:
        """An empty queue; ``seen`` counts the keys that ever entered it."""
        return {
            "queue": like.new_zeros(self.params.queue, self.params.projector[-1]),
            "seen": torch.zeros((), dtype=torch.int64, device=like.device),
        }

    def loss(
        self, encodings: tuple[Tensor, ...], labels: Tensor | None, memory: Memory | None = None
    ) -> Tensor:
        """The loss with the queue's keys as negatives."""
        assert memory is not None
        return self.contrast(encodings, memory["queue"], self.empty(memory))

    def empty(self, memory: Memory) -> Tensor:
        """Which places of the queue no key has entered yet."""
        places = torch.arange(len(memory["queue"]), device=memory["queue"].device)
        return places >= memory["seen"]

    def contrast(self, encodings: tuple[Tensor, ...], negatives: Tensor, empty: Tensor) -> Tensor:
        """The sum of both directions' cross-entropy (He et al. 2020, Eq. 1)."""
        q1, q2, k1, k2 = (F.normalize(e, dim=1) for e in encodings)
        return self._against(q1, k2, negatives, empty) + self._against(q2, k1, negatives, empty)

    def _against(self, query: Tensor, key: Tensor, negatives: Tensor, empty: Tensor) -> Tensor:
        positive = (query * key).sum(1, keepdim=True)
        negative = (query @ negatives.T).masked_fill(empty, -torch.inf)
        logits = torch.cat((positive, negative), dim=1) / self.temperature
        return (torch.logsumexp(logits, dim=1) - logits[:, 0]).mean()

    def remember(self, memory: Memory, encodings: tuple[Tensor, ...]) -> None:
        """Both views' keys enter; the oldest leave, so that the last K are always there."""
        keys = F.normalize(torch.cat(encodings[2:]).detach(), dim=1)
        queue, seen = memory["queue"], memory["seen"]
        skipped = max(0, len(keys) - len(queue))  # by a batch larger than the queue
        arrival = torch.arange(skipped, len(keys), device=queue.device) + seen
        queue.index_copy_(0, arrival % len(queue), keys[skipped:].to(queue.dtype))
        seen += len(keys)
