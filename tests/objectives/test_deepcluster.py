"""DeepCluster-v2: k-means against a slow one, and the bank row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import engine_of, groups_of, made_split, relative, settings, step, unit_rows
from numpy.typing import NDArray
from rounds import assert_first_statistics_are_of_both_views, epochs, losses, weights_after
from torch import Tensor

from fedssl.config import Config
from fedssl.engines.local import LocalEngine
from fedssl.federation.client import Client
from fedssl.objectives import deepcluster
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.deepcluster import DeepCluster, RoundLoss, fill_bank, kmeans

WORDS = ("objective.name=deepcluster", "objective.projector=32,16", "objective.clusters=3,2,4")
Rows = NDArray[np.float64]


def slow_kmeans(rows: Rows, centroids: Rows, iterations: int) -> tuple[Rows, list[int]]:
    centroids = centroids.copy()

    def nearest() -> list[int]:
        return [int(np.argmax([row @ c for c in centroids])) for row in rows]

    for _ in range(iterations):
        own = nearest()
        for k in range(len(centroids)):
            members = [row for row, j in zip(rows, own, strict=True) if j == k]
            if members:
                total = np.sum(members, axis=0)
                centroids[k] = total / np.sqrt((total**2).sum())
    return centroids, nearest()


def a_client(config: Config, size: int = 9, round: int = 0) -> tuple[LocalEngine, Client]:
    engine, _ = engine_of(config, made_split(), groups_of(5, size))
    return engine, engine.client(np.array([1]), round, remember=False)


def a_step(config: Config, size: int = 9, round: int = 0) -> tuple[Client, RoundLoss]:
    engine, client = a_client(config, size, round)
    loss = engine.trainer.objective.round_loss(client, engine.trainer.initial)
    assert isinstance(loss, RoundLoss)
    engine.trainer.load(engine.trainer.initial)
    return client, loss


@pytest.mark.parametrize("seed", range(5))
def test_kmeans_is_the_slow_one(seed: int) -> None:
    rows = unit_rows(300, 5, seed)  # of which none stands still after 9 iterations
    for start in (rows[seed : seed + 7], torch.cat((rows[:3], rows[:1], -rows.mean(0)[None]))):
        centroids, nearest = kmeans(rows, start)
        expected, own = slow_kmeans(rows.numpy(), start.numpy(), iterations=10)
        np.testing.assert_allclose(centroids, expected, rtol=1e-9, atol=1e-12)
        assert nearest.tolist() == own


def test_an_empty_cluster_keeps_its_centroid() -> None:
    rows = unit_rows(30, 5)
    far = -F.normalize(rows.sum(0), dim=0)
    rows = rows[rows @ far < 0]  # it is nobody's nearest
    centroids, nearest = kmeans(rows, torch.stack((rows[0], far, -far)))
    assert 1 not in nearest.tolist()
    assert torch.equal(centroids[1], far)


@pytest.mark.parametrize("batch", ["null", "4"])
def test_the_bank_holds_every_sample_at_its_place(batch: str) -> None:
    """One by one: without batch norm samples do not see each other; 4 does not divide 9."""
    config = epochs(*WORDS, "encoder.norm=group", f"algorithm.batch={batch}")
    engine, client = a_client(config, round=3)
    start = engine.trainer.initial * 1.1
    bank = fill_bank(client, start)
    assert bank.shape == (2, 9, 16) and not bank.requires_grad
    epoch, _ = engine.trainer.batches.positions(3, 0, 1, 9)
    engine.trainer.load(start)
    for i in range(9):
        one = torch.tensor([i])
        seen = engine.trainer.encode_batch(client.members[one], client.random_state(epoch - 1, one))
        for view, encoding in enumerate(seen.encodings):
            expected = F.normalize(encoding[0].detach(), dim=0)
            torch.testing.assert_close(bank[view, i], expected, rtol=1e-9, atol=1e-12)
    assert relative(bank[0], bank[1]) > 0.01


def test_to_batch_norm_the_bank_is_made_of_shuffled_batches() -> None:
    engine, client = a_client(epochs(*WORDS))
    seen: list[Tensor] = []
    real = engine.trainer.encode_batch
    engine.trainer.encode_batch = lambda m, s, *rest: seen.append(m) or real(m, s, *rest)
    fill_bank(client, engine.trainer.initial)
    assert sorted(map(len, seen)) == [4, 5]  # none of one sample
    assert sorted(torch.cat(seen).tolist()) == client.members.tolist()
    assert torch.cat(seen).tolist() != client.members.tolist()


def test_the_loss_written_out_and_the_bank_after_each_step() -> None:
    """Four epochs of two steps: clusters are those of the bank when the epoch began."""
    config = epochs(*WORDS, "algorithm.local_epochs=4", "objective.temperature=0.3")
    client, loss = a_step(config, round=2)
    bank = loss.bank.clone()
    for number in range(8):
        if number % 2 == 0:
            assert loss.step == number
            found = [loss.cluster(number // 2, j) for j in range(3)]
            for j, (centroids, own) in enumerate(found):
                rows = bank[j % 2]
                scores = rows @ centroids.T
                assert centroids.shape == (config.objective.clusters[j], 16)
                assert own.tolist() == scores.argmax(1).tolist()
        encoded = client.encode_step(number)
        value = loss(encoded)
        _, chosen = client.trainer.batches.positions(2, number, 1, 9)
        assert isinstance(chosen, Tensor) and len(chosen) == 4
        views = [F.normalize(e, dim=1) for e in encoded.encodings]
        places = range(4)
        parts = []
        for centroids, own in found:
            for view in views:
                logits = (view @ centroids.T).detach().numpy() / 0.3
                chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
                parts.append(-np.mean(np.log(chances[places, own[chosen]])))
        assert float(value.detach()) == pytest.approx(float(np.mean(parts)), rel=1e-10)
        for view in (0, 1):
            bank[view, chosen] = views[view].detach()
        assert torch.equal(loss.bank, bank)
        assert value.requires_grad and not any(c.requires_grad for c, _ in loss.sets)


Called = list[tuple[Tensor, Tensor]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """The arguments of each call of k-means: rows, and the centroids that it starts from."""
    calls: Called = []
    monkeypatch.setattr(
        deepcluster, "kmeans", lambda r, c: calls.append((r.clone(), c)) or kmeans(r, c)
    )
    return calls


def drawn(called: Called) -> list[tuple[int, ...]]:
    """Return the rows that each call starts from."""
    return [tuple(int((r == c).all(1).nonzero()) for c in start) for r, start in called]


def test_set_j_clusters_view_j_mod_2_once_an_epoch(called: Called) -> None:
    client, loss = a_step(epochs(*WORDS, "objective.clusters=3,3,3"), size=20)
    bank = loss.bank.clone()
    for number in range(10):  # 5 in an epoch
        loss(client.encode_step(number))
    assert len(called) == 6
    for j in range(3):
        assert torch.equal(called[j][0], bank[j % 2])
    assert all(len(set(rows)) == 3 for rows in drawn(called))
    assert len(set(drawn(called))) == 6


def test_first_centroids_differ_between_rounds_and_clients(called: Called) -> None:
    config = epochs(*WORDS, "objective.clusters=5")
    engine, _ = engine_of(config, made_split(), groups_of(20, 20))
    for round in (0, 1):
        for k in (0, 1):
            client = engine.client(np.array([k]), round, remember=False)
            loss = engine.trainer.objective.round_loss(client, engine.trainer.initial)
            loss.cluster(0, 0)
    assert len(set(drawn(called))) == 4


def test_fewer_samples_than_clusters() -> None:
    client, loss = a_step(epochs(*WORDS, "objective.clusters=300,5"), size=6)
    assert math.isfinite(float(loss(client.encode_step(0)).detach()))
    (centroids, own), (few, _) = loss.sets
    assert len(centroids) == 6 and sorted(own.tolist()) == list(range(6))
    assert len(few) == 5


def test_the_pass_that_fills_the_bank_leaves_no_trace() -> None:
    assert_first_statistics_are_of_both_views(*WORDS)


def test_dittos_global_model_is_fedavgs() -> None:
    """Two trainings in a round, from different weights: each has a bank of its own."""
    fedavg = weights_after(epochs(*WORDS))
    ditto = weights_after(epochs(*WORDS, "algorithm.name=ditto"))
    assert len(ditto) == 4 * len(fedavg)  # and the personal models
    assert torch.equal(ditto[: len(fedavg)], fedavg)
    assert relative(ditto[len(fedavg) : 2 * len(fedavg)], fedavg) > 1e-3


def test_nothing_is_kept() -> None:
    engine, server = engine_of(
        settings("algorithm.name=fedavg", *WORDS), made_split(), groups_of(4, 4)
    )
    step(engine, server, 0)
    assert not any(engine.states[k] for k in range(2))


def test_the_loss_falls() -> None:
    first, *_, last = losses(epochs(*WORDS, "algorithm.local_epochs=6"), rounds=3)
    assert last < 0.9 * first < 2 * math.log(4)


def test_there_is_no_loss_of_a_batch() -> None:
    batch = EncodedBatch((unit_rows(4, 5), unit_rows(4, 5, 1)))
    with pytest.raises(NotImplementedError):
        DeepCluster(DeepCluster.Params("deepcluster")).loss(batch)
