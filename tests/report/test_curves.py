"""The contents of the metrics, and the figures drawn from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from made_runs import made

from fedssl.report.curves import draw_panels, select_points
from fedssl.report.history import MOST_CLIENTS, History, Traffic, read_history
from fedssl.runs.reader import RunReader


@pytest.mark.parametrize("count", [1, 2, 1500, 1501, 100_000])
def test_thinning_keeps_ends_and_extremes(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    values[count // 3], values[count // 2] = 50.0, -50.0
    kept = select_points(values, 1500)
    assert len(kept) == count if count <= 1500 else len(kept) <= 1500
    assert (np.diff(kept) > 0).all()
    assert {0, count - 1, int(values.argmin()), int(values.argmax())} <= set(kept.tolist())


def test_thinning_keeps_every_peak() -> None:
    values = np.zeros(60_000)
    peaks = np.arange(100, 60_000, 997)
    values[peaks] = 1 + np.arange(len(peaks))
    assert set(peaks.tolist()) <= set(select_points(values, 1500).tolist())


def line(round: int, **more: object) -> dict[str, object]:
    return {
        "round": round, "loss": 1.0 / round, "seconds": 2.0, "images": 10, "clients": 2,
        "missing": 0, "skipped": False, "bytes_up": 0, "bytes_down": 0, "faults": {"1": "late"},
        "exchanges": {"train": {"up": 5, "down": 7}}, **more,
    }  # fmt: skip


def history_of(path: Path, *lines: dict[str, object]) -> History:
    return read_history(RunReader(made(path, (), None, lines)))


def test_curves_and_traffic_of_a_run(tmp_path: Path) -> None:
    history = history_of(
        tmp_path / "a",
        line(1, mu={"0": 0.5, "7": None}, epsilon=0.5),
        line(2, mu={"0": 0.25, "7": 0.75}, odd="text", linear_top1=60.0),
    )
    traffic = Traffic(10, 14, 2.5, 3.5, 2)
    assert (history.rounds, history.tasks, history.traffic) == (2, {"train": traffic}, traffic)
    assert set(history.curves) == {"loss", "images_per_second", "epsilon", "linear_top1"}
    panels = {panel.measure: panel for panel in draw_panels([("a", history)])}
    assert list(panels) == ["loss", "linear_top1", "mu", "images_per_second", "epsilon"]
    assert [(s.name, s.x, s.y) for s in panels["mu"].series] == [
        ("mean", [1, 2], [0.5, 0.5]),
        ("client 0", [1, 2], [0.5, 0.25]),
        ("client 7", [2], [0.75]),
    ]


def test_curves_carry_the_names_of_clients(tmp_path: Path) -> None:
    path = tmp_path / "a"
    lines = line(1, mu={"10": 0.5, "0": 0.25, "2": 1, "3": 0.5})

    def names(history: History) -> list[str]:
        (mu,) = (p for p in draw_panels([("a", history)]) if p.measure == "mu")
        return [series.name for series in mu.series]

    numbers = ["mean", "client 0", "client 2", "client 3", "client 10"]
    assert names(history_of(path, lines)) == numbers
    names_of = {0: "south", 2: "7", 10: "a"}
    rows = [{"client": k, "name": name, "samples": 1} for k, name in names_of.items()]
    (path / "clients.json").write_text(json.dumps(rows))
    assert names(read_history(RunReader(path))) == ["mean", "south", "client 7", "client 3", "a"]


def test_of_many_clients_a_few_have_a_curve(tmp_path: Path) -> None:
    many = {str(k): float(k) for k in range(1000)}
    parts = history_of(tmp_path / "a", line(1, divergence=many)).parts["divergence"]
    assert len(parts) == 1 + MOST_CLIENTS and parts["mean"].values[0] == 499.5


def test_runs_share_figures_and_keep_their_color(tmp_path: Path) -> None:
    first = history_of(tmp_path / "a", line(1))
    second = history_of(tmp_path / "b", line(1, consensus=3.0), line(2))
    panels = {p.measure: p for p in draw_panels([("a", first), ("b", second)])}
    assert [s.name for s in panels["loss"].series] == ["a", "b"]
    assert panels["consensus"].series[0].colour == 1 and panels["consensus"].legend


def test_values_that_are_no_number_are_skipped(tmp_path: Path) -> None:
    run = made(tmp_path / "a", (), None, (line(1),))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "loss": NaN, "seconds": 0, "images": 3}\n{"round": 3, "lo')
    history = read_history(RunReader(run))
    assert history.rounds == 2 and list(history.curves["loss"].values) == [1.0]
