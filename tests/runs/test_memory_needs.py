"""Memory that a run certainly needs is compared with what is free, before the first round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import refused
from rounds import METHODS, RUN, run_of

from fedssl import config
from fedssl.runs import loop, memory_needs
from fedssl.runs.build import build_experiment
from fedssl.util.text import format_bytes


def settings(*words: str) -> config.Config:
    return config.resolve(config.read_recipe(None), [*RUN, *words])


def test_a_run_that_cannot_fit_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes of vectors, computed by hand."""
    byol = settings("algorithm.name=fedavg", "objective.name=byol")
    trainer = build_experiment(byol).trainer
    assert trainer.target is not None
    numbers, target = len(trainer.initial), len(trainer.target.vector)
    networks = 4 * (2 * numbers + trainer.flat.parameter_count + target)
    needed = networks + 4 * (numbers + 1) + 4 * 6 * 64  # a reply has a loss; 6 images, 8 x 8
    free = needed - 1
    monkeypatch.setattr(memory_needs, "find_free_memory", lambda: free)
    said = f"needs at least {format_bytes(needed)} of memory (networks {format_bytes(networks)}, a "
    with refused("device", "auto", said):
        loop.run(byol, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    free = needed
    build_experiment(byol)


def test_a_matrix_of_correlations_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_needs, "find_free_memory", lambda: 12 * 10**9)
    wide = ("objective.name=cco", "objective.projector=65536", "algorithm.name=dcco")
    plain = ("algorithm.local_epochs=null", "algorithm.batch=null", "encoder.norm=group")
    with refused("device", "auto", "a reply 17.2 GB"):
        build_experiment(settings(*wide, *plain))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_estimated(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_needs, "find_free_memory", lambda: 100_000)
    with refused("device"):
        build_experiment(run_of(method))


def test_a_gpu_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_needs, "find_free_memory", lambda: 5)
    numbers = {"mem_get_info": (70, 80), "memory_reserved": 9, "memory_allocated": 4}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert memory_needs._find_free(torch.device("cuda")) == 75
    assert memory_needs._find_free(torch.device("cpu")) == 5
