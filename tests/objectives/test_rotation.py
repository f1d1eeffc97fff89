"""Rotation: what the network sees, which class is which, and whole rounds of it."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, settings, train
from rounds import (
    assert_both_engines_agree,
    assert_compiled_is_plain,
    assert_merging_changes_nothing,
    assert_refused,
    epochs,
    losses,
    weights_after,
)

from fedssl.data.dataset import Split
from fedssl.objectives.base import Networks
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.rotation import Rotation

ROTATION = "objective.name=rotation"
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA"))


def objective() -> Rotation:
    return Rotation(Rotation.Params("rotation"))


def test_class_r_is_r_quarter_turns() -> None:
    view = torch.rand(3, 2, 8, 8, dtype=torch.float64)
    identity = Networks(lambda turned: turned, None, {})  # type: ignore[arg-type]
    seen = objective().encode(identity, (view,), None)
    assert len(seen) == 4
    for turns, image in enumerate(seen):
        np.testing.assert_array_equal(image, np.rot90(view.numpy(), turns, axes=(2, 3)))
        sure = torch.full((3, 4), -50.0, dtype=torch.float64)
        sure[:, turns] = 50.0
        others = [torch.zeros_like(sure)] * 4
        others[turns] = sure  # right about this one, and knows nothing of the others
        assert float(objective().loss(EncodedBatch(tuple(others)))) == pytest.approx(
            0.75 * math.log(4)
        )


def test_the_central_square_of_other_images_is_turned() -> None:
    """Their shape would tell the rotation."""
    view = torch.rand(1, 1, 4, 8)
    identity = Networks(lambda turned: turned, None, {})  # type: ignore[arg-type]
    seen = objective().encode(identity, (view,), None)
    assert torch.equal(seen[0], view[..., 2:6]) and {t.shape[2:] for t in seen} == {(4, 4)}


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_loss_written_out(norm: str) -> None:
    """Network, rotations and cross-entropy again; to batch norm the four are one batch."""
    config = settings(ROTATION, "algorithm.name=fedavg", f"encoder.norm={norm}")
    engine, _ = engine_of(config, made_split(), groups_of(6, 5))
    trainer, client = engine.trainer, engine.client(np.array([1]), 2, remember=False)
    network, members = copy.deepcopy(trainer.network), client.members
    encoded = client.encode_step(0)
    view = trainer.augmentation.views(
        trainer.images[0][members], client.random_state(2, slice(None)), 0, trainer.dtype
    )
    turned = np.concatenate([np.rot90(view.numpy(), r, axes=(2, 3)) for r in range(4)])
    with torch.no_grad():
        logits = network.towers[0](torch.from_numpy(turned.copy())).numpy()
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = -np.mean([np.log(chances[i, i // 5]) for i in range(20)])
    assert float(client.batch_loss(encoded).detach()) == pytest.approx(expected, rel=1e-10)


def test_no_labels_are_needed() -> None:
    split = Split(made_split().images, labels=None)
    engine, server = engine_of(settings(ROTATION, "algorithm.name=fedavg"), split, groups_of(5, 5))
    assert torch.isfinite(train(engine, server, 1)).all()


def test_it_learns_which_side_is_bright() -> None:
    ramp = torch.linspace(0, 200, 8)[:, None].expand(8, 8)
    noise = torch.randint(0, 50, (31, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    split = Split(((ramp + noise).to(torch.uint8),), labels=None)
    first, second = losses(epochs(ROTATION, "algorithm.local_epochs=5"), split)
    assert second < 0.5 * first < 0.5 * math.log(4)


def test_merged_is_client_by_client() -> None:
    assert_merging_changes_nothing(ROTATION)


@pytest.mark.parametrize("algorithm", ["fedavg", "centralized", "standalone", "ditto"])
def test_every_algorithm_trains_it_the_same_way_twice(algorithm: str) -> None:
    config = epochs(ROTATION, f"algorithm.name={algorithm}")
    first, again = weights_after(config), weights_after(config)
    assert torch.isfinite(first).all() and torch.equal(first, again)


def test_in_bfloat16_the_loss_is_finite() -> None:
    assert all(math.isfinite(x) for x in losses(epochs(ROTATION, "precision=bf16")))


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_compiled_is_plain(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_compiled_is_plain(epochs(ROTATION), monkeypatch, device)


def test_both_engines_agree(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    assert_both_engines_agree(tmp_path, ROTATION)


@pytest.mark.parametrize("word", ["encoder.towers=2", "evaluate.protocols=head"])
def test_what_is_refused(word: str) -> None:
    assert_refused(ROTATION, word)
