"""FedEMA (Algorithm 1) and FedU: where a client starts a round, by hand from the vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, siamese, step
from torch import Tensor

from fedssl.config import Config
from fedssl.data.dataset import Split
from fedssl.engines.local import LocalEngine
from fedssl.federation.client import Client, Trained
from fedssl.federation.server import Server

SIZES = (6, 9, 5)
DIVERGENCES = ("drift", "distance")
Logged = dict[tuple[int, int], dict[str, Any]]


def fedema(*words: str) -> Config:
    return siamese("byol", "algorithm.name=fedema", "algorithm.local_epochs=1", "rounds=8", *words)


def made(config: Config, split: Split | None = None) -> tuple[LocalEngine, Server]:
    return engine_of(config, split or made_split(), groups_of(*SIZES))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Logged:
    """For each round and client: the network that it started at, and after its training."""
    seen: Logged = {}
    real = Client.train_from

    def train(self: Client, start: Tensor, keep: Any, *rest: Any, **named: Any) -> Trained:
        had_target = "target" in keep
        trained = real(self, start, keep, *rest, **named)
        seen[self.round, self.id] = {
            "start": start.clone(), "after": trained.weights.clone(), "had_target": had_target
        }  # fmt: skip
        return trained

    monkeypatch.setattr(Client, "train_from", train)
    return seen


def by_part(engine: LocalEngine, vector: Tensor) -> dict[str, Tensor]:
    """The numbers of encoder with projector, of the predictor, and batch norm's statistics."""
    named = engine.trainer.flat.named(vector)
    parts: dict[str, list[Tensor]] = {"encoder": [], "predictor": [], "buffers": []}
    for name, tensor in named.items():
        kind = "encoder" if name.startswith("towers.") else "predictor"
        parts["buffers" if "running" in name else kind].append(tensor.reshape(-1))
    return {kind: torch.cat(tensors) for kind, tensors in parts.items()}


def run_logged(engine: LocalEngine, server: Server, rounds: int) -> list[Tensor]:
    """The global network before each round, and after the last."""
    path = [server.weights.clone()]
    for round in range(rounds):
        step(engine, server, round)
        path.append(server.weights.clone())
    return path


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_lambda_0_is_fedbyol_bit_for_bit(divergence: str) -> None:
    results = []
    for words in (
        ["algorithm.lambda=0", f"algorithm.divergence={divergence}"],
        ["algorithm.name=fedavg"],
    ):
        engine, server = made(fedema(*words))
        run_logged(engine, server, 4)
        results.append([server.weights, *(engine.states[k]["target"] for k in range(3))])
    for ema, byol in zip(*results, strict=True):
        assert torch.equal(ema, byol)


def test_mu_1_uses_nothing_global() -> None:
    """Each client's path is that of standalone training, whatever the others hold."""
    other = made_split()
    images = other.images[0].clone()
    images[SIZES[0] :] = 255 - images[SIZES[0] :]
    paths: list[list[dict[str, Any]]] = []
    for split in (other, Split((images,), other.labels)):
        engine, server = made(fedema("algorithm.decay=1"), split)
        run_logged(engine, server, 4)
        states: list[Any] = [engine.states[k] for k in range(2)]
        paths.append([by_part(engine, s["network"]) | {"target": s["target"]} for s in states])
    for part in ("encoder", "predictor", "target"):
        assert torch.equal(paths[0][0][part], paths[1][0][part])
    assert relative(paths[0][1]["encoder"], paths[1][1]["encoder"]) > 1e-3
    alone, server = made(fedema("algorithm.name=standalone"))
    run_logged(alone, server, 4)
    for k in range(2):
        weights = by_part(alone, alone.states[k]["weights"])  # type: ignore[arg-type]
        for part in ("encoder", "predictor"):
            assert relative(paths[0][k][part], weights[part]) < 1e-9


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tau", [0.7, 1.0])
def test_the_autoscalers_first_update_has_mu_tau_exactly(divergence: str, tau: float) -> None:
    engine, server = made(fedema(f"algorithm.divergence={divergence}", f"algorithm.tau={tau}"))
    first: dict[int, float] = {}
    for round in range(4):
        server.client_log.clear()
        step(engine, server, round)
        mu, measured = server.client_log["mu"], server.client_log["divergence"]
        if round == 0:
            assert list(mu.values()) == [0, 0, 0] and list(measured.values()) == [None] * 3
            continue
        if round == 1:
            assert list(mu.values()) == [tau] * 3
            first = {k: float(engine.states[k]["first"]) for k in range(3)}  # type: ignore[arg-type]
            assert first == measured
        for k in range(3):
            assert float(engine.states[k]["first"]) == first[k]  # type: ignore[arg-type]
            expected = min(tau / first[k] * measured[k], 1)  # type: ignore[operator]
            assert mu[k] == pytest.approx(expected, rel=1e-12)
    assert len(set(first.values())) == 3


