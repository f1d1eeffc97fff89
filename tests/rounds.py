"""Whole rounds and runs, in ways that must agree: what several tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    engine_of,
    groups_of,
    made_split,
    refused,
    relative,
    settings,
    step,
    timeless,
    train,
)
from safetensors.torch import load_file
from torch import Tensor, nn

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.data.dataset import Split
from fedssl.federation.cohort import Cohort
from fedssl.federation.driver import run_round
from fedssl.models.norms import BatchNorm
from fedssl.runs import checkpoint, loop
from fedssl.runs.build import Experiment, build_experiment
from fedssl.util.trees import flatten

SIZES = (9, 12, 10)
RUN = (
    *("rounds=4", "data.size=8", "data.labels=80", "partition.name=iid", "partition.clients=5"),
    *("cohort.size=3", "encoder.norm=batch", "algorithm.local_epochs=1", "algorithm.batch=6"),
    *("objective.projector=32,16", "server.optimizer=sgd", "server.lr=1", "client.lr=0.05"),
    *("evaluate.protocols=knn", "evaluate.baselines=[]", "engine.threads=1"),
    "checkpoint.seconds=0",
)
METHODS = {
    "ccl": "algorithm.name=ccl algorithm.neighbours=3 objective.name=moco objective.queue=20",
    "fedca": "algorithm.name=fedca algorithm.public=17 algorithm.base_epochs=2 "
    "algorithm.dictionary=9 objective.name=simclr",
    "featarc": "algorithm.name=featarc objective.name=byol objective.predictor=24,16 rounds=3 "
    "cohort.size=4 client.momentum=0.9 evaluate.protocols=per-client,knn",
    "ditto": "algorithm.name=ditto algorithm.local_epochs=null algorithm.batch=null "
    "objective.name=byol objective.predictor=24,16 partition.clients=4 cohort.size=null "
    "encoder.norm=group evaluate.protocols=per-client",
    "gossip": "algorithm.name=gossip objective.name=simclr rounds=3",
}


def run_of(method: str, *words: str) -> Config:
    """A whole run of one of the methods, on digits; several words may stand in a string."""
    given = " ".join((METHODS[method], *words)).split()
    return configuration.resolve(configuration.read_recipe(None), [*RUN, *given])


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


def assert_first_statistics_are_of_both_views(*words: str) -> None:
    """``norm_policy=reset``: after one step, those that batch norm saw in it, and nothing else."""
    whole = ("algorithm.local_epochs=1", "algorithm.batch=9", "algorithm.norm_policy=reset")
    engine, server = engine_of(epochs(*words, *whole), made_split(), groups_of(9))
    trainer, client = engine.trainer, engine.client(np.array([0]), 0, remember=False)
    state = client.random_state(0, slice(None))
    views = trainer.augmentation.each([trainer.images[0][:9]] * 2, state, trainer.dtype)
    modules = list(trainer.network.named_modules())
    conv = next(module for _, module in modules if isinstance(module, nn.Conv2d))
    name = next(name for name, module in modules if isinstance(module, BatchNorm))
    seen = conv(torch.cat(views)).detach()
    step(engine, server, 0)
    now = trainer.flat.named(server.weights)
    torch.testing.assert_close(now[f"{name}.running_mean"], seen.mean((0, 2, 3)))
    torch.testing.assert_close(now[f"{name}.running_var"], seen.var((0, 2, 3)))


def go(session: Experiment, rounds: int) -> list[Cohort]:
    """Some rounds, and their cohorts."""
    cohorts, server = [], session.server
    server.public = session.public
    for _ in range(rounds):
        cohort = session.engine.cohort(session.draw_cohort(server.round), server.round)
        result = run_round(session.algorithm, server, cohort)
        assert result.skipped is None
        cohorts.append(cohort)
    return cohorts


def assert_both_engines_agree(folder: Path, *words: str) -> tuple[Experiment, Experiment]:
    """Three rounds give the same weights, states, logs and traffic; words may stand in a string.

    They are of FedAvg unless the words say otherwise.
    """
    from far import SMALL, far_session

    common = [word for word in SMALL if not word.startswith("objective.")]
    given = ["encoder.norm=batch", "algorithm.name=fedavg", "engine.merge=off"]
    config = configuration.resolve(
        configuration.read_recipe(None), [*common, *given, *" ".join(words).split()]
    )
    near, (far, _) = build_experiment(config), far_session(config, folder)
    assert_sessions_agree(near, far)
    return near, far


def assert_sessions_agree(near: Experiment, far: Experiment, rounds: int = 3) -> None:
    from far import states_of

    here, there = go(near, rounds), go(far, rounds)
    assert relative(near.server.weights, near.trainer.initial) > 1e-3 or list(near.engine.states)
    assert relative(far.server.weights, near.server.weights) < 1e-10
    close = {"rtol": 1e-9, "atol": 1e-12, "equal_nan": True}
    torch.testing.assert_close(flatten(far.server.state), flatten(near.server.state), **close)
    torch.testing.assert_close(far.server.log, near.server.log, **close)
    assert far.server.client_log.keys() == near.server.client_log.keys()
    for name, each in near.server.client_log.items():
        found = [far.server.client_log[name][client] for client in each]
        expected = np.array([*each.values()], float)  # None, which is not known yet, is NaN
        np.testing.assert_allclose(np.array(found, float), expected, rtol=1e-8)
    for ours, theirs in zip(here, there, strict=True):
        assert theirs.traffic.up == ours.traffic.up and theirs.traffic.down == ours.traffic.down
        assert not theirs.faults
    torch.testing.assert_close(states_of(far), states_of(near), **close)


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


def assert_resumes(config: Config, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """A resumed run leaves what the unbroken one does; return the tensors of its checkpoint."""
    run_and_resume(config, folder, patch)
    whole, cut = (load_file(folder / name / checkpoint.FILE) for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert timeless(folder / "whole") == timeless(folder / "cut")
    return whole


def assert_refused(*words: str, key: str = "") -> None:
    """The last of these settings, or ``key``, is refused before the first round, in one line."""
    given = ["algorithm.name=fedavg", "evaluate.baselines=[]", "engine.threads=1", *words]
    with refused(key or words[-1].partition("=")[0]):
        build_experiment(configuration.resolve(configuration.read_recipe(None), given))
