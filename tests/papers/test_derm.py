"""DCCO's Table 2 on made data: photos of cases, of which there are train/, val/ and test/."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation import blind, data_of, evaluate, hidden, labelled
from helpers import refused
from PIL import Image

from fedssl import config
from fedssl.config import Evaluate
from fedssl.data.labels import draw_any
from fedssl.data.load import load_dataset
from fedssl.evaluate import finetune
from fedssl.evaluate.base import EvaluationData
from fedssl.evaluate.registry import parse_protocol
from fedssl.runs import loop
from fedssl.runs.build import build_experiment
from fedssl.runs.reevaluate import evaluate as reevaluate

SETTINGS = Evaluate(protocols=("finetune@30",), preset="derm")
SMALL = (
    *("data.size=8", "evaluate.size=12", "encoder.name=tiny", "encoder.groups=8", "rounds=1"),
    *("engine.threads=1", "server.lr=0.01", "objective.projector=[16,16]", "cohort.size=4"),
    "evaluate.protocols=finetune",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folders of cases with one to three photos, whose class is their brightness."""
    generator, place = np.random.default_rng(0), tmp_path / "labelled"
    for split in ("train", "val", "test"):
        for label in range(2):
            for case in range(6 - 2 * label):  # classes differ in size
                folder = place / split / f"class{label}" / f"case{case}"
                folder.mkdir(parents=True)
                for photo in range(1 + case % 3):
                    pixels = generator.integers(100 * label, 100 * label + 90, (8, 8, 3))
                    Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{photo}.png")
    return place


def made(recipe: str, root: Path, *words: str) -> config.Config:
    given = [*SMALL, f"data.root={root}", f"data.cache={root.parent / 'cache'}", *words]
    return config.resolve(config.read_recipe(recipe), given)


def with_val(settings: Evaluate) -> EvaluationData:
    data = data_of(settings, hidden(60, 0), hidden(100, 1), 2)
    return replace(data, dataset=replace(data.dataset, val=hidden(40, 2)))


def test_small_cases_are_left_out_instead_of_refusing_the_run(root: Path) -> None:
    recipe = "dcco/table2/contrastive-fedavg/clients-64"
    sizes = build_experiment(made(recipe, root)).engine.groups.sizes
    assert sorted(sizes) == [2, 2, 2, 3, 3, 3]  # of ten cases of 1, 2, 3, 1, … photos
    with refused("algorithm.name", "fedavg", says="holds 1 image"):
        build_experiment(made(recipe, root, "partition.minimum=1"))
    with refused("partition.minimum", 4, says="no client has so many"):
        build_experiment(made(recipe, root, "partition.minimum=4"))
    assert (
        build_experiment(made("dcco/table2/dcco/clients-64", root)).engine.groups.sizes.min() == 1
    )


def test_validation_images_are_read_only_if_asked_for(root: Path) -> None:
    data = made("dcco/table2/dcco/clients-64", root).data
    dataset = load_dataset(data)
    assert dataset.val is not None and len(dataset.val) == len(dataset.test or ())
    assert dataset.files["val"] != dataset.files["test"]
    (root / "val").rename(root / "elsewhere")
    with refused("data.val", True, says="no validation images"):
        load_dataset(data)
    without = load_dataset(made("dcco/table2/dcco/clients-64", root, "data.val=false").data)
    assert without.val is None and "val" not in without.files


def test_rate_and_steps_are_chosen_on_validation_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores on validation decide alone: the model of the best look is returned, of any rate."""
    monkeypatch.setattr(finetune, "DERM", replace(finetune.DERM, steps=7, batch=8))
    monkeypatch.setattr(finetune, "LOOK_EVERY", 2)
    train, val = labelled(hidden(20)), labelled(hidden(10, 2))
    scores = [10.0, 20.0, 15.0, 5.0, 12.0, 30.0, 8.0, 30.0]  # looks at 2, 4, 6, 7 with each rate
    seen: list[torch.Tensor] = []

    def score(model: finetune.Classifier, of: object) -> float:
        assert of is val
        seen.append(model.head.weight.detach().clone())
        return scores[len(seen) - 1]

    monkeypatch.setattr(finetune, "score", score)
    chosen = finetune.search(blind(), 2, train, val, seed=0)
    assert len(seen) == 8 and torch.equal(chosen.head.weight, seen[5])
    assert not torch.equal(seen[1], seen[5])


def test_a_training_that_brings_nothing_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "LOOK_EVERY", 1)
    monkeypatch.setattr(finetune, "PATIENCE", 3)
    looks: list[int] = []

    def score(model: finetune.Classifier, of: object) -> float:
        looks.append(1)
        return 50.0

    monkeypatch.setattr(finetune, "score", score)
    finetune.search(blind(), 2, labelled(hidden(20)), labelled(hidden(10)), seed=0)
    assert len(looks) == 4 + 3  # the first look of all is the best, three bring nothing


def test_fine_tuning_learns_and_needs_validation_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "DERM", replace(finetune.DERM, steps=150))
    monkeypatch.setattr(finetune, "DERM_RATES", (1e-2,))
    data = with_val(SETTINGS)
    parse_protocol("finetune@30").check(data)
    assert evaluate(blind(), data)["finetune@30_top1"] > 90
    with refused("evaluate.preset", "derm", says="no labelled validation images"):
        parse_protocol("finetune").check(data_of(SETTINGS, hidden(60), hidden(20, 1), 2))


def test_cases_are_drawn_regardless_of_class_and_nested() -> None:
    """1,524 is no multiple of 27 classes."""
    labels = torch.tensor([0] * 90 + [1] * 10 + [-1] * 20)
    words = {"key": "evaluate.protocols", "value": "finetune@41"}
    few, many = (draw_any(labels, n, 3, **words).tolist() for n in (41, 70))
    assert len(few) == 41 and set(few) < set(many) and max(many) < 100
    assert draw_any(labels, 41, 4, **words).tolist() != few
    with refused("evaluate.protocols", "finetune@41", says="only 100"):
        draw_any(labels, 101, 3, **words)


def test_pretraining_on_unlabelled_cases_and_fine_tuning_on_others(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two commands of the recipe's comment."""
    monkeypatch.setattr(finetune, "DERM", replace(finetune.DERM, steps=3))
    unlabelled = tmp_path / "unlabelled"
    for number, case in enumerate(sorted((root / "train").glob("*/*"))):
        (unlabelled / f"{number}").mkdir(parents=True)
        for photo in case.iterdir():
            (unlabelled / f"{number}" / photo.name).write_bytes(photo.read_bytes())
    words = ("data.levels=case", "data.val=false", "evaluate.protocols=unlabeled")
    run = tmp_path / "run"
    loop.run(made("dcco/table2/dcco/clients-64", unlabelled, *words), run)
    labelled_words = [
        *(f"data.root={root}", "data.levels=class,case", "data.val=true"),
        "evaluate.protocols=finetune@5,finetune",
    ]
    rows = reevaluate(run, labelled_words)
    assert rows["result"].keys() == {"finetune@5_top1", "finetune_top1"}


def test_supervised_from_scratch_is_fine_tuning_after_no_rounds(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "DERM", replace(finetune.DERM, steps=3))
    words = ("evaluate.protocols=finetune@5", "rounds=0")
    loop.run(
        made("dcco/table2/supervised/pooled", root, *words, "cohort.size=null"), tmp_path / "r"
    )
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["rounds"] == 0 and "finetune@5_top1" in summary["result"]