def test_mu_is_tau_at_the_first_divergence_to_the_last_bit() -> None:
    """Whatever the numbers: τ/d · d would be off by a bit for one in ten."""
    generator = torch.Generator().manual_seed(0)
    for tau in (0.7, 0.3, 0.9):
        engine, _ = made(fedema(f"algorithm.tau={tau}"))
        client: Any = engine.client(np.array([0]), 1, remember=False)
        for d in torch.rand(200, generator=generator, dtype=torch.float64):
            client.state = {"first": d}
            assert engine.algorithm.mu(client, float(d)) == (tau, tau)  # type: ignore[attr-defined]
    client.state = {"first": torch.tensor(0.0)}  # nothing to measure by: the global network
    assert engine.algorithm.mu(client, 0.5) == (0, 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_constant_lambda_and_mu_never_above_1(divergence: str, log: Logged) -> None:
    words = [f"algorithm.divergence={divergence}"]
    engine, server = made(fedema(*words, "algorithm.lambda=0.02"))
    run_logged(engine, server, 3)
    for k, mu in server.client_log["mu"].items():
        assert mu == pytest.approx(0.02 * server.client_log["divergence"][k], rel=1e-12)  # type: ignore[operator]
    engine, server = made(fedema(*words, "algorithm.lambda=1e6"))
    run_logged(engine, server, 3)
    assert list(server.client_log["mu"].values()) == [1, 1, 1]
    for k in range(3):
        started, before = (by_part(engine, v) for v in (log[2, k]["start"], log[1, k]["after"]))
        assert torch.equal(started["encoder"], before["encoder"])


def test_divergences_by_hand(log: Logged) -> None:
    for divergence in DIVERGENCES:
        engine, server = made(fedema(f"algorithm.divergence={divergence}"))
        path = run_logged(engine, server, 3)
        for k in range(3):
            after = log[1, k]["after"]
            if divergence == "drift":
                named = engine.trainer.flat.named(after - log[1, k]["start"])
                convolutions = [t for t in named.values() if t.ndim == 4]
                assert len(convolutions) == 3
                expected = sum(float(t.square().sum().sqrt()) for t in convolutions) / 3
            else:
                new, old = by_part(engine, path[2]), by_part(engine, after)
                expected = float((new["encoder"] - old["encoder"]).square().sum().sqrt())
            assert server.client_log["divergence"][k] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("words", "encoder", "predictor"),
    [
        (["algorithm.tau=0.6"], 0.6, 0.6),
        (["algorithm.tau=0.6", "algorithm.parts=encoder"], 0.6, 0.0),
        (["algorithm.tau=0.6", "algorithm.parts=predictor"], 0.0, 0.6),
        (["algorithm.decay=0.25"], 0.25, 0.25),
        (["algorithm.decay=0.2,0.9"], 0.2, 0.9),
        (["algorithm.decay=0.2,0.9", "algorithm.parts=predictor"], 0.0, 0.9),
    ],
)
def test_where_a_client_starts(
    words: list[str], encoder: float, predictor: float, log: Logged
) -> None:
    """Eq. 1 and 2 for each part; batch norm's statistics are the global network's."""
    engine, server = made(fedema(*words))
    path = run_logged(engine, server, 2)
    received = by_part(engine, path[1])
    for k in range(3):
        assert torch.equal(log[0, k]["start"], path[0]) and not log[0, k]["had_target"]
        assert log[1, k]["had_target"]
        start, own = by_part(engine, log[1, k]["start"]), by_part(engine, log[0, k]["after"])
        assert torch.equal(start["buffers"], received["buffers"])
        for part, mu in (("encoder", encoder), ("predictor", predictor)):
            expected = mu * own[part] + (1 - mu) * received[part]
            torch.testing.assert_close(start[part], expected, rtol=1e-12, atol=1e-14)
            if mu == 0:
                assert torch.equal(start[part], received[part])


