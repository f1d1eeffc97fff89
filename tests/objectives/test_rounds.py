"""Whole rounds of objectives that are more than a loss of two projections."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rounds import epochs, losses, weights_after

SWAV = "objective.name=swav objective.projector=32,16 objective.prototypes=6"
CLUSTERS = "objective.name=deepcluster objective.projector=32,16 objective.clusters=3,2,4"
SIGREG = "objective.name=sigreg objective.projector=32,16 objective.slices=20"
MAE = (
    "objective.name=mae encoder.name=vit-tiny client.optimizer=adamw client.weight_decay=0.05 "
    "client.momentum=0 client.lr=2e-4"
)
CASES = [
    *(f"objective.name=rotation algorithm.name={name}" for name in ("fedavg", "centralized")),
    *(f"objective.name=rotation algorithm.name={name}" for name in ("standalone", "ditto")),
    *(f"{SWAV} objective.queue=8 algorithm.name={name}" for name in ("fedavg", "standalone")),
    f"{SWAV} algorithm.name=centralized",
    f"{SWAV} algorithm.name=ditto objective.queue=8",
    f"{SWAV} algorithm.name=fedavg encoder.towers=2 objective.queue=8",
    *(f"{CLUSTERS} algorithm.name={name}" for name in ("fedavg", "centralized", "standalone")),
    f"{CLUSTERS} algorithm.name=fedavg encoder.towers=2",
    f"{CLUSTERS} algorithm.name=fedavg algorithm.local_steps=3 algorithm.local_epochs=null",
    *(f"{SIGREG} algorithm.name={name}" for name in ("fedavg", "centralized", "standalone")),
    *(f"{MAE} algorithm.name={name}" for name in ("fedavg", "centralized")),
]


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("words", CASES)
def test_every_algorithm_trains_it_the_same_in_any_order(words: str) -> None:
    config = epochs(*words.split())
    order = None if "centralized" in words else np.array([2, 0, 1])
    first, again = weights_after(config), weights_after(config, order=order)
    assert torch.isfinite(first).all() and torch.equal(first, again)


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize(
    "words", ["objective.name=rotation", f"{SWAV} objective.queue=8", CLUSTERS, SIGREG, MAE]
)
def test_in_bfloat16_the_loss_is_finite(words: str) -> None:
    assert all(math.isfinite(x) for x in losses(epochs(*words.split(), "precision=bf16")))
