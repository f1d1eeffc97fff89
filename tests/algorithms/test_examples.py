"""The algorithms of examples/own run, on both engines, and do what their text says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from far import far_session, go, small
from helpers import relative

from fedssl.runs.build import build_experiment

OWN = Path(__file__).resolve().parents[2] / "examples/own"
SIMCLR = ("objective.name=simclr", "objective.projector=[32,128]", "algorithm.local_steps=2")
ALGORITHMS = {
    "algorithm.py:Momentum": "algorithm.momentum=0.5",
    "personal.py:Mixture": "server.momentum=0.5",
    "features.py:Shared": "algorithm.batch=4",
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_examples_run_on_both_engines(name: str, tmp_path: Path) -> None:
    config = small(*SIMCLR, f"algorithm.name={OWN / name}", ALGORITHMS[name])
    near, (far, _) = build_experiment(config), far_session(config, tmp_path)
    here, there = go(near, 3), go(far, 3)
    assert relative(near.server.weights, near.trainer.initial) > 1e-3
    assert relative(far.server.weights, near.server.weights) < 1e-10
    assert [c.traffic.up for c in here] == [c.traffic.up for c in there]
    assert [c.traffic.down for c in here] == [c.traffic.down for c in there]


def test_the_personal_example_gives_each_client_a_model() -> None:
    experiment = build_experiment(small(*SIMCLR, f"algorithm.name={OWN}/personal.py:Mixture"))
    go(experiment, 2)
    models = experiment.models.personal_models()
    assert set(models) == set(range(5)) and experiment.models.result == "personal"
    assert not any(torch.equal(model, experiment.server.weights) for model in models.values())


def test_the_features_example_sends_each_client_the_features_of_all_others() -> None:
    experiment = build_experiment(small(*SIMCLR, f"algorithm.name={OWN}/features.py:Shared"))
    first, second = go(experiment, 2)
    assert first.traffic.up["share"] == 30 * 128 * 8  # all images, float64
    assert first.traffic.down["share"] == 0
    assert second.traffic.down["share"] == 4 * first.traffic.up["share"]
