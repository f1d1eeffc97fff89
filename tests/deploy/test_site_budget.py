"""A site's own count of the privacy that runs spend of its images, and its refusal."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
from three_sites import grid_of, hello, metrics, serve_here, settled

from fedssl.config import Config
from fedssl.deploy import site as site_module
from fedssl.deploy.site import build_site_experiment
from fedssl.engines.remote.disk_states import History
from fedssl.engines.remote.messages import Request
from fedssl.engines.remote.site_budget import FILE, find_budget
from fedssl.privacy.accountant import Release, compute_epsilon
from fedssl.privacy.ledger import Ledger

NOISE = ("privacy.noise=4", "objective.bound=1", "privacy.delta=1e-5")
ONE = Release((2 / 4**2) ** -0.5, 1, 1)


def spent(sites: Path, name: str) -> list[Counter[Release]]:
    """The releases of each run by a site's own count."""
    path = site_module.state_folder(str(sites / name)) / FILE
    return [entry.releases for entry in Ledger(path).read().values()]


def server_spent(state: Path) -> list[Counter[Release]]:
    paths = (state / "privacy").glob("*.json")
    return [entry.releases for path in paths for entry in Ledger(path).read().values()]


@pytest.mark.parametrize("words", [(), ("privacy.secure=true",)])
def test_sites_count_each_round_once_in_which_they_took_part(
    words: tuple[str, ...], sites: Path, tmp_path: Path
) -> None:
    first = serve_here(settled(*NOISE, *words, "rounds=2"), sites, tmp_path / "first")
    serve_here(settled(*NOISE, *words, "rounds=1"), sites, tmp_path / "second")
    for name in ("ward", "clinic", "lab"):
        assert spent(sites, name) == [Counter({ONE: 2}), Counter({ONE: 1})]
    at_server = replace(ONE, clients=3, drawn=3)
    assert server_spent(tmp_path / "state") == [Counter({at_server: 2}), Counter({at_server: 1})]
    assert first["epsilon"] == compute_epsilon(Counter({ONE: 2}), 1e-5, "rdp")


def test_a_round_that_a_site_is_not_asked_in_costs_it_nothing(sites: Path, tmp_path: Path) -> None:
    config = settled(*NOISE, "rounds=6", "cohort.size=2")
    serve_here(config, sites, tmp_path / "run")
    each = [sum(sum(c.values()) for c in spent(sites, n)) for n in ("ward", "clinic", "lab")]
    assert sum(each) == 12 and max(each) <= 6


def with_budget(rounds: float, *words: str) -> Config:
    limit = compute_epsilon(Counter({ONE: int(rounds)}), 1e-5, "rdp") + 0.01
    return settled(*NOISE, f"privacy.budget={limit}", *words)


def test_the_server_ends_in_time_and_a_site_takes_part_in_no_further_run(
    sites: Path, tmp_path: Path
) -> None:
    summary = serve_here(with_budget(2, "rounds=5"), sites, tmp_path / "run")
    assert summary["rounds"] == 2 and "budget_spent" in summary
    assert not any(row["missing"] for row in metrics(tmp_path / "run"))
    told = hello(grid_of(with_budget(2), sites))
    assert told["fault"].startswith("refused: privacy.budget=") and "facts" not in told
    assert "facts" in hello(grid_of(with_budget(3), sites))


def test_a_server_that_does_not_count_is_refused_by_its_sites(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedssl.runs.budget.Budget.reserve", lambda self: True)
    monkeypatch.setattr("fedssl.runs.budget.Budget.settle", lambda self: None)
    serve_here(with_budget(1, "rounds=3"), sites, tmp_path / "run")
    rows = metrics(tmp_path / "run")
    assert [row["skipped"] for row in rows] == [False, True, True]
    assert all("privacy.budget" in fault for fault in rows[1]["faults"].values())
    assert spent(sites, "ward") == [Counter({ONE: 1})]


def request(attempt: str, round: int, task: str = "encode", run: str = "a") -> Request:
    return Request(task, (0,), round, 0, History((run, attempt), (0, round), 0), "samples")


def test_a_repeated_round_with_new_noise_counts_again(sites: Path) -> None:
    experiment = build_site_experiment(settled(*NOISE), str(sites / "ward"))
    budget = find_budget(experiment.engine, site_module.state_folder(str(sites / "ward")))
    assert budget is not None
    for each in (
        *(request("x", 0), request("x", 0, "descend"), request("x", 1), request("x", 1)),
        *(request("y", 1), request("y", 2), request("y", 2, "descend", run="b")),
    ):
        budget.count(each)
    assert spent(sites, "ward") == [Counter({ONE: 4}), Counter({ONE: 1})]


def test_without_noise_nothing_is_counted(sites: Path, tmp_path: Path) -> None:
    serve_here(settled("rounds=1"), sites, tmp_path / "run")
    assert not (site_module.state_folder(str(sites / "ward")) / FILE).exists()


def test_a_damaged_count_refuses_without_a_path(sites: Path, tmp_path: Path) -> None:
    serve_here(settled(*NOISE, "rounds=1"), sites, tmp_path / "run")
    path = site_module.state_folder(str(sites / "ward")) / FILE
    path.write_text(path.read_text()[:-9])
    told: dict[str, Any] = hello(grid_of(settled(*NOISE), sites))
    assert told["fault"] == (
        "refused: its record of the privacy spent is damaged; the site's log says more"
    )
