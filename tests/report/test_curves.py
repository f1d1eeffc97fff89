"""Curves: what is kept of them, and what they are of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from made_runs import made

from fedssl.report import curves
from fedssl.runs.record import Run


@pytest.mark.parametrize("count", [1, 2, 10, 1500, 1501, 5000, 100_000])
def test_thinning_keeps_ends_and_all_that_stands_out(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    values[count // 3], values[count // 2] = 50.0, -50.0
    kept = curves.keep(values, 1500)
    assert len(kept) <= 1500 and (np.diff(kept) > 0).all()
    assert {0, count - 1, int(values.argmin()), int(values.argmax())} <= set(kept.tolist())
    if count <= 1500:
        assert len(kept) == count


def test_every_peak_of_a_long_curve_is_seen() -> None:
    values = np.zeros(60_000)
    peaks = np.arange(100, 60_000, 997)
    values[peaks] = 1 + np.arange(len(peaks))
    assert set(peaks.tolist()) <= set(curves.keep(values, 1500).tolist())


def line(round: int, **more: object) -> dict[str, object]:
    return {
        "round": round, "loss": 1.0 / round, "seconds": 2.0, "images": 10, "clients": 2,
        "missing": 0, "skipped": False, "bytes_up": 0, "bytes_down": 0, "faults": {"1": "late"},
        "exchanges": {"train": {"up": 5, "down": 7}}, **more,
    }  # fmt: skip


def test_what_a_metrics_file_becomes(tmp_path: Path) -> None:
    lines = (
        line(1, mu={"0": 0.5, "7": None}, epsilon=0.5),
        line(2, mu={"0": 0.25, "7": 0.75}, odd="text", linear_top1=60.0),
    )
    history = curves.read(Run(made(tmp_path / "a", (), None, lines)))
    moved = curves.Moved(10, 14, 2.5, 3.5, 2)
    assert (history.rounds, history.exchanges, history.moved) == (2, {"train": moved}, moved)
    assert set(history.plain) == {"loss", "images_per_second", "epsilon", "linear_top1"}
    panels = {panel["of"][0]: panel for panel in curves.panels([("a", history)])}
    assert list(panels) == ["loss", "linear_top1", "mu", "images_per_second", "epsilon"]
    assert [(s["name"], s["x"], s["y"]) for s in panels["mu"]["series"]] == [
        ("mean", [1, 2], [0.5, 0.5]),
        ("client 0", [1, 2], [0.5, 0.25]),
        ("client 7", [2], [0.75]),
    ]


def test_a_clients_curve_has_its_name(tmp_path: Path) -> None:
    """That of its folder; without a file that says it, or of another client, its number."""
    own = made(tmp_path / "a", (), None, (line(1, mu={"10": 0.5, "0": 0.25, "2": 1, "3": 0.5}),))
    rows = [{"client": 0, "name": "south"}, {"client": 2, "name": "7"}, {"client": 10, "name": "a"}]

    def names() -> list[str]:
        (mu,) = (p for p in curves.panels([("a", curves.read(Run(own)))]) if p["of"] == ["mu"])
        return [series["name"] for series in mu["series"]]

    numbers = ["mean", "client 0", "client 2", "client 3", "client 10"]
    assert names() == numbers
    for text in ("{", '{"a": 1}', "[1, 2]", '[{"client": 0}]'):
        (own / "clients.json").write_text(text)
        assert names() == numbers
    (own / "clients.json").write_text(json.dumps(rows))
    assert names() == ["mean", "south", "client 7", "client 3", "a"]


def test_a_thousand_clients_are_a_mean_and_a_few(tmp_path: Path) -> None:
    many = {str(k): float(k) for k in range(1000)}
    history = curves.read(Run(made(tmp_path / "a", (), None, (line(1, divergence=many),))))
    parts = history.parts["divergence"]
    assert len(parts) == 1 + curves.MOST_CLIENTS and parts["mean"].values[0] == 499.5


def test_several_runs_share_a_figure_and_keep_their_colour(tmp_path: Path) -> None:
    first = curves.read(Run(made(tmp_path / "a", (), None, (line(1),))))
    second = curves.read(Run(made(tmp_path / "b", (), None, (line(1, consensus=3.0), line(2)))))
    panels = {p["of"][0]: p for p in curves.panels([("a", first), ("b", second)])}
    assert [s["name"] for s in panels["loss"]["series"]] == ["a", "b"]
    assert panels["consensus"]["series"][0]["colour"] == 1 and panels["consensus"]["legend"]


def test_a_line_cut_short_and_values_of_no_number_are_passed_over(tmp_path: Path) -> None:
    run = made(tmp_path / "a", (), None, (line(1),))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "loss": NaN, "seconds": 0, "images": 3}\n{"round": 3, "lo')
    history = curves.read(Run(run))
    assert history.rounds == 2 and list(history.plain["loss"].values) == [1.0]
