"""A compiled step, on tensors that stay in place, gives the numbers of the plain loop.

The compiler returns its input here; test_compiled.py runs torch's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, siamese, step

from fedssl.engines.local import LocalEngine
from fedssl.util.trees import flatten


def results(compiles: bool, objective: str, *words: str) -> tuple[LocalEngine, dict[str, Any]]:
    config = siamese(objective, "algorithm.local_epochs=1", *words)
    engine, server = engine_of(config, made_split(), groups_of(9, 3, 8))  # 3 is less than a batch
    engine.trainer.compiles = compiles
    announced: list[None] = []
    engine.trainer.announce_compiling = lambda: announced.append(None)
    for round in range(3):
        step(engine, server, round)
    assert len(announced) == compiles  # once, and only where a step is made
    numbers = {"weights": server.weights, "loss": server.log["loss"]}
    for k in engine.states:
        numbers |= {f"{k}/{name}": leaf for name, leaf in flatten(engine.states[k]).items()}
    return engine, numbers


@pytest.mark.parametrize(
    "words",
    [
        "simclr",
        "byol",
        "byol objective.stop_gradient=false",
        "byol objective.stop_gradient=false client.optimizer=adam client.lr=0.001",
        "moco",
        "byol algorithm.name=ditto algorithm.lambda=3",
        "byol algorithm.name=fedema algorithm.norm_policy=local",
    ],
)
def test_the_replayed_step_is_the_plain_one(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    objective, *rest = words.split()
    _, plain = results(False, objective, *rest)
    engine, replayed = results(True, objective, *rest)
    assert len(engine.trainer.compiled_steps.by_shape) == (2 if "ditto" in words else 1)
    assert plain.keys() == replayed.keys()
    # Adam makes large steps of gradients that are nothing but rounding.
    close = 1e-3 if "adam" in words else 1e-9
    for name, tensor in plain.items():
        if tensor.any():
            assert relative(replayed[name].double(), tensor.double()) < close, name
