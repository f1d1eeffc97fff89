from __future__ import annotations

import json
from pathlib import Path

from fedssl.runs.metrics import first_rounds, totals


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


def test_a_number_that_a_users_algorithm_logs_as_overhead_is_not_counted(tmp_path: Path) -> None:
    zeros = {"images": 0, "bytes_up": 0, "bytes_down": 0, "missing": 0}
    lines = [
        {"round": 1, "seconds": 2.0, "overhead": 1.0, **zeros},
        {"round": 2, "seconds": 3.0, "overhead": {"evaluate": 4.0}, **zeros},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summed = totals(tmp_path, {"evaluate": 0.5})
    assert summed["seconds"] == 5.0 and summed["overhead"] == {"evaluate": 4.5}
