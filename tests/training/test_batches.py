"""Batches of a client are a function of round, step and client."""

from __future__ import annotations

import pytest
import torch

from fedssl.training.batches import Batches


def test_epochs_are_shuffled_anew_and_each_sample_is_used_once_in_one() -> None:
    batches = Batches(steps=1, epochs=None, size=5, seed=0)
    rounds = [batches.positions(r, 0, client=3, samples=20) for r in range(8)]
    assert [epoch for epoch, _ in rounds] == [0, 0, 0, 0, 1, 1, 1, 1]
    orders = [torch.cat([chosen for e, chosen in rounds if e == epoch]) for epoch in (0, 1)]  # type: ignore[misc]
    for order in orders:
        assert sorted(order.tolist()) == list(range(20))
    assert not torch.equal(*orders)


@pytest.mark.parametrize(
    ("batches", "size", "steps", "used", "trained"),
    [
        (Batches(1, None, None, 0), 7, 1, 7, 7),
        (Batches(3, None, 2, 0), 7, 3, 6, 6),
        (Batches(3, None, 2, 0), 5, 3, 5, 6),
        (Batches(None, 2, 3, 0), 7, 4, 7, 12),  # the last partial batch is dropped
        (Batches(None, 2, 9, 0), 7, 2, 7, 14),  # a client smaller than one batch still trains
    ],
)
def test_batches(batches: Batches, size: int, steps: int, used: int, trained: int) -> None:
    assert batches.per_round(size) == steps
    assert batches.contributing(size) == used
    assert batches.images(size) == trained
