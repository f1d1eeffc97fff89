"""A run's metrics, read once: a curve for each measure, and the bytes of each task."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedssl.runs.metrics import for_one, is_number
from fedssl.runs.reader import RunReader

MOST_CLIENTS = 12  # clients with a curve; the mean is over all
# Fields of a line that are no curve, or that a curve is computed from.
NO_CURVE = {
    *("round", "seconds", "images", "clients", "skipped", "delta", "exchanges", "faults"),
    *("overhead", "bytes_up_per_client", "bytes_down_per_client"),
}
HIDDEN_IF_ZERO = ("missing", "bytes_up", "bytes_down")


@dataclass
class Curve:
    """The values of one measure, by round."""

    rounds: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, round: int, value: float) -> None:
        """Append a point."""
        self.rounds.append(round)
        self.values.append(value)


@dataclass
class Traffic:
    """Bytes of all clients, and of one client in the round in which that was largest.

    The mean over rounds would be too small: in some rounds a reply is missing.
    """

    up: int = 0
    down: int = 0
    client_up: float = 0.0
    client_down: float = 0.0
    rounds: int = 0

    def add(self, round: Traffic) -> None:
        """Add one round."""
        self.rounds += 1
        self.up, self.down = self.up + round.up, self.down + round.down
        self.client_up = max(self.client_up, round.client_up)
        self.client_down = max(self.client_down, round.client_down)


@dataclass
class History:
    """The contents of a run's metrics."""

    rounds: int = 0
    curves: dict[str, Curve] = field(default_factory=dict)
    parts: dict[str, dict[str, Curve]] = field(default_factory=dict)  # by client or layer
    tasks: dict[str, Traffic] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)  # of all tasks
    last: dict[str, Any] = field(default_factory=dict)  # line
    names: dict[str, str] = field(default_factory=dict)  # of clients with parts, by number


def read_history(run: RunReader) -> History:
    """Read a run's metrics."""
    history = History()
    for line in run.lines():
        _add_line(history, line)
    for name in HIDDEN_IF_ZERO:
        if name in history.curves and not any(history.curves[name].values):
            del history.curves[name]
    shown = {key for parts in history.parts.values() for key in parts}
    names = ((str(row["client"]), str(row["name"])) for row in run.clients)
    history.names = {number: name for number, name in names if number in shown}
    return history


def _add_line(history: History, line: Mapping[str, Any]) -> None:
    round = line["round"]
    history.rounds, history.last = max(history.rounds, round), dict(line)
    for name, value in line.items():
        if isinstance(value, dict) and name not in NO_CURVE:
            _add_parts(history, name, round, value)
        elif is_number(value) and name not in NO_CURVE:
            history.curves.setdefault(name, Curve()).add(round, value)
    if "exchanges" in line:
        _add_traffic(history, line["exchanges"], line.get("clients", 0))
    seconds, images = line.get("seconds"), line.get("images")
    if is_number(seconds) and is_number(images) and seconds and is_number(images / seconds):
        history.curves.setdefault("images_per_second", Curve()).add(round, images / seconds)


def _add_parts(history: History, name: str, round: int, values: Mapping[str, Any]) -> None:
    """Add a point to the curves of the first clients, and the mean over all clients."""
    numbers = {str(k): float(v) for k, v in values.items() if is_number(v)}
    if not numbers:
        return
    parts = history.parts.setdefault(name, {"mean": Curve()})
    parts["mean"].add(round, math.fsum(numbers.values()) / len(numbers))
    for key, value in numbers.items():
        if key in parts or len(parts) <= MOST_CLIENTS:
            parts.setdefault(key, Curve()).add(round, value)


def _add_traffic(history: History, tasks: Mapping[str, Any], clients: int) -> None:
    """Add one round's bytes of each task."""
    total = Traffic()
    for task, counts in tasks.items():
        up, down = (for_one(counts, way, clients) for way in ("up", "down"))
        traffic = Traffic(counts["up"], counts["down"], up, down)
        history.tasks.setdefault(task, Traffic()).add(traffic)
        total.up, total.down = total.up + traffic.up, total.down + traffic.down
        total.client_up, total.client_down = total.client_up + up, total.client_down + down
    history.traffic.add(total)
