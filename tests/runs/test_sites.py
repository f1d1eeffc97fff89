"""Runs whose clients are folders: names, notes, each site's own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import refused
from image_folders import save
from PIL import Image

from fedssl import config
from fedssl.deploy.introduction import Introduction
from fedssl.deploy.server import build_server_experiment
from fedssl.runs import loop
from fedssl.runs.build import build_experiment
from fedssl.runs.reevaluate import evaluate
from fedssl.runs.result import format_cost
from fedssl.runs.validate import list_warnings

SITES = ("berlin", "oslo", "paris")
WORDS = [
    "data.name=folder", "data.levels=client,class", "partition.name=folder", "encoder.name=tiny",
    "encoder.groups=8", "algorithm.name=ditto", "objective.name=byol", "objective.projector=32,16",
    "encoder.norm=batch", "algorithm.local_epochs=1", "algorithm.batch=4", "server.optimizer=sgd",
    "server.lr=1", "client.lr=0.01", "rounds=2", "cohort.size=null", "evaluate.baselines=[]",
    "evaluate.protocols=per-client", "engine.threads=1", "augment.name=flip", "data.size=16",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/<site>/<class>/<image>, and test images of the first two sites."""
    root = tmp_path_factory.mktemp("sites")
    generator = np.random.default_rng(0)
    for split, sites in (("train", SITES), ("test", SITES[:2])):
        for site in sites:
            for label in range(2):
                place = root / split / site / f"class{label}"
                place.mkdir(parents=True)
                for image in range(4):
                    pixels = generator.integers(0, 128, (16, 16, 3), dtype=np.uint8)
                    Image.fromarray(pixels + np.uint8(127 * label)).save(place / f"{image}.png")
    return root


def settings(folder: Path, tmp_path: Path, *words: str) -> config.Config:
    where = [f"data.root={folder}", f"data.cache={tmp_path / 'cache'}"]
    return config.resolve(config.read_recipe(None), [*WORDS, *where, *words])


def test_sites_are_named_and_each_has_its_numbers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    summary = loop.run(settings(folder, tmp_path), out)
    listed = json.loads((out / "clients.json").read_text())
    assert [(c["client"], c["name"], c["samples"]) for c in listed] == [
        (0, "berlin", 8), (1, "oslo", 8), (2, "paris", 8),
    ]  # fmt: skip
    assert "1 of 3 clients have no test images and are left out (paris)" in capsys.readouterr().err
    for model in ("global", "personal"):
        scores = summary["per_client"][model]
        assert list(scores) == ["berlin", "oslo"]
        mean = summary[f"per-client_{model}_top1"]
        assert mean == pytest.approx(np.mean(list(scores.values())), abs=1e-3)
        assert summary[f"per-client_{model}_worst"] == pytest.approx(min(scores.values()), abs=1e-3)
    note = json.loads((out / "encoder.json").read_text())
    assert note["model"] == "global"
    assert note["personal"] == [f"personal/client-{k}.safetensors" for k in range(3)]
    personal = [(out / name).read_bytes() for name in note["personal"]]
    modes = [(out / name).stat().st_mode & 0o777 for name in (*note["files"], *note["personal"])]
    assert modes == [0o644, *[0o600] * 3]  # what is the clients' own is for nobody else
    assert (out / "encoder.safetensors").read_bytes() not in personal
    assert len(set(personal)) == 3


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("algorithm.name=fedavg objective.name=simclr", "algorithm.name"),
        ("algorithm.name=ccl objective.name=moco encoder.norm=group", "algorithm.name"),
        ("algorithm.name=fedavg", "encoder.norm"),
    ],
)
def test_a_site_that_is_too_small_is_named(words: str, key: str, tmp_path: Path) -> None:
    for name, count in (("large", 6), ("small", 1)):
        for image in range(count):
            made = Image.new("RGB", (16, 16), (40 * image, 90, 0))
            save(tmp_path / "images" / name / f"{image}.png", made)
    plain = ["data.levels=client", "evaluate.protocols=unlabeled"]
    with refused(key, says="small "):
        build_experiment(settings(tmp_path / "images", tmp_path, *plain, *words.split()))


def test_a_server_names_the_site_that_is_too_small() -> None:
    words = ["engine.name=flower", "engine.sites=2", "algorithm.name=fedavg", "data.root=null"]
    words += ["evaluate.protocols=knn", "objective.name=simclr", "encoder.norm=group"]
    sites = [Introduction(name, name, n, (3,), 16, 16) for name, n in (("a", 1), ("b", 6))]
    with refused("algorithm.name", "fedavg", "a holds 1"):
        build_server_experiment(config.resolve(config.read_recipe(None), [*WORDS, *words]), sites)


def test_clients_with_norm_layers_of_their_own_get_their_models(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["algorithm.name=fedavg", "algorithm.norm_policy=local"]
    summary = loop.run(settings(folder, tmp_path, *words), out)
    assert summary["norm_layers"] == "the mean of the clients'"
    assert format_cost(summary).startswith("normalization layers: the mean of the clients'\n")
    assert len(list((out / "personal").iterdir())) == 3
    assert {"per-client_global_top1", "per-client_personal_top1"} <= summary.keys()
    (out / "evaluations.jsonl").mkdir()  # cannot be written, even by root
    rows = evaluate(out, ["evaluate.protocols=per-client"])
    assert rows["result, global"]["per-client_top1"] == summary["per-client_global_top1"]
    assert rows["result, personal"]["per-client_top1"] == summary["per-client_personal_top1"]
    assert "evaluations.jsonl cannot be written" in capsys.readouterr().err


def test_a_partition_that_ignores_the_folders_is_said(folder: Path, tmp_path: Path) -> None:
    words = ["partition.name=iid", "partition.clients=2", "evaluate.protocols=knn"]
    said = "partition.name=iid: your 3 client folders are ignored."
    warnings = list_warnings(build_experiment(settings(folder, tmp_path, *words)))
    assert any(said in warning for warning in warnings)


def test_the_monitor_runs_after_the_last_round_too(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [
        "evaluate.every=1", "evaluate.monitor=linear", "evaluate.protocols=knn",
        "evaluate.targets=1,101",
    ]  # fmt: skip
    summary = loop.run(settings(folder, tmp_path, *words), out)
    assert (summary["rounds_to_1"], summary["rounds_to_101"]) == (1, None)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert ["linear_top1" in line for line in lines] == [True, True]
    assert not any("knn_top1" in line for line in lines)
