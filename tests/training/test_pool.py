"""Clients side by side give what they give one after another."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, settings, step, train, without_compiler

from fedssl.algorithms.ccl import CCL
from fedssl.engines.local import LocalEngine
from fedssl.federation.client import Client, Trained
from fedssl.federation.server import Server
from fedssl.training import compiled
from fedssl.training import trainer as training
from fedssl.training.batches import Batches
from fedssl.training.pool import TrainerPool
from fedssl.util.trees import flatten

BYOL = "objective.name=byol objective.projector=32,16 objective.predictor=32,16"
FEDAVG = f"algorithm.name=fedavg {BYOL}"
MOCO = "objective.name=moco objective.projector=32,16 objective.queue=20"
CCL_WORDS = f"algorithm.name=ccl algorithm.neighbours=3 algorithm.features=4 {MOCO}"
FEATARC = (
    "algorithm.name=featarc algorithm.start=apart algorithm.norm_policy=local "
    "objective.name=simclr objective.projector=32,16"
)
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA"))
SIZES = (20, 24, 5, 20, 16)  # one is smaller than a batch


@pytest.fixture(autouse=True)
def as_it_is_on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests check what compiling gives; it takes seconds for each network."""
    torch.compiler.reset()
    monkeypatch.setattr(compiled, "RARE", 1)
    monkeypatch.setattr(CCL, "secret", lambda *_: np.random.default_rng(1))
    if "cuda" not in request.node.name:
        without_compiler(monkeypatch)


