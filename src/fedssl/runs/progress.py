"""The live display of a run: a bar in a terminal or notebook, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm

from fedssl.util.text import escape

LINE_SECONDS = 5.0


class Progress:
    """Show round, loss, images per second and time left on standard error."""

    def __init__(self, title: str, rounds: int, done: int = 0) -> None:
        self.title = title
        self.rounds = rounds
        self.first = done
        self.images = 0
        self.settled = False
        self.started = time.monotonic()
        self.last_line = self.started
        self.live = sys.stderr.isatty() or in_notebook()
        self.bar = tqdm(
            total=rounds,
            initial=done,
            desc=title,
            unit="round",
            disable=not self.live,
            bar_format="{desc} {n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}",
            dynamic_ncols=True,
        )

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.bar.close()

    def after_round(self, line: Mapping[str, Any]) -> None:
        """Show the round of a line of metrics."""
        self.update(line["round"], line["loss"], line["images"], line["skipped"])

    def update(self, round: int, loss: float | None, images: int, skipped: bool = False) -> None:
        """Show that ``round`` rounds are done; where clients keep their loss, none is known."""
        self.images += images
        now = time.monotonic()
        known = "loss not shared" if loss is None else f"loss {loss:.4g}"
        shown = "skipped" if skipped else known
        if self.live:
            self.bar.set_postfix_str(f"{shown}, {self._rate(now):,.0f} images/s", False)
            self.bar.update(round - self.bar.n)
        elif now - self.last_line > LINE_SECONDS or round == self.rounds:
            self.last_line = now
            left = (now - self.started) / (round - self.first) * (self.rounds - round)
            self.say(
                f"{self.title} round {round}/{self.rounds}  {shown}  "
                f"{self._rate(now):,.0f} images/s  {left:.0f} s left"
            )
        if not self.settled:  # the first round compiles and fills caches: the others are faster
            self.settled, self.first, self.images, self.started = True, round, 0, now

    def say(self, line: str) -> None:
        """A line of its own, above the bar."""
        tqdm.write(escape(line), file=sys.stderr)

    def _rate(self, now: float) -> float:
        return self.images / max(1e-9, now - self.started)


def in_notebook() -> bool:
    """Return whether this is a notebook; IPython in a terminal is a terminal."""
    shell = sys.modules.get("IPython")
    ours = None if shell is None else shell.get_ipython()
    return ours is not None and hasattr(ours, "kernel")
