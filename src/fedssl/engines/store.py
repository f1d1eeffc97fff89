"""What clients keep between rounds, on the disk of whoever the client is.

A state is tagged with the round that it came out of and with the attempt: a server that is killed
and started again goes on from its last checkpoint, which may be rounds ago, so what a client kept
from later rounds must not count, and what it had before must still be there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedssl.engines.remote.codec import MalformedError
from fedssl.training.trainer import State
from fedssl.util.files import save_tensors
from fedssl.util.trees import flatten, leaves, unflatten


@dataclass(frozen=True)
class History:
    """Which attempt of a run did which rounds: attempt ``names[i]`` from round ``starts[i]`` on.

    ``committed`` rounds are in the server's checkpoint: they will not be done again.
    """

    names: tuple[str, ...]
    starts: tuple[int, ...]
    committed: int

    def counts(self, round: int, attempt: str) -> bool:
        """Whether what came out of a round in an attempt is part of the run."""
        ends = (*self.starts[1:], None)
        return any(
            name == attempt and start <= round and (end is None or round < end)
            for name, start, end in zip(self.names, self.starts, ends, strict=True)
        )


class Store:
    """The states of the clients of one run, a folder each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, client: int, round: int, history: History) -> State:
        """The state that a client enters a task of ``round`` with; reading changes nothing."""
        files = self._files(client)
        counting = [(made, path) for path, made, attempt in files if history.counts(made, attempt)]
        if not counting:
            return {}
        made, path = max(counting)
        if made > round:  # a message that was delivered late
            raise MalformedError(f"round {made} was done already")
        return unflatten(load_file(path))

    def save(self, client: int, state: State, round: int, history: History) -> None:
        """Keep a state, and those before it as far back as the server may have to go."""
        if not state:
            return
        if not all(bool(torch.isfinite(leaf).all()) for leaf in leaves(state)):
            raise MalformedError("training gave numbers that are not finite")
        flat = {name: leaf.detach().cpu().contiguous() for name, leaf in flatten(state).items()}
        path = self.folder / str(client) / f"{round}-{history.names[-1]}.safetensors"
        save_tensors(path, flat, {}, can_resume=False)
        files = self._files(client)
        counting = [made for _, made, attempt in files if history.counts(made, attempt)]
        needed = max((made for made in counting if made < history.committed), default=0)
        for old, made, attempt in files:
            if made < needed or not history.counts(made, attempt):
                old.unlink(missing_ok=True)

    def _files(self, client: int) -> list[tuple[Path, int, str]]:
        found = []
        for path in (self.folder / str(client)).glob("*.safetensors"):
            made, _, attempt = path.stem.partition("-")
            found.append((path, int(made), attempt))
        return found


class Stored:
    """The clients' states as a simulation's server may look at them (a real one cannot)."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.history = History((), (), 0)
        self.round = 0
        self.changed: set[int] = set()
        self.versions: dict[int, int] = {}  # files of a checkpoint: there are none

    def __iter__(self) -> Iterator[int]:
        if self.folder is None or not self.folder.exists():
            return iter(())
        names = (path.name for path in self.folder.iterdir())
        return iter(sorted(int(name) for name in names if name.isdecimal()))

    def on_host(self, client: int) -> dict[str, Tensor]:
        """The flat state of a client."""
        if self.folder is None:
            return {}
        return flatten(Store(self.folder).load(client, self.round, self.history))

    def restore(self, client: int, flat: dict[str, Tensor], version: int) -> None:
        """A checkpoint holds no states of these clients."""
        raise AssertionError

    def forget(self) -> None:
        """After the last round: nothing will be read from them."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
