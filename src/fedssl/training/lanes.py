"""Several clients at once, each in a network of its own: one client's steps do not fill a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from fedssl.training.trainer import Trainer

MOST = 5  # clients at once (benchmarks/NOTES.md)
Answer = TypeVar("Answer")


class Lanes:
    """Networks that clients train in side by side: a thread and a stream for each.

    Steps are compiled once, by the clients that come first, one after another; another network only
    captures them. A client's numbers do not depend on who trains beside it.
    """

    def __init__(self, trainer: Trainer, most: int = MOST) -> None:
        self.most = most
        self._trainers = [trainer]
        self._streams = [_stream(trainer.device)]
        self._threads = ThreadPoolExecutor(most, "client")
        self._tasks: set[str] = set()

    def knows(self, task: str) -> bool:
        """Whether all that a task compiles was compiled, so that it can run side by side."""
        trainer = self._trainers[0]
        return task in self._tasks and trainer.shares_steps and trainer.watched is None

    def learned(self, task: str) -> None:
        """A client that fills a batch has answered this task."""
        self._tasks.add(task)

    def width(self, clients: int) -> int:
        """How many of so many clients run at once: as many as there is memory for."""
        wanted = min(self.most, clients)
        if wanted > len(self._trainers):
            self._open(min(wanted, len(self._trainers) + _room(self._trainers)))
        most = min(wanted, len(self._trainers))
        return -(-clients // -(-clients // most))  # as even as can be

    def _open(self, networks: int) -> None:
        first = self._trainers[0]
        try:
            while len(self._trainers) < networks:
                other = first.twin()
                other.adopt_steps(first)
                self._trainers.append(other)
                self._streams.append(_stream(first.device))
        except torch.OutOfMemoryError:
            self.most = len(self._trainers)

    def run(self, jobs: Sequence[Callable[[Trainer], Answer]]) -> list[Answer]:
        """The answers of some jobs, each done in a network of its own."""
        first = self._trainers[0]
        for trainer in self._trainers:
            if trainer is not first:
                trainer.adopt_steps(first)
            trainer.alone = False
        for stream in filter(None, self._streams):
            stream.wait_stream(torch.cuda.current_stream(first.device))
        started = [
            self._threads.submit(_do, job, trainer, stream)
            for job, trainer, stream in zip(jobs, self._trainers, self._streams, strict=False)
        ]
        try:
            wait(started)  # also where one fails: none may still be at work in a network
        except BaseException:
            first.halted.set()
            raise
        finally:
            for trainer in self._trainers:
                trainer.alone = True
        return [answer.result() for answer in started]


def _room(trainers: Sequence[Trainer]) -> int:
    """How many more networks there is memory for, and something left."""
    device = trainers[0].device
    if device.type != "cuda":
        return MOST
    # A network takes at most what this process has taken for the first one and all else.
    held = max(1, torch.cuda.memory_reserved(device) // len(trainers))
    return max(0, torch.cuda.mem_get_info(device)[0] // held - 1)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _do(
    job: Callable[[Trainer], Answer], trainer: Trainer, stream: torch.cuda.Stream | None
) -> Answer:
    if stream is None:
        return job(trainer)
    try:
        with torch.cuda.stream(stream):
            return job(trainer)
    finally:
        stream.synchronize()
