"""Runs whose views are cropped from whole images, from the folder to the embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_folders import save
from PIL import Image
from rounds import METHODS, RUN, go
from torch import Tensor

import fedssl
from fedssl import config
from fedssl.data.random import key, mix
from fedssl.data.squares import MiddleSquares, middle_squares
from fedssl.encoder.formats import describe_preprocessing, load_check_images
from fedssl.evaluate.features import extract
from fedssl.report.data import RunData
from fedssl.report.embeddings import embed_images
from fedssl.runs.build import Experiment, build_experiment
from fedssl.runs.reader import RunReader

WORDS = (
    *("data.size=20", "augment.size=12", "encoder.name=tiny", "encoder.groups=8", "rounds=2"),
    *("objective.projector=16,16", "engine.threads=1", "evaluate.protocols=knn,unlabeled"),
    *("partition.name=iid", "partition.clients=5"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two classes, none of them square or of one size."""
    root, generator = tmp_path_factory.mktemp("whole"), np.random.default_rng(0)
    for k in range(60):
        height, width = generator.integers(9, 40, 2)
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        split = "test" if k % 3 == 0 else "train"
        save(root / split / "ab"[k % 2] / f"{k:02}.png", Image.fromarray(pixels))
    return root


def resolve(root: Path, *words: str) -> config.Config:
    tree = config.read_recipe("folder")
    return config.resolve(tree, [f"data.root={root}", *WORDS, *words])


@pytest.fixture(scope="module")
def experiment(root: Path) -> Experiment:
    return build_experiment(resolve(root))


def test_evaluation_sees_middle_squares_and_views_of_whole_images(experiment: Experiment) -> None:
    stored, evaluator = experiment.dataset.train, experiment.evaluator
    seen, tower = evaluator.data.train.images[0], evaluator.tower(experiment.trainer.initial)
    assert stored.images[0].shape[2:] == (20, 20) and seen.shape[2:] == (12, 12)
    assert stored.sizes is not None and isinstance(seen, MiddleSquares)
    height, width = stored.sizes[0][7].tolist()
    square = middle_squares(stored.images[0][7:8, :, :height, :width], 12)
    assert torch.equal(seen[7:8], square)
    features = extract(tower.encoder, seen)
    torch.testing.assert_close(features[7:8], extract(tower.encoder, square))
    view, index = evaluator._views(torch.arange(9), 0), torch.arange(9)
    expected = evaluator.trainer.augmentation.views(
        stored.images[0][index], random_state(experiment, index), 0, sizes=stored.sizes[0][index]
    )
    assert torch.equal(view, expected)


def test_training_sees_views_of_whole_images(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, stored, seen = experiment.trainer, experiment.dataset.train, list[Tensor]()
    index = torch.arange(4)
    state = random_state(experiment, index)
    monkeypatch.setattr(trainer, "encode", lambda views, state: seen.extend(views))
    trainer.encode_samples(index, state)
    assert stored.sizes is not None
    for view in (0, 1):
        images, sizes = stored.images[0][index], stored.sizes[0][index]
        expected = trainer.augmentation.views(images, state, view, sizes=sizes)
        torch.testing.assert_close(seen[view], expected, rtol=0, atol=1e-6)


def random_state(experiment: Experiment, index: Tensor) -> Tensor:
    return mix(key(experiment.config.seed, "views"), index)


def test_evaluation_at_another_size_takes_other_squares(root: Path) -> None:
    other = build_experiment(resolve(root, "evaluate.size=16"))
    assert other.evaluator.data.train.images[0].shape[2:] == (16, 16)
    assert other.evaluator.evaluate(other.trainer.initial).keys() >= {"knn_top1", "alignment"}


def test_squares_are_reduced_to_the_size_of_a_view(root: Path) -> None:
    made = build_experiment(resolve(root, "data.shape=square"))
    assert made.dataset.train.sizes is None
    assert made.dataset.train.images[0].shape[2:] == (20, 20)
    assert made.evaluator.data.train.images[0].shape[2:] == (12, 12)
    go(made, 1)


@pytest.fixture(scope="module")
def run(root: Path, tmp_path_factory: pytest.TempPathFactory) -> fedssl.Run:
    out = tmp_path_factory.mktemp("run") / "run"
    words: dict[str, Any] = dict(w.split("=", 1) for w in (*WORDS, "data.interpolation=bicubic"))
    keys = {name.replace(".", "__"): value for name, value in words.items()}
    return fedssl.train("folder", out, data__root=str(root), **keys)


def test_embeddings_of_files_are_those_of_evaluation(run: fedssl.Run, root: Path) -> None:
    experiment = build_experiment(run.settings)
    evaluated = experiment.evaluator.data.test
    assert evaluated is not None
    encoder = run.encoder
    files = sorted((root / "test").rglob("*.png"))
    assert (encoder.height, encoder.stored) == (12, 20)
    assert torch.equal(encoder.embed(files), extract(encoder.body, evaluated.images[0]))
    assert torch.equal(encoder.embed(Image.open(files[0])), encoder.embed(files[0]))
    index, seen = torch.arange(5), experiment.evaluator.data.train.images[0]
    assert torch.equal(experiment.trainer.plain_images(index), seen[index])
    other = build_experiment(resolve(root)).evaluator.data.train.images[0]
    assert not torch.equal(other[index], seen[index])  # bilinear


def test_exports_say_how_whole_images_are_prepared(run: fedssl.Run) -> None:
    steps = " ".join(describe_preprocessing(run.encoder)["steps"])
    assert "longer side has more than 20 pixels" in steps and "12 by 12" in steps
    assert "resize, BICUBIC" in steps and "bytes, bicubic" in steps
    images, origin = load_check_images(run.path, run.encoder)
    assert images.shape == (20, 3, 12, 12) and origin == "20 of the run's test images"


def test_a_page_shows_the_images_that_were_evaluated(run: fedssl.Run) -> None:
    assert embed_images(RunData(RunReader(run.path))).total == 20


@pytest.mark.parametrize("method", ["ccl", "fedca", "featarc"])
def test_algorithms_that_look_at_plain_images(method: str, root: Path) -> None:
    words = " ".join((*RUN, METHODS[method], "data.labels=null data.size=20")).split()
    words += ["algorithm.public=5"] if method == "fedca" else []
    made = build_experiment(resolve(root, *words))
    plain = made.trainer.plain_images(torch.arange(3))
    assert torch.equal(plain, made.evaluator.data.train.images[0][:3])
    go(made, 2)


def test_clients_of_ones_own_have_whole_images_too(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = [
        Image.fromarray(np.random.default_rng(k).integers(0, 256, (10 + k, 30), dtype=np.uint8))
        for k in range(8)
    ]
    tensors = torch.randint(0, 256, (8, 1, 18, 9), dtype=torch.uint8, generator=generator)
    run = fedssl.train(
        out=tmp_path / "run",
        clients=[pictures, tensors],
        data__size=15,
        augment__size=12,
        rounds=1,
        encoder__name="tiny",
        objective__projector=[16, 16],
        evaluate__protocols=["unlabeled"],
    )
    train = build_experiment_of(run).dataset.train
    assert train.images[0].shape == (16, 1, 15, 15) and train.sizes is not None
    assert train.sizes[0][:2].tolist() == [[5, 15], [6, 15]]  # halved, as 30 pixels become 15
    assert train.sizes[0][8:].tolist() == [[15, 8]] * 8


def build_experiment_of(run: fedssl.Run) -> Experiment:
    with run._objects.held():
        return build_experiment(run.settings)
