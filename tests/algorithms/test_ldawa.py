"""L-DAWA (Rehman et al. 2023): each layer counts by its cosine with the global one."""

from __future__ import annotations

import pytest
from helpers import engine_of, groups_of, made_split, relative, siamese, step, train
from plain import Plain, assert_network, loops_of, mean_state
from torch import Tensor

SIZES = (6, 9)


def scaled(after: Tensor, before: Tensor) -> Tensor:
    norms = after.norm() * before.norm()
    return after * ((after * before).sum() / norms if norms else 1)


@pytest.mark.parametrize("objective", ["simclr", "byol"])
def test_rounds_are_those_of_a_plain_loop(objective: str) -> None:
    config = siamese(objective, "algorithm.name=ldawa")
    engine, server = engine_of(config, made_split(), groups_of(*SIZES))
    loops = loops_of(Plain, config, *SIZES)
    for round in range(2):
        start = {n: t.clone() for n, t in engine.trainer.flat.named(server.weights).items()}
        states = []
        for plain in loops:
            plain.receive(start)
            plain.round(round)
            state = {n: t.detach().clone() for n, t in plain.network.state_dict().items()}
            for name, _ in plain.network.named_parameters():
                state[name] = scaled(state[name], start[name])
            states.append(state)
        step(engine, server, round)
        assert_network(engine, server.weights, mean_state(states, [1, 1]))


def test_a_client_that_turned_away_counts_less() -> None:
    """At a rate of zero the model stays; at a large one its layers shrink beside FedAvg's."""
    norms = {}
    for name in ("ldawa", "fedavg algorithm.weight=uniform"):
        for lr in (1e-9, 0.5):
            words = ("algorithm.name=" + name, f"client.lr={lr}", "client.weight_decay=0")
            config = siamese("simclr", *" ".join(words).split())
            engine, server = engine_of(config, made_split(), groups_of(*SIZES))
            weights = train(engine, server, 1)
            if lr < 0.5:
                n = engine.trainer.flat.parameter_count
                assert relative(weights[:n], engine.trainer.initial[:n]) < 1e-7
            norms[name[:5], lr] = float(engine.trainer.flat.learned[0].of(weights).norm())
    assert norms["ldawa", 0.5] < 0.99 * norms["fedav", 0.5]
