"""The interface of engines: clients to ask, and the states that they keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data.dataset import Groups
from fedssl.federation.aggregate import Aggregator
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.cohort import Cohort
from fedssl.federation.driver import RoundResult
from fedssl.training.trainer import Trainer

Version = tuple[int, str]  # a client's file in a checkpoint: its number, which grows, and its seal


class StateFiles(Protocol):
    """Files for states that do not fit into memory."""

    def write(self, client: int, flat: dict[str, Tensor]) -> Version:
        """Write a client's state to a file of its own."""

    def read(self, client: int, version: Version) -> dict[str, Tensor]:
        """Read a state."""


class ClientStates(Protocol):
    """The clients' states, as evaluation and checkpoints use them."""

    changed: set[int]
    versions: dict[int, Version]
    files: StateFiles | None

    def __iter__(self) -> Iterator[int]: ...

    def on_host(self, client: int) -> dict[str, Tensor]:
        """Return a client's state as files hold it: tensors by path."""

    def restore(self, client: int, flat: dict[str, Tensor], version: Version) -> None:
        """Take a state from a checkpoint's file."""

    def forget(self) -> None:
        """Drop the states after the last round: nothing reads them any more."""


@dataclass(eq=False, repr=False)
class Engine(ABC):
    """The place where clients work."""

    trainer: Trainer
    algorithm: Algorithm
    groups: Groups
    aggregator: Aggregator = field(default_factory=Aggregator)
    states: ClientStates = field(init=False)
    merges: bool = field(init=False, default=False)  # a cohort may be one batch for the network

    @abstractmethod
    def cohort(self, ids: NDArray[np.int64], round: int) -> Cohort:
        """Return the clients of one round."""

    def count_images(self, result: RoundResult) -> int:
        """Return how many images a round trained on, repeats counted."""
        batches, sizes = self.trainer.batches, self.groups.sizes[result.answered]
        if batches.size is None:
            return int(sizes.sum()) * batches.per_round(1) * result.passes
        return sum(batches.images(int(size)) for size in sizes) * result.passes

    def open(self, out: Path) -> None:
        """Prepare for a run whose files go to ``out``."""
        return

    def drive(self, work: Callable[[], None]) -> None:
        """Call ``work``, which asks cohorts."""
        work()

    def rest(self) -> None:
        """Give back what only training needs, after the last round."""
        return

    def notes(self) -> dict[str, str]:
        """Return the entries that a checkpoint must keep for the engine."""
        return {}

    def resume(self, notes: Mapping[str, str], round: int) -> None:
        """Continue from a checkpoint with these entries."""
        return

    def committed(self, round: int) -> None:
        """Note that a checkpoint after this many rounds is on the disk."""
        return
