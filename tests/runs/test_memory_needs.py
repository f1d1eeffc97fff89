"""Memory that a run certainly needs is compared with what there is, before the first round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import refused
from rounds import METHODS, RUN, run_of

from fedssl import config
from fedssl.runs import build, loop, memory_needs
from fedssl.runs.build import build_experiment
from fedssl.util.text import format_bytes


def settings(*words: str) -> config.Config:
    return config.resolve(config.read_recipe(None), [*RUN, *words])


def test_what_cannot_fit_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes of vectors and matrices, computed by hand."""
    needs: list[dict[str, int]] = []
    monkeypatch.setattr(memory_needs, "_compare", lambda each, *_: needs.append(each))
    experiment = build_experiment(settings("algorithm.name=fedavg", "objective.name=byol"))
    numbers, learned = len(experiment.trainer.initial), experiment.trainer.flat.parameter_count
    (need,) = needs
    assert need["networks"] == 4 * (2 * numbers + learned + _target(experiment))
    assert need["replies"] == 4 * (numbers + 1)
    assert need["a batch"] == 4 * 6 * 64
    assert need["states of clients"] == 3 * 4 * _target(experiment)
    monkeypatch.undo()
    free = 1_000_000
    monkeypatch.setattr(memory_needs, "find_free_memory", lambda: free)
    said = f"needs at least {format_bytes(sum(need.values()))} of memory (states of clients "
    with refused("device", "auto", said):
        loop.run(settings("algorithm.name=fedavg", "objective.name=byol"), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    free = sum(need.values())
    build_experiment(settings("algorithm.name=fedavg", "objective.name=byol"))
    monkeypatch.setattr(memory_needs, "find_free_memory", lambda: None)  # not known
    build_experiment(settings("algorithm.name=fedavg", "objective.name=byol"))


def _target(experiment: build.Experiment) -> int:
    target = experiment.trainer.target
    assert target is not None
    return len(target.vector)


def test_a_matrix_of_correlations_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_needs, "find_free_memory", lambda: 12 * 10**9)
    wide = ("objective.name=cco", "objective.projector=65536", "algorithm.name=dcco")
    plain = ("algorithm.local_epochs=null", "algorithm.batch=null", "encoder.norm=group")
    with refused("device", "auto", "replies 17.2 GB"):
        build_experiment(settings(*wide, *plain))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_estimated(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, int]] = []
    monkeypatch.setattr(memory_needs, "_compare", lambda needs, *_: seen.append(needs))
    build_experiment(run_of(method))
    assert seen and all(needs["networks"] > 100_000 for needs in seen)
    assert all(needs["replies"] > 100_000 for needs in seen) or method == "ccl"


def test_a_gpu_has_the_images_too_and_the_host_the_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = build_experiment(settings("algorithm.name=fedavg", "objective.name=byol"))
    compared: list[tuple[set[str], int]] = []

    def compare(needs: dict[str, int], free: int, _: config.Config) -> None:
        compared.append((set(needs), free))

    monkeypatch.setattr(memory_needs, "_compare", compare)
    monkeypatch.setattr(memory_needs, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(memory_needs, "find_free_memory", lambda: 5)
    numbers = {"mem_get_info": (70, 80), "memory_reserved": 9, "memory_allocated": 4}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    engine = experiment.engine
    memory_needs.check_memory(experiment.trainer, experiment.algorithm, engine.groups)
    on_gpu = {"networks", "replies", "a batch", "images"}
    assert compared == [(on_gpu, 75), ({"states of clients"}, 5)]
