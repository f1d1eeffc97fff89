"""FedSC: its gradient, a plain loop, its relation to DCCO, its noise, and a resumed run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, settings, step, train
from rounds import assert_resumes, run_of

from fedssl.engines.local import LocalEngine
from fedssl.federation.server import Server
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.moments import scale_down
from fedssl.objectives.spectral import Spectral

HEAD = ("objective.name=spectral", "objective.projector=32,16")
ONE = ("algorithm.alpha_start=0.25", "algorithm.local_steps=1")  # of four clients


def made(*words: str, sizes: tuple[int, ...] = (5, 5, 5, 5)) -> tuple[LocalEngine, Server]:
    config = settings("algorithm.name=fedsc", *HEAD, *words)
    return engine_of(config, made_split(), groups_of(*sizes))


def change(engine: LocalEngine, server: Server, rounds: int = 1) -> torch.Tensor:
    return train(engine, server, rounds) - engine.trainer.initial


def test_the_loss_contrasts_all_pairs_of_images() -> None:
    """HaoChen et al. (2021), Eq. 6, over all pairs of the four images of two views each."""
    f, g = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spectral = Spectral(Spectral.Params("spectral", projector=(6,), bound=1.3))
    short = [z * min(1, 1.3 / float(z.norm())) for z in (*f, *g)]
    pairs = [float(a @ b) ** 2 for a in short for b in short]
    agree = [float(a @ b) for a, b in zip(short[:4], short[4:], strict=True)]
    expected = -2 * np.mean(agree) + np.mean(pairs)
    assert float(spectral.loss(EncodedBatch((f, g)))) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_with_the_others_matrices_one_step_is_a_centralized_step(alpha: float) -> None:
    """The paper's point: with α = 1/M the clients' mean gradient is that of all images."""
    federated = change(*made(*ONE[1:], f"algorithm.alpha_start={alpha}"))
    words = ("algorithm.name=fedavg", *HEAD)
    engine, server = engine_of(settings(*words), made_split(), groups_of(5, 5, 5, 5))
    union = engine.client(np.arange(4), 0, remember=False)
    union.sizes = np.array([union.samples])
    server.apply(engine.algorithm.train(union, server.weights))
    apart = relative(federated, server.weights - engine.trainer.initial)
    assert apart < 1e-9 if alpha == 0.25 else apart > 1e-2


def test_with_alpha_1_it_is_fedavg() -> None:
    words = ("algorithm.local_steps=3", "algorithm.batch=2")
    ours = change(*made(*words, "algorithm.alpha=1"), rounds=2)
    config = settings("algorithm.name=fedavg", "algorithm.weight=uniform", *HEAD, *words)
    theirs = change(*engine_of(config, made_split(), groups_of(5, 5, 5, 5)), rounds=2)
    assert relative(ours, theirs) < 1e-9


def test_with_alpha_1_over_m_it_is_dcco_with_fresh_statistics() -> None:
    """This holds while DCCO's radius ends no round and all steps have the same views."""
    steps = ("algorithm.local_steps=4", "augment.name=none", "client.lr=0.05")
    ours = change(*made(*steps, *ONE[:1]))
    config = settings("algorithm.name=dcco", "algorithm.radius=1e9", *HEAD, *steps)
    dcco = change(*engine_of(config, made_split(), groups_of(5, 5, 5, 5)))
    one = change(*made(*ONE, "augment.name=none", "client.lr=0.05"))
    assert relative(ours, dcco) < 1e-9 and relative(ours, one) > 0.1


def test_rounds_are_those_of_a_plain_loop() -> None:
    """Two rounds of three steps on clients of 3, 4 and 6 images; α falls from 0.8 to 1/3."""
    words = ("algorithm.local_steps=3", "algorithm.alpha_start=0.8", "rounds=2")
    engine, server = made(*words, sizes=(3, 4, 6))
    objective, trainer = engine.trainer.objective, engine.trainer
    weights = server.weights.clone()
    for round, alpha in ((0, 0.8), (1, (0.8 + 1 / 3) / 2)):
        clients = [engine.client(np.array([k]), round, remember=False) for k in range(3)]
        trainer.load(weights)
        with torch.no_grad():
            sent = [objective.moments(client.encode_step(0), {})["r"] for client in clients]
        ends = []
        for client, own in zip(clients, sent, strict=True):
            others = (sent[0] + sent[1] + sent[2] - own) / 2
            trainer.load(weights)
            for number in range(3):
                trainer.flat.gradient.zero_()
                f, g = (scale_down(z, 2**0.5) for z in client.encode_step(number).encodings)
                r = (f.T @ f + g.T @ g) / 2 / len(f)
                loss = -2 * (f * g).sum() / len(f) + alpha * (r**2).sum()
                (loss + 2 * (1 - alpha) * torch.trace(r @ others)).backward()
                trainer.flat.params.add_(trainer.flat.gradient, alpha=-trainer.config.client.lr)
            ends.append(trainer.flat.vector.clone())
        weights = torch.stack(ends).mean(0)
    for round in range(2):
        step(engine, server, round)
    assert relative(server.weights - trainer.initial, weights - trainer.initial) < 1e-9


def test_noise_is_scaled_to_the_bound_of_encodings() -> None:
    algorithm = made("objective.bound=0.7")[0].algorithm
    task = algorithm.tasks()["correlate"]
    assert task.bound(algorithm) == pytest.approx(0.49)
    generator = torch.Generator().manual_seed(0)
    f = 100 * torch.randn(1, 16, dtype=torch.float64, generator=generator)
    norm = algorithm.objective.moments(EncodedBatch((f, f)), {})["r"].norm()
    assert float(norm) == pytest.approx(0.49)
    assert task.bound(made("objective.bound=null")[0].algorithm) is None


def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_of("gossip", "algorithm.name=fedsc objective.name=spectral rounds=4")
    assert_resumes(config, tmp_path, monkeypatch)
