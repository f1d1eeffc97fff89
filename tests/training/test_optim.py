"""Update rules against independent implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm.optim
import torch
from torch import Tensor

from fedssl.config import Optimizer
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
