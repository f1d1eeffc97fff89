"""The guard: held-out images choose the encoder, and the start is kept if nothing is better."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused
from rounds import RUN, run_and_resume
from safetensors.torch import load_file
from torch import Tensor

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.runs import loop, reevaluate
from fedssl.runs.build import build_experiment
from fedssl.runs.guard import Guard

GUARDED = ("evaluate.guard=knn", "evaluate.every=1", "data.holdout=0.3", "data.labels=200")


def small(*words: str) -> Config:
    given = [*RUN, "algorithm.name=fedavg", "objective.name=simclr", "schedule=constant"]
    return configuration.resolve(configuration.read_recipe(None), [*given, *GUARDED, *words])


def scripted(monkeypatch: pytest.MonkeyPatch, *measures: float) -> None:
    """Let the guard see these measures: the start's, then one for each round."""
    left: Iterator[float] = iter(measures)
    monkeypatch.setattr(Guard, "measure", lambda self, weights: next(left))


def encoder_of(out: Path) -> dict[str, Tensor]:
    return load_file(out / "encoder.safetensors")


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_the_best_round_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, 50, 55, 60, 60, 40)  # of two equal ones the earlier counts
    summary = loop.run(small("rounds=4"), tmp_path / "whole")
    assert summary["guard"] == {"start": 50, "best": 60, "last": 40, "round": 2}
    loop.run(small("rounds=2", "evaluate.guard=null"), tmp_path / "two")
    assert equal(encoder_of(tmp_path / "whole"), encoder_of(tmp_path / "two"))
    again = reevaluate.evaluate(tmp_path / "whole", [])
    assert again["result"]["knn_top1"] == summary["knn_top1"]


def test_the_start_is_kept_where_continuing_hurts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, 90, 60, 50)
    loop.run(small("rounds=2"), tmp_path / "run")
    experiment = build_experiment(small("rounds=2"))
    start = experiment.tower().encoder.state_dict()
    assert equal(encoder_of(tmp_path / "run"), start)
    said = capsys.readouterr().err
    assert "continuing hurts" in said and "the starting encoder is kept" in said


def test_a_resumed_run_keeps_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = run_and_resume(small("rounds=4"), tmp_path, monkeypatch)
    assert equal(encoder_of(tmp_path / "whole"), encoder_of(tmp_path / "cut"))
    assert summary["guard"]["best"] >= max(summary["guard"]["start"], summary["guard"]["last"])


def test_ruinous_training_is_noticed_and_no_client_has_the_images(tmp_path: Path) -> None:
    words = ("rounds=3", "client.lr=30", "encoder.norm=group", "encoder.groups=8")
    summary = loop.run(small(*words), tmp_path / "run")
    assert summary["guard"]["last"] <= summary["guard"]["best"]
    experiment = build_experiment(small(*words))
    trained = experiment.engine.groups.members
    assert not np.intersect1d(trained, experiment.guard.images.numpy()).size
    assert len(experiment.guard.images) == 60


def test_without_labels_views_are_matched(tmp_path: Path) -> None:
    summary = loop.run(small("evaluate.guard=unlabeled", "rounds=2"), tmp_path / "run")
    assert 0 <= summary["guard"]["start"] <= summary["guard"]["best"] <= 100


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("evaluate.every=0",), "evaluate.every=5"),
        (("data.holdout=0",), "data.holdout=0.1"),
        (("algorithm.name=standalone",), "no global model"),
    ],
)
def test_what_a_guard_needs(words: tuple[Any, ...], says: str) -> None:
    with refused("evaluate.guard", says=says):
        build_experiment(small(*words))
