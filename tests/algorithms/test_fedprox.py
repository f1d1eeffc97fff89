"""FedProx: FedAvg with μ/2 ‖w − w_received‖² in every local step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, settings, siamese, step, train
from plain import Plain, mean_state
from rounds import assert_compiled_is_plain, assert_merging_changes_nothing

SIZES = (6, 9)


@pytest.mark.parametrize("words", ["", "algorithm.norm_policy=local", "algorithm.replace=both"])
def test_mu_0_is_fedavg(words: str) -> None:
    results = []
    for name in ("fedavg", "fedprox algorithm.mu=0", "fedprox algorithm.mu=0.5"):
        config = siamese("byol", *f"algorithm.name={name} {words}".split())
        engine, server = engine_of(config, made_split(), groups_of(*SIZES))
        results.append(train(engine, server, 2))
    assert torch.equal(results[1], results[0])
    assert relative(results[2], results[0]) > 1e-5


def test_the_second_step_has_exactly_the_proximal_term() -> None:
    """w₂ − w₁ = −η (∇l(w₁) + μ (w₁ − w₀)), and w₁ − w₀ = −η ∇l(w₀)."""
    config = settings(
        *("algorithm.name=fedprox", "algorithm.mu=0.7", "algorithm.local_steps=2"),
        *("objective.name=simclr", "objective.projector=32,16", "client.lr=0.05"),
    )
    engine, server = engine_of(config, made_split(), groups_of(9))
    w0, n = server.weights.clone(), engine.trainer.flat.parameter_count
    step(engine, server, 0)
    loop, w = Plain(config, made_split(), range(9)), w0[:n]
    for number in range(2):
        loop.receive(engine.trainer.flat.named(torch.cat((w, w0[n:]))))
        loop.network.zero_grad()
        loop.loss(*loop.views(number, torch.arange(9))).backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in loop.network.parameters()])
        w = w - 0.05 * (gradient + 0.7 * (w - w0[:n]))
    torch.testing.assert_close(server.weights[:n], w, rtol=1e-10, atol=1e-12)


def test_rounds_are_those_of_a_plain_loop_with_the_term_in_its_loss() -> None:
    config = siamese("byol", "algorithm.name=fedprox", "algorithm.mu=2", "algorithm.local_epochs=1")
    engine, server = engine_of(config, made_split(), groups_of(*SIZES))
    loops = [
        Plain(config, made_split(), range(6), client=0),
        Plain(config, made_split(), range(6, 15), client=1),
    ]
    names = [name for name, _ in loops[0].network.named_parameters()]
    for round in range(2):
        start = engine.trainer.flat.named(server.weights.clone())
        for loop in loops:
            loop.receive(start)
            loop.pull = (2.0, [start[name] for name in names])
            loop.round(round)
        step(engine, server, round)
        mean = mean_state([loop.network.state_dict() for loop in loops], list(SIZES))
        after = engine.trainer.flat.named(server.weights)
        for name, tensor in mean.items():
            assert (after[name] - tensor).norm() < 1e-9 * tensor.norm() + 1e-11, name


def test_a_large_mu_keeps_clients_near_the_global_model() -> None:
    moved = []
    for mu in (0, 1, 5):
        config = siamese("simclr", "algorithm.name=fedprox", f"algorithm.mu={mu}")
        engine, server = engine_of(config, made_split(), groups_of(*SIZES))
        moved.append(float((train(engine, server, 1) - engine.trainer.initial).norm()))
    assert moved == sorted(moved, reverse=True) and moved[-1] < 0.9 * moved[0]


def test_merging_changes_nothing() -> None:
    assert_merging_changes_nothing("algorithm.name=fedprox", "algorithm.mu=3")


def test_compiled_steps_have_the_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    config = siamese("simclr", "algorithm.name=fedprox", "algorithm.mu=2")
    assert_compiled_is_plain(config, monkeypatch)


def test_both_engines_agree(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from rounds import assert_both_engines_agree

    words = ("objective.name=simclr", "objective.projector=32,16", "algorithm.local_epochs=2")
    assert_both_engines_agree(tmp_path, "algorithm.name=fedprox", "algorithm.mu=2", *words)
