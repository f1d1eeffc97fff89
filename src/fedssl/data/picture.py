"""The picture of a partition: a bar a client, a colour a class (Dec-SSL, Figure 17)."""

from __future__ import annotations

import colorsys
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from fedssl.data.dataset import Groups
from fedssl.data.partition import called, counts, distance
from fedssl.util.errors import UserError

MOST = 100  # clients that get a bar
LEFT, TOP, WIDTH = 90, 40, 600  # where the bars start, and how long the longest is
HEIGHT = 800  # of all bars together, if that leaves a bar between 8 and 28 pixels
MARGIN, LINE, COLUMN = 10, 16, 136  # around all, and of the legend
_GRAY = (128, 128, 128)  # samples without a class
# The usual ten; more classes are spread over hue and brightness.
_TEN = (
    (31, 119, 180),
    (255, 127, 14),
    (44, 160, 44),
    (214, 39, 40),
    (148, 103, 189),
    (140, 86, 75),
    (227, 119, 194),
    (188, 189, 34),
    (23, 190, 207),
    (60, 60, 60),
)
Colour = tuple[int, int, int]


def draw(
    path: Path,
    groups: Groups,
    labels: NDArray[np.int64] | None,
    classes: Sequence[str],
    names: Sequence[str] = (),
) -> None:
    """Write the PNG; the length of a bar is the client's number of samples."""
    title = f"{len(groups)} clients"
    if labels is None or (labels < 0).all():
        labels, classes = np.zeros(groups.members.max() + 1, np.int64), ("no labels",)
    else:
        title += f", average earth mover's distance {distance(groups, labels):.3f}"
    if len(groups) > MOST:
        title += f" (the first {MOST} are shown)"
    held = counts(groups, labels)[:MOST]
    held = np.pad(held, ((0, 0), (0, len(classes) - held.shape[1])))
    try:
        render(held, groups.sizes[:MOST], title, classes, names).save(path, "PNG")
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({error.strerror})") from None


def render(
    held: NDArray[np.int64],
    sizes: NDArray[np.int64],
    title: str,
    classes: Sequence[str],
    names: Sequence[str] = (),
) -> Image.Image:
    """The picture of ``held[client, class]`` samples; what has no class is gray."""
    columns = (LEFT + WIDTH) // COLUMN
    bottom = TOP + bar_step(len(held)) * len(held) + MARGIN
    height = bottom + LINE * -(-len(classes) // columns) + MARGIN
    image = Image.new("RGB", (LEFT + WIDTH + 2 * MARGIN, height), "white")
    pen, colours = ImageDraw.Draw(image), palette(len(classes))
    pen.text((MARGIN, MARGIN), title, "black", ImageFont.load_default())
    _bars(pen, held, sizes, [*colours, _GRAY], names)
    for c, name in enumerate(classes):
        x, y = MARGIN + c % columns * COLUMN, bottom + c // columns * LINE
        pen.rectangle((x, y + 2, x + 10, y + 12), colours[c])
        pen.text((x + 16, y), name[:18], "black", ImageFont.load_default())
    return image


def _bars(
    pen: ImageDraw.ImageDraw,
    held: NDArray[np.int64],
    sizes: NDArray[np.int64],
    colours: Sequence[Colour],
    names: Sequence[str],
) -> None:
    step = bar_step(len(held))
    every = -(-LINE // step)  # a name must not overlap the next
    for k, row in enumerate(held):
        top = TOP + k * step
        if k % every == 0:
            name = called(names, k)[:12]
            pen.text((MARGIN, top + step // 2 - 6), name, "black", ImageFont.load_default())
        edges = np.rint(np.cumsum([0, *row, sizes[k] - row.sum()]) * WIDTH / sizes.max())
        for colour, (start, end) in zip(colours, itertools.pairwise(edges), strict=True):
            if end > start:
                pen.rectangle((LEFT + int(start), top, LEFT + int(end) - 1, top + step - 2), colour)


def bar_step(clients: int) -> int:
    """Pixels from one bar to the next; one of them is white."""
    return min(28, max(8, HEIGHT // clients))


def palette(count: int) -> list[Colour]:
    """A colour for each class, all different."""
    if count <= len(_TEN):
        return list(_TEN[:count])
    shades = [
        colorsys.hsv_to_rgb(k / count, (1, 0.55)[k % 2], (0.85, 0.6, 1)[k % 3])
        for k in range(count)
    ]
    return [(round(255 * r), round(255 * g), round(255 * b)) for r, g, b in shades]
