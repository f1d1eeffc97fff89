"""FedProx: FedAvg with μ/2 ‖w − w_received‖² in every local step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, siamese, step, train
from plain import Plain, assert_network, loops_of, mean_network
from rounds import run_of

from fedssl.runs import loop
from fedssl.runs.reevaluate import evaluate

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


def test_rounds_are_those_of_a_plain_loop_with_the_term_in_its_loss() -> None:
    config = siamese("byol", "algorithm.name=fedprox", "algorithm.mu=2")
    engine, server = engine_of(config, made_split(), groups_of(*SIZES))
    loops = loops_of(Plain, config, *SIZES)
    for round in range(2):
        start = engine.trainer.flat.named(server.weights.clone())
        for plain in loops:
            plain.receive(start)
            plain.pull = (2.0, [start[name] for name, _ in plain.network.named_parameters()])
            plain.round(round)
        step(engine, server, round)
        assert_network(engine, server.weights, mean_network(loops))


def test_the_local_models_of_the_last_round_are_kept() -> None:
    """Their mean by samples is the new global model."""
    config = siamese("simclr", "algorithm.name=fedprox", "algorithm.mu=2", "rounds=2")
    engine, server = engine_of(config, made_split(), groups_of(*SIZES))
    step(engine, server, 0)
    assert all("local" not in engine.states[k] for k in range(len(SIZES)))
    step(engine, server, 1)
    first, second = (engine.states[k]["local"] for k in range(len(SIZES)))
    assert relative(first, second) > 1e-5
    shares = [engine.trainer.batches.contributing(size) for size in SIZES]
    mean = (shares[0] * first + shares[1] * second) / sum(shares)
    assert relative(mean, server.weights) < 1e-12


def test_a_finished_run_evaluates_its_local_models_again(tmp_path: Path) -> None:
    config = run_of("ditto", "algorithm.name=fedprox", "algorithm.mu=0.1", "rounds=1", "device=cpu")
    summary = loop.run(config, tmp_path / "run")
    assert summary["per-client_local_top1"] != summary["per-client_global_top1"]
    table = evaluate(tmp_path / "run", [])
    (again,) = (row for row in table.values() if "per-client_local_top1" in row)
    assert again["per-client_local_top1"] == summary["per-client_local_top1"]


def test_a_large_mu_keeps_clients_near_the_global_model() -> None:
    moved = []
    for mu in (0, 1, 5):
        config = siamese("simclr", "algorithm.name=fedprox", f"algorithm.mu={mu}")
        engine, server = engine_of(config, made_split(), groups_of(*SIZES))
        moved.append(float((train(engine, server, 1) - engine.trainer.initial).norm()))
    assert moved == sorted(moved, reverse=True) and moved[-1] < 0.9 * moved[0]
