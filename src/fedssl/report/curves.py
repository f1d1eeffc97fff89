"""The curves of ``metrics.jsonl``: read once, and thinned out without losing their extremes."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedssl.data.partition import worded
from fedssl.runs.metrics import for_one, is_number
from fedssl.runs.record import Run
from fedssl.util.errors import UserError
from fedssl.util.text import name_measure

POINTS = 1500  # of one curve, at most
ALL_POINTS, FEWEST = 12_000, 200  # of all runs' curves of one measure, and of each even so
MOST_CLIENTS = 12  # that have a curve of their own; the others are in the mean
# Not curves: what a round's line says otherwise, or what other curves are made of.
_OTHER = {
    *("round", "seconds", "images", "clients", "skipped", "delta", "exchanges", "faults"),
    *("overhead", "bytes_up_per_client", "bytes_down_per_client"),
}
_DULL = {"missing", "bytes_up", "bytes_down"}  # if there are none
TITLES = {
    "loss": ("Loss", ""),
    "divergence": ("Divergence of client and server", ""),
    "mu": ("μ: what a client keeps of its own", ""),
    "mu_predictor": ("μ of the predictor", ""),
    "consensus": ("Consensus: peers to their mean", ""),
    "false_negatives": ("Share of false negatives", ""),
    "cluster": ("Cluster of each client", ""),
    "kept_predictor": ("Whether a client kept its own predictor", ""),
    "local_weight_distance": ("Drift of weights, client to global", ""),
    "local_feature_distance": ("Drift of features, client to global", ""),
    "local_cka": ("Drift: CKA with global features", ""),
    "layer_distance": ("Drift by layer", ""),
    "between_clients_weight_distance": ("Distance between clients' weights", ""),
    "bytes_up": ("Bytes up, a round, all clients", "B"),
    "bytes_down": ("Bytes down, a round, all clients", "B"),
    "images_per_second": ("Images per second", ""),
    "epsilon": ("ε spent", ""),
    "missing": ("Replies missing", ""),
}
ORDER = tuple(TITLES)


@dataclass
class Curve:
    """The values of one measure, by round."""

    rounds: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, round: int, value: float) -> None:
        """One more point."""
        self.rounds.append(round)
        self.values.append(value)

    def thinned(self, most: int) -> tuple[list[int], list[float]]:
        """At most ``most`` points: first and last, smallest and largest of each stretch."""
        x, y = np.array(self.rounds), np.array(self.values)
        kept = keep(y, most)
        return x[kept].tolist(), y[kept].tolist()

    @property
    def extremes(self) -> dict[str, tuple[int, float]]:
        """Round and value of the first, the last, the smallest and the largest."""
        y = np.array(self.values)
        places = {"first": 0, "last": -1, "lowest": int(y.argmin()), "highest": int(y.argmax())}
        return {name: (self.rounds[k], self.values[k]) for name, k in places.items()}


@dataclass
class Moved:
    """Bytes up and down: over all clients, and a client's in the round with the most.

    In the mean over rounds, one that was cut short would make what a client sends look less.
    """

    up: int = 0
    down: int = 0
    one_up: float = 0.0
    one_down: float = 0.0
    rounds: int = 0

    def add(self, round: Moved) -> None:
        """One more round."""
        self.rounds += 1
        self.up, self.down = self.up + round.up, self.down + round.down
        self.one_up = max(self.one_up, round.one_up)
        self.one_down = max(self.one_down, round.one_down)


@dataclass
class History:
    """What a run's metrics say: a curve a measure, or several by client, and sums of bytes."""

    rounds: int = 0
    lines: int = 0
    plain: dict[str, Curve] = field(default_factory=dict)
    parts: dict[str, dict[str, Curve]] = field(default_factory=dict)  # by client, or by layer
    exchanges: dict[str, Moved] = field(default_factory=dict)
    moved: Moved = field(default_factory=Moved)  # by all exchanges
    last: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # of clients, by number
    problem: str = ""  # why the metrics could not be read to their end


def read(run: Run) -> History:
    """Read a run's metrics, once; what is odd in a file of another version ends them."""
    history = History(names=_names(run))
    try:
        for line in run.lines():
            _take(history, line)
    except Exception as error:  # what came before can still be shown
        history.problem = f"{type(error).__name__}: {str(error)[:200]}"
    for name in _DULL & set(history.plain):
        if not any(history.plain[name].values):
            del history.plain[name]
    return history


def _names(run: Run) -> dict[str, str]:
    """The clients' names, where there is a file of them that can be read."""
    try:
        return {str(row["client"]): str(row["name"]) for row in run.clients}
    except (UserError, LookupError, TypeError):  # without it, curves have the clients' numbers
        return {}


def _take(history: History, line: Mapping[str, Any]) -> None:
    round = line["round"]
    history.rounds, history.lines = max(history.rounds, round), history.lines + 1
    history.last = dict(line)
    clients = line.get("clients")
    asked = int(clients) if is_number(clients) else 0
    for name, value in line.items():
        if name == "exchanges" and isinstance(value, dict):
            _add_traffic(history, value, asked)
        elif name in _OTHER:
            continue
        elif isinstance(value, dict):
            _take_parts(history, name, round, value)
        elif is_number(value):
            history.plain.setdefault(name, Curve()).add(round, value)
    seconds, images = line.get("seconds"), line.get("images")
    if is_number(seconds) and is_number(images) and seconds:
        speed = images / seconds
        if is_number(speed):
            history.plain.setdefault("images_per_second", Curve()).add(round, speed)


