"""Every recipe that ships runs to its end: one round, on small made data of the right layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl import config, run

CLASSES = 4
SMALLER = {
    "cifar100": [
        "data.name=folder", "encoder.groups=8", "encoder.name=tiny", "objective.projector=32,32,16",
        "evaluate.protocols=knn,linear@8,finetune@8",
    ],
    "supervised": ["data.name=folder", "data.labels=16", "encoder.name=tiny"],
    "derm": [
        "encoder.name=tiny", "encoder.groups=8", "objective.projector=32,32,16", "data.size=16",
        "evaluate.size=24", "cohort.size=8",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/<class>/<case>/<image> with two images a case: read with or without the case level."""
    root = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for split, cases in (("train", 136), ("test", 2)):
        for label in range(CLASSES):
            for case in range(cases):
                place = root / split / f"class{label}" / f"case{case:03}"
                place.mkdir(parents=True)
                for image in range(2):
                    pixels = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(place / f"{image}.png")
    return root


def words_for(name: str) -> list[str]:
    if "fashion" in name:
        return ["data.name=digits", "evaluate.protocols=linear@10,knn"]
    if name == "default":
        return []
    kind = "derm" if "derm" in name else "supervised" if "supervised" in name else "cifar100"
    words = list(SMALLER[kind])
    if kind == "supervised":
        words = [w for w in words if "projector" not in w]
    return words


@pytest.mark.parametrize("name", config.recipes())
def test_recipe_runs(name: str, folder: Path, tmp_path: Path) -> None:
    words = [
        "rounds=1",
        "engine.threads=1",
        f"data.cache={tmp_path.parent / 'cache'}",
        *words_for(name),
    ]
    if "data.name=folder" in words or "derm" in name:
        words.append(f"data.root={folder}")
    summary = run.run(config.resolve(config.read_recipe(name), words), tmp_path / "run")
    assert summary["rounds"] == 1
    assert any(key.endswith("_top1") for key in summary["result"])
