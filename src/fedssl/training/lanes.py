"""Several clients at once, each in a network of its own: one client's steps do not fill a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from fedssl.training.workspace import Workspace

MOST = 5  # clients at once (benchmarks/NOTES.md)
Answer = TypeVar("Answer")


class Lanes:
    """Networks that clients train in side by side: a thread and a stream for each.

    Steps are compiled once, by the clients that come first, one after another; another network only
    captures them. A client's numbers do not depend on who trains beside it.
    """

    def __init__(self, work: Workspace, most: int = MOST) -> None:
        self.most = most
        self._works = [work]
        self._streams = [_stream(work.device)]
        self._threads = ThreadPoolExecutor(most, "client")
        self._tasks: set[str] = set()

    def knows(self, task: str) -> bool:
        """Whether all that a task compiles was compiled, so that it can run side by side."""
        work = self._works[0]
        return task in self._tasks and work.shares_steps and work.watched is None

    def learned(self, task: str) -> None:
        """A client that fills a batch has answered this task."""
        self._tasks.add(task)

    def width(self, clients: int) -> int:
        """How many of so many clients run at once: as many as there is memory for."""
        wanted = min(self.most, clients)
        if wanted > len(self._works):
            self._open(min(wanted, len(self._works) + _room(self._works)))
        most = min(wanted, len(self._works))
        return -(-clients // -(-clients // most))  # as even as can be

    def _open(self, networks: int) -> None:
        first = self._works[0]
        try:
            while len(self._works) < networks:
                other = first.twin()
                other.adopt_steps(first)
                self._works.append(other)
                self._streams.append(_stream(first.device))
        except torch.OutOfMemoryError:
            self.most = len(self._works)

    def run(self, jobs: Sequence[Callable[[Workspace], Answer]]) -> list[Answer]:
        """The answers of some jobs, each done in a network of its own."""
        first = self._works[0]
        for work in self._works:
            if work is not first:
                work.adopt_steps(first)
            work.alone = False
        for stream in filter(None, self._streams):
            stream.wait_stream(torch.cuda.current_stream(first.device))
        started = [
            self._threads.submit(_do, job, work, stream)
            for job, work, stream in zip(jobs, self._works, self._streams, strict=False)
        ]
        try:
            wait(started)  # also where one fails: none may still be at work in a network
        except BaseException:
            first.halted.set()
            raise
        finally:
            for work in self._works:
                work.alone = True
        return [answer.result() for answer in started]


def _room(works: Sequence[Workspace]) -> int:
    """How many more networks there is memory for, and something left."""
    device = works[0].device
    if device.type != "cuda":
        return MOST
    # A network takes at most what this process has taken for the first one and all else.
    held = max(1, torch.cuda.memory_reserved(device) // len(works))
    return max(0, torch.cuda.mem_get_info(device)[0] // held - 1)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _do(
    job: Callable[[Workspace], Answer], work: Workspace, stream: torch.cuda.Stream | None
) -> Answer:
    if stream is None:
        return job(work)
    try:
        with torch.cuda.stream(stream):
            return job(work)
    finally:
        stream.synchronize()
