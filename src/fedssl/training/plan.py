"""Which samples a client uses in which step: a pure function of round, step and client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.config import AlgorithmParams
from fedssl.data.random import key, permutation


@dataclass(frozen=True)
class Plan:
    """Which samples a client uses in which step of a round: a pure function of the round."""

    steps: int | None
    epochs: int | None
    batch: int | None
    seed: int
    device: torch.device | None = None  # where samples are chosen; none: the host

    @classmethod
    def from_config(
        cls, algorithm: AlgorithmParams, seed: int, device: torch.device | None = None
    ) -> Plan:
        """One step on all samples unless the algorithm's keys say otherwise."""
        steps = algorithm.local_steps
        if steps is None and algorithm.local_epochs is None:
            steps = 1
        return cls(steps, algorithm.local_epochs, algorithm.batch, seed, device)

    @property
    def one_full_step(self) -> bool:
        """Whether a round is one step on everything that a client holds."""
        return (self.steps == 1 or self.epochs == 1) and self.batch is None

    def batches(self, size: int) -> int:
        """Batches in one pass; the last partial one is dropped unless it is the only one."""
        return 1 if self.batch is None else max(1, size // self.batch)

    def count(self, size: int) -> int:
        """Steps in a round."""
        return self.steps if self.steps is not None else (self.epochs or 1) * self.batches(size)

    def images(self, size: int) -> int:
        """Samples that one round trains on, repeats counted."""
        return self.count(size) * min(size, self.batch or size)

    def first_pass(self, size: int) -> int:
        """Steps that statistics are of: one pass over the samples, or fewer in a round of fewer."""
        return min(self.count(size), self.batches(size))

    def averaged(self, size: int) -> int:
        """Samples that a client's statistics are means over, repeats counted."""
        return self.first_pass(size) * min(size, self.batch or size)

    def contributing(self, size: int) -> int:
        """Different samples that a round uses: N_k of the DCCO paper's Eq. 3."""
        if self.batch is None or self.steps is None:
            return size
        return min(size, self.steps * self.batch)

    def indices(self, round: int, step: int, client: int, size: int) -> tuple[int, slice | Tensor]:
        """The epoch that a step belongs to and the positions of its samples within the client.

        Steps walk through an endless row of shuffled epochs, so that a client asked in every round
        (centralized training) sees each sample once an epoch.
        """
        epoch, place = divmod(round * self.count(size) + step, self.batches(size))
        if self.batch is None or self.batch >= size:
            return epoch, slice(None)
        state = key(self.seed, "shuffle", client, epoch)
        order = _order(state, size, self.device, _stream(self.device))
        return epoch, order[place * self.batch : (place + 1) * self.batch]


def _stream(device: torch.device | None) -> int:
    on_gpu = device is not None and device.type == "cuda"
    return torch.cuda.current_stream(device).stream_id if on_gpu else 0


@lru_cache(maxsize=8)  # more than there are clients that train at once
def _order(state: int, size: int, device: torch.device | None, stream: int) -> Tensor:
    """For use on one stream: where others read it too, its memory might be given away too soon."""
    return on_device(permutation(state, size), device)


def on_device(numbers: NDArray[np.int64], device: torch.device | None) -> Tensor:
    """Numbers on the device. From pinned memory: the host waits for nothing that runs there."""
    tensor = torch.from_numpy(numbers)
    if device is None or device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
