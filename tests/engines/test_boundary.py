"""What a real client would have: its own process, bytes in, bytes out, its own state on a disk.

Every task of every exchange runs in a trainer made for it alone, so an algorithm that relied on
what an earlier task left in memory, or on an object of the server, would give other weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, settings, siamese
from safetensors.torch import load, save

from fedssl.algorithms.ccl import CCL
from fedssl.config import Config
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.cohort import Cohort
from fedssl.federation.task import ClientTask
from fedssl.federation.traffic import Argument
from fedssl.util.trees import Tree, flatten, unflatten

GROUPS = groups_of(3, 5, 2, 4)  # whatever the batch, none is a single sample


def over_the_wire(tree: Tree) -> Tree:
    """Through bytes; a lone tensor travels as a tree of one."""
    lone = isinstance(tree, torch.Tensor)
    flat = flatten({"it": tree} if lone else tree)
    back = unflatten(load(save({k: v.detach().contiguous() for k, v in flat.items()})))
    return back["it"] if lone else back


class Remote(Cohort):
    """Clients that share nothing with the server but messages."""

    def __init__(
        self, config: Config, algorithm: Algorithm, round: int, disk: dict[int, bytes]
    ) -> None:
        super().__init__(np.arange(len(GROUPS)), 1, algorithm.weight)
        self.config, self.round, self.disk = config, round, disk

    def ask(self, task: ClientTask, payload: tuple[Argument, ...]) -> Iterator[Any]:
        for k in self.ids:
            engine, _ = engine_of(self.config, made_split(), GROUPS)
            if int(k) in self.disk:
                engine.states[int(k)] = unflatten(load(self.disk[int(k)]))
            client = engine.client(np.array([k]), self.round, remember=False)
            own = (item.of(int(k)) for item in payload)
            reply = getattr(engine.algorithm, task.name)(client, *map(over_the_wire, own))
            if client.state:
                self.disk[int(k)] = save(flatten(client.state))
            yield (
                np.array([k]),
                client.weight if self.weight == "samples" else 1,
                over_the_wire(reply),
            )


def run_both(config: Config) -> None:
    """Three rounds here and far away: weights, every client's whole state, what is logged."""
    local, server = engine_of(config, made_split(), GROUPS)
    _, far_server = engine_of(config, made_split(), GROUPS)
    disk: dict[int, bytes] = {}
    for round in range(3):
        server.round = far_server.round = round
        local.algorithm.round(server, local.cohort(np.arange(len(GROUPS)), round))
        algorithm = engine_of(config, made_split(), GROUPS)[0].algorithm
        algorithm.round(far_server, Remote(config, algorithm, round, disk))
    assert relative(far_server.weights, server.weights) < 1e-10
    here, there = flatten(server.state), flatten(far_server.state)
    assert here.keys() == there.keys()
    for name, leaf in here.items():
        torch.testing.assert_close(there[name], leaf, rtol=1e-8, atol=1e-10, msg=name)
    states = {k: flatten(local.states[k]) for k in local.states}
    assert states.keys() == disk.keys()
    for k, state in states.items():
        far = load(disk[k])
        assert far.keys() == state.keys()
        for name, leaf in state.items():
            assert far[name].dtype == leaf.dtype
            torch.testing.assert_close(far[name], leaf, rtol=1e-8, atol=1e-10, msg=name)
    assert far_server.log["loss"] == pytest.approx(float(server.log["loss"]), rel=1e-10)
    assert far_server.client_log.keys() == server.client_log.keys()
    for name, each in server.client_log.items():
        assert far_server.client_log[name] == pytest.approx(each, rel=1e-8)


@pytest.mark.parametrize("algorithm", ["dcco", "fedavg", "standalone"])
@pytest.mark.parametrize(
    "local", ["algorithm.local_steps=1", "algorithm.local_epochs=2"], ids=["step", "epochs"]
)
def test_clients_in_processes_of_their_own_give_the_same_weights(
    algorithm: str, local: str
) -> None:
    words = [f"algorithm.name={algorithm}", local, "server.momentum=0.9"]
    if "epochs" in local:
        words.append("algorithm.batch=2")
    run_both(settings(*words))


@pytest.mark.parametrize(
    "words",
    [
        "byol algorithm.name=fedavg",
        "byol algorithm.name=fedavg algorithm.replace=both",
        "byol algorithm.name=fedavg objective.stop_gradient=false",
        "moco algorithm.name=fedavg",
        "simsiam algorithm.name=fedavg",
        "byol algorithm.name=fedavg algorithm.norm_policy=local",
        "byol algorithm.name=fedavg algorithm.norm_policy=reset",
        "byol algorithm.name=fedema",
        "byol algorithm.name=fedema algorithm.divergence=distance algorithm.norm_policy=local",
        "simsiam algorithm.name=fedema algorithm.decay=0.3,0.8",
        "byol algorithm.name=fedu algorithm.threshold=0.1",
        "byol algorithm.name=ditto",
        "moco algorithm.name=ditto algorithm.norm_policy=local",
        "moco algorithm.name=standalone server.momentum=0.9",
        "moco algorithm.name=ccl algorithm.mix=2",
        "moco algorithm.name=ccl algorithm.mix=2 algorithm.remote=only algorithm.norm_policy=local",
    ],
)
def test_states_of_siamese_methods_go_through_files(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CCL, "secret", lambda _, c: np.random.default_rng([c.id, c.round]))
    objective, *rest = words.split()
    run_both(siamese(objective, "algorithm.local_epochs=1", "algorithm.batch=3", *rest))


def test_a_lost_log_line_takes_nobody_out_of_the_round() -> None:
    """What is only for the log must not make a round that counted a skipped one."""

    class Silent(Remote):
        def ask(self, task: ClientTask, payload: tuple[Argument, ...]) -> Iterator[Any]:
            replies = list(super().ask(task, payload))
            yield from replies[:-1] if task.is_logged else replies

    config = siamese("byol", "algorithm.name=fedema", "algorithm.local_epochs=1")
    engine, server = engine_of(config, made_split(), GROUPS)
    cohort = Silent(config, engine.algorithm, 0, {})
    cohort.minimum = len(GROUPS)
    engine.algorithm.round(server, cohort)
    assert cohort.missing == 0 and len(cohort.ids) == len(GROUPS)
    assert len(server.client_log["mu"]) == len(GROUPS) - 1