def engine_with(
    words: str, pool: int, device: str = "cpu", rounds: int = 3
) -> tuple[LocalEngine, torch.Tensor]:
    config = settings(
        *("algorithm.local_epochs=2", "algorithm.batch=8", "client.momentum=0.9"),
        *("encoder.norm=batch", "augment.name=flip", *words.split()),
    )
    engine, server = engine_of(config, made_split(sum(SIZES), 3, 8), groups_of(*SIZES), device)
    engine.trainer.compiles = True
    engine.pool = TrainerPool(engine.trainer, pool) if pool else None
    return engine, train(engine, server, rounds)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(
    ("words", "first"),
    [
        (FEDAVG, 1),
        (f"algorithm.name=fedema {BYOL}", 1),
        (f"algorithm.name=ditto algorithm.lambda=0.5 {MOCO}", 1),
        (f"algorithm.name=fedavg algorithm.norm_policy=local {MOCO}", 1),
        (f"{FEDAVG} precision=bf16", 1),  # also of the client in plain steps
        (CCL_WORDS, 2),  # there are no banks in its first round
        (f"{CCL_WORDS} algorithm.remote=off algorithm.lambda=0", 1),
        (FEATARC, 1),
        (f"{FEATARC} precision=bf16", 1),
    ],
)
def test_side_by_side_as_one_by_one(
    words: str, first: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side as soon as all that will come again is compiled; nothing is, beside others."""
    networks: dict[int, set[tuple[bool, int]]] = {}
    made: set[str] = set()
    inner, init = Client.train_from, compiled.CompiledStep.__init__

    def train_from(self: Client, *args: Any, **named: Any) -> Trained:
        beside = threading.current_thread().name.startswith("client")
        networks.setdefault(self.round, set()).add((beside, id(self.trainer)))
        return inner(self, *args, **named)

    def note(self: compiled.CompiledStep, *args: Any) -> None:
        made.add(threading.current_thread().name)
        init(self, *args)

    alone, plain = engine_with(words, 0, device, rounds=4)
    monkeypatch.setattr(Client, "train_from", train_from)
    monkeypatch.setattr(compiled.CompiledStep, "__init__", note)
    engine, fast = engine_with(words, 3, device, rounds=4)
    for round, seen in networks.items():  # one network, and then three
        assert len(seen) == (1 if round < first else 3)
        assert {beside for beside, _ in seen} == {round >= first}
    assert made == {"MainThread"} and engine.trainer.compiled_steps.may_capture
    close = 0.0 if device == "cpu" else 1e-2 if "precision=bf16" in words else 1e-9
    torch.testing.assert_close(fast, plain, rtol=close, atol=close)
    for client in alone.states:
        found, expected = (flatten(e.states[client]) for e in (engine, alone))
        torch.testing.assert_close(found, expected, rtol=close, atol=close)


def test_waves_are_even_and_a_watched_round_is_not_shared() -> None:
    engine, _ = engine_with(FEDAVG, 5)
    pool = engine.pool
    assert pool.is_ready("train") and not pool.is_ready("other")
    assert [pool.width(n) for n in (1, 2, 5, 6, 7, 8, 11, 100)] == [1, 2, 5, 3, 4, 4, 4, 5]
    engine.trainer.watched = {}
    assert not pool.is_ready("train")
    engine.rest()
    assert engine.pool is None and not engine.trainer.compiled_steps.is_complete


def test_shapes_that_are_not_compiled_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while one waits for it, nor is one captured that comes up beside others."""
    engine, _ = engine_with(CCL_WORDS, 3)
    assert engine.pool.is_ready("train") and engine.pool.is_ready("share")
    trainer, steps = engine.trainer, next(iter(engine.trainer.compiled_steps.by_shape.values()))
    loss = SimpleNamespace(function=steps.function, recurs=True)
    other = tuple(torch.cat((i, i)) for i in steps.inputs)
    trainer.compiled_steps.may_capture = False
    assert all(trainer.compiled_steps.find(8, None, loss, other) is None for _ in range(3))
    assert not engine.pool.is_ready("train")
    trainer.compiled_steps.may_capture = True
    assert trainer.compiled_steps.find(8, None, loss, other) is not None
    assert engine.pool.is_ready("train")


def test_a_shape_may_come_up_between_two_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """While CCL's banks grow, those who are in them see one less than newcomers do."""
    words = ("algorithm.local_epochs=2", "algorithm.batch=8", "augment.name=flip")
    config = settings(*words, *CCL_WORDS.split())
    known, found = [], []
    for pool in (0, 2):
        engine, server = engine_of(config, made_split(96, 3, 8), groups_of(*[16] * 6))
        engine.trainer.compiles = True
        engine.pool = TrainerPool(engine.trainer, pool) if pool else None
        for ids in ([2, 3, 4, 5], [2, 3, 4, 5], [0, 1, 2, 3]):
            known.append(engine.pool is not None and engine.pool.is_ready("train"))
            engine.algorithm.round(server, engine.cohort(np.array(ids), server.round))
            server.round += 1
        found.append(server.weights)
    assert known == [False] * 5 + [True]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_task_is_known_when_a_client_that_fills_a_batch_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = engine_with(FEDAVG, 3)
    server = Server(engine.trainer)
    for ids, expected in (([2], False), ([2, 1], True), ([1], True)):
        engine.pool = TrainerPool(engine.trainer, 3)
        step(engine, server, 0, *ids)
        assert engine.pool.is_ready("train") == expected
    monkeypatch.setattr(engine.pool, "run", None)
    step(engine, server, 1, 0)  # one client alone is not sent to a thread


def test_what_fails_beside_others_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_with(FEDAVG, 3)

    def broken(trainer: training.Trainer) -> None:
        raise torch.OutOfMemoryError("no memory")

    ended: list[bool] = []

    def slow(trainer: training.Trainer) -> None:
        time.sleep(0.3)
        ended.append(True)

    with pytest.raises(torch.OutOfMemoryError):
        engine.pool.run([broken, slow])
    assert ended  # nobody is left in a network


def test_who_interrupts_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_with(FEDAVG, 3)
    server, pool = Server(engine.trainer), engine.pool

    started: list[Future[object]] = []

    def interrupted(futures: list[Future[object]]) -> None:
        started.extend(futures)
        raise KeyboardInterrupt

    monkeypatch.setattr("fedssl.training.pool.wait", interrupted)
    config = replace(engine.trainer.config.algorithm, local_epochs=10**6)
    for trainer in pool._trainers:
        trainer.batches = Batches.from_config(config, 0, trainer.device)
    with pytest.raises(KeyboardInterrupt):
        step(engine, server, 1)
    try:
        assert started and not wait(started, 20).not_done  # they stop at the end of their step
    finally:
        engine.trainer.halted.set()  # else a test that failed would never end


def test_without_memory_there_are_fewer_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_with(FEDAVG, 2)
    pool, twin = engine.pool, engine.trainer.twin
    assert pool.width(4) == 2

    def full() -> training.Trainer:
        if len(pool._trainers) == 3:
            raise torch.OutOfMemoryError
        return twin()

    monkeypatch.setattr(engine.trainer, "twin", full)
    pool.most = 5
    assert [pool.width(5), pool.most, len(pool._trainers)] == [3, 3, 3]
