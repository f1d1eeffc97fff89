"""FedEMA (Algorithm 1) and FedU: where a client starts a round, by hand from the vectors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, siamese, step, train
from torch import Tensor, nn

from fedssl.data.dataset import Split
from fedssl.engines.local import LocalEngine
from fedssl.federation.client import Client, Trained
from fedssl.federation.server import Server

SIZES = (6, 9, 5)
DIVERGENCES = ("drift", "distance")
Logged = dict[tuple[int, int], Any]


def made(*words: str, split: Split | None = None) -> tuple[LocalEngine, Server]:
    given = ("algorithm.name=fedema", "algorithm.local_epochs=1", "rounds=8", *words)
    return engine_of(siamese("byol", *given), split or made_split(), groups_of(*SIZES))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Logged:
    """For each round and client: the network that it started at, and after its training."""
    seen: Logged = {}
    real = Client.train_from

    def train_from(self: Client, start: Tensor, keep: Any, *rest: Any, **named: Any) -> Trained:
        had_target = "target" in keep
        trained = real(self, start, keep, *rest, **named)
        seen[self.round, self.id] = SimpleNamespace(
            start=start.clone(), after=trained.weights, had_target=had_target
        )
        return trained

    monkeypatch.setattr(Client, "train_from", train_from)
    return seen


def by_part(engine: LocalEngine, vector: Tensor) -> dict[str, Tensor]:
    """The numbers of encoder with projector, of the predictor, and batch norm's statistics."""
    parts: dict[str, list[Tensor]] = {"encoder": [], "predictor": [], "buffers": []}
    for name, tensor in engine.trainer.flat.named(vector).items():
        kind = "encoder" if name.startswith("towers.") else "predictor"
        parts["buffers" if "running" in name else kind].append(tensor.reshape(-1))
    return {kind: torch.cat(tensors) for kind, tensors in parts.items()}


def run_logged(engine: LocalEngine, server: Server, rounds: int) -> list[Tensor]:
    """The global network before each round, and after the last."""
    path = [server.weights]
    for round in range(rounds):
        step(engine, server, round)
        path.append(server.weights)
    return path


def mean_norm(engine: LocalEngine, change: Tensor) -> float:
    """The mean over convolution layers of the L2 norm."""
    layers = [t for t in engine.trainer.flat.named(change).values() if t.ndim == 4]
    assert len(layers) == 3
    return sum(float(layer.square().sum().sqrt()) for layer in layers) / 3


@pytest.mark.parametrize(
    "words",
    [
        "algorithm.lambda=0 algorithm.divergence=drift",
        "algorithm.lambda=0 algorithm.divergence=distance",
        "algorithm.name=fedu algorithm.threshold=1e9",
    ],
)
def test_without_divergence_it_is_fedbyol_bit_for_bit(words: str) -> None:
    results = []
    for given in (words, "algorithm.name=fedavg"):
        engine, server = made(*given.split())
        train(engine, server, 4)
        results.append([server.weights, *(engine.states[k]["target"] for k in range(3))])
    assert all(map(torch.equal, *results))


def test_mu_1_uses_nothing_global() -> None:
    """Each client's path is that of standalone training, whatever the others hold."""
    other = made_split()
    images = other.images[0].clone()
    images[SIZES[0] :] = 255 - images[SIZES[0] :]
    paths = []
    for split in (other, Split((images,), other.labels)):
        engine, server = made("algorithm.decay=1", split=split)
        train(engine, server, 4)
        states = [engine.states[k] for k in range(2)]
        paths.append([by_part(engine, s["network"]) | {"target": s["target"]} for s in states])
    for part in ("encoder", "predictor", "target"):
        assert torch.equal(paths[0][0][part], paths[1][0][part])
    assert relative(paths[0][1]["encoder"], paths[1][1]["encoder"]) > 1e-3
    alone, server = made("algorithm.name=standalone")
    train(alone, server, 4)
    for k in range(2):
        weights = by_part(alone, alone.states[k]["weights"])
        for part in ("encoder", "predictor"):
            assert relative(paths[0][k][part], weights[part]) < 1e-9


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tau", [0.7, 1.0])
def test_the_autoscalers_first_update_has_mu_tau_exactly(divergence: str, tau: float) -> None:
    engine, server = made(f"algorithm.divergence={divergence}", f"algorithm.tau={tau}")
    step(engine, server, 0)
    assert server.client_log["mu"] == dict.fromkeys(range(3), 0)
    assert server.client_log["divergence"] == dict.fromkeys(range(3))
    step(engine, server, 1)
    assert server.client_log["mu"] == dict.fromkeys(range(3), tau)
    first = dict(server.client_log["divergence"])
    assert len(set(first.values())) == 3
    for round in (2, 3):
        step(engine, server, round)
        for k in range(3):
            assert float(engine.states[k]["first"]) == first[k]
            expected = min(tau / first[k] * server.client_log["divergence"][k], 1)
            assert server.client_log["mu"][k] == pytest.approx(expected, rel=1e-12)


def test_a_network_without_convolutions_is_measured_by_its_linear_layers(log: Logged) -> None:
    engine, server = made("encoder.name=vit-tiny")
    run_logged(engine, server, 2)
    for k, measured in server.client_log["divergence"].items():
        change = engine.trainer.flat.named(log[0, k].after - log[0, k].start)
        names = {n for n, m in engine.trainer.network.named_modules() if isinstance(m, nn.Linear)}
        norms = [float(change[f"{name}.weight"].norm()) for name in names]
        assert measured == pytest.approx(sum(norms) / len(norms), rel=1e-6)


