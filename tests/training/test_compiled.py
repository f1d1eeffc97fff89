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

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA"))
SIAMESE = {
    "byol": ["objective.projector=32,16", "objective.predictor=32,16"],
    "moco": ["objective.projector=32,16", "objective.queue=20"],
    "simsiam": ["objective.projector=32,16", "objective.predictor=32,16"],
    "simclr": ["objective.projector=32,16"],
    "swav": ["objective.projector=32,16", "objective.prototypes=5,4", "objective.queue=12"],
    "rotation": [],
}


@pytest.fixture(autouse=True)
def no_code_for_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    if request.node.callspec.params["device"] == "cpu":
        without_code(monkeypatch)


def trained(words: list[str], compiled: bool, device: str) -> tuple[torch.Tensor, dict[str, float]]:
    config = settings(
        "algorithm.local_epochs=2",
        "algorithm.batch=8",
        "encoder.norm=batch",
        "client.momentum=0.9",
        # Other parameters are drawn in float32, where a compiler rounds once and not twice.
        "augment.name=flip",
        *words,
    )
    engine, server = engine_of(config, made_split(64, 3, 16), groups_of(20, 24, 20), device)
    engine.trainer.compiles = compiled
    weights = train(engine, server, 3)
    if compiled:
        # Personal models take a step of their own; nothing is compiled again for a client.
        assert len(engine.trainer.compiled_steps.by_shape) == (2 if "ditto" in words[0] else 1)
    assert compiled or not engine.trainer.compiled_steps.by_shape
    sums = {
        f"{client}/{name}": float(leaf.double().sum())
        for client in sorted(engine.states)
        for name, leaf in flatten(engine.states[client]).items()
    }
    return weights, sums


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("objective", quick(SIAMESE, "simsiam"))
def test_compiled_step_equals_the_plain_one(objective: str, device: str) -> None:
    words = ["algorithm.name=fedavg", f"objective.name={objective}", *SIAMESE[objective]]
    plain, states = trained(words, False, device)
    fast, fast_states = trained(words, True, device)
    assert relative(fast, plain) < 1e-12
    assert fast_states == pytest.approx(states, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize(
    "algorithm",
    [
        ["algorithm.name=fedema"],
        ["algorithm.name=ditto", "algorithm.lambda=0.5"],
        ["algorithm.name=fedavg", "algorithm.norm_policy=local"],
        ["algorithm.name=fedavg", "client.optimizer=adam", "client.momentum=0", "client.lr=0.001"],
        ["algorithm.name=fedavg", "objective.stop_gradient=false"],
    ],
    ids=lambda words: words[-1],
)
def test_compiled_step_in_every_algorithm(algorithm: list[str], device: str) -> None:
    words = [*algorithm, "objective.name=byol", *SIAMESE["byol"]]
    plain, states = trained(words, False, device)
    fast, fast_states = trained(words, True, device)
    assert relative(fast, plain) < 1e-8  # Adam divides by tiny numbers in its first steps
    assert fast_states == pytest.approx(states, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("words", quick([[], ["algorithm.lambda=0", "algorithm.remote=only"]], []))
def test_compiled_ccl(words: list[str], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its second round on, when all banks have come and the queues are full."""
    monkeypatch.setattr(compiled, "RARE", 4)
    secret = lambda *_: np.random.default_rng(1)  # noqa: E731
    monkeypatch.setattr(CCL, "secret", secret)
    keys = ["algorithm.name=ccl", "algorithm.neighbours=3", "algorithm.features=9", *words]
    moco = ["objective.name=moco", *SIAMESE["moco"], "objective.queue=8"]
    plain, states = trained([*keys, *moco], False, device)
    fast, fast_states = trained([*keys, *moco], True, device)
    assert relative(fast, plain) < 1e-9
    assert fast_states == pytest.approx(states, rel=1e-8, abs=1e-8)


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


@pytest.mark.parametrize("device", [CUDA])
def test_compiled_augmentation(device: str) -> None:
    words = ["algorithm.name=fedavg", "objective.name=byol", *SIAMESE["byol"]]
    plain, _ = trained([*words, "augment.name=simclr"], False, device)
    fast, _ = trained([*words, "augment.name=simclr"], True, device)
    assert relative(fast, plain) < 1e-4  # strengths are drawn in float32


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("objective", ["byol", "moco"])
def test_states_on_the_host_change_nothing(objective: str, device: str) -> None:
    """The same run on the CPU, where nothing moves."""
    words = ["algorithm.name=fedema", f"objective.name={objective}", *SIAMESE[objective]]
    here, states = trained(words, False, "cpu")
    there, moved = trained(words, False, device)
    assert relative(there.cpu(), here) < 1e-8
    assert moved == pytest.approx(states, rel=1e-6, abs=1e-6)
