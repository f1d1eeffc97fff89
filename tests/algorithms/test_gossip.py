"""Gossip: local training, then a mean with one's neighbours by Metropolis weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from helpers import (
    engine_of,
    groups_of,
    made_split,
    relative,
    replace_task,
    siamese,
    step,
    timeless,
)
from rounds import assert_sessions_agree, run_and_resume
from torch import Tensor

from fedssl import config as configuration
from fedssl.algorithms.fedavg import FedAvg
from fedssl.algorithms.gossip import Gossip, among, metropolis
from fedssl.config import AlgorithmParams, Config
from fedssl.engines.local import LocalEngine
from fedssl.federation.client import Client
from fedssl.federation.server import Server
from fedssl.objectives.base import Objective
from fedssl.runs.build import build_experiment
from fedssl.util.errors import UserError
from fedssl.util.trees import Tree

SIZES = (4, 7, 5, 6)


def gossip(*words: str, objective: str = "simclr") -> Config:
    return siamese(objective, "algorithm.name=gossip", "algorithm.local_epochs=1", *words)


def made(*words: str, sizes: tuple[int, ...] = SIZES) -> tuple[LocalEngine, Server]:
    return engine_of(gossip(*words), made_split(), groups_of(*sizes))


def models(server: Server) -> Tensor:
    found = server.state["models"]
    assert isinstance(found, Tensor)
    return found


def idle(self: Gossip, client: Client, received: Tensor) -> dict[str, Tree]:
    """No local training."""
    return {"change": torch.zeros_like(received), "loss": received.new_zeros(())}


class Unweighted(FedAvg):
    """FedAvg in which a client counts as much as any other."""

    def __init__(self, params: AlgorithmParams, objective: Objective) -> None:
        super().__init__(params, objective)
        self.weight = "uniform"


@pytest.mark.parametrize("policy", ["average", "local", "reset"])
def test_on_a_complete_graph_a_round_is_unweighted_fedavg(policy: str) -> None:
    words = (f"algorithm.norm_policy={policy}",)
    engine, server = made("algorithm.topology=complete", *words)
    config = siamese("simclr", "algorithm.local_epochs=1", *words)
    other, plain = engine_of(config, made_split(), groups_of(*SIZES))
    other.algorithm = Unweighted(other.algorithm.params, other.algorithm.objective)
    for round in range(2):  # W is 1/K everywhere, so that all start the second round alike
        step(engine, server, round)
        step(other, plain, round)
        assert relative(server.weights, plain.weights) < 1e-12
        assert relative(models(server), server.model.expand(len(SIZES), -1)) < 1e-12
    assert relative(server.weights, engine.trainer.initial) > 1e-3


def test_two_rounds_on_a_path_by_hand(tmp_path: Path) -> None:
    """0 – 1 – 2: degrees 1, 2, 1, so that both edges weigh 1/3."""
    (tmp_path / "path").write_text("0 1  # an edge\n\n1 2\n")
    engine, server = made(f"algorithm.topology={tmp_path / 'path'}", sizes=SIZES[:3])
    x = server.weights.repeat(3, 1)
    for round in range(2):
        clients = [engine.client(np.array([k]), round, remember=False) for k in range(3)]
        changes = [client.train(own)["change"] for client, own in zip(clients, x, strict=True)]
        y = x + torch.stack(changes)  # type: ignore[arg-type]
        x = torch.stack((2 * y[0] + y[1], y[0] + y[1] + y[2], y[1] + 2 * y[2])) / 3
        step(engine, server, round)
        assert relative(models(server), x) < 1e-12
        assert relative(server.weights, x.mean(0)) < 1e-12
        distances = [float((own - x.mean(0)).norm()) for own in x]
        assert float(server.log["consensus"]) == pytest.approx(np.mean(distances), rel=1e-9)
    assert max(distances) > 1e-4  # the middle one is the mean itself


@pytest.mark.parametrize("kind", ["star", "cycle", "tree", "random"])
def test_without_training_models_meet_at_the_second_eigenvalue(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_task(monkeypatch, Gossip, "train", idle)
    engine, server = made(f"algorithm.topology={kind}", sizes=(3,) * 7)
    algorithm: Any = engine.algorithm
    values, vectors = np.linalg.eigh(algorithm.weights)
    slow = int(np.argsort(np.abs(values))[-2])
    rate = abs(values[slow])
    assert 0.1 < rate < 0.99
    direction, mean = torch.randn(len(server.weights)).double(), server.weights.clone()
    start = mean + torch.from_numpy(vectors[:, slow])[:, None] * direction
    server.state["models"] = start
    before = float((start - mean).norm(dim=1).mean())
    for round in range(4):
        step(engine, server, round)
        after = float(server.log["consensus"])
        assert after / before == pytest.approx(rate, rel=1e-9)
        assert relative(server.weights, mean) < 1e-12
        before = after


def test_who_is_not_asked_neither_trains_nor_mixes() -> None:
    engine, server = made("algorithm.topology=cycle")
    step(engine, server, 0)
    before = models(server).clone()
    trained = [
        before[k] + engine.client(np.array([k]), 1, remember=False).train(before[k])["change"]  # type: ignore[operator]
        for k in (0, 1, 3)
    ]
    step(engine, server, 1, 0, 1, 3)  # of the cycle 0 1 2 3, the path 1 – 0 – 3 is left
    after = models(server)
    assert torch.equal(after[2], before[2])
    assert relative(after[1], (2 * trained[1] + trained[0]) / 3) < 1e-12
    assert relative(after[0], (trained[0] + trained[1] + trained[2]) / 3) < 1e-12
    # W of a round is symmetric, so that the mean moves by the changes alone.
    moved = sum(t - before[k] for t, k in zip(trained, (0, 1, 3), strict=True)) / 4
    assert relative(server.weights - before.mean(0), moved) < 1e-9


@pytest.mark.parametrize("graph", [nx.star_graph(5), nx.path_graph(6), nx.wheel_graph(6)])
def test_metropolis_weights(graph: Any) -> None:
    weights = metropolis(graph)
    assert (weights >= 0).all() and np.array_equal(weights, weights.T)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-12)
    for i in graph:
        for j in graph:
            if i != j:
                larger = max(graph.degree[i], graph.degree[j])
                expected = 1 / (1 + larger) if graph.has_edge(i, j) else 0
                assert weights[i, j] == expected
    part = among(weights, [0, 2, 3])
    np.testing.assert_allclose(part.sum(1), 1, rtol=1e-12)
    assert part[0, 1] == weights[0, 2] and np.array_equal(part, part.T)


def test_topologies() -> None:
    algorithm: Any
    edges = {}
    for kind in ("star", "cycle", "tree", "random", "complete"):
        words = (f"algorithm.topology={kind}", "algorithm.edge_probability=0.5")
        algorithm = made(*words, sizes=(2,) * 7)[0].algorithm
        edges[kind] = {(int(i), int(j)) for i, j in np.argwhere(algorithm.weights) if i < j}
    assert edges["star"] == {(0, k) for k in range(1, 7)}
    assert edges["cycle"] == {(k, k + 1) for k in range(6)} | {(0, 6)}
    assert edges["tree"] == {(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6)}
    assert len(edges["complete"]) == 21 and edges["random"] < edges["complete"]
    seeds = [algorithm.graph(30, seed).number_of_edges() for seed in range(3)]  # complete
    assert seeds == [435] * 3
    drawn: Any = Gossip(gossip("algorithm.topology=random").algorithm, algorithm.objective)
    graphs = [set(drawn.graph(30, seed).edges) for seed in (0, 0, 1)]
    assert graphs[0] == graphs[1] != graphs[2]
    assert abs(len(graphs[0]) / 435 - 0.7) < 0.08
    for kind in ("star", "cycle", "tree", "random", "complete"):
        for alone in (1, 2):  # also the smallest federations
            words = (f"algorithm.topology={kind}", "algorithm.edge_probability=1")
            engine, server = made(*words, sizes=(5,) * alone)
            step(engine, server, 0)
            assert np.isfinite(float(server.log["consensus"]))


BAD = ("0 1\n2 3", "0 1\n1 2", "0 1\n1 2\n2 4", "0 1 2", "a b", "-1 0")
DATA = (
    *("data.size=8", "data.labels=40", "partition.name=iid", "partition.clients=4"),
    *("cohort.size=null", "evaluate.baselines=[]", "evaluate.protocols=knn", "engine.threads=1"),
    *("objective.name=simclr", "objective.projector=32,16", "algorithm.batch=5", "rounds=2"),
    *("server.optimizer=sgd", "server.lr=1", "client.lr=0.05", "algorithm.name=gossip"),
)


def words_of(*words: str) -> Config:
    return configuration.resolve(configuration.read_recipe(None), [*DATA, *words])


@pytest.mark.parametrize("text", BAD)
def test_bad_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "edges"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        build_experiment(words_of(f"algorithm.topology={path}"))
    assert error.value.key == "algorithm.topology" and error.value.fix


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("algorithm.topology=ring", "algorithm.topology"),
        ("algorithm.topology=random algorithm.edge_probability=0.01", "algorithm.topology"),
        ("server.optimizer=adam", "server.optimizer"),
        ("server.lr=0.5", "server.optimizer"),
        ("server.momentum=0.9", "server.optimizer"),
        ("cohort.average=median", "cohort.average"),
        ("privacy.noise=1", "privacy.noise"),
    ],
)
def test_bad_settings_are_refused(words: str, key: str) -> None:
    with pytest.raises(UserError) as error:
        build_experiment(words_of(*words.split()))
    assert error.value.key == key


def test_a_run_logs_consensus_says_that_it_is_routed_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = words_of("rounds=3", "checkpoint.seconds=0", "cohort.size=3", "objective.name=byol",
                      "objective.predictor=24,16", "algorithm.norm_policy=local")  # fmt: skip
    run_and_resume(config, tmp_path, monkeypatch)
    note = json.loads((tmp_path / "whole/encoder.json").read_text())
    assert note["model"].startswith("global: the mean of all peers")
    assert "models go through the server" in capsys.readouterr().err
    lines = [timeless(tmp_path / name) for name in ("whole", "cut")]
    assert all(line["consensus"] > 0 for line in lines[0])
    assert lines[0] == lines[1]
    files = [(tmp_path / name / "encoder.safetensors").read_bytes() for name in ("whole", "cut")]
    assert files[0] == files[1]


@pytest.mark.parametrize("words", ["", "cohort.size=3 algorithm.norm_policy=local"])
def test_both_engines_agree(words: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from far import BYOL, far_session, small

    config = small(*BYOL, "algorithm.name=gossip", "algorithm.topology=tree", *words.split())
    assert_sessions_agree(build_experiment(config), far_session(config, tmp_path)[0])
