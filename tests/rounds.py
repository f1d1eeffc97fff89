"""Whole rounds of one objective, in ways that must agree: what the tests of objectives share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, settings, step, train
from torch import Tensor

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.data.dataset import Split
from fedssl.runs import loop
from fedssl.runs.build import Experiment, build_experiment
from fedssl.util.errors import UserError
from fedssl.util.trees import flatten

SIZES = (9, 12, 10)


def epochs(*words: str) -> Config:
    """FedAvg of epochs in batches that do not divide the clients, with batch norm."""
    return settings(
        *("algorithm.name=fedavg", "algorithm.local_epochs=2", "algorithm.batch=4"),
        *("encoder.norm=batch", "client.lr=0.05", "client.momentum=0.9", "augment.name=flip"),
        *words,
    )


def weights_after(config: Config, rounds: int = 2, order: Any = None) -> Tensor:
    """The server's, and then all that clients keep."""
    engine, server = engine_of(config, made_split(), groups_of(*SIZES))
    train(engine, server, rounds, order)
    kept = [leaf for k in sorted(engine.states) for leaf in flatten(engine.states[k]).values()]
    return torch.cat([leaf.reshape(-1).double() for leaf in (server.weights, *kept)])


def losses(config: Config, split: Split | None = None, rounds: int = 2) -> list[float]:
    """The mean loss of each round."""
    engine, server = engine_of(config, split or made_split(), groups_of(*SIZES))
    found = []
    for round in range(rounds):
        step(engine, server, round)
        found.append(float(server.log["loss"]))
    return found


def assert_merging_changes_nothing(*words: str) -> None:
    results = []
    for merge in ("engine.merge=auto", "engine.merge=off", "engine.chunk=6"):
        config = settings("algorithm.name=fedavg", "server.momentum=0.9", *words, merge)
        engine, server = engine_of(config, made_split(), groups_of(3, 5, 2, 7, 2))
        results.append(train(engine, server, rounds=3) - engine.trainer.initial)
        assert engine.merges == (merge != "engine.merge=off")
    assert results[1].norm() > 1e-3
    assert relative(results[0], results[1]) < 1e-9
    assert relative(results[2], results[1]) < 1e-9


def assert_compiled_is_plain(
    config: Config, monkeypatch: pytest.MonkeyPatch, device: str = "cpu"
) -> None:
    """On the CPU the whole step is traced as one graph, and what was traced is run as it is."""
    real = torch.compile
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", lambda f, **k: real(f, backend="eager", **k))
    results = []
    for compiled in (False, True):
        engine, server = engine_of(config, made_split(), groups_of(*SIZES), device)
        engine.trainer.compiles = compiled
        results.append(train(engine, server, 2))
        assert len(engine.trainer.compiled_steps.by_shape) == compiled
    assert relative(results[1], results[0]) < 1e-12


def assert_sessions_agree(near: Experiment, far: Experiment, rounds: int = 3) -> None:
    """Some rounds of two engines: weights, states, logs and traffic."""
    from far import go, states_of

    here, there = go(near, rounds), go(far, rounds)
    assert relative(near.server.weights, near.trainer.initial) > 1e-3 or list(near.engine.states)
    assert relative(far.server.weights, near.server.weights) < 1e-10
    for ours, theirs in (
        (flatten(near.server.state), flatten(far.server.state)),
        (near.server.log, far.server.log),
    ):
        assert theirs.keys() == ours.keys()
        for name, leaf in ours.items():
            torch.testing.assert_close(theirs[name], leaf, rtol=1e-9, atol=1e-12)
    assert far.server.client_log.keys() == near.server.client_log.keys()
    for name, each in near.server.client_log.items():
        found = [far.server.client_log[name][client] for client in each]
        expected = np.array([*each.values()], float)  # None, which is not known yet, is NaN
        np.testing.assert_allclose(np.array(found, float), expected, rtol=1e-8)
    assert [c.traffic.up for c in there] == [c.traffic.up for c in here]
    assert [c.traffic.down for c in there] == [c.traffic.down for c in here]
    assert not any(c.faults for c in there)
    states, others = states_of(near), states_of(far)
    assert others.keys() == states.keys()
    for client, state in states.items():
        assert others[client].keys() == state.keys()
        for name, value in state.items():
            assert others[client][name].dtype == value.dtype
            np.testing.assert_allclose(others[client][name], value, rtol=1e-9, atol=1e-12)


def assert_both_engines_agree(folder: Path, *words: str) -> None:
    from far import SMALL, far_session

    common = [w for w in SMALL if not w.startswith("objective.")]
    batches = ("algorithm.local_epochs=1", "algorithm.batch=3", "encoder.norm=batch")
    config = configuration.resolve(
        configuration.read_recipe(None),
        [*common, *batches, "algorithm.name=fedavg", "engine.merge=off", *words],
    )
    assert_sessions_agree(build_experiment(config), far_session(config, folder)[0], 2)


def before_round(patch: pytest.MonkeyPatch, round: int, act: Callable[[], object]) -> None:
    """Act when a run begins this round, counted from zero."""
    real = loop.run_one_round

    def one_round(session: Experiment, *rest: Any) -> Any:
        if session.server.round == round:
            act()
        return real(session, *rest)

    patch.setattr(loop, "run_one_round", one_round)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def run_and_resume(config: Config, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run to ``whole``, and to ``cut`` with a stop after two rounds; return the first summary."""
    summary = loop.run(config, folder / "whole")
    with patch.context() as cut:
        before_round(cut, 2, interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.run(config, folder / "cut")
    loop.run(config, folder / "cut", resume=True)
    return summary


def assert_refused(*words: str, key: str = "") -> None:
    """The last of these settings, or ``key``, is refused before the first round, in one line."""
    common = ("algorithm.name=fedavg", "evaluate.baselines=[]", "engine.threads=1")
    with pytest.raises(UserError) as error:
        build_experiment(configuration.resolve(configuration.read_recipe(None), [*common, *words]))
    line = str(error.value)
    assert line.startswith(f"{key or words[-1].partition('=')[0]}=") and "\n" not in line
