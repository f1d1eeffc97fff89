"""``partition.seed``: who holds which images, whatever the run's seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import refused

from fedssl import cli, config
from fedssl.config import Config
from fedssl.data.load import load_dataset
from fedssl.evaluate.base import EvaluationData
from fedssl.evaluate.registry import parse_protocol
from fedssl.runs import batch, folder, split
from fedssl.runs.build import build_experiment
from fedssl.runs.sweep import list_runs

SMALL = (
    "data.size=8", "engine.threads=1", "cohort.size=2", "evaluate.protocols=knn",
    "evaluate.baselines=[]",
)  # fmt: skip
SPLITS = {
    "iid": ["partition.name=iid", "partition.clients=4"],
    "class pairs": ["partition.name=classes", "partition.clients=5", "partition.classes=2"],
    "fraction": ["partition.name=dirichlet", "partition.clients=4", "partition.fraction=0.5"],
    "held out": ["partition.name=iid", "partition.clients=4", "data.holdout=0.2"],
    "labels": ["partition.name=iid", "partition.clients=4", "data.labels=100"],
    "clusters": ["partition.name=skew", "partition.clients=3", "partition.source=features"],
    "rotations": ["partition.name=skew", "partition.clients=3", "partition.source=rotation"],
    "public": [
        "objective.name=simclr", "algorithm.name=fedca", "algorithm.public=40",
        "partition.name=iid", "partition.clients=4",
    ],
}  # fmt: skip


def settings(*words: str) -> Config:
    return config.resolve(config.read_recipe(None), [*SMALL, *words])


def draws(given: Config) -> list[torch.Tensor]:
    """Everything that is drawn among a run's images."""
    dataset = split.load_run_dataset(given)
    groups = split.split_clients(given, dataset)
    protocol = parse_protocol("linear@50")
    parts = [
        *(groups.members, groups.offsets),
        *(split.held_out_images(given, dataset), split.public_images(given, dataset)),
        protocol.draw(EvaluationData(given, dataset, groups, [])),
    ]
    return [dataset.train.images[0], *map(torch.as_tensor, parts)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("words", SPLITS.values(), ids=SPLITS)
def test_it_alone_draws_images(words: list[str]) -> None:
    by_run = [draws(settings(*words, f"seed={seed}")) for seed in (0, 1)]
    assert not same(*by_run)
    for seed in (0, 1):
        assert same(draws(settings(*words, f"seed={seed}", "partition.seed=1")), by_run[1])


@pytest.mark.parametrize("name", ["class pairs", "rotations"])
def test_it_leaves_the_weights_to_the_seed(name: str) -> None:
    words = [*SPLITS[name], "partition.seed=3"]
    each = [settings(*words, f"seed={seed}") for seed in (0, 1)]
    one, other = (build_experiment(c, load_dataset(c.data, c.split_seed)) for c in each)
    assert not torch.equal(one.trainer.initial, other.trainer.initial)
    assert np.array_equal(one.clients.members, other.clients.members)
    assert torch.equal(one.dataset.train.images[0], other.dataset.train.images[0])
    tests = one.evaluator.client_tests, other.evaluator.client_tests
    assert np.array_equal(tests[0].members, tests[1].members)
    assert torch.equal(one.evaluator.client_test_images, other.evaluator.client_test_images)


def test_a_share_of_labels_is_still_among_the_held_out_images() -> None:
    given = settings(*SPLITS["held out"], "seed=1", "partition.seed=7")
    dataset = split.load_run_dataset(given)
    data = EvaluationData(given, dataset, split.split_clients(given, dataset), [])
    held = split.held_out_images(given, dataset)
    assert set(parse_protocol("heldout@10%").draw(data)) < set(held.tolist())


def test_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    folder.write_config(settings("partition.seed=3"), tmp_path)
    folder.check_folder(settings("partition.seed=3"), tmp_path, resume=True)
    for words in ([], ["partition.seed=4"]):
        with refused("partition.seed"):
            folder.check_folder(settings(*words), tmp_path, resume=True)


def test_a_sweep_over_it_makes_runs_with_other_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seeds = batch.load_dataset, list[int]()
    monkeypatch.setattr(batch, "load_dataset", lambda *a: seeds.append(a[1]) or real(*a))
    words = [*SMALL, *SPLITS["labels"], "partition.seed=[3,4]", "rounds=1"]
    found = list_runs(config.apply_words(config.read_recipe(None), words))
    assert list(found) == ["partition.seed=3", "partition.seed=4"]
    batch.check_all([batch.PlannedRun(n, each, tmp_path / n) for n, each in found.items()])
    assert seeds == [3, 4]
    assert not same(*map(draws, found.values()))


@pytest.mark.parametrize("name", ["class pairs", "labels"])
def test_the_command_partition_shows_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (["seed=0"], ["seed=1"], ["seed=1", "partition.seed=0"]):
        assert cli.main(["partition", *SMALL, *SPLITS[name], *words]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] != shown[1] and shown[0] == shown[2]
