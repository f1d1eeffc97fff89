"""Momentum contrast (He et al. 2020, Chen et al. 2020b): negatives from a queue of earlier keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.config import Recipe, key
from fedssl.objectives.base import Encodings, ProjectorParams, projector_key
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.memory import Queue, Target
from fedssl.objectives.siamese import Siamese

TEMPERATURES = {1: 0.07, 2: 0.2}


class MoCo(Siamese):
    """Each query must pick its own key among the queue's; both views are query once."""

    @dataclass(frozen=True)
    class Params(ProjectorParams):
        """Keys of MoCo; the defaults are those of the FedEMA paper."""

        # A client should have more images than its queue has places.
        recommended: ClassVar[Recipe] = {
            **ProjectorParams.recommended,
            "data.name=digits": {"objective": {"queue": 128}},
        }

        projector: tuple[int, ...] = projector_key(4096, 2048)
        version: Literal[1, 2] = key(
            2,
            help="Version of MoCo, which sets the temperature. Their augmentations are "
            "`augment.name=moco-v1` and `augment.name=fedema`.",
        )
        temperature: float | None = key(
            None, gt=0, help="Temperature. `null`: 0.07 for version 1, 0.2 for version 2."
        )
        momentum: float = key(
            0.99,
            ge=0,
            le=1,
            help="Share of its weights that the key network keeps in a step.",
        )
        queue: int = key(4096, ge=1, le=1_000_000, help="Number of negatives that the queue holds.")

    params: Params

    @property
    def temperature(self) -> float:
        """The temperature, from the key or the version."""
        given = self.params.temperature
        return TEMPERATURES[self.params.version] if given is None else given

    @property
    def memory(self) -> Queue:
        """The key network, and the queue of its keys."""
        width = self.params.projector[-1]
        return Queue(self.params.queue, width, target=Target(self.params.momentum))

    def loss(self, batch: EncodedBatch) -> Tensor:
        """Return the loss with the queue's keys as negatives."""
        negatives, empty = batch.memory["queue"], self.memory.free_places(batch.memory)
        return self.contrast(batch.encodings, negatives, empty)

    def contrast(self, encodings: Encodings, negatives: Tensor, empty: Tensor) -> Tensor:
        """Return the sum of both directions' cross-entropy (He et al. 2020, Eq. 1)."""
        q1, q2, k1, k2 = (F.normalize(e, dim=1) for e in encodings)
        return self._against(q1, k2, negatives, empty) + self._against(q2, k1, negatives, empty)

    def _against(self, query: Tensor, key: Tensor, negatives: Tensor, empty: Tensor) -> Tensor:
        positive = (query * key).sum(1, keepdim=True)
        negative = (query @ negatives.T).masked_fill(empty, -torch.inf)
        logits = torch.cat((positive, negative), dim=1) / self.temperature
        return (torch.logsumexp(logits, dim=1) - logits[:, 0]).mean()