def test_the_global_network_is_the_mean_of_the_clients(log: Logged) -> None:
    """Lines 7 and 8: of what they end with, wherever they started."""
    engine, server = made(fedema())
    path = run_logged(engine, server, 3)
    for round in range(3):
        total = sum(size * log[round, k]["after"] for k, size in enumerate(SIZES))
        assert relative(path[round + 1], total / sum(SIZES)) < 1e-12


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_client_that_skipped_a_round_starts_from_the_global_network(
    divergence: str, log: Logged
) -> None:
    """Lines 13 and 14, the target network included; its λ_k is still from its first round."""
    engine, server = made(fedema(f"algorithm.divergence={divergence}"))
    cohorts = [(0, 1, 2), (0, 1), (0, 1, 2), (0, 1, 2), (0, 1), (0, 1, 2)]
    for round, ids in enumerate(cohorts):
        sent = server.weights.clone()
        server.client_log.clear()
        step(engine, server, round, *ids)
        mu = server.client_log["mu"]
        if round in (2, 5):
            assert torch.equal(log[round, 2]["start"], sent) and not log[round, 2]["had_target"]
            assert mu[2] == 0 and server.client_log["divergence"][2] is None
            assert mu[0] > 0 and log[round, 0]["had_target"]  # type: ignore[operator]
            assert not torch.equal(log[round, 0]["start"], sent)
        if round == 3:
            assert mu[2] > 0 and log[3, 2]["had_target"]  # type: ignore[operator]
    if divergence == "drift":
        named = engine.trainer.flat.named(log[0, 2]["after"] - log[0, 2]["start"])
        first = sum(float(t.norm()) for t in named.values() if t.ndim == 4) / 3
        assert float(engine.states[2]["first"]) == pytest.approx(first, rel=1e-12)  # type: ignore[arg-type]


def test_a_warning_when_every_mu_is_1_twice_in_a_row() -> None:
    engine, server = made(fedema("algorithm.decay=1"))
    said = []
    for round, ids in enumerate([(0, 1), (0, 1), (0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)]):
        server.warnings.clear()
        step(engine, server, round, *ids)
        said.append(len(server.warnings))
        assert all("twice in a row" in line for line in server.warnings)
    # Round 0 has no μ yet; in round 2 client 2 is new; 3 is the first of a row, so 4 warns, once.
    assert said == [0, 0, 0, 0, 1, 0]


def fedu(*words: str) -> Config:
    return fedema("algorithm.name=fedu", *words)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_fedu_takes_the_global_predictor_only_below_the_threshold(
    divergence: str, log: Logged
) -> None:
    """Encoder and statistics are always the global ones; the target network stays."""
    keys = [f"algorithm.divergence={divergence}"]
    engine, server = made(fedu(*keys, "algorithm.threshold=0"))
    run_logged(engine, server, 2)
    measured = server.client_log["divergence"]
    threshold = sorted(measured.values())[1]  # type: ignore[type-var]
    log.clear()
    engine, server = made(fedu(*keys, f"algorithm.threshold={threshold!r}"))
    path = run_logged(engine, server, 2)
    assert server.client_log["divergence"] == measured
    received = by_part(engine, path[1])
    kept = {k: d >= threshold for k, d in measured.items()}  # type: ignore[operator]
    assert sorted(kept.values()) == [False, True, True]
    assert {k: bool(v) for k, v in server.client_log["kept_predictor"].items()} == kept
    for k in range(3):
        start, own = by_part(engine, log[1, k]["start"]), by_part(engine, log[0, k]["after"])
        assert torch.equal(start["encoder"], received["encoder"])
        assert torch.equal(start["buffers"], received["buffers"])
        expected = own if kept[k] else received
        assert torch.equal(start["predictor"], expected["predictor"])
        assert log[1, k]["had_target"]


def test_fedu_with_a_high_threshold_is_fedbyol_bit_for_bit() -> None:
    results = []
    for words in (["algorithm.threshold=1e9"], ["algorithm.name=fedavg"]):
        engine, server = made(fedu(*words))
        results.append(run_logged(engine, server, 3)[-1])
    assert torch.equal(*results)
