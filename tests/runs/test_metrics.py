from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedssl import config
from fedssl.runs.build import build_experiment
from fedssl.runs.metrics import first_rounds, totals
from fedssl.util.errors import UserError


def test_the_first_round_that_reached_an_accuracy(tmp_path: Path) -> None:
    """FedEMA, Table 11; other measures, and rounds that were not evaluated, do not count."""
    lines = [
        {"round": 1, "knn_top1": 99.0},
        {"round": 2, "linear_top1": 60.0},
        {"round": 3},
        {"round": 4, "linear_top1": 71.0},
        {"round": 5, "linear_top1": 69.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    reached = first_rounds(tmp_path, (50, 70, 75, 80), "linear_top1", {"linear_top1": 75.5})
    assert reached == {
        "rounds_to_50": 2,
        "rounds_to_70": 4,
        "rounds_to_75": 5,
        "rounds_to_80": None,
    }


def test_targets_need_the_accuracy_of_all_labels() -> None:
    words = ["evaluate.every=1", "evaluate.monitor=linear@100", "evaluate.targets=70"]
    with pytest.raises(UserError, match=r"evaluate.targets=.*of all labels"):
        build_experiment(config.resolve(config.read_recipe(None), words))


def test_an_algorithms_own_overhead_is_not_the_runs(tmp_path: Path) -> None:
    """A plugin may log a measure of that name."""
    known = {"seconds": 1, "images": 2, "bytes_up": 0, "bytes_down": 0, "missing": 0}
    lines = [{"round": 1, "overhead": 0.5}, {"round": 2, "overhead": {"evaluate": 2}}, {"round": 3}]
    text = "".join(json.dumps(line | known) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert totals(tmp_path, {"evaluate": 1.5})["overhead"] == {"evaluate": 3.5}