def _take_parts(history: History, name: str, round: int, values: Mapping[str, Any]) -> None:
    """Each of the first clients, and the mean over all of this round."""
    known = {str(k): float(v) for k, v in values.items() if is_number(v)}
    if not known:
        return
    parts = history.parts.setdefault(name, {"mean": Curve()})
    parts["mean"].add(round, math.fsum(known.values()) / len(known))
    for key, value in known.items():
        if key in parts or len(parts) <= MOST_CLIENTS:
            parts.setdefault(key, Curve()).add(round, value)


def _add_traffic(history: History, line: Mapping[str, Any], asked: int) -> None:
    """One round's bytes of each exchange."""
    whole = Moved()
    for task, moved in line.items():
        known = moved if isinstance(moved, dict) else {}
        up, down = (int(known[w]) if is_number(known.get(w)) else 0 for w in ("up", "down"))
        own = Moved(up, down, for_one(known, "up", asked), for_one(known, "down", asked))
        history.exchanges.setdefault(str(task), Moved()).add(own)
        whole.up, whole.down = whole.up + own.up, whole.down + own.down
        whole.one_up, whole.one_down = whole.one_up + own.one_up, whole.one_down + own.one_down
    history.moved.add(whole)


def keep(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Places of at most ``most`` values: first and last, smallest and largest of each stretch."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, max(1, (most - 2) // 2) + 1).astype(np.int64)
    kept = {0, count - 1}
    for start, stop in itertools.pairwise(edges):
        kept |= {
            int(start + values[start:stop].argmin()),
            int(start + values[start:stop].argmax()),
        }
    return np.array(sorted(kept))


def panels(histories: Sequence[tuple[str, History]]) -> list[dict[str, Any]]:
    """The figures of all runs together: a figure a measure, with a curve a run or a client."""
    most = max(FEWEST, min(POINTS, ALL_POINTS // len(histories)))
    alone = len(histories) == 1
    found = _accuracies(histories[0][1], most) if alone else []
    found += _bytes(histories[0][1], most) if alone else []
    shown = {name for panel in found for name in panel["of"]}
    names = dict.fromkeys(n for _, h in histories for n in (*h.plain, *h.parts) if n not in shown)
    for name in names:
        series: list[dict[str, Any]] = []
        for k, (label, history) in enumerate(histories):
            if name in history.plain:
                what = title(name)[0] if alone else label
                series.append({**_series(what, history.plain[name], most), "colour": k})
            elif name in history.parts and not alone:
                series.append({**_series(label, history.parts[name]["mean"], most), "colour": k})
            elif name in history.parts:
                series += _by_part(name, history, most)
        found.append(_panel([name], *title(name), series, "" if alone else _mean(name, histories)))
        if not alone:  # a run has the same colour in every figure
            found[-1] |= {"colours": len(histories), "legend": True}
    return sorted(found, key=_place)


def _mean(name: str, histories: Sequence[tuple[str, History]]) -> str:
    if not any(name in history.parts for _, history in histories):
        return ""
    return f"mean over {'layers' if name == 'layer_distance' else 'clients'}"


def _place(panel: Mapping[str, Any]) -> tuple[int, str]:
    name = panel["of"][0]
    if name.endswith("_top1"):
        return 1, name
    places = [0, *range(2, len(ORDER) + 1)]  # accuracies come after the loss
    return (places[ORDER.index(name)] if name in ORDER else len(ORDER) + 1), name


def title(name: str) -> tuple[str, str]:
    """A measure's name for people, and its unit."""
    if name in TITLES:
        return TITLES[name]
    if name.endswith("_top1"):
        return f"Accuracy: {name_measure(name)}", "%"
    return name.replace("_", " "), ""


def _accuracies(history: History, most: int) -> list[dict[str, Any]]:
    names = [name for name in history.plain if name.endswith("_top1")]
    if not names:
        return []
    series = [_series(name_measure(name), history.plain[name], most) for name in names]
    return [_panel(names, "Accuracy where it was evaluated", "%", series, "")]


def _bytes(history: History, most: int) -> list[dict[str, Any]]:
    names: list[str] = [name for name in ("bytes_up", "bytes_down") if name in history.plain]
    if len(names) < 2:
        return []
    words = ("up, to the server", "down, to the clients")
    each = zip(words, names, strict=True)
    series = [_series(word, history.plain[name], most) for word, name in each]
    series[0]["dash"] = "6 5"  # the two are often the same: the lower shows through the upper
    return [_panel(names, "Bytes a round, all clients", "B", series, "")]


def _by_part(name: str, history: History, most: int) -> list[dict[str, Any]]:
    """The mean, and each client (or layer) by itself."""
    parts = history.parts[name]
    names = {key: key for key in parts if key != "mean"}
    if name != "layer_distance":
        keys = sorted(names, key=_number)
        names = {key: worded(history.names.get(key, key)) for key in keys}
    return [
        _series("mean", parts["mean"], most),
        *(_series(shown, parts[key], most) for key, shown in names.items()),
    ]


def _number(key: str) -> tuple[int, str]:
    return (int(key) if key.isdecimal() else -1), key


def _series(name: str, curve: Curve, most: int) -> dict[str, Any]:
    x, y = curve.thinned(most)
    return {"name": name, "x": x, "y": y, "of": len(curve.values), "extremes": curve.extremes}


def _panel(
    names: list[str], title: str, unit: str, series: list[dict[str, Any]], note: str
) -> dict[str, Any]:
    for k, own in enumerate(series):
        own.setdefault("colour", k)
    return {
        "of": names,
        "title": title,
        "unit": unit,
        "series": series,
        "note": note,
        "colours": len(series),
        "legend": len(series) > 1,
    }
