"""Show what the program is doing, so that it is never silent for two seconds.

A terminal shows one live line. Elsewhere, such as in a log file, a line is printed after a silence.
The silence allowed there grows with the running time, so that a long run has a short log.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from fedssl.util.text import escape, fit_line

SILENCE = 1.5  # seconds without output after which a line is printed
SHARE = 30  # outside of a terminal, a silence is at most one part in so many of the running time
LIVE_AFTER = 0.4  # seconds without output after which a terminal's live line appears
TICK = 0.2


class Stage:
    """A piece of work that is under way; with a ``total``, so many images of it."""

    def __init__(self, text: str, total: int | None = None) -> None:
        self.total = total
        self.restart(text)

    def restart(self, text: str) -> None:
        """Begin the next piece of work in the place of this one."""
        self.text, self.done, self.started = text, 0, time.monotonic()

    def advance(self, count: int) -> None:
        """Count images that are done."""
        self.done += count

    def describe(self) -> str:
        """Return the text, with the images that are done."""
        counted = self.total is not None and self.done > 0
        return f"{self.text}: {self.done:,} of {self.total:,}" if counted else self.text

    def time(self) -> str:
        """Return the seconds so far, or the seconds left where that can be estimated."""
        seconds = time.monotonic() - self.started
        if self.total and self.done:
            return f"{seconds / self.done * (self.total - self.done):.0f} s left"
        return f"{seconds:.0f} s"


class _Display:
    """The stages that are under way, and a thread that shows them."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.begun = self.last = time.monotonic()
        self.line: Any = None  # a tqdm
        self.lock = threading.RLock()
        self.ended = threading.Event()

    def add(self, stage: Stage) -> None:
        """Show a stage until it is removed."""
        with self.lock:
            self.stages.append(stage)
            if len(self.stages) > 1:
                return
            self.begun = time.monotonic()
            self.ended = threading.Event()
            threading.Thread(target=self._work, args=[self.ended], daemon=True).start()

    def remove(self, stage: Stage) -> None:
        """Stop showing a stage."""
        with self.lock:
            self.stages.remove(stage)
            if not self.stages:
                self.ended.set()
                self.clear()

    def clear(self) -> None:
        """Remove the live line."""
        with self.lock:
            if self.line is not None:
                self.line.close()
                self.line = None

    def _work(self, ended: threading.Event) -> None:
        while not ended.wait(TICK):
            with self.lock:
                if self.stages and self.ended is ended:
                    self._show()

    def _show(self) -> None:
        silence, stage = time.monotonic() - self.last, self.stages[-1]
        text = f"{': '.join(each.describe() for each in self.stages)} ({stage.time()})"
        if not is_terminal():
            if is_due():
                say(text)
        elif silence < LIVE_AFTER:
            self.clear()
        else:
            self.show_live(text)

    def show_live(self, text: str) -> None:
        """Show a text on the terminal's live line."""
        text = text[: shutil.get_terminal_size().columns - 1]
        if self.line is None:
            self.line = tqdm(desc=text, bar_format="{desc}", file=sys.stderr, leave=False)
        else:
            self.line.set_description_str(text)


_display = _Display()


@contextlib.contextmanager
def stage(text: str, total: int | None = None) -> Iterator[Stage]:
    """Show what is under way; within another stage, it is shown behind that one's text."""
    under_way = Stage(text, total)
    with show(under_way):
        yield under_way


@contextlib.contextmanager
def show(stage: Stage) -> Iterator[None]:
    """Show a stage while the block runs."""
    _display.add(stage)
    try:
        yield
    finally:
        _display.remove(stage)


@contextlib.contextmanager
def stage_without_threads(text: str) -> Iterator[None]:
    """Show, at once, work that lets no other thread run, such as loading a large library."""
    if is_terminal():
        _display.show_live(text)
    else:
        say(text)
    try:
        yield
    finally:
        _display.clear()


def say(line: str) -> None:
    """Print a line above whatever is live."""
    note_output()
    columns = shutil.get_terminal_size().columns if is_terminal() else None
    tqdm.write(fit_line(escape(line), columns), file=sys.stderr)


def note_output() -> None:
    """Start a new silence: something has been shown."""
    _display.last = time.monotonic()


def is_due() -> bool:
    """Return whether a log file has been silent for long enough for another line."""
    now = time.monotonic()
    return now - _display.last > max(SILENCE, (now - _display.begun) / SHARE)


def is_terminal() -> bool:
    """Return whether standard error is a terminal."""
    return sys.stderr.isatty()
