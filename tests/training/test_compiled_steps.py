"""A compiled step, on tensors that stay in place, gives the numbers of the plain loop.

The compiler returns its input here; test_compiled.py runs torch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import engine_of, groups_of, made_split, relative, settings, step, without_compiler

from fedssl.algorithms.ccl import CCL
from fedssl.engines.local import LocalEngine
from fedssl.training import compiled
from fedssl.util.trees import flatten

HEADS = "objective.projector=32,16"
BYOL = f"objective.name=byol {HEADS} objective.predictor=24,16"
SIMCLR = f"objective.name=simclr {HEADS}"
MOCO = f"objective.name=moco {HEADS} objective.queue=20"
CCL_WORDS = f"{MOCO} algorithm.name=ccl algorithm.neighbours=3 algorithm.mix=2"


def results(compiles: bool, words: str) -> tuple[LocalEngine, dict[str, Any]]:
    config = settings(
        *("algorithm.name=fedavg", "algorithm.local_epochs=2", "algorithm.batch=4"),
        *("encoder.norm=batch", "client.lr=0.05", "client.momentum=0.9"),
        *words.split(),
    )
    engine, server = engine_of(config, made_split(), groups_of(9, 3, 8))  # 3 is less than a batch
    engine.trainer.compiles = compiles
    announced: list[None] = []
    engine.trainer.announce_compiling = lambda: announced.append(None)
    for round in range(3):
        step(engine, server, round)
    assert len(announced) == compiles  # once, and only where a step is made
    numbers = {"weights": server.weights, "loss": server.log["loss"], **flatten(server.state)}
    for k in engine.states:
        numbers |= {f"{k}/{name}": leaf for name, leaf in flatten(engine.states[k]).items()}
    return engine, numbers


def test_views_of_two_sizes_are_not_stacked() -> None:
    for words, stacks in (((), True), (("augment.small=1", "augment.small_size=4"), False)):
        method = f"objective.name=swav {HEADS} algorithm.name=fedavg encoder.norm=batch"
        given = settings(*method.split(), *words)
        trainer = engine_of(given, made_split(), groups_of(9))[0].trainer
        trainer.network.joint = False  # as a user's own objective may be
        with trainer.stacked_views():
            assert trainer.network._stacked == stacks


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (SIMCLR, 1),
        (BYOL, 1),
        (f"{BYOL} objective.stop_gradient=false", 1),
        # Adam makes large steps of gradients that are nothing but rounding.
        (f"{BYOL} objective.stop_gradient=false client.optimizer=adam client.lr=0.001", 1),
        (MOCO, 1),
        ("objective.name=rotation", 1),
        (f"objective.name=swav {HEADS} objective.prototypes=6,3 objective.queue=14", 1),
        (f"{BYOL} algorithm.name=ditto algorithm.lambda=3", 2),  # of the personal models too
        (f"{BYOL} algorithm.name=fedema algorithm.norm_policy=local", 1),
        (f"{SIMCLR} algorithm.name=fedprox algorithm.mu=2", 1),
        (f"{SIMCLR} algorithm.name=scaffold client.momentum=0", 1),
        (f"{SIMCLR} algorithm.name=featarc algorithm.clusters=1", 1),
        (CCL_WORDS, 2),  # two clients have as many candidates
        (f"{CCL_WORDS} algorithm.remote=only", 2),
        (f"{CCL_WORDS} algorithm.lambda=0", 2),
        (f"{CCL_WORDS} algorithm.remote=off algorithm.lambda=0", 1),
    ],
)
def test_the_replayed_step_is_the_plain_one(
    words: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch)
    monkeypatch.setattr(compiled, "RARE", 3)
    monkeypatch.setattr(CCL, "secret", lambda *_: np.random.default_rng(5))
    _, plain = results(False, words)
    engine, replayed = results(True, words)
    assert len(engine.trainer.compiled_steps.by_shape) == steps
    assert plain.keys() == replayed.keys()
    for name, tensor in plain.items():
        if tensor.any():
            close = 1e-3 if "adam" in words else 1e-9
            assert relative(replayed[name].double(), tensor.double()) < close, name
