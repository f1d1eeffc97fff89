"""``metrics.jsonl``: a line a round; the same numbers for TensorBoard and other loggers."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from fedssl.config import Config

FILE = "metrics.jsonl"
LARGEST = 2**63  # of whole numbers: what arrays hold
SHARED = {"up": "replied", "down": "reached"}  # the clients that an exchange's bytes are of
BOARD_POINTS = 2000  # loggers show no more, and a point costs as much as a small round


class Overhead:
    """Seconds spent on something other than rounds, by purpose, since they were last taken."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def timed(self, purpose: str) -> Iterator[None]:
        """Count the time spent within."""
        started = time.perf_counter()
        yield
        self._seconds[purpose] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Return the seconds so far, and start again at zero."""
        taken = {purpose: round(seconds, 6) for purpose, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken


class Metrics:
    """Appends to a run's metrics; lines after the checkpoint that is resumed are dropped."""

    def __init__(self, out: Path, round: int, rounds: int, config: Config | None = None) -> None:
        from fedssl.runs import loggers  # these need more than reading does

        path = out / FILE
        kept = [line for line in read(out) if line["round"] <= round]
        new = path.with_name(FILE + ".new")
        new.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        new.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._loggers = loggers.start(config, out, round)
        self._every = max(1, rounds // BOARD_POINTS)
        self._finished = False

    def close(self) -> None:
        """Nothing more will be written."""
        self._file.close()
        for logger in self._loggers:
            logger.close(self._finished)

    def write(self, line: dict[str, Any]) -> None:
        """One round's numbers."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if line["round"] % self._every == 0:
            self._log(line["round"], _numbers(line))

    def conclude(self, summary: dict[str, Any]) -> None:
        """The run is finished: its result stands at the last round, its totals beside."""
        totals = {f"summary/{name}": value for name, value in _numbers(summary).items()}
        self._log(summary["rounds"], _numbers(summary["result"]) | totals)
        self._finished = True

    def _log(self, round: int, numbers: dict[str, float]) -> None:
        for logger in self._loggers:
            logger.write([(round, numbers)])

    @staticmethod
    def totals(out: Path, overhead: dict[str, float]) -> dict[str, Any]:
        """Sums over a run's rounds, and with what came after the last one."""
        lines = list(read(out))
        others: dict[str, float] = defaultdict(float)
        for each in (overhead, *(line.get("overhead") for line in lines)):
            for what, taken in each.items() if isinstance(each, dict) else ():
                others[what] += taken
        seconds = sum(line["seconds"] for line in lines)
        images = sum(line["images"] for line in lines)
        return {
            "seconds": round(seconds, 3),
            "overhead": {what: round(taken, 3) for what, taken in sorted(others.items())},
            "images": images,
            "images_per_second": round(images / seconds, 1) if seconds else 0.0,
            "bytes_up": sum(line["bytes_up"] for line in lines),
            "bytes_down": sum(line["bytes_down"] for line in lines),
            "missing": sum(line["missing"] for line in lines),
        }

    @staticmethod
    def first_rounds(
        out: Path, targets: tuple[float, ...], measure: str, result: dict[str, float]
    ) -> dict[str, int | None]:
        """The first evaluated round in which ``measure`` reached each accuracy.

        ``result`` are the numbers at the end; none: never reached (FedEMA, Table 11).
        """
        lines = list(read(out))
        end = {"round": lines[-1]["round"] if lines else 0, **result}
        known = [(line["round"], line[measure]) for line in (*lines, end) if measure in line]
        return {
            f"rounds_to_{target:g}": next((r for r, top1 in known if top1 >= target), None)
            for target in targets
        }


def read(out: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's metrics; a line that a kill cut short is passed over."""
    if not (out / FILE).is_file():
        return
    with (out / FILE).open(encoding="utf-8", errors="replace") as file:
        for text in file:
            with contextlib.suppress(json.JSONDecodeError):
                line = json.loads(text)
                if isinstance(line, dict) and type(line.get("round")) is int:
                    yield line


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value from a file is a number that can be drawn and averaged."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < LARGEST


def for_one(moved: Any, way: str, asked: int) -> float:
    """An exchange's bytes for one of the clients that they are of, in the mean.

    Lines of older versions say only how many were asked.
    """
    known = moved if isinstance(moved, dict) else {}
    count, clients = known.get(way), known.get(SHARED[way])
    if not is_number(count):
        return 0.0
    return count / max(1, clients if is_number(clients) and clients else asked)


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    """What can be drawn over rounds."""
    known = line.items()
    return {k: v for k, v in known if isinstance(v, (int, float)) and k != "round"}
