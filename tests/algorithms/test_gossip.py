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
    refused,
    relative,
    replace_task,
    siamese,
    step,
    timeless,
)
from rounds import assert_resumes, run_of
from torch import Tensor

from fedssl.algorithms.gossip import Gossip, among, metropolis
from fedssl.engines.local import LocalEngine
from fedssl.federation.client import Client
from fedssl.federation.server import Server
from fedssl.runs.build import build_experiment
from fedssl.runs.result import split_models

SIZES = (4, 7, 5, 6)
KINDS = ("star", "cycle", "tree", "random", "complete")


def made(*words: str, sizes: tuple[int, ...] = SIZES) -> tuple[LocalEngine, Server]:
    config = siamese("simclr", "algorithm.name=gossip", "algorithm.local_epochs=1", *words)
    return engine_of(config, made_split(), groups_of(*sizes))


def idle(self: Gossip, client: Client, received: Tensor) -> dict[str, Tensor]:
    """No local training."""
    return {"change": torch.zeros_like(received), "loss": received.new_zeros(())}


@pytest.mark.parametrize("policy", ["average", "local", "reset"])
def test_on_a_complete_graph_a_round_is_unweighted_fedavg(policy: str) -> None:
    words = (f"algorithm.norm_policy={policy}",)
    engine, server = made("algorithm.topology=complete", *words)
    uniform = ("algorithm.local_epochs=1", "algorithm.weight=uniform")
    config = siamese("simclr", *uniform, *words)
    other, plain = engine_of(config, made_split(), groups_of(*SIZES))
    for round in range(2):  # W is 1/K everywhere, so that all start the second round alike
        step(engine, server, round)
        step(other, plain, round)
        assert relative(server.weights, plain.weights) < 1e-12
        assert relative(server.state["models"], server.model.expand(len(SIZES), -1)) < 1e-12
    assert relative(server.weights, engine.trainer.initial) > 1e-3


def test_two_rounds_on_a_path_by_hand(tmp_path: Path) -> None:
    """0 – 1 – 2: degrees 1, 2, 1, so that both edges weigh 1/3."""
    (tmp_path / "path").write_text("0 1  # an edge\n\n1 2\n")
    engine, server = made(f"algorithm.topology={tmp_path / 'path'}", sizes=SIZES[:3])
    x = server.weights.repeat(3, 1)
    for round in range(2):
        clients = [engine.client(np.array([k]), round, remember=False) for k in range(3)]
        changes = [client.train(own)["change"] for client, own in zip(clients, x, strict=True)]
        y = x + torch.stack(changes)
        x = torch.stack((2 * y[0] + y[1], y[0] + y[1] + y[2], y[1] + 2 * y[2])) / 3
        step(engine, server, round)
        assert relative(server.state["models"], x) < 1e-12
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
    values, vectors = np.linalg.eigh(engine.algorithm.weights)
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
    before = server.state["models"].clone()
    trained = [
        before[k] + engine.client(np.array([k]), 1, remember=False).train(before[k])["change"]
        for k in (0, 1, 3)
    ]
    step(engine, server, 1, 0, 1, 3)  # of the cycle 0 1 2 3, the path 1 – 0 – 3 is left
    after = server.state["models"]
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
    edges = {}
    for kind in KINDS:
        words = (f"algorithm.topology={kind}", "algorithm.edge_probability=0.5")
        weights = made(*words, sizes=(2,) * 7)[0].algorithm.weights
        edges[kind] = {(int(i), int(j)) for i, j in np.argwhere(weights) if i < j}
    assert edges["star"] == {(0, k) for k in range(1, 7)}
    assert edges["cycle"] == {(k, k + 1) for k in range(6)} | {(0, 6)}
    assert edges["tree"] == {(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6)}
    assert len(edges["complete"]) == 21 and edges["random"] < edges["complete"]
    algorithm = made("algorithm.topology=random", "algorithm.edge_probability=0.7")[0].algorithm
    graphs = [set(algorithm.graph(30, seed).edges) for seed in (0, 0, 1)]
    assert graphs[0] == graphs[1] != graphs[2]
    assert abs(len(graphs[0]) / 435 - 0.7) < 0.08


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clients", [1, 2])
def test_the_smallest_federations(kind: str, clients: int) -> None:
    words = (f"algorithm.topology={kind}", "algorithm.edge_probability=1")
    engine, server = made(*words, sizes=(5,) * clients)
    step(engine, server, 0)
    assert np.isfinite(float(server.log["consensus"]))


@pytest.mark.parametrize("text", ["0 1\n2 3", "0 1\n1 2", "0 1\n1 2\n2 4", "0 1 2", "a b", "-1 0"])
def test_bad_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "edges"
    path.write_text(text)
    with refused("algorithm.topology", path):
        build_experiment(run_of("gossip", "partition.clients=4", f"algorithm.topology={path}"))


def test_a_run_logs_consensus_says_that_it_is_routed_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "objective.name=byol objective.predictor=24,16 algorithm.norm_policy=local"
    assert_resumes(run_of("gossip", words), tmp_path, monkeypatch)
    note = json.loads((tmp_path / "whole/encoder.json").read_text())
    assert note["model"].startswith("global: the mean of all peers")
    assert "models go through the server" in capsys.readouterr().err
    assert all(line["consensus"] > 0 for line in timeless(tmp_path / "whole"))
    files = [(tmp_path / name / "encoder.safetensors").read_bytes() for name in ("whole", "cut")]
    assert files[0] == files[1]


@pytest.mark.parametrize("policy", ["average", "local"])
def test_every_peer_is_judged_beside_their_mean(policy: str) -> None:
    words = ("evaluate.protocols=knn", f"algorithm.norm_policy={policy}", "client.lr=0.3")
    session = build_experiment(run_of("gossip", *words))
    engine, evaluator, models = session.engine, session.evaluator, session.models
    assert "peers_knn_top1" not in evaluator.evaluate_result(models)  # nobody has a model yet
    step(engine, session.server, 0)
    each = []
    for client, sent in enumerate(session.server.state["models"]):
        full = session.server.weights.clone()
        if policy == "average":
            full = sent
        else:
            full[session.trainer.shared] = sent
            full[session.trainer.kept] = engine.states[client]["norm"]
        each.append(evaluator.evaluate(full)["knn_top1"])
    results = evaluator.evaluate_result(models)
    assert len(set(each)) > 1
    assert results["peers_knn_top1"] == pytest.approx(np.mean(each))
    assert results["peers_knn_worst"] == min(each)
    assert results["knn_top1"] == evaluator.evaluate(models.global_model())["knn_top1"]
    rows = split_models("gossip", results, "global")
    assert rows["gossip, global"] == {"knn_top1": results["knn_top1"]}
    assert rows["gossip, peers"] == {"knn_top1": np.mean(each), "knn_worst": min(each)}
