"""The compiled step gives what the plain one gives, and client states survive their travels.

On the CPU torch traces, differentiates and functionalizes as ever, and only does not generate code,
which would take it a minute for each of these.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, quick, relative, settings, train, without_code

from fedssl.algorithms.ccl import CCL
from fedssl.training import compiled
from fedssl.util.trees import flatten

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")
CUDA = pytest.param("cuda", marks=GPU)
HEADS = "objective.projector=32,16"
BYOL = f"objective.name=byol {HEADS} objective.predictor=32,16"
SIMSIAM = f"objective.name=simsiam {HEADS} objective.predictor=32,16"
MOCO = f"objective.name=moco {HEADS} objective.queue=20"
CCL_WORDS = (
    f"{MOCO} algorithm.name=ccl algorithm.neighbours=3 algorithm.features=9 objective.queue=8"
)
CASES = [
    SIMSIAM,
    BYOL,
    MOCO,
    f"objective.name=simclr {HEADS}",
    f"objective.name=swav {HEADS} objective.prototypes=5,4 objective.queue=12",
    f"objective.name=swav {HEADS} objective.prototypes=6 augment.small=2 augment.small_size=8",
    "objective.name=rotation",
    f"{BYOL} algorithm.name=fedema",
    f"{BYOL} algorithm.name=ditto algorithm.lambda=0.5",
    f"{BYOL} algorithm.norm_policy=local",
    f"{BYOL} client.optimizer=adam client.momentum=0 client.lr=0.001",
    f"{BYOL} objective.stop_gradient=false",
    CCL_WORDS,
    f"{CCL_WORDS} algorithm.lambda=0 algorithm.remote=only",
]


@pytest.fixture(autouse=True)
def no_code_for_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    # CCL is compiled from its second round on, when all banks have come and the queues are full.
    monkeypatch.setattr(compiled, "RARE", 4)
    monkeypatch.setattr(CCL, "secret", lambda *_: np.random.default_rng(1))
    if "cpu" in request.node.name:
        without_code(monkeypatch)


def trained(words: str, compiled: bool, device: str) -> tuple[torch.Tensor, dict[str, float]]:
    config = settings(
        *("algorithm.name=fedavg", "algorithm.local_epochs=2", "algorithm.batch=8"),
        *("encoder.norm=batch", "client.momentum=0.9"),
        # Other parameters are drawn in float32, where a compiler rounds once and not twice.
        "augment.name=flip",
        *words.split(),
    )
    engine, server = engine_of(config, made_split(64, 3, 16), groups_of(20, 24, 20), device)
    engine.trainer.compiles = compiled
    weights = train(engine, server, 3)
    # Personal models take a step of their own; nothing is compiled again for a client.
    steps = len(engine.trainer.compiled_steps.by_shape)
    assert steps == compiled * (2 if "ditto" in words else 1)
    sums = {
        f"{client}/{name}": float(leaf.double().sum())
        for client in sorted(engine.states)
        for name, leaf in flatten(engine.states[client]).items()
    }
    return weights, sums


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("words", quick(CASES, SIMSIAM, CCL_WORDS))
def test_compiled_step_equals_the_plain_one(words: str, device: str) -> None:
    plain, states = trained(words, False, device)
    fast, fast_states = trained(words, True, device)
    assert relative(fast, plain) < 1e-8  # Adam divides by tiny numbers in its first steps
    assert fast_states == pytest.approx(states, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("chunk", [1024, 20])  # at once, and in parts of two sizes
def test_compiled_passes_of_a_merged_cohort(chunk: int, device: str) -> None:
    weights = []
    for is_compiled in (False, True):
        words = ("augment.name=flip", "server.optimizer=adam", "server.lr=0.01")
        config = settings(*words, f"engine.chunk={chunk}")
        engine, server = engine_of(config, made_split(64, 3, 16), groups_of(*[4] * 16), device)
        assert engine.merges
        if is_compiled:
            engine.trainer.compile_passes()
        weights.append(train(engine, server, 3))
    assert relative(weights[1], weights[0]) < 1e-9


@GPU
def test_compiled_augmentation() -> None:
    plain, fast = (trained(f"{BYOL} augment.name=simclr", c, "cuda")[0] for c in (False, True))
    assert relative(fast, plain) < 1e-4  # strengths are drawn in float32


@GPU
@pytest.mark.parametrize("objective", [BYOL, MOCO])
def test_states_on_the_host_change_nothing(objective: str) -> None:
    """The same run on the CPU, where nothing moves."""
    words = f"{objective} algorithm.name=fedema"
    here, states = trained(words, False, "cpu")
    there, moved = trained(words, False, "cuda")
    assert relative(there.cpu(), here) < 1e-8
    assert moved == pytest.approx(states, rel=1e-6, abs=1e-6)
