"""Charts as PNG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partitions import groups_of
from PIL import Image

from fedssl.cli import main
from fedssl.data import charts


def row_of(image: Image.Image, client: int, clients: int) -> list[tuple[int, ...]]:
    """The pixels along the middle of a client's bar."""
    step = charts.bar_step(clients)
    pixels = np.asarray(image)[charts.TOP + client * step + step // 2 - 1]
    return [tuple(map(int, p)) for p in pixels[charts.LEFT : charts.LEFT + charts.WIDTH]]


def test_a_partition_has_a_bar_for_each_client_and_a_color_for_each_class(tmp_path: Path) -> None:
    labels = np.array([0, 0, 1, 1, 1, 2, -1, 0])
    groups = groups_of([0, 1, 2, 5], [3, 4], [6, 7])
    charts.draw_partition(tmp_path / "a.png", groups, labels, ("x", "y", "z", "unseen"))
    with Image.open(tmp_path / "a.png") as file:
        assert file.format == "PNG"
        image = file.convert("RGB")
    x, y, z, unseen = charts.palette(4)
    white, gray = (255, 255, 255), (128, 128, 128)
    assert row_of(image, 0, 3) == [x] * 300 + [y] * 150 + [z] * 150
    assert row_of(image, 1, 3) == [y] * 300 + [white] * 300
    assert row_of(image, 2, 3) == [x] * 150 + [gray] * 150 + [white] * 300
    below = np.asarray(image)[charts.TOP + 3 * charts.bar_step(3) :]
    for colour in (x, y, z, unseen):  # the legend
        assert (below == colour).all(axis=2).sum() == 11 * 11


def test_a_hundred_clients_are_drawn(tmp_path: Path) -> None:
    labels = np.arange(1000) % 10
    names = [str(c) for c in range(10)]
    sizes = []
    for clients in (100, 150):
        groups = groups_of(*(list(range(k, 1000, clients)) for k in range(clients)))
        charts.draw_partition(tmp_path / "a.png", groups, labels, names)
        with Image.open(tmp_path / "a.png") as image:
            sizes.append(image.size)
            assert row_of(image.convert("RGB"), 99, 100)[0] != (255, 255, 255)
    assert sizes[0] == sizes[1] and sizes[0][1] < 1000


@pytest.mark.parametrize("count", [1, 10, 11, 100, 200])
def test_colors_differ(count: int) -> None:
    colours = charts.palette(count)
    assert len({*colours, (255, 255, 255), (128, 128, 128)}) == count + 2


def test_a_partition_without_labels(tmp_path: Path) -> None:
    charts.draw_partition(tmp_path / "a.png", groups_of([0, 1], [3]), np.full(4, -1), ())
    with Image.open(tmp_path / "a.png") as image:
        (colour,) = charts.palette(1)
        assert row_of(image.convert("RGB"), 1, 2)[:301] == [colour] * 300 + [(255,) * 3]


def test_the_command_prints_the_distance_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.png"
    words = [
        f"partition.{word}" for word in ("name=skew", "source=style", "sources=5", "clients=5")
    ]
    assert main(["partition", *words, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "distance             0.800 on average" in shown and "styles per client    1" in shown
    assert "plain  sepia  contrast  canvas  blur" in shown and str(out) in shown
    with Image.open(out) as image:
        colours = [row_of(image.convert("RGB"), k, 5)[100] for k in range(5)]
    assert colours == charts.palette(5)
