"""The clients' states between rounds, on the client's own disk.

A state is tagged with the round that made it, and with the attempt. A server that is killed and
started again continues from its last checkpoint, which may be rounds ago. Then states from later
rounds must not count, and the earlier state must still be there.
"""

from __future__ import annotations

import bisect
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedssl.engines.base import StateFiles, Version
from fedssl.engines.remote.codec import MalformedError
from fedssl.training.trainer import State
from fedssl.util.files import load_tensors, save_tensors
from fedssl.util.trees import flatten, leaves


@dataclass(frozen=True)
class History:
    """The attempts of a run: attempt ``names[i]`` did the rounds from ``starts[i]`` on.

    ``committed`` rounds are in the server's checkpoint: they will not be done again.
    """

    names: tuple[str, ...]
    starts: tuple[int, ...]
    committed: int

    def counts(self, round: int, attempt: str) -> bool:
        """Return whether the round of an attempt is part of the run."""
        return self.names[bisect.bisect(self.starts, round) - 1] == attempt


class DiskStates:
    """The states of the clients of one run, a folder each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, client: int, round: int, history: History) -> dict[str, Tensor]:
        """Return the flat state with which a client enters a task of ``round``; it stays."""
        files = self._files(client)
        counting = [
            (number, path) for number, attempt, path in files if history.counts(number, attempt)
        ]
        if not counting:
            return {}
        number, path = max(counting)
        if number > round:  # a message that was delivered late
            raise MalformedError(f"round {number} was done already")
        return load_tensors(path)

    def save(self, client: int, state: State, round: int, history: History) -> None:
        """Keep a state, and earlier ones as far back as the server may have to go."""
        if not state:
            return
        if not all(bool(torch.isfinite(leaf).all()) for leaf in leaves(state)):
            raise MalformedError("training gave numbers that are not finite")
        flat = {name: leaf.detach().cpu().contiguous() for name, leaf in flatten(state).items()}
        path = self.folder / str(client) / f"{round}-{history.names[-1]}.safetensors"
        save_tensors(path, flat, {}, can_resume=False)
        files = self._files(client)
        counting = [number for number, attempt, _ in files if history.counts(number, attempt)]
        needed = max((number for number in counting if number < history.committed), default=0)
        for number, attempt, old in files:
            if number < needed or not history.counts(number, attempt):
                old.unlink(missing_ok=True)

    def _files(self, client: int) -> list[tuple[int, str, Path]]:
        files = []
        for path in (self.folder / str(client)).glob("*.safetensors"):
            number, _, attempt = path.stem.partition("-")
            files.append((int(number), attempt, path))
        return files


class ReadOnlyStates:
    """The clients' states as a simulation's server reads them (a real server cannot)."""

    def __init__(self, history: History) -> None:
        self.folder: Path | None = None
        self.history = history
        self.round = 0
        self.changed: set[int] = set()
        self.versions: dict[int, Version] = {}  # files of a checkpoint: there are none
        self.files: StateFiles | None = None

    def __iter__(self) -> Iterator[int]:
        if self.folder is None or not self.folder.exists():
            return iter(())
        names = (path.name for path in self.folder.iterdir())
        return iter(sorted(int(name) for name in names if name.isdecimal()))

    def on_host(self, client: int) -> dict[str, Tensor]:
        """Return a client's state: tensors by path."""
        if self.folder is None:
            return {}
        return DiskStates(self.folder).load(client, self.round, self.history)

    def restore(self, client: int, flat: dict[str, Tensor], version: Version) -> None:
        """Fail: a checkpoint holds no states of these clients."""
        raise AssertionError

    def forget(self) -> None:
        """Delete the states after the last round."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
