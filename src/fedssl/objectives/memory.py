"""Memory of a client between steps and rounds, besides its network: a target network, a queue."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Target:
    """A second network that follows the online one step by step and gives its targets.

    With ``learns`` it follows a gradient too: the ablation without stop-gradient.
    """

    momentum: float
    learns: bool = False


class Memory:
    """A client's memory, in tensors that are updated in place; this one has none.

    Subclasses override both methods.
    """

    def __init__(self, target: Target | None = None) -> None:
        self.target = target

    def start(self, like: Tensor) -> Tensors:
        """Return the tensors before a client's first step, of the type and device of ``like``."""
        return {}

    def update(self, tensors: Tensors, encodings: tuple[Tensor, ...]) -> None:
        """Take the encodings of a step into the tensors."""

    @property
    def is_empty(self) -> bool:
        """True if a client keeps nothing."""
        return self.target is None and not self.start(torch.zeros(()))


class Queue(Memory):
    """The latest targets of both views, each of length 1, in one queue or in one for each view.

    ``seen`` counts the targets that ever entered a queue.
    """

    def __init__(
        self, places: int, width: int, per_view: bool = False, target: Target | None = None
    ) -> None:
        super().__init__(target)
        self.shape = (2, places, width) if per_view else (places, width)

    def start(self, like: Tensor) -> Tensors:
        """Return empty queues."""
        return {
            "queue": like.new_zeros(self.shape),
            "seen": torch.zeros((), dtype=torch.int64, device=like.device),
        }

    def update(self, tensors: Tensors, encodings: tuple[Tensor, ...]) -> None:
        """Let both views' targets, the last two encodings, take the places of the oldest."""
        new = F.normalize(torch.stack(encodings[-2:]).detach(), dim=2)
        queue, seen = tensors["queue"], tensors["seen"]
        if queue.dim() == 2:
            new = new.flatten(0, 1)
        samples, places = new.shape[-2], queue.shape[-2]
        skipped = max(0, samples - places)  # of a batch larger than the queue
        arrival = torch.arange(skipped, samples, device=queue.device) + seen
        queue.index_copy_(-2, arrival % places, new[..., skipped:, :].to(queue.dtype))
        seen += samples

    def free_places(self, tensors: Tensors) -> Tensor:
        """Return a mask of the places that no target has entered yet."""
        queue = tensors["queue"]
        return torch.arange(queue.shape[-2], device=queue.device) >= tensors["seen"]
