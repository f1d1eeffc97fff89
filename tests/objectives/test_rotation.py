"""Rotation: what the network sees, and which class is which."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, settings, train
from rounds import epochs, losses

from fedssl.data.dataset import Split
from fedssl.objectives.base import Networks
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.rotation import Rotation

ROTATION = "objective.name=rotation"
ROTATE = Rotation(Rotation.Params("rotation"))
IDENTITY: Any = Networks(lambda turned: turned, None, {})


def test_class_r_is_r_quarter_turns() -> None:
    view = torch.rand(3, 2, 8, 8, dtype=torch.float64)
    seen = ROTATE.encode(IDENTITY, (view,), None)
    assert len(seen) == 4
    for turns, image in enumerate(seen):
        np.testing.assert_array_equal(image, np.rot90(view.numpy(), turns, axes=(2, 3)))
        sure = torch.full((3, 4), -50.0, dtype=torch.float64)
        sure[:, turns] = 50.0
        others = [torch.zeros_like(sure)] * 4
        others[turns] = sure  # right about this one, and knows nothing of the others
        loss = ROTATE.loss(EncodedBatch(tuple(others)))
        assert float(loss) == pytest.approx(0.75 * math.log(4))


def test_the_central_square_of_other_images_is_turned() -> None:
    """Their shape would tell the rotation."""
    view = torch.rand(1, 1, 4, 8)
    seen = ROTATE.encode(IDENTITY, (view,), None)
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
