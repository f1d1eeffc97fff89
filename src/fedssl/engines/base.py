"""What every engine is to a run: clients to ask, and what they keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data.dataset import Groups
from fedssl.federation.aggregate import Aggregator
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.cohort import Cohort
from fedssl.training.trainer import Trainer


class ClientStates(Protocol):
    """What judging and checkpoints need of the clients' states."""

    changed: set[int]
    versions: dict[int, int]

    def __iter__(self) -> Iterator[int]: ...

    def on_host(self, client: int) -> dict[str, Tensor]:
        """The flat state of a client."""

    def get_leaf(self, client: int, path: tuple[str, ...]) -> Tensor | None:
        """One tensor of a client's state."""

    def restore(self, client: int, flat: dict[str, Tensor], version: int) -> None:
        """Take a state from a checkpoint's file."""

    def forget(self) -> None:
        """After the last round: nothing will be read from them."""


class Engine(ABC):
    """Where client work happens."""

    states: ClientStates
    merges = False  # whether a cohort may go through the network as one batch

    def __init__(
        self,
        trainer: Trainer,
        algorithm: Algorithm,
        groups: Groups,
        aggregator: Aggregator | None = None,
    ) -> None:
        self.trainer = trainer
        self.algorithm = algorithm
        self.groups = groups
        self.aggregator = aggregator or Aggregator()

    @abstractmethod
    def cohort(self, ids: NDArray[np.int64], round: int) -> Cohort:
        """The clients of one round."""

    def open(self, out: Path) -> None:
        """Before a run: where its files go."""
        return

    def drive(self, work: Callable[[], None]) -> None:
        """Do ``work``, which asks cohorts."""
        work()

    def rest(self) -> None:
        """After the last round: what only training needs is given back."""
        return

    def notes(self) -> dict[str, str]:
        """What a checkpoint must say for the engine to go on."""
        return {}

    def resume(self, notes: Mapping[str, str], round: int) -> None:
        """Go on from a checkpoint."""
        return

    def committed(self, round: int) -> None:
        """A checkpoint of so many rounds is on the disk."""
        return
