"""The privacy of all runs on the same images, and the budget that ends or refuses a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from image_folders import save_noise
from noisy import small
from rounds import before_round

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.privacy.accountant import Release, compute_epsilon
from fedssl.privacy.ledger import Ledger
from fedssl.runs import loop, sweep
from fedssl.runs.build import build_experiment
from fedssl.runs.result import format_privacy
from fedssl.util.errors import UserError

NOISE = ("privacy.noise=4", "objective.bound=1")
ONE = Release((2 / 4**2) ** -0.5, 6, 3)  # of the small run: both sums of a round


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSSL_STATE", str(tmp_path / "home"))
    return tmp_path / "home"


def counted(home: Path) -> list[Counter[Release]]:
    """The releases of each run on the only images."""
    (path,) = (home / "privacy").glob("*.json")
    return [entry.releases for entry in Ledger(path).read().values()]


def epsilon(rounds: int, accountant: Any = "rdp") -> float:
    return compute_epsilon(Counter({ONE: rounds}), 1e-5, accountant)


def test_a_sweep_of_three_seeds_counts_thrice(home: Path, tmp_path: Path) -> None:
    tree = configuration.to_tree(small(*NOISE, "rounds=2"))
    summaries = sweep.sweep(tree | {"seed": [0, 1, 2]}, tmp_path / "sweep", False)
    assert counted(home) == [Counter({ONE: 2})] * 3
    totals = [(s["epsilon_total"], s["runs_counted"]) for s in summaries.values()]
    assert totals == [(pytest.approx(epsilon(2 * k)), k) for k in (1, 2, 3)]
    assert all(s["epsilon"] == pytest.approx(epsilon(2)) for s in summaries.values())
    assert epsilon(6) < 3 * epsilon(2)


def test_a_run_says_what_it_spends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        summary = loop.run(small(*NOISE, "rounds=2"), tmp_path / name)
    said = capsys.readouterr().err.splitlines()
    once, twice = f"{epsilon(2):.3g}", f"{epsilon(4):.3g}"
    assert f"Privacy: ε = {once} for δ = 1e-05 at the end." in said
    assert format_privacy(summary) == (
        f"Privacy: ε = {once} for δ = 1e-05, {twice} with all 2 runs on these images"
    )
    assert not any("vacuous" in line for line in said)
    assert format_privacy({}) is None


def test_a_vacuous_epsilon_is_called_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = loop.run(small("privacy.noise=0.3", NOISE[1], "rounds=1"), tmp_path / "run")
    assert summary["epsilon"] > 50
    lines = [line for line in capsys.readouterr().err.splitlines() if "vacuous" in line]
    assert len(lines) == 1 and str(format_privacy(summary)).endswith("(vacuous)")


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_a_run_ends_before_the_round_that_would_exceed_the_budget(
    accountant: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit, out = epsilon(3, accountant) + 0.01, tmp_path / "run"
    words = (*NOISE, "rounds=6", f"privacy.accountant={accountant}", "schedule=cosine")
    summary = loop.run(small(*words, f"privacy.budget={limit}"), out)
    assert summary["rounds"] == 3 and summary["budget_spent"] == limit
    assert summary["epsilon_total"] == pytest.approx(epsilon(3, accountant))
    assert (out / "encoder.safetensors").exists() and summary["result"]["knn_top1"] > 0
    said = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("Stopped after round 3: ") for line in said) == 1
    planned = f"privacy.budget={limit:g} ends this run after 3 of 6 rounds."
    assert sum(line.startswith(planned) for line in said) == 1
    assert counted(home) == [Counter({ONE: 3})]

    again = loop.run(small(*words, f"privacy.budget={limit}"), out, resume=True)
    assert again["rounds"] == 3 and counted(home) == [Counter({ONE: 3})]
    larger = epsilon(6, accountant) + 0.01
    more = loop.run(small(*words, f"privacy.budget={larger}"), out, resume=True)
    assert more["rounds"] == 6 and "budget_spent" not in more
    assert counted(home) == [Counter({ONE: 6})]


def test_a_run_that_cannot_do_a_round_is_refused_and_leaves_nothing(
    home: Path, tmp_path: Path
) -> None:
    limit = f"privacy.budget={epsilon(1) - 0.01}"
    with pytest.raises(UserError) as error:
        loop.run(small(*NOISE, limit), tmp_path / "run")
    assert error.value.key == "privacy.budget" and not (tmp_path / "run").exists()
    loop.run(small(*NOISE, "rounds=2"), tmp_path / "first")
    limit = f"privacy.budget={epsilon(2) + 0.01}"  # would be enough, were there no other run
    with pytest.raises(UserError) as error:
        loop.run(small(*NOISE, limit), tmp_path / "run")
    assert error.value.key == "privacy.budget" and not (tmp_path / "run").exists()
    loop.run(small(*NOISE, limit, "rounds=0"), tmp_path / "run")  # releases nothing
    assert counted(home) == [Counter({ONE: 2})]


def test_two_runs_at_once_stay_within_the_budget(home: Path) -> None:
    config = small(*NOISE, f"privacy.budget={epsilon(5) + 0.01}")
    budgets = [build_experiment(config).budget for _ in range(2)]
    allowed = []
    for _ in range(5):
        for budget in budgets:
            assert budget is not None
            allowed.append(budget.reserve())
            if allowed[-1]:  # as a round does that released both sums
                for task in ("encode", "descend"):
                    budget.account.note(task)
    assert allowed == [True] * 5 + [False] * 5
    assert sum(counted(home), Counter()) == Counter({ONE: 5})


def test_a_killed_round_is_counted_and_an_interrupted_one_only_as_far_as_it_came(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(*args: Any) -> None:
        raise Killed

    config = small(*NOISE, "rounds=4")
    with monkeypatch.context() as patch:
        before_round(patch, 2, kill)
        patch.setattr("fedssl.runs.budget.Budget.settle", lambda self: None)  # no time for that
        with pytest.raises(Killed):
            loop.run(config, tmp_path / "run")
    assert counted(home) == [Counter({ONE: 3})]
    summary = loop.run(config, tmp_path / "run", resume=True)
    assert summary["rounds"] == 4 and summary["epsilon"] == pytest.approx(epsilon(5))
    assert counted(home) == [Counter({ONE: 5})]
    with monkeypatch.context() as patch:
        before_round(patch, 2, kill)
        with pytest.raises(Killed):
            loop.run(config, tmp_path / "other")
    assert counted(home) == [Counter({ONE: 5}), Counter({ONE: 2})]


def test_a_round_that_released_one_of_its_sums_is_counted_as_that(home: Path) -> None:
    budget = build_experiment(small(*NOISE)).budget
    assert budget is not None and budget.reserve()
    budget.account.note("encode")
    budget.settle()
    assert counted(home) == [Counter({Release(4.0, 6, 3): 1})]
    assert budget.reserve()
    assert counted(home) == [Counter({Release(4.0, 6, 3): 1, ONE: 1})]
    budget.settle()
    assert counted(home) == [Counter({Release(4.0, 6, 3): 1})]


def test_images_are_known_again_by_their_content_not_by_their_place(
    home: Path, tmp_path: Path
) -> None:
    for name, count in (("a", 9), ("b", 9), ("c", 8)):
        for split in ("train", "test"):
            save_noise(tmp_path / name / split, "x", count=count)
            save_noise(tmp_path / name / split, "y", count=4)

    def experiment(name: str, *words: str) -> Config:
        own = (f"data.root={tmp_path / name}", "data.name=folder", "data.labels=null", *words)
        return small(*NOISE, *own, "partition.clients=3")

    def place(config: Config) -> Path:
        budget = build_experiment(config).budget
        assert budget is not None
        return budget.ledger.path

    first = place(experiment("a"))
    assert place(experiment("b")) == first == place(experiment("a", "data.size=12"))
    assert place(experiment("a", "seed=3", "partition.clients=2", "cohort.size=2")) == first
    assert first not in (place(experiment("c")), place(small(*NOISE)))


def test_a_damaged_ledger_refuses_a_run_in_one_line(home: Path, tmp_path: Path) -> None:
    loop.run(small(*NOISE, "rounds=1"), tmp_path / "run")
    (path,) = (home / "privacy").glob("*.json")
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    for out, resume in (("other", False), ("run", True)):
        with pytest.raises(UserError) as error:
            loop.run(small(*NOISE, "rounds=2"), tmp_path / out, resume=resume)
        assert str(path) in error.value.problem
    assert not (tmp_path / "other").exists()
    loop.run(small("rounds=1"), tmp_path / "plain")  # without noise nobody looks


def test_a_sweep_takes_a_run_that_its_budget_ended_for_finished(tmp_path: Path) -> None:
    words = (*NOISE, "rounds=3", f"privacy.budget={epsilon(5) + 0.01}")
    tree = configuration.to_tree(small(*words))
    out = tmp_path / "sweep"
    summaries = sweep.sweep(tree | {"seed": [0, 1]}, out, False)
    assert [s["rounds"] for s in summaries.values()] == [3, 2]
    again = sweep.sweep(tree | {"seed": [0, 1]}, out, True)
    assert again == summaries


def test_the_summary_of_a_run_without_noise_has_no_privacy(home: Path, tmp_path: Path) -> None:
    summary = loop.run(small("rounds=1"), tmp_path / "run")
    assert not {"epsilon", "epsilon_total", "runs_counted"} & summary.keys()
    assert not home.exists() and build_experiment(small()).budget is None
