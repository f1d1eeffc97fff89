"""The FedSSL framework (FedEMA paper, section 3): FedAvg is what a plain loop would do."""

from __future__ import annotations

import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, siamese, step, train
from plain import Plain, assert_network, flat_params, loops_of, mean_network

from fedssl.config import Config
from fedssl.engines.local import LocalEngine
from fedssl.federation.server import Server

CASES = {
    "simclr": ("simclr",),
    "byol": ("byol",),
    "byol without predictor": ("byol", "objective.predictor=off"),
    "byol without stop-gradient": ("byol", "objective.stop_gradient=false"),
    "byol without EMA": ("byol", "objective.momentum=1"),
    "simsiam": ("simsiam",),
    "simsiam without stop-gradient": ("simsiam", "objective.stop_gradient=false"),
    "moco": ("moco",),
}


def assert_same(
    engine: LocalEngine, server: Server, loops: list[Plain], expected: dict[str, torch.Tensor]
) -> None:
    assert_network(engine, server.weights, expected)
    for k, loop in enumerate(loops):
        state = engine.states[k]
        assert ("target" in state) == (engine.trainer.target is not None)
        if "target" in state:
            assert relative(state["target"], flat_params(loop.target)) < 1e-8
        if "memory" in state:
            held = state["memory"]["queue"][: int(state["memory"]["seen"])]
            assert relative(torch.sort(held, 0)[0], torch.sort(loop.queue, 0)[0]) < 1e-8


@pytest.mark.parametrize(
    ("case", "size"), [*((case, 11) for case in CASES), ("simclr", 3), ("byol", 3), ("moco", 3)]
)
def test_one_client_with_everything_is_centralized_training(case: str, size: int) -> None:
    """Optimizer made new and learning rate set every E epochs, batch norm's buffers included.

    Of 11 samples in batches of 4 the last three are dropped; 3 samples are one batch.
    """
    config = siamese(*CASES[case])
    engine, server = engine_of(config, made_split(), groups_of(size))
    (loop,) = loops_of(Plain, config, size)
    for round in range(config.rounds):
        step(engine, server, round)
        loss = loop.round(round)
        assert float(server.log["loss"]) == pytest.approx(loss, rel=1e-9)
        assert_same(engine, server, [loop], loop.network.state_dict())
    assert engine.trainer.batches.images(size) == (16 if size == 11 else 6)


def test_the_algorithm_centralized_is_that_client() -> None:
    results = []
    for name in ("fedavg", "centralized"):
        config = siamese("byol", f"algorithm.name={name}")
        results.append(train(*engine_of(config, made_split(), groups_of(11)), rounds=2))
    assert torch.equal(*results)


def federated(config: Config, replace: str, sizes: tuple[int, ...]) -> None:
    engine, server = engine_of(config, made_split(), groups_of(*sizes))
    loops = loops_of(Plain, config, *sizes)
    for round in range(config.rounds):
        step(engine, server, round)
        for loop in loops:
            loop.round(round)
        mean = mean_network(loops)
        assert_same(engine, server, loops, mean)
        for loop in loops:
            loop.receive(mean, target=replace == "both")


@pytest.mark.parametrize(
    "case", ["simclr", "byol", "byol without stop-gradient", "simsiam", "moco"]
)
def test_upload_aggregate_replace(case: str) -> None:
    """Online networks are averaged by samples and replaced; targets and queues never leave."""
    federated(siamese(*CASES[case]), "online", (5, 9, 3))


@pytest.mark.parametrize("objective", ["byol", "moco"])
def test_replacing_both_networks(objective: str) -> None:
    """Tables 2 and 9: the target network, too, starts a round from the global one."""
    federated(siamese(objective, "algorithm.replace=both"), "both", (5, 9))
