"""Figures of curves: one for each measure, with a curve for each run or client."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedssl.report.history import Curve, History
from fedssl.util.text import format_client, name_measure

MOST_POINTS = 1500  # of one curve
ALL_POINTS, FEWEST_POINTS = 12_000, 200  # of all runs' curves of a measure; of a curve even then
# Title and unit by measure, in the order of the page; accuracies follow the first.
TITLES = {
    "loss": ("Loss", ""),
    "divergence": ("Divergence of client and server", ""),
    "mu": ("μ: share of its own model that a client keeps", ""),
    "mu_predictor": ("μ of the predictor", ""),
    "consensus": ("Consensus: distance of peers to their mean", ""),
    "false_negatives": ("Share of false negatives", ""),
    "cluster": ("Cluster of each client", ""),
    "kept_predictor": ("Client kept its own predictor (1: yes)", ""),
    "local_weight_distance": ("Drift of weights, client to global", ""),
    "local_feature_distance": ("Drift of features, client to global", ""),
    "local_cka": ("Drift: CKA with global features", ""),
    "layer_distance": ("Drift by layer", ""),
    "between_clients_weight_distance": ("Distance between clients' weights", ""),
    "bytes_up": ("Bytes up per round, all clients", "B"),
    "bytes_down": ("Bytes down per round, all clients", "B"),
    "images_per_second": ("Images per second", ""),
    "epsilon": ("ε spent", ""),
    "missing": ("Replies missing", ""),
}
ORDER = tuple(TITLES)


@dataclass
class Series:
    """One curve of a figure."""

    name: str
    x: list[int]
    y: list[float]
    total: int  # points before thinning
    extremes: list[tuple[float, int]]  # values and their rounds
    colour: int = 0
    dash: str = ""

    @classmethod
    def from_curve(cls, name: str, curve: Curve, most: int) -> Series:
        """Return at most ``most`` points of a curve, and its first, last, lowest and highest."""
        x, y = np.array(curve.rounds), np.array(curve.values)
        kept = select_points(y, most)
        places = (0, -1, int(y.argmin()), int(y.argmax()))
        extremes = [(curve.values[k], curve.rounds[k]) for k in places]
        return cls(name, x[kept].tolist(), y[kept].tolist(), len(y), extremes)


@dataclass
class Panel:
    """One figure."""

    measures: list[str]
    title: str
    unit: str
    series: list[Series]
    note: str = ""
    colours: int = 0
    legend: bool = False

    def color_in_order(self) -> Panel:
        """Give every series a color; a single series needs no legend."""
        for number, series in enumerate(self.series):
            series.colour = number
        self.colours, self.legend = len(self.series), len(self.series) > 1
        return self

    @property
    def order(self) -> tuple[float, str]:
        """The figure's place on the page."""
        name = self.measures[0]
        if name.endswith("_top1"):
            return 0.5, name
        return (ORDER.index(name) if name in ORDER else len(ORDER)), name


def draw_panels(histories: Sequence[tuple[str, History]]) -> list[Panel]:
    """Return the figures of one run, or of several labelled runs together."""
    most = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // len(histories)))
    draw = _draw_one(histories[0][1], most) if len(histories) == 1 else _draw_all(histories, most)
    return sorted(draw, key=lambda panel: panel.order)


def _draw_one(history: History, most: int) -> list[Panel]:
    """Draw one run: all accuracies in one figure, bytes in another, each client by its name."""
    panels = []
    accuracies = [name for name in history.curves if name.endswith("_top1")]
    ways = {"bytes_up": "up, to the server", "bytes_down": "down, to the clients"}
    joined = list(ways) if ways.keys() <= history.curves.keys() else []
    if accuracies:
        series = [Series.from_curve(name_measure(n), history.curves[n], most) for n in accuracies]
        panels.append(Panel(accuracies, "Accuracy", "%", series))
    if joined:
        series = [Series.from_curve(ways[n], history.curves[n], most) for n in joined]
        series[0].dash = "6 5"  # often equal to the other, which then shows through
        panels.append(Panel(joined, "Bytes per round, all clients", "B", series))
    for name, curve in history.curves.items():
        if name not in (*accuracies, *joined):
            title, unit = _title_of(name)
            panels.append(Panel([name], title, unit, [Series.from_curve(title, curve, most)]))
    for name, parts in history.parts.items():
        names = {key: key for key in parts}
        if name != "layer_distance":
            keys = sorted(parts, key=lambda key: (int(key) if key.isdecimal() else -1, key))
            names = {key: format_client(history.names.get(key, key)) for key in keys}
        series = [Series.from_curve(names[key], parts[key], most) for key in names]
        panels.append(Panel([name], *_title_of(name), series))
    return [panel.color_in_order() for panel in panels]


def _draw_all(histories: Sequence[tuple[str, History]], most: int) -> list[Panel]:
    """Draw several runs: one figure for each measure, one color for each run."""
    panels = []
    for name in dict.fromkeys(n for _, h in histories for n in (*h.curves, *h.parts)):
        series, note = [], ""
        for colour, (label, history) in enumerate(histories):
            curve = history.curves.get(name)
            if name in history.parts:
                curve = history.parts[name]["mean"]
                note = f"mean over {'layers' if name == 'layer_distance' else 'clients'}"
            if curve is not None:
                series.append(Series.from_curve(label, curve, most))
                series[-1].colour = colour
        panels.append(Panel([name], *_title_of(name), series, note, len(histories), True))
    return panels


def _title_of(name: str) -> tuple[str, str]:
    """Return a measure's title and unit."""
    if name in TITLES:
        return TITLES[name]
    if name.endswith("_top1"):
        return f"Accuracy: {name_measure(name)}", "%"
    return name.replace("_", " "), ""


def select_points(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Return the places of at most ``most`` values that show the whole curve.

    They are the first and the last, and the smallest and the largest of every stretch.
    """
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, max(1, (most - 2) // 2) + 1).astype(np.int64)
    kept = {0, count - 1}
    for start, stop in itertools.pairwise(edges):
        kept.add(int(start + values[start:stop].argmin()))
        kept.add(int(start + values[start:stop].argmax()))
    return np.array(sorted(kept))
