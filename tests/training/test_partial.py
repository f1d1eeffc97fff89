"""A part of the network trains: rounds, sums, states and files hold that part, in float64."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    engine_of,
    groups_of,
    made_split,
    quick,
    refused,
    relative,
    settings,
    siamese,
    step,
    train,
    without_code,
)
from rounds import RUN, assert_resumes
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedssl import config as configuration
from fedssl import load_encoder
from fedssl.config import Config
from fedssl.engines.local import LocalEngine
from fedssl.federation.client import Client, Trained
from fedssl.federation.server import Server
from fedssl.models.trainable import merge_factors
from fedssl.privacy.noise import Noisy
from fedssl.runs import checkpoint, loop
from fedssl.runs.build import build_experiment

UNEVEN = (1, 5, 2, 7, 1, 4)
PARTS = {
    "last": "encoder.train=last:1 encoder.norm=frozen",
    "norms": "encoder.train=norms encoder.norm=group",
    "none": "encoder.train=none encoder.norm=frozen",
    "frozen": "encoder.norm=frozen",
    "lora": "encoder.name=vit-tiny encoder.norm=group encoder.train=lora:2",
    "both": "encoder.name=vit-tiny encoder.norm=group encoder.train=lora:2 encoder.factors=both",
}


def made(words: str, *sizes: int) -> tuple[LocalEngine, Server]:
    return engine_of(settings(*words.split()), made_split(), groups_of(*(sizes or UNEVEN)))


def count(engine: LocalEngine) -> int:
    """How many numbers of the network train, without the flat vector."""
    parameters = engine.trainer.network.parameters()
    return sum(p.numel() for p in parameters if p.requires_grad)


@pytest.mark.parametrize("merge", ["off", "auto"])
@pytest.mark.parametrize("part", PARTS)
def test_a_round_of_dcco_is_a_centralized_step_on_the_union(part: str, merge: str) -> None:
    engine, server = made(f"{PARTS[part]} engine.merge={merge}")
    assert engine.merges == (merge == "auto")
    federated = train(engine, server, 1) - engine.trainer.initial
    assert len(federated) == count(engine)
    engine, server = made(f"{PARTS[part]} algorithm.name=fedavg")
    union = engine.client(np.arange(len(UNEVEN)), 0, remember=False)
    union.sizes = np.array([union.samples])
    server.apply(engine.algorithm.train(union, server.weights))
    centralized = server.weights - engine.trainer.initial
    assert centralized.norm() > 0.01
    assert relative(federated, centralized) < 1e-9


@pytest.mark.parametrize("part", ["last", "norms", "none"])
def test_the_part_changes_as_it_does_where_all_trains(part: str) -> None:
    """One step: the gradient of a parameter does not depend on what else trains."""
    engine, server = made(PARTS[part])
    changed = engine.trainer.flat.named(train(engine, server, 1) - engine.trainer.initial)
    whole, server = made(" ".join(w for w in PARTS[part].split() if "train=" not in w))
    everything = whole.trainer.flat.named(train(whole, server, 1) - whole.trainer.initial)
    assert changed.keys() < everything.keys()
    for name, tensor in changed.items():
        torch.testing.assert_close(tensor, everything[name], rtol=1e-9, atol=1e-14)


def log_training(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Note where each client's training starts and ends, by round and client."""
    seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    real = Client.train_from

    def train_from(self: Client, start: Tensor, *rest: Any, **named: Any) -> Trained:
        trained = real(self, start, *rest, **named)
        seen[self.round, self.id] = start.clone(), trained.weights
        return trained

    monkeypatch.setattr(Client, "train_from", train_from)
    return seen