def test_mu_is_tau_at_the_first_divergence_to_the_last_bit() -> None:
    """Whatever the numbers: τ/d · d would be off by a bit for one in ten."""
    generator = torch.Generator().manual_seed(0)
    for tau in (0.7, 0.3, 0.9):
        algorithm = made(f"algorithm.tau={tau}")[0].algorithm
        for d in torch.rand(200, generator=generator, dtype=torch.float64):
            assert algorithm.mu(SimpleNamespace(state={"first": d}), float(d)) == (tau, tau)
    # With nothing to measure by it is the global network.
    assert algorithm.mu(SimpleNamespace(state={"first": torch.tensor(0.0)}), 0.5) == (0, 0)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_constant_lambda_and_mu_never_above_1(divergence: str, log: Logged) -> None:
    words = f"algorithm.divergence={divergence}"
    engine, server = made(words, "algorithm.lambda=0.02")
    path = run_logged(engine, server, 3)
    for k, mu in server.client_log["mu"].items():
        measured = server.client_log["divergence"][k]
        assert mu == pytest.approx(0.02 * measured, rel=1e-12)
        after = log[1, k].after
        if divergence == "drift":
            expected = mean_norm(engine, after - log[1, k].start)
        else:
            new, old = by_part(engine, path[2]), by_part(engine, after)
            expected = float((new["encoder"] - old["encoder"]).square().sum().sqrt())
        assert measured == pytest.approx(expected, rel=1e-10)
    engine, server = made(words, "algorithm.lambda=1e6")
    train(engine, server, 3)
    assert list(server.client_log["mu"].values()) == [1, 1, 1]
    for k in range(3):
        started, before = (by_part(engine, v) for v in (log[2, k].start, log[1, k].after))
        assert torch.equal(started["encoder"], before["encoder"])


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
    engine, server = made(*words)
    path = run_logged(engine, server, 2)
    received = by_part(engine, path[1])
    for k in range(3):
        assert torch.equal(log[0, k].start, path[0]) and not log[0, k].had_target
        assert log[1, k].had_target
        start, own = by_part(engine, log[1, k].start), by_part(engine, log[0, k].after)
        assert torch.equal(start["buffers"], received["buffers"])
        for part, mu in (("encoder", encoder), ("predictor", predictor)):
            expected = mu * own[part] + (1 - mu) * received[part]
            torch.testing.assert_close(start[part], expected, rtol=1e-12, atol=1e-14)
            assert mu or torch.equal(start[part], received[part])
    # Lines 7 and 8: the mean of the networks that clients end with, wherever they started.
    for round in range(2):
        total = sum(size * log[round, k].after for k, size in enumerate(SIZES))
        assert relative(path[round + 1], total / sum(SIZES)) < 1e-12


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_client_that_skipped_a_round_starts_from_the_global_network(
    divergence: str, log: Logged
) -> None:
    """Lines 13 and 14, the target network included; its λ_k is still from its first round."""
    engine, server = made(f"algorithm.divergence={divergence}")
    cohorts = [(0, 1, 2), (0, 1), (0, 1, 2), (0, 1, 2), (0, 1), (0, 1, 2)]
    for round, ids in enumerate(cohorts):
        sent = server.weights
        server.client_log.clear()
        step(engine, server, round, *ids)
        mu = server.client_log["mu"]
        if round in (2, 5):
            assert torch.equal(log[round, 2].start, sent) and not log[round, 2].had_target
            assert mu[2] == 0 and server.client_log["divergence"][2] is None
            assert mu[0] > 0 and log[round, 0].had_target
            assert not torch.equal(log[round, 0].start, sent)
        if round == 3:
            assert mu[2] > 0 and log[3, 2].had_target
    if divergence == "drift":
        first = mean_norm(engine, log[0, 2].after - log[0, 2].start)
        assert float(engine.states[2]["first"]) == pytest.approx(first, rel=1e-12)


def test_a_warning_when_every_mu_is_1_twice_in_a_row() -> None:
    engine, server = made("algorithm.decay=1")
    said = []
    for round, ids in enumerate([(0, 1), (0, 1), (0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)]):
        server.warnings.clear()
        step(engine, server, round, *ids)
        said.append(len(server.warnings))
        assert all("twice in a row" in line for line in server.warnings)
    # Round 0 has no μ yet; in round 2 client 2 is new; 3 is the first of a row, so 4 warns, once.
    assert said == [0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_fedu_takes_the_global_predictor_only_below_the_threshold(
    divergence: str, log: Logged
) -> None:
    """Encoder and statistics are always the global ones; the target network stays."""
    words = ("algorithm.name=fedu", f"algorithm.divergence={divergence}")
    engine, server = made(*words, "algorithm.threshold=0")
    train(engine, server, 2)
    measured = server.client_log["divergence"]
    threshold = sorted(measured.values())[1]
    engine, server = made(*words, f"algorithm.threshold={threshold!r}")
    received = by_part(engine, run_logged(engine, server, 2)[1])
    assert server.client_log["divergence"] == measured
    kept = {k: d >= threshold for k, d in measured.items()}
    assert sorted(kept.values()) == [False, True, True]
    assert server.client_log["kept_predictor"] == kept
    for k in range(3):
        start, own = by_part(engine, log[1, k].start), by_part(engine, log[0, k].after)
        expected = {**received, "predictor": own["predictor"]} if kept[k] else received
        assert all(torch.equal(start[part], expected[part]) for part in expected)
        assert log[1, k].had_target
