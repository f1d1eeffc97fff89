"""Update rules against independent implementations."""

from __future__ import annotations

import pytest
import timm.optim
import torch

from fedssl.config import Optimizer
from fedssl.training import optim


def layers() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 3), (4,), (2, 4))
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


def walk(rule: Optimizer, steps: int = 6) -> torch.Tensor:
    start = layers()
    params = torch.cat([t.flatten() for t in start])
    state = optim.start(rule, params)
    for step in range(steps):
        gradient = torch.sin(3 * params + step)
        params = params + optim.step(
            rule, state, params, gradient, rule.lr, [t.shape for t in start]
        )
    return params


def walk_with(make: object, steps: int = 6) -> torch.Tensor:
    params = [t.clone().requires_grad_() for t in layers()]
    rule = make(params)  # type: ignore[operator]
    for step in range(steps):
        for p in params:
            p.grad = torch.sin(3 * p.detach() + step)
        rule.step()
    return torch.cat([p.detach().flatten() for p in params])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_is_torchs(momentum: float, decay: float) -> None:
    ours = walk(Optimizer("sgd", 0.1, momentum, decay))
    theirs = walk_with(lambda p: torch.optim.SGD(p, 0.1, momentum=momentum, weight_decay=decay))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_torchs(decay: float) -> None:
    theirs = walk_with(lambda p: torch.optim.Adam(p, 0.01, weight_decay=decay))
    torch.testing.assert_close(
        walk(Optimizer("adam", 0.01, 0.0, decay)), theirs, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_torchs(decay: float) -> None:
    theirs = walk_with(lambda p: torch.optim.AdamW(p, 0.01, weight_decay=decay))
    torch.testing.assert_close(
        walk(Optimizer("adamw", 0.01, 0.0, decay)), theirs, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_is_timms(decay: float) -> None:
    """timm adapts every tensor of a group, so weights and biases are two groups for it."""

    def make(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        weights = [p for p in params if p.ndim > 1]
        biases = [p for p in params if p.ndim == 1]
        groups = [
            {"params": weights, "weight_decay": decay},
            {"params": biases, "weight_decay": 0.0, "always_adapt": False},
        ]
        return timm.optim.Lars(
            groups, lr=2.0, momentum=0.9, trust_coeff=optim.LARS_TRUST, always_adapt=True
        )

    ours = walk(Optimizer("lars", 2.0, 0.9, decay))
    torch.testing.assert_close(ours, walk_with(make), rtol=1e-6, atol=1e-9)


def test_lars_moves_a_classifier_that_starts_at_zero() -> None:
    rule = Optimizer("lars", 0.5)
    change = optim.step(rule, {}, torch.zeros(6), torch.ones(6), 0.5, [(2, 3)])
    torch.testing.assert_close(change, torch.full((6,), -0.5))


@pytest.mark.parametrize("total", [4, 10, 25, 100])
def test_steps_are_three_tenths_at_three_points_of_the_way(total: int) -> None:
    """As Dec-SSL's program: ``MultiStepLR`` at 30, 60 and 90 % of the rounds, with 0.3."""
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
    assert optim.cosine(0, 10) == 1
    assert optim.cosine(5, 10) == pytest.approx(0.5)
    assert optim.cosine(10, 10) == pytest.approx(0)
