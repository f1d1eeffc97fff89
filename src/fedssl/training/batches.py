"""The batches that a client trains on in a round: a pure function of round, step and client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedssl.config import AlgorithmParams
from fedssl.data.random import key, permutation
from fedssl.util.device import to_device


@dataclass(frozen=True)
class Batches:
    """How clients divide their samples into batches, and how many batches a round has."""

    steps: int | None
    epochs: int | None
    size: int | None  # samples in a batch; None: all samples of the client
    seed: int
    device: torch.device | None = None  # where the chosen positions are needed; None: the host

    @classmethod
    def from_config(
        cls, algorithm: AlgorithmParams, seed: int, device: torch.device | None = None
    ) -> Batches:
        """One step on all samples unless the algorithm's keys say otherwise."""
        steps = algorithm.local_steps
        if steps is None and algorithm.local_epochs is None:
            steps = 1
        return cls(steps, algorithm.local_epochs, algorithm.batch, seed, device)

    @property
    def is_one_step(self) -> bool:
        """True if a round is one step of every client."""
        return self.steps == 1 or (self.epochs == 1 and self.size is None)

    @property
    def is_one_full_step(self) -> bool:
        """True if a round is one step on all samples of a client."""
        return self.is_one_step and self.size is None

    def per_epoch(self, samples: int) -> int:
        """Batches in an epoch; a partial last batch is dropped unless it is the only one."""
        return 1 if self.size is None else max(1, samples // self.size)

    def per_round(self, samples: int) -> int:
        """Batches, and so steps, in a round."""
        if self.steps is not None:
            return self.steps
        return (self.epochs or 1) * self.per_epoch(samples)

    def images(self, samples: int) -> int:
        """Images that a round trains on, repeats counted."""
        return self.per_round(samples) * min(samples, self.size or samples)

    def first_epoch(self, samples: int) -> int:
        """Batches that a client's statistics are averaged over: one epoch, or the round if less."""
        return min(self.per_round(samples), self.per_epoch(samples))

    def averaged(self, samples: int) -> int:
        """Images that a client's statistics are averaged over, repeats counted."""
        return self.first_epoch(samples) * min(samples, self.size or samples)

    def contributing(self, samples: int) -> int:
        """Different samples that a round can use."""
        if self.size is None or self.steps is None:
            return samples
        return min(samples, self.steps * self.size)

    def positions(
        self, round: int, step: int, client: int, samples: int
    ) -> tuple[int, slice | Tensor]:
        """Return a step's epoch, and the positions of its samples within the client.

        Steps walk through an endless row of shuffled epochs, so that a client asked in every round
        (centralized training) sees each sample once an epoch.
        """
        epoch, place = divmod(round * self.per_round(samples) + step, self.per_epoch(samples))
        if self.size is None or self.size >= samples:
            return epoch, slice(None)
        state = key(self.seed, "shuffle", client, epoch)
        order = _order(state, samples, self.device, _stream(self.device))
        return epoch, order[place * self.size : (place + 1) * self.size]


def _stream(device: torch.device | None) -> int:
    on_gpu = device is not None and device.type == "cuda"
    return torch.cuda.current_stream(device).stream_id if on_gpu else 0


@lru_cache(maxsize=8)  # more than the clients that train at once
def _order(state: int, samples: int, device: torch.device | None, stream: int) -> Tensor:
    """Return the shuffled samples, cached per stream: a stream may reuse the memory it frees."""
    return to_device(permutation(state, samples), device)
