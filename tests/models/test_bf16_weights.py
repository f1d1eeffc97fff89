"""Weights rounded once a step give autocast's numbers."""

from __future__ import annotations

import pytest
import torch
from helpers import engine_of, groups_of, made_split, quick, relative, settings, train, without_code
from torch import Tensor, nn

from fedssl.models.bf16_weights import BF16Weights
from fedssl.models.flat_weights import FlatWeights, differentiate
from fedssl.models.norms import StandardizedConv2d
from fedssl.training import compiled


def network() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    return body.extend([nn.Linear(8 * 9, 16), nn.ReLU(), nn.Linear(16, 4)])


def gradients(flat: FlatWeights, x: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = flat.module(x).float().square().sum()
    (found,) = differentiate(loss, flat)
    places = [s.of(flat.gradient) for s in flat.learned]
    compiled.copy_tensors(places, list(found))
    return [loss.detach(), *(p.clone() for p in places)]


def test_the_numbers_are_autocasts() -> None:
    flat, x = FlatWeights(network()), torch.randn(5, 3, 5, 5)
    rounded, plain = BF16Weights(flat), gradients(flat, x)
    before = list(flat.module.parameters())
    compiled.copy_tensors(*rounded.pairs)
    with rounded.in_use():
        dtypes = {p.dtype for p in flat.module.parameters()}
        fast = gradients(flat, x)
    assert dtypes == {torch.bfloat16, torch.float32}  # batch norm's own stay as they are
    for a, b in zip(fast, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert all(a is b for a, b in zip(flat.module.parameters(), before, strict=True))


def test_what_a_layer_makes_of_its_weights_is_not_rounded() -> None:
    """Standardized filters are rounded after that, as autocast does it."""
    flat = FlatWeights(nn.Sequential(StandardizedConv2d(3, 4, 3), nn.Linear(4, 2)))
    copies, exact = BF16Weights(flat).pairs
    assert [tuple(c.shape) for c in copies] == [(2, 4), (2,)]
    assert {e.dtype for e in exact} == {torch.float32}


def test_a_network_of_other_layers_is_left_as_it_is() -> None:
    layer = nn.utils.weight_norm(nn.Linear(3, 2, bias=False))
    for module in (nn.BatchNorm2d(3), layer):
        assert BF16Weights(FlatWeights(module)).pairs == ([], [])


def test_what_a_loss_does_not_see_has_a_gradient_of_zero() -> None:
    flat = FlatWeights(nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)]))
    first = flat.module[0]  # type: ignore[index]
    (found,) = differentiate(first(torch.ones(1, 2)).sum(), flat)
    assert [g.tolist() for g in found] == [[[1, 1]], [[0, 0]]]


@pytest.mark.parametrize("objective", quick(["byol", "simclr"], "simclr"))
def test_compiled_training_in_bf16(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is no further from float32 than plain bf16 is, and much nearer than the start."""
    without_code(monkeypatch)
    found, start = {}, None
    for precision, is_compiled in (("fp32", False), ("bf16", False), ("bf16", True)):
        config = settings(
            "algorithm.name=fedavg", "algorithm.local_epochs=2", "algorithm.batch=8",
            f"objective.name={objective}", "objective.projector=32,16", "encoder.norm=batch",
            "augment.name=flip", "client.lr=0.01", f"precision={precision}",
        )  # fmt: skip
        engine, server = engine_of(config, made_split(48, 3, 16), groups_of(24, 24))
        engine.trainer.compiles = is_compiled
        start = server.weights.clone()
        found[precision, is_compiled] = train(engine, server, 1) - start
        assert len(engine.trainer.compiled_steps.by_shape) == is_compiled
        for replay in engine.trainer.compiled_steps.by_shape.values():  # BYOL's target, too
            assert len(replay.bf16_weights) == (2 if objective == "byol" else 1)
    exact, plain, fast = found.values()
    assert relative(fast, exact) < 1.5 * relative(plain, exact) < 0.1
