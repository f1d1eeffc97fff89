"""A batch of encodings, and losses of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.objectives.memory import Tensors
from fedssl.util.device import to_device


@dataclass(frozen=True)
class EncodedBatch:
    """The encodings of a batch, its labels if there are any, and the clients it belongs to.

    Encodings are F and G, and for Siamese objectives the targets they are compared with.
    """

    encodings: tuple[Tensor, ...]
    labels: Tensor | None = None
    sizes: NDArray[np.int64] | None = None  # samples of each client, in order; None: one client
    memory: Tensors = field(default_factory=dict)  # the objective's, of a single client
    draw: Tensor | None = None  # random state that all clients of the round share

    def mean_over_clients(self, loss: Loss) -> Tensor:
        """Average each client's own ``loss`` by samples: what FedAvg of one step descends.

        A merged cohort goes through the network as one batch and is taken apart here. Clients of
        the same size are one vectorized call.
        """
        if self.sizes is None:
            return loss(self)
        total = self.encodings[0].new_zeros(())
        starts = np.cumsum(self.sizes) - self.sizes
        for size in np.unique(self.sizes):
            rows = starts[self.sizes == size][:, None] + np.arange(size)
            index = to_device(rows, self.encodings[0].device)
            encodings = tuple(e[index] for e in self.encodings)
            if self.labels is None:
                losses = torch.vmap(lambda *e: loss(EncodedBatch(e, draw=self.draw)))(*encodings)
            else:
                labels = self.labels[index]
                losses = torch.vmap(lambda y, *e: loss(EncodedBatch(e, y)))(labels, *encodings)
            total = total + losses.sum() * float(size)
        return total / float(self.sizes.sum())


Loss = Callable[[EncodedBatch], Tensor]


class Steps(ABC):
    """The loss of one client's steps, one after another, which needs more than their batches.

    ``function`` depends on the batch and on ``inputs`` only and is the same object for all clients,
    so that steps whose inputs have the same shapes share a compiled step.
    """

    function: Callable[..., Tensor]
    recurs = True  # whether inputs of these shapes will come again

    @abstractmethod
    def inputs(self) -> tuple[Tensor, ...]:
        """Return the tensors that the next step needs besides its batch."""

    @abstractmethod
    def done(self, encodings: tuple[Tensor, ...]) -> None:
        """Note that a step was made on a batch with these encodings."""

    def __call__(self, batch: EncodedBatch) -> Tensor:
        """Return the next step's loss."""
        loss = self.function(batch, *self.inputs())
        self.done(batch.encodings)
        return loss
