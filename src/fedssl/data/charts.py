"""Charts as PNG files: stacked bars and points in the plane."""

from __future__ import annotations

import colorsys
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from fedssl.data.client_table import count_labels, mean_distance
from fedssl.data.dataset import Groups
from fedssl.util import files
from fedssl.util.text import name_client

MOST_CLIENTS = 100
LEFT, TOP, WIDTH = 140, 40, 600  # where bars begin, and the length of the longest, in pixels
HEIGHT = 800  # of all bars together, if that leaves 8 to 28 pixels for each
MARGIN, LINE, COLUMN = 10, 16, 136  # around everything; of the legend
LETTERS = 20  # of a bar's name
SIDE, DOT = 900, 4  # of a chart of points
GRAY = (128, 128, 128)
_TEN = (
    (31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189),
    (140, 86, 75), (227, 119, 194), (188, 189, 34), (23, 190, 207), (60, 60, 60),
)  # fmt: skip
Color = tuple[int, int, int]


def draw_partition(
    path: Path,
    groups: Groups,
    labels: NDArray[np.int64],
    classes: Sequence[str],
    names: Sequence[str] = (),
) -> None:
    """Draw a bar for each client and a color for each class (Dec-SSL, Figure 17)."""
    title = f"{len(groups)} clients"
    if (labels < 0).all():
        labels, classes = np.zeros(len(labels), np.int64), ("no labels",)
    else:
        title += f", average earth mover's distance {mean_distance(groups, labels):.3f}"
    if len(groups) > MOST_CLIENTS:
        title += f" (the first {MOST_CLIENTS} are shown)"
    held = count_labels(groups, labels, len(classes))[:MOST_CLIENTS]
    unlabeled = groups.sizes[:MOST_CLIENTS] - held.sum(axis=1)
    bars = [name_client(names, k) for k in range(len(held))]
    save(draw_bars(title, bars, np.column_stack((held, unlabeled)), classes), path)


def draw_bars(
    title: str, names: Sequence[str], values: NDArray[np.generic], legend: Sequence[str]
) -> Image.Image:
    """Draw ``values[bar, part]``; parts beyond the legend are gray."""
    columns, step = (LEFT + WIDTH) // COLUMN, bar_step(len(values))
    bottom = TOP + step * len(values) + MARGIN
    height = bottom + LINE * -(-len(legend) // columns) + MARGIN
    image, pen = _blank(LEFT + WIDTH + 2 * MARGIN, height)
    colors = [*palette(len(legend)), GRAY]
    _write(pen, (MARGIN, MARGIN), title)
    ends = np.rint(values.cumsum(axis=1) * WIDTH / values.sum(axis=1).max()).astype(int)
    for k, row in enumerate(ends):
        top = TOP + k * step
        if k % -(-LINE // step) == 0:  # names must not overlap
            _write(pen, (MARGIN, top + step // 2 - 6), names[k][:LETTERS])
        for color, (start, end) in zip(colors, itertools.pairwise([0, *row]), strict=False):
            if end > start:
                pen.rectangle((LEFT + start, top, LEFT + end - 1, top + step - 2), color)
    for k, name in enumerate(legend):
        x, y = MARGIN + k % columns * COLUMN, bottom + k // columns * LINE
        pen.rectangle((x, y + 2, x + 10, y + 12), colors[k])
        _write(pen, (x + 16, y), name[:18])
    return image


def bar_step(bars: int) -> int:
    """Return the pixels from one bar to the next."""
    return min(28, max(8, HEIGHT // bars))


def draw_points(groups: Mapping[str, NDArray[np.float64]]) -> Image.Image:
    """Draw points ``[N, 2]`` of several groups, each in a color."""
    points = np.concatenate(list(groups.values()))
    low, high = points.min(0), points.max(0)
    places = 20 + (points - low) / np.maximum(high - low, 1e-12) * (SIDE - 60)
    image, pen = _blank(SIDE, SIDE)
    colors = palette(len(groups))
    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups.values()])
    for i in np.random.default_rng(0).permutation(len(places)):  # no group covers the others
        x, y = places[i]
        pen.ellipse((x, y, x + DOT, y + DOT), fill=colors[owners[i]])
    for k, name in enumerate(groups):
        _write(pen, (10 + 90 * (k % 9), SIDE - 34 + 14 * (k // 9)), name[:12], colors[k])
    return image


def save(image: Image.Image, path: Path, option: str = "--out") -> None:
    """Write a PNG file."""
    with files.replace_output(path, option) as new:
        image.save(new, "PNG")


def palette(count: int) -> list[Color]:
    """Return ``count`` different colors."""
    if count <= len(_TEN):
        return list(_TEN[:count])
    shades = [
        colorsys.hsv_to_rgb(k / count, (1, 0.55)[k % 2], (0.85, 0.6, 1)[k % 3])
        for k in range(count)
    ]
    return [(round(255 * r), round(255 * g), round(255 * b)) for r, g, b in shades]


def _blank(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (width, height), "white")
    return image, ImageDraw.Draw(image)


def _write(
    pen: ImageDraw.ImageDraw, at: tuple[int, int], text: str, color: Color = (0, 0, 0)
) -> None:
    pen.text(at, text, color, ImageFont.load_default())
