"""The algorithms of examples/own do what their text says; test_both_engines.py runs them."""

from __future__ import annotations

from pathlib import Path

import torch
from far import small
from rounds import go

from fedssl.runs.build import Experiment, build_experiment

OWN = Path(__file__).resolve().parents[2] / "examples/own"


def example(name: str) -> Experiment:
    words = ("objective.name=simclr", "objective.projector=[32,128]", "algorithm.local_steps=2")
    return build_experiment(small(*words, f"algorithm.name={OWN}/{name}"))


def test_the_personal_example_gives_each_client_a_model() -> None:
    experiment = example("personal.py:Mixture")
    go(experiment, 2)
    models = experiment.models.personal_models(9)
    assert set(models) == set(range(5)) and experiment.models.result == "personal"
    assert not any(torch.equal(model, experiment.server.weights) for model in models.values())


def test_the_features_example_sends_each_client_the_features_of_all_others() -> None:
    first, second = (cohort.traffic for cohort in go(example("features.py:Shared"), 2))
    assert first.up["share"] == 30 * 128 * 8  # all images, float64
    assert first.down["share"] == 0
    assert second.down["share"] == 4 * first.up["share"]
