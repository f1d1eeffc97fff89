"""Figures of curves: one for each measure, with a curve for each run or client."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedssl.report.history import Curve, History
from fedssl.util.text import format_client, name_measure

MOST_POINTS = 1500  # of one curve
ALL_POINTS, FEWEST_POINTS = 12_000, 200  # of all runs' curves of a measure; of a curve even then
FLAT = 0.05  # of the most bytes of a round: a smaller difference is no curve worth drawing
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


@dataclass(frozen=True)
class Series:
    """One curve of a figure."""

    name: str
    colour: int
    x: list[int]
    y: list[float]
    total: int  # points before thinning
    extremes: list[tuple[float, int]]  # first, last, lowest and highest value with their rounds

    @property
    def lowest(self) -> float:
        """The lowest value."""
        return self.extremes[2][0]

    @property
    def highest(self) -> float:
        """The highest value."""
        return self.extremes[3][0]

    @classmethod
    def from_curve(cls, name: str, colour: int, curve: Curve, most: int) -> Series:
        """Keep at most ``most`` points of a curve."""
        x, y = np.array(curve.rounds), np.array(curve.values)
        kept = select_points(y, most)
        places = (0, -1, int(y.argmin()), int(y.argmax()))
        extremes = [(curve.values[k], curve.rounds[k]) for k in places]
        return cls(name, colour, x[kept].tolist(), y[kept].tolist(), len(y), extremes)


@dataclass
class Panel:
    """One figure."""

    measure: str
    title: str
    unit: str
    note: str = ""
    series: list[Series] = field(default_factory=list)
    colours: int = 0
    legend: bool = False
    is_flat: bool = False  # a sentence says the values better

    @property
    def order(self) -> tuple[float, str]:
        """The figure's place on the page."""
        name = self.measure
        if name.endswith("_top1"):
            return 0.5, name
        return (ORDER.index(name) if name in ORDER else len(ORDER)), name


def draw_panels(histories: Sequence[tuple[str, History]]) -> list[Panel]:
    """Return the figures of one run, or of several labelled runs together.

    Of one run, all accuracies are in one figure, and each client has a curve. Of several, each
    has one curve and one color in every figure.
    """
    many = len(histories)
    most = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // many))
    panels: dict[str, Panel] = {}
    for name in dict.fromkeys(n for _, h in histories for n in (*h.curves, *h.parts)):
        title, unit = _title_of(name)
        if many == 1 and name.endswith("_top1"):
            title = "Accuracy"
        panel = panels.setdefault(title, Panel(name, title, unit))
        for number, (label, history) in enumerate(histories):
            curves = list(_draw_one(name, history))
            if many > 1 and name in history.parts:
                panel.note = f"mean over {'layers' if name == 'layer_distance' else 'clients'}"
            for key, curve in curves[:1] if many > 1 else curves:
                colour = number if many > 1 else len(panel.series)
                series = Series.from_curve(label if many > 1 else key, colour, curve, most)
                panel.series.append(series)
        panel.colours = max(many, len(panel.series))
        panel.legend = panel.colours > 1
        slack = FLAT if panel.unit == "B" else 0.0
        each = (one.highest - one.lowest <= slack * abs(one.highest) for one in panel.series)
        panel.is_flat = len(panel.series) <= many and all(each)
    return sorted(panels.values(), key=lambda panel: panel.order)


def _draw_one(name: str, history: History) -> Iterator[tuple[str, Curve]]:
    """Yield a run's curves of a measure with their names; the mean comes first."""
    if name in history.curves:
        yield name_measure(name), history.curves[name]
    parts = history.parts.get(name, {})
    for key in parts if name == "layer_distance" else sorted(parts, key=_by_number):
        yield format_client(history.names.get(key, key)), parts[key]


def _by_number(client: str) -> tuple[int, str]:
    return (int(client) if client.isdecimal() else -1, client)


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