@pytest.mark.parametrize("divergence", ["drift", "distance"])
@pytest.mark.parametrize("part", ["last", "norms", "lora", "both"])
def test_fedema_diverges_over_whatever_trains(
    part: str, divergence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_training(monkeypatch)
    words = ("algorithm.name=fedema", "algorithm.lambda=0.8", "algorithm.local_epochs=1")
    config = siamese("byol", *words, f"algorithm.divergence={divergence}", *PARTS[part].split())
    engine, server = engine_of(config, made_split(), groups_of(6, 9, 5))
    step(engine, server, 0)
    received = server.weights.clone()
    step(engine, server, 1)
    named = engine.trainer.flat.named
    assert len(received) == count(engine)
    for client in range(3):
        begun, ended = log[0, client]
        if divergence == "drift":
            norms = [float(t.norm()) for t in named(ended - begun).values()]
            expected = math.fsum(norms) / len(norms)
        else:
            apart = [t for n, t in named(received - ended).items() if n.startswith("towers.")]
            expected = math.sqrt(math.fsum(float(t.square().sum()) for t in apart))
        assert server.client_log["divergence"][client] == pytest.approx(expected, rel=1e-9)
        mu = min(0.8 * expected, 1)
        assert server.client_log["mu"][client] == pytest.approx(mu, rel=1e-9)
        mixed = mu * ended + (1 - mu) * received
        torch.testing.assert_close(log[1, client][0], mixed, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("part", ["last", "lora"])
def test_clipping_and_noise_are_of_the_part(part: str) -> None:
    pytest.importorskip("dp_accounting")
    words = f"{PARTS[part]} algorithm.name=fedavg engine.merge=off privacy.clip=0.001"
    engine, server = made(f"{words} privacy.noise=1e-9", 4, 4, 4)
    changes = []
    for client in range(3):
        one = engine.client(np.array([client]), 0, remember=False)
        change = engine.algorithm.train(one, server.model)["change"]
        assert len(change) == count(engine) and change.norm() > 0.001
        changes.append(change * (0.001 / change.norm()))
    engine.aggregator = Noisy(engine.trainer.config, engine.algorithm, 3, 3)
    before = server.weights.clone()
    step(engine, server, 0)
    expected = torch.stack(changes).mean(0)
    torch.testing.assert_close(server.weights - before, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("part", quick(["last", "lora"], "last"))
def test_secure_sums_are_of_the_part(part: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from far import BYOL, far_session, go, small

    words = (*BYOL, "algorithm.name=fedema", "encoder.groups=8", *PARTS[part].split())
    plain, _ = far_session(small(*words), tmp_path / "plain")
    secure, _ = far_session(small(*words, "privacy.secure=true"), tmp_path / "secure")
    go(plain, 2)
    (first, _) = go(secure, 2)
    torch.testing.assert_close(secure.server.weights, plain.server.weights, rtol=0, atol=1e-8)
    assert relative(secure.server.weights, secure.trainer.initial) > 1e-4
    assert not first.faults
    numbers = count_numbers(secure.trainer.network)
    assert len(secure.server.weights) == numbers
    # A masked vector has 8 bytes a number; keys and shares are short.
    assert 5 * 8 * numbers < first.traffic.up["train"] < 5 * (8 * numbers + 20_000)


def count_numbers(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


COMPILED = {
    "last": "objective.name=byol objective.predictor=24,16 algorithm.name=fedema",
    "norms": "objective.name=simclr",
    "both": "objective.name=simclr",
}


def train_steps(part: str, compiles: bool) -> tuple[Tensor, int]:
    words = f"{PARTS[part]} objective.projector=32,16 {COMPILED[part]}"
    config = settings(
        *("algorithm.name=fedavg", "algorithm.local_epochs=2", "algorithm.batch=8"),
        *("client.momentum=0.9", "augment.name=flip", *words.split()),
    )
    engine, server = engine_of(config, made_split(64, 3, 16), groups_of(20, 24, 20))
    engine.trainer.compiles = compiles
    return train(engine, server, 3), len(engine.trainer.compiled_steps.by_shape)


@pytest.mark.parametrize("part", quick(COMPILED, "norms"))
def test_the_compiled_step_is_the_plain_one(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_code(monkeypatch)
    plain, none = train_steps(part, False)
    fast, one = train_steps(part, True)
    assert (none, one) == (0, 1)
    assert relative(fast, plain) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("part", ["last", "both"])
def test_the_step_that_torch_compiles_is_the_plain_one(part: str) -> None:
    torch.compiler.reset()
    assert relative(train_steps(part, True)[0], train_steps(part, False)[0]) < 1e-9


def whole_run(*words: str) -> Config:
    given = [*RUN, "algorithm.name=fedavg", "objective.name=simclr", *words]
    return configuration.resolve(configuration.read_recipe(None), given)


def test_messages_and_checkpoints_hold_the_part_and_the_encoder_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("encoder.groups=8", "data.size=16", "encoder.patch=4", "rounds=3")
    config = whole_run(*PARTS["lora"].split(), *small)
    saved = assert_resumes(config, tmp_path, monkeypatch)
    experiment = build_experiment(config)
    numbers = count_numbers(experiment.trainer.network)
    assert saved["weights"].numel() == numbers
    first = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["bytes_down_per_client"] == 4 * numbers
    assert first["bytes_up_per_client"] == 4 * (numbers + 1)  # and the loss
    encoder = load_encoder(tmp_path / "whole")
    images = torch.randint(0, 256, (3, 1, 16, 16), dtype=torch.uint8)
    experiment.trainer.load(saved["weights"].to(experiment.trainer.initial))
    body = merge_factors(copy.deepcopy(experiment.tower().encoder)).eval()
    with torch.no_grad():
        torch.testing.assert_close(encoder.embed(images), body(images.float() / 255))
    assert load_file(tmp_path / "whole" / "encoder.safetensors").keys() == body.state_dict().keys()


def test_other_constants_are_refused_when_a_run_goes_on(tmp_path: Path) -> None:
    first = whole_run("rounds=1", "encoder.norm=group", "encoder.groups=8")
    loop.run(first, tmp_path / "start")
    file = tmp_path / "start.safetensors"
    tensors = load_file(tmp_path / "start" / "encoder.safetensors")
    save_file(tensors, file)
    words = (f"encoder.init={file}", "encoder.norm=group", "encoder.groups=8", "rounds=2")
    config = whole_run(*words, "encoder.train=last:1", "schedule=constant")
    loop.run(config, tmp_path / "run")
    assert "constants" in checkpoint._load(tmp_path / "run" / checkpoint.FILE, whole=False)[1]
    tensors["layers.0.weight"] += 1
    save_file(tensors, file)
    more = whole_run(*words[:-1], "rounds=3", "encoder.train=last:1", "schedule=constant")
    with refused("encoder.init", says="weights that do not train"):
        loop.run(more, tmp_path / "run", resume=True)
