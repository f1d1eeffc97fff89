"""Several clients at once on a GPU, each in a network of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from fedssl.training.trainer import Trainer

MAX_CLIENTS = 5  # at once: one client's steps do not fill a GPU (benchmarks/NOTES.md)
Answer = TypeVar("Answer")


class TrainerPool:
    """Trainers that clients use side by side: a network, a thread and a stream for each.

    The first trainer compiles the steps, for the first clients, one after another. The others only
    capture them. A client's numbers do not depend on the clients that train beside it.
    """

    def __init__(self, trainer: Trainer, most: int = MAX_CLIENTS) -> None:
        self.most = most
        self._trainers = [trainer]
        self._streams = [_stream(trainer.device)]
        self._threads = ThreadPoolExecutor(most, "client")
        self._ready: set[str] = set()

    def is_ready(self, task: str) -> bool:
        """Return whether every step of a task is compiled, so that clients can run side by side."""
        trainer = self._trainers[0]
        complete = trainer.compiled_steps.is_complete and trainer.watched is None
        return task in self._ready and complete

    def mark_ready(self, task: str) -> None:
        """Note that a client with a full batch has answered this task."""
        self._ready.add(task)

    def width(self, clients: int) -> int:
        """Return how many of so many clients run at once, as far as memory allows."""
        wanted = min(self.most, clients)
        if wanted > len(self._trainers):
            self._add(min(wanted, len(self._trainers) + _room(self._trainers)))
        most = min(wanted, len(self._trainers))
        return -(-clients // -(-clients // most))  # in groups of nearly equal size

    def _add(self, count: int) -> None:
        first = self._trainers[0]
        try:
            while len(self._trainers) < count:
                other = first.twin()
                other.compiled_steps.copy_from(first.compiled_steps)
                self._trainers.append(other)
                self._streams.append(_stream(first.device))
        except torch.OutOfMemoryError:
            self.most = len(self._trainers)

    def run(self, jobs: Sequence[Callable[[Trainer], Answer]]) -> list[Answer]:
        """Run each job with a trainer of its own and return their answers."""
        first = self._trainers[0]
        for trainer in self._trainers:
            if trainer is not first:
                trainer.compiled_steps.copy_from(first.compiled_steps)
            trainer.compiled_steps.may_capture = False
        for stream in filter(None, self._streams):
            stream.wait_stream(torch.cuda.current_stream(first.device))
        started = [
            self._threads.submit(_run, job, trainer, stream)
            for job, trainer, stream in zip(jobs, self._trainers, self._streams, strict=False)
        ]
        try:
            wait(started)  # even if one fails: none may still use its network
        except BaseException:
            first.halted.set()
            raise
        finally:
            for trainer in self._trainers:
                trainer.compiled_steps.may_capture = True
        return [answer.result() for answer in started]


def _room(trainers: Sequence[Trainer]) -> int:
    """Return how many more networks fit into memory, with some memory left."""
    device = trainers[0].device
    if device.type != "cuda":
        return MAX_CLIENTS
    # A network takes at most the memory of this process, divided by the networks there are.
    held = max(1, torch.cuda.memory_reserved(device) // len(trainers))
    return max(0, torch.cuda.mem_get_info(device)[0] // held - 1)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _run(
    job: Callable[[Trainer], Answer], trainer: Trainer, stream: torch.cuda.Stream | None
) -> Answer:
    if stream is None:
        return job(trainer)
    try:
        with torch.cuda.stream(stream):
            return job(trainer)
    finally:
        stream.synchronize()
