"""``algorithm.norm_policy``: what of the normalization layers is sent, averaged, or kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, siamese, step, train
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedssl.config import Config
from fedssl.engines.local import LocalEngine
from fedssl.federation.server import Server
from fedssl.runs.build import Experiment

SIZES = (6, 9)


def policy(name: str, *words: str) -> Config:
    return siamese("byol", f"algorithm.norm_policy={name}", *words)


def made(config: Config) -> tuple[LocalEngine, Server]:
    return engine_of(config, made_split(), groups_of(*SIZES))


def norm_names(engine: LocalEngine) -> set[str]:
    """By the type of the layers, from the module itself."""
    kinds = (_BatchNorm, nn.GroupNorm)
    return {
        f"{prefix}.{name}"
        for prefix, module in engine.trainer.network.named_modules()
        if isinstance(module, kinds)
        for name, _ in [*module.named_parameters(), *module.named_buffers()]
    }


def assert_norms_stay(engine: LocalEngine, server: Server) -> None:
    """The server changes all but the normalization layers."""
    start, now = (engine.trainer.flat.named(v) for v in (engine.trainer.initial, server.weights))
    assert all(torch.equal(start[n], now[n]) == (n in norm_names(engine)) for n in now)


def next_start(engine: LocalEngine, server: Server, k: int) -> dict[str, Tensor]:
    client = engine.client(np.array([k]), server.round + 1, remember=False)
    return engine.trainer.flat.named(client.full_weights(server.model))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_local_norms_are_not_sent(norm: str) -> None:
    engine, server = made(policy("local", f"encoder.norm={norm}"))
    step(engine, server, 0)
    cohort = step(engine, server, 1)
    norms = norm_names(engine)
    others = sum(t.numel() for n, t in engine.trainer.flat.named().items() if n not in norms)
    assert len(server.model) == others < len(server.weights)
    clients, size = 2, 8  # bytes a number
    assert dict(cohort.traffic.down) == {"train": clients * size * others}
    assert dict(cohort.traffic.up) == {"train": clients * size * (others + 1)}  # and the loss
    # The server's own copy of them stays as it was.
    assert_norms_stay(engine, server)


def test_local_norms_continue_where_the_client_left_them() -> None:
    engine, server = made(policy("local"))
    step(engine, server, 0)
    kept = engine.states[1]["norm"]
    step(engine, server, 1, 0)  # client 1 is not asked
    assert torch.equal(engine.states[1]["norm"], kept)
    start = next_start(engine, server, 1)
    held = torch.cat([start[s.name].reshape(-1) for s in engine.trainer.flat.of(_BatchNorm)])
    assert torch.equal(held, kept)


@pytest.mark.parametrize(("norm", "count"), [("batch", 20), ("group", 10)])
def test_local_norms_of_two_clients_by_hand(norm: str, count: int) -> None:
    """Each client trains from the shared mean and its own norms; the mean is by samples."""
    engine, server = made(policy("local", f"encoder.norm={norm}"))
    norms, own = norm_names(engine), {}
    assert len(norms) == count  # of 5 layers, with statistics or without
    for round in range(2):
        ends = []
        for k in range(2):
            client = engine.client(np.array([k]), round, remember=False)
            start = client.full_weights(server.model)
            trained = client.train_from(start, dict(client.state))
            ends.append(engine.trainer.flat.named(trained.weights))
        step(engine, server, round)
        now = engine.trainer.flat.named(server.weights)
        for name in now.keys() - norms:
            assert relative(now[name], (6 * ends[0][name] + 9 * ends[1][name]) / 15) < 1e-12
        own = {k: next_start(engine, server, k) for k in range(2)}
        assert all(torch.equal(own[k][n], ends[k][n]) for k in range(2) for n in norms)
    assert all(torch.equal(own[0][n], own[1][n]) != (n in norms) for n in own[0])


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ("algorithm.weight=samples", SIZES),
        ("algorithm.weight=uniform", (1, 1)),
        ("algorithm.name=gossip", (1, 1)),
    ],
)
def test_the_global_model_of_local_norms_has_their_mean(
    words: str, counts: tuple[int, int]
) -> None:
    config = policy("local", words)
    engine, server = made(config)
    models = Experiment(config, None, engine.groups, [], engine, server).models
    assert torch.equal(models.global_model(), engine.trainer.initial)
    step(engine, server, 0)
    first, second = (next_start(engine, server, k) for k in range(2))
    assert any(relative(first[name], second[name]) > 1e-3 for name in norm_names(engine))
    own = engine.trainer.flat.named(models.personal_model(1))
    for name, tensor in engine.trainer.flat.named(models.global_model()).items():
        mean = (counts[0] * first[name] + counts[1] * second[name]) / sum(counts)
        torch.testing.assert_close(tensor, mean, rtol=1e-12, atol=1e-14)
        assert torch.equal(own[name], second[name])


@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("sizes", [(8,), (8, 12)], ids=["one client", "two"])
def test_reset_statistics_are_those_of_the_rounds_batches(
    towers: int, sizes: tuple[int, ...]
) -> None:
    """Σ 0.1 · 0.9^(n−i) s_i / (1 − 0.9^n) over the n batches that a layer saw, by hand."""
    config = policy("reset", f"encoder.towers={towers}", "algorithm.local_epochs=1")
    engine, server = engine_of(config, made_split(), groups_of(*sizes))
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor]) -> None:
            rows = inputs[0].detach().transpose(0, 1).flatten(1)
            seen.setdefault(name, []).append((rows.mean(1), rows.var(1)))

        return hook

    for name, module in engine.trainer.network.named_modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(watch(name))
    for round in range(2):
        seen.clear()
        step(engine, server, round)
        now = engine.trainer.flat.named(server.weights)
        passes = [size // 4 * (2 if towers == 1 else 1) for size in sizes]
        for name, batches in seen.items():
            assert len(batches) == sum(passes)
            for i, what in enumerate(("running_mean", "running_var")):
                expected, start = torch.zeros_like(batches[0][0]), 0
                for size, n in zip(sizes, passes, strict=True):
                    values = [b[i] for b in batches[start : start + n]]
                    shares = [0.1 * 0.9 ** (n - 1 - j) / (1 - 0.9**n) for j in range(n)]
                    assert sum(shares) == pytest.approx(1)
                    own = sum(s * v for s, v in zip(shares, values, strict=True))
                    expected += size / sum(sizes) * own
                    start += n
                torch.testing.assert_close(now[f"{name}.{what}"], expected, rtol=1e-9, atol=1e-11)
    assert len(seen) == 5 * towers


def test_reset_averages_parameters_as_average_does() -> None:
    """Statistics do not act on training, so that parameters agree to the last bit."""
    results = []
    for name in ("average", "reset"):
        engine, server = made(policy(name))
        train(engine, server, 2)
        results.append((server.weights, engine.trainer.flat.parameter_count))
    (average, n), (reset, _) = results
    assert torch.equal(average[:n], reset[:n])
    assert relative(reset[n:], average[n:]) > 0.01


@pytest.mark.parametrize("algorithm", ["fedema", "fedu", "ditto"])
@pytest.mark.parametrize("name", ["local", "reset"])
def test_policies_go_with_the_other_algorithms(algorithm: str, name: str) -> None:
    config = policy(name, f"algorithm.name={algorithm}")
    engine, server = made(config)
    train(engine, server, 3)
    if name == "local":
        assert_norms_stay(engine, server)
        first, second = (next_start(engine, server, k) for k in range(2))
        assert not any(torch.equal(first[n], second[n]) for n in norm_names(engine))
    else:
        variance = [t for n, t in engine.trainer.flat.named(server.weights).items() if "var" in n]
        assert all(bool((v > 0).all()) for v in variance)
