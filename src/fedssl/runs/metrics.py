"""``metrics.jsonl``, with a line per round: read it, and sum over its lines."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from fedssl.util.errors import UserError

FILE = "metrics.jsonl"
LARGEST = 2**63  # the largest whole number that arrays hold
COUNTED = {"up": "replied", "down": "reached"}  # the clients whose bytes an exchange counts
NUMBERS = ("seconds", "images", "clients", "missing", "bytes_up", "bytes_down")  # of a line


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


def totals(out: Path, overhead: Mapping[str, float]) -> dict[str, Any]:
    """Sum over a run's rounds; ``overhead`` came after the last one."""
    lines = list(read(out))
    others: dict[str, float] = defaultdict(float, overhead)
    for line in lines:
        taken = line.get("overhead")
        if isinstance(taken, Mapping):  # a user's algorithm may log a number of this name
            for purpose, seconds in taken.items():
                others[purpose] += seconds
    seconds = sum(line["seconds"] for line in lines)
    images = sum(line["images"] for line in lines)
    return {
        "seconds": round(seconds, 3),
        "overhead": {purpose: round(each, 3) for purpose, each in sorted(others.items())},
        "images": images,
        "images_per_second": round(images / seconds, 1) if seconds else 0.0,
        "bytes_up": sum(line["bytes_up"] for line in lines),
        "bytes_down": sum(line["bytes_down"] for line in lines),
        "missing": sum(line["missing"] for line in lines),
    }


def first_rounds(
    out: Path, targets: tuple[float, ...], measure: str, result: dict[str, float]
) -> dict[str, int | None]:
    """Return the first evaluated round in which ``measure`` reached each accuracy.

    ``result`` are the numbers at the end. ``None``: never reached (FedEMA, Table 11).
    """
    lines = list(read(out))
    end = {"round": lines[-1]["round"] if lines else 0, **result}
    scores = [(line["round"], line[measure]) for line in (*lines, end) if measure in line]
    return {
        f"rounds_to_{target:g}": next((r for r, top1 in scores if top1 >= target), None)
        for target in targets
    }


def read(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's metrics; skip the last one if a kill cut it short."""
    path = out / FILE
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            line = None
            with contextlib.suppress(ValueError, RecursionError):
                line = json.loads(text)
            if text.endswith("\n") and not _is_line(line):
                fix = "Put back a copy of the file, or remove the line."
                raise UserError(f"{path}: line {number} is not that of a round", fix=fix)
            if _is_line(line):
                yield line


def _is_line(line: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether the values that fedssl reads in a line have the types that it writes."""
    if not isinstance(line, dict) or type(line.get("round")) is not int:
        return False
    exchanges = line.get("exchanges", {})
    return (
        0 < line["round"] < LARGEST
        and all(type(line.get(name, 0)) in (int, float) for name in NUMBERS)
        and isinstance(exchanges, dict)
        and all(isinstance(moved, dict) for moved in exchanges.values())
        and all(type(moved.get(w)) in (int, float) for moved in exchanges.values() for w in COUNTED)
    )


def read_rounds(out: Path, rounds: int, digest: str) -> str:
    """Return the lines of the rounds that a checkpoint holds; ``digest`` is that of all of them.

    Lines of later rounds, and one that a kill cut short, are left out.
    """
    path, lines = out / FILE, list[bytes]()
    fix = "Put back a copy of it, or start a new run in another folder."
    with contextlib.suppress(FileNotFoundError):
        lines = path.read_bytes().splitlines(keepends=True)[:rounds]
    for number in range(1, rounds + 1):
        if number > len(lines) or _read_round(lines[number - 1]) != number:
            raise UserError(f"{path}: line {number} is not that of round {number}", fix=fix)
    if rounds and hashlib.sha256(b"".join(lines)).hexdigest() != digest:
        raise UserError(f"{path}: the lines of rounds 1 to {rounds} were changed", fix=fix)
    return b"".join(lines).decode()


def _read_round(text: bytes) -> Any:
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        return json.loads(text)["round"]
    return None


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value from a file is a number that can be drawn and averaged."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < LARGEST


def for_one(moved: Any, way: str, asked: int) -> float:
    """Return an exchange's bytes for one of its clients, on average."""
    exchange = moved if isinstance(moved, dict) else {}
    count, clients = exchange.get(way), exchange.get(COUNTED[way])
    if not is_number(count):
        return 0.0
    return count / max(1, clients if is_number(clients) and clients else asked)


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line that loggers can draw over rounds."""
    return {k: v for k, v in line.items() if isinstance(v, int | float) and k != "round"}
