"""Update rules against independent implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm.optim
import torch
from helpers import engine_of, groups_of, made_split, relative, settings, train
from torch import Tensor

from fedssl.config import Encoder, Optimizer
from fedssl.federation.server import learning_rates
from fedssl.models.flat_weights import FlatWeights
from fedssl.models.network import Heads, build
from fedssl.models.trainable import find_depths
from fedssl.training import optim

SHAPES = ((4, 3), (4,), (2, 4))


def walk(rule: Optimizer) -> Tensor:
    params = torch.cat([layer.flatten() for layer in layers()])
    state = optim.start(rule, params)
    for step in range(6):
        gradient = torch.sin(3 * params + step)
        params = params + optim.step(rule, state, params, gradient, rule.lr, SHAPES)
    return params


def walk_with(make: Callable[[list[Tensor]], Any]) -> Tensor:
    params = [layer.requires_grad_() for layer in layers()]
    rule = make(params)
    for step in range(6):
        for p in params:
            p.grad = torch.sin(3 * p.detach() + step)
        rule.step()
    return torch.cat([p.detach().flatten() for p in params])


def layers() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in SHAPES]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (("sgd", 0.1), lambda p, decay: torch.optim.SGD(p, 0.1, weight_decay=decay)),
        (("sgd", 0.1, 0.9), lambda p, decay: torch.optim.SGD(p, 0.1, 0.9, weight_decay=decay)),
        (("adam", 0.01), lambda p, decay: torch.optim.Adam(p, 0.01, weight_decay=decay)),
        (("adamw", 0.01), lambda p, decay: torch.optim.AdamW(p, 0.01, weight_decay=decay)),
    ],
    ids=["sgd", "momentum", "adam", "adamw"],
)
def test_rules_are_torchs(ours: tuple[Any, ...], theirs: Any, decay: float) -> None:
    expected = walk_with(lambda params: theirs(params, decay))
    rule = Optimizer(*ours, weight_decay=decay)
    torch.testing.assert_close(walk(rule), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_is_timms(decay: float) -> None:
    """timm adapts every tensor of a group, so weights and biases are two groups for it."""

    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        weights = {"params": [p for p in params if p.ndim > 1], "weight_decay": decay}
        biases = {"params": [p for p in params if p.ndim == 1], "always_adapt": False}
        return timm.optim.Lars(
            [weights, biases], lr=2.0, momentum=0.9, trust_coeff=optim.LARS_TRUST, always_adapt=True
        )

    ours = walk(Optimizer("lars", 2.0, 0.9, decay))
    torch.testing.assert_close(ours, walk_with(make), rtol=1e-6, atol=1e-9)


def test_lars_moves_a_classifier_that_starts_at_zero() -> None:
    rule = Optimizer("lars", 0.5)
    change = optim.step(rule, {}, torch.zeros(6), torch.ones(6), 0.5, [(2, 3)])
    torch.testing.assert_close(change, torch.full((6,), -0.5))


@pytest.mark.parametrize("total", [4, 10, 25, 100])
def test_steps_are_three_tenths_at_three_points_of_the_way(total: int) -> None:
    """Like Dec-SSL's program: ``MultiStepLR`` at 30, 60 and 90 % of the rounds, with 0.3."""
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    at = [int(share * total) for share in (0.3, 0.6, 0.9)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(theirs, at, gamma=0.3)
    for step in range(total):
        assert optim.steps(step, total) == pytest.approx(theirs.param_groups[0]["lr"])
        theirs.step()
        schedule.step()


def test_a_short_trial_starts_at_the_full_rate() -> None:
    assert [optim.steps(0, total) for total in (1, 2, 3)] == [1, 1, 1]


def test_cosine_starts_at_one_and_ends_at_zero() -> None:
    assert [optim.cosine(step, 10) for step in (0, 5, 10)] == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_decay_of_matrices_is_torchs_with_groups(name: str) -> None:
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]

    def make(params: list[Tensor]) -> Any:
        vectors = [p for p in params if p.ndim < 2]
        matrices = [p for p in params if p.ndim > 1]
        groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
        return kind(groups, lr=0.05, weight_decay=0.3)

    rule = Optimizer(name, 0.05, weight_decay=0.3, decay="matrices")  # type: ignore[arg-type]
    torch.testing.assert_close(walk(rule), walk_with(make), rtol=1e-12, atol=1e-12)
    everything = walk(Optimizer(name, 0.05, weight_decay=0.3))  # type: ignore[arg-type]
    assert not torch.allclose(walk(rule), everything)


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_is_torchs(limit: float) -> None:
    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], limit)
            super().step(closure)

    expected = walk_with(lambda params: Clipped(params, 0.1, 0.9, weight_decay=0.1))
    rule = Optimizer("sgd", 0.1, 0.9, weight_decay=0.1, clip_norm=limit)
    torch.testing.assert_close(walk(rule), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "mobilenetv3_small_050"])
def test_rates_by_layer_are_timms(name: str) -> None:
    settings = Encoder(f"timm/{name}", norm="frozen")
    network = build(settings, (3,), 32, lambda e, norm: Heads(torch.nn.Linear(e.features, 4)), 0)
    flat = FlatWeights(network)
    model = timm.create_model(name, num_classes=0)
    groups = timm.optim.param_groups_layer_decay(model, layer_decay=0.7)
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    expected = {f"towers.0.encoder.body.{n}": scales[id(p)] for n, p in model.named_parameters()}
    depths = find_depths(flat, network.towers)
    params, ones = torch.zeros_like(flat.params), torch.ones_like(flat.params)
    rule = Optimizer("sgd", 1.0, layer_decay=0.7)
    change = optim.step(rule, {}, params, ones, 1.0, flat.layers, depths)
    assert len(set(expected.values())) > 4
    for span in flat.learned:
        found = span.of(change)
        torch.testing.assert_close(found, torch.full_like(found, -expected.get(span.name, 1.0)))


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_warm_up_is_torchs(schedule: str) -> None:
    words = ("server.lr=1", "client.lr=0.4", "client.warmup=3", "rounds=10")
    config = settings(*words, f"schedule={schedule}")
    rule = torch.optim.SGD([torch.zeros(1)], 0.4)
    lr = torch.optim.lr_scheduler
    rising = lr.LambdaLR(rule, lambda round: (round + 1) / 3)
    after: Any = lr.CosineAnnealingLR(rule, 7)
    if schedule == "constant":
        after = lr.ConstantLR(rule, 1.0)
    chain = lr.SequentialLR(rule, [rising, after], [3])
    for round in range(10):
        assert learning_rates(config, round) == pytest.approx((1.0, rule.param_groups[0]["lr"]))
        rule.step()
        chain.step()
    adam = settings("server.optimizer=adam", "server.lr=0.1", "server.warmup=4", "client.lr=0.4")
    assert learning_rates(adam, 1) == pytest.approx((0.05, 0.4))


def test_clipped_clients_are_not_merged_and_decayed_rates_are() -> None:
    for words, merges in (("client.clip_norm=1", False), ("client.layer_decay=0.5", True)):
        ends = []
        for merge in ("auto", "off"):
            config = settings(*words.split(), f"engine.merge={merge}")
            engine, server = engine_of(config, made_split(), groups_of(4, 7, 2))
            assert engine.merges == (merges and merge == "auto")
            ends.append(train(engine, server, 2))
        assert relative(ends[0], ends[1]) < 1e-9
