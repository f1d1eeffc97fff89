"""SCAFFOLD (Karimireddy et al. 2020): control variates take client drift out of local training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, settings, siamese, step, train
from plain import Plain, assert_network, flat_params, loops_of, mean_state
from rounds import assert_resumes, run_of
from torch import Tensor

from fedssl.config import Config
from fedssl.data.dataset import Split
from fedssl.federation.server import learning_rates

SIZES = (6, 9, 8)


def scaffold(*words: str) -> Config:
    return siamese("simclr", "algorithm.name=scaffold", "client.momentum=0", *words)


class Corrected(Plain):
    """A plain client whose gradient has the server's control variate minus its own."""

    correction: Tensor

    def loss(self, x1: Tensor, x2: Tensor) -> Tensor:
        flat = torch.cat([p.reshape(-1) for p in self.network.parameters()])
        return super().loss(x1, x2) + flat @ self.correction


def test_rounds_are_those_of_a_plain_loop() -> None:
    """Algorithm 1 with option II, every client in rounds 0 and 2 and two of three in round 1."""
    config = scaffold()
    engine, server = engine_of(config, made_split(), groups_of(*SIZES))
    server.client_names = ["0", "1", "2"]
    loops: list[Any] = loops_of(Corrected, config, *SIZES)
    count = engine.trainer.flat.parameter_count
    control = torch.zeros(count, dtype=torch.float64)
    own = [control for _ in SIZES]
    for round, ids in enumerate([(0, 1, 2), (0, 2), (0, 1, 2)]):
        start = engine.trainer.flat.named(server.weights.clone())
        changes = []
        for k in ids:
            plain = loops[k]
            plain.receive(start)
            before = flat_params(plain.network)
            plain.correction = control - own[k]
            plain.round(round)
            steps = 2 * len(plain.batches(2 * round, 4))
            mean = (before - flat_params(plain.network)) / (
                steps * learning_rates(config, round)[1]
            )
            changes.append(mean - control)
            own[k] = own[k] + changes[-1]
        control = control + sum(changes) / len(SIZES)
        step(engine, server, round, *ids)
        states = [loops[k].network.state_dict() for k in ids]
        assert_network(engine, server.weights, mean_state(states, [1] * len(ids)))
        assert relative(server.state["control"], control) < 1e-9


def test_local_steps_end_where_all_clients_agree() -> None:
    """The fixed point has no gradient of the mean loss; that of FedAvg has, with other classes.

    Theorem III of the paper against its section 3.1.
    """
    left, one_step = {}, settings("algorithm.name=fedavg", "algorithm.local_steps=1").algorithm
    for name in ("scaffold", "fedavg"):
        words = ("algorithm.local_steps=8", "objective.name=supervised", "augment.name=none")
        config = settings(f"algorithm.name={name}", *words, "client.lr=0.004", "encoder.norm=group")
        images = torch.cat((made_split(6).images[0],) * 2)  # the same, with other labels
        labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, 0, 2, 1, 1, 3])
        split, groups = Split((images,), labels), groups_of(6, 6)
        engine, server = engine_of(config, split, groups)
        train(engine, server, 80)
        judge, at_rest = engine_of(replace(config, algorithm=one_step), split, groups)
        at_rest.weights = server.weights
        step(judge, at_rest, 0)
        left[name] = float((at_rest.weights - server.weights).norm())
    assert left["scaffold"] < 0.3 * left["fedavg"]


def test_a_resumed_run_has_the_same_control_variates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "algorithm.name=scaffold client.momentum=0"
    config = run_of("gossip", words, "rounds=4")
    tensors = assert_resumes(config, tmp_path, monkeypatch)
    assert any("control" in name and bool(tensor.any()) for name, tensor in tensors.items())
