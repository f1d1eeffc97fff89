"""What changes from round to round, and what must not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, settings, train

from fedssl.config import Config
from fedssl.data.dataset import Groups
from fedssl.data.random import key, mix
from fedssl.engines.local import LocalCohort, LocalEngine
from fedssl.federation.server import learning_rates
from fedssl.runs import build, loop
from fedssl.runs.build import Experiment


def views(engine: LocalEngine, round: int, step: int = 0) -> torch.Tensor:
    """The encodings of client 0's first view: as good as its pixels."""
    client = engine.client(np.array([0]), round, remember=False)
    engine.trainer.load(engine.trainer.initial)
    with torch.no_grad():
        return client.encode_step(step).encodings[0]


def test_every_round_step_and_view_is_augmented_anew() -> None:
    engine, _ = engine_of(settings("algorithm.local_steps=2"), made_split(), groups_of(4, 4))
    first = views(engine, 0)
    assert torch.equal(first, views(engine, 0))
    for other in (views(engine, 1), views(engine, 0, step=1)):
        assert relative(other, first) > 0.01
    client = engine.client(np.array([0]), 0, remember=False)
    with torch.no_grad():
        f, g = client.encode_step(0).encodings
    assert relative(f, g) > 0.01


def test_a_samples_random_state_is_its_clients_whoever_is_merged_with_it() -> None:
    engine, _ = engine_of(settings(), made_split(), groups_of(3, 2, 4))
    for epoch in (5, 6):
        start = key(engine.trainer.config.seed, "augment", epoch)
        own = {c: [mix(mix(start, c), i) for i in range(n)] for c, n in enumerate((3, 2, 4))}
        merged = engine.client(np.array([0, 2]), 0, remember=False)
        alone = engine.client(np.array([2]), 0, remember=False)
        merged.random_state(epoch - 1, slice(None))  # what was asked before does not matter
        alone.random_state(epoch - 1, slice(None))
        found = merged.random_state(epoch, slice(None)).numpy().view(np.uint64)
        assert found.tolist() == own[0] + own[2]
        some = alone.random_state(epoch, torch.tensor([3, 1])).numpy().view(np.uint64)
        assert some.tolist() == [own[2][3], own[2][1]]


def test_the_next_cohort_is_drawn_before_the_loss_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = settings("cohort.size=5")
    engine, server = engine_of(config, made_split(), groups_of(*[2] * 20))
    session = Experiment(config, None, engine.groups, [], engine, server)  # type: ignore[arg-type]
    wanted = [session.draw_cohort(round).tolist() for round in range(3)]
    asked, events, real = [], [], build.draw_cohort

    def drawn(config: Config, clients: int, round: int) -> np.ndarray:
        events.append(f"draw {round}")
        return real(config, clients, round)

    def cohort(ids: np.ndarray, round: int) -> LocalCohort:
        asked.append(ids.tolist())
        return LocalCohort(engine, ids, round)

    monkeypatch.setattr(build, "draw_cohort", drawn)
    monkeypatch.setattr(engine, "cohort", cohort)
    monkeypatch.setattr(torch.Tensor, "__float__", lambda t: events.append("read") or t.item())
    for _ in range(3):
        loop.run_one_round(session, Path(), print)
    assert asked == wanted
    assert events == ["draw 0", "draw 1", "read", "draw 2", "read", "draw 3", "read"]


def test_cohorts_differ_from_round_to_round_and_everyone_is_asked() -> None:
    config = settings("cohort.size=5")
    engine, server = engine_of(config, made_split(), groups_of(*[2] * 20))
    session = Experiment(config, None, engine.groups, [], engine, server)  # type: ignore[arg-type]
    cohorts = [session.draw_cohort(r) for r in range(40)]
    assert all(len(set(c.tolist())) == 5 for c in cohorts)
    assert len({tuple(c.tolist()) for c in cohorts}) > 30
    assert set(np.concatenate(cohorts).tolist()) == set(range(20))


def with_server(config: Config, **keys: object) -> Config:
    return dataclasses.replace(config, server=dataclasses.replace(config.server, **keys))


def test_the_schedule_acts_on_the_server_or_where_that_only_adds_on_the_clients() -> None:
    config = dataclasses.replace(settings("client.lr=0.5"), schedule="cosine", rounds=4)
    half = 2
    assert learning_rates(config, half) == pytest.approx((1.0, 0.25))
    adam = with_server(config, optimizer="adam", lr=0.1)
    assert learning_rates(adam, half) == pytest.approx((0.05, 0.5))
    assert learning_rates(with_server(config, momentum=0.9), half) == pytest.approx((0.5, 0.5))
    constant = dataclasses.replace(adam, schedule="constant")
    assert learning_rates(constant, half) == pytest.approx((0.1, 0.5))
    steps = dataclasses.replace(adam, schedule="steps")
    assert learning_rates(steps, half) == pytest.approx((0.009, 0.5))
    engine, server = engine_of(adam, made_split(), groups_of(4, 4))
    changes = []
    for round in (0, half):
        server.weights, server.rule_state["steps"] = engine.trainer.initial, torch.zeros(())
        for name in "mv":
            server.rule_state[name].zero_()
        server.round = round
        server.apply({"change": torch.ones_like(server.weights), "loss": torch.zeros(())})
        changes.append((server.weights - engine.trainer.initial).norm())
    assert float(changes[1] / changes[0]) == pytest.approx(0.5)


def test_batch_norm_statistics_reach_the_server_as_a_mean() -> None:
    config = settings("encoder.norm=batch", "algorithm.name=fedavg")
    engine, server = engine_of(config, made_split(), groups_of(4, 12))
    start, n = server.weights, engine.trainer.flat.parameter_count
    own = []
    for k in range(2):
        client = engine.client(np.array([k]), 0, remember=False)
        own.append(engine.algorithm.train(client, start)["change"][n:])
    train(engine, server, rounds=1)
    moved = server.weights[n:] - start[n:]
    assert moved.norm() > 0.01
    assert relative(moved, (4 * own[0] + 12 * own[1]) / 16) < 1e-12


@pytest.mark.parametrize("objective", ["simclr", "cco"])
@pytest.mark.parametrize(("weight", "shares"), [("samples", (0.25, 0.75)), ("uniform", (0.5, 0.5))])
def test_clients_count_by_their_samples_or_all_the_same(
    objective: str, weight: str, shares: tuple[float, float]
) -> None:
    """One step each, where a cohort may be merged; with ``uniform`` it must not be."""
    words = (f"objective.name={objective}", f"algorithm.weight={weight}")
    config = settings("algorithm.name=fedavg", *words)
    engine, server = engine_of(config, made_split(), groups_of(4, 12))
    assert engine.merges == (weight == "samples")
    start, own = server.weights, []
    for k in range(2):
        client = engine.client(np.array([k]), 0, remember=False)
        own.append(engine.algorithm.train(client, start)["change"])
    train(engine, server, rounds=1)
    expected = shares[0] * own[0] + shares[1] * own[1]
    assert relative(server.weights - start, expected) < 1e-10
    assert relative(own[0], own[1]) > 1e-3


def test_the_centre_follows_the_encodings() -> None:
    engine, server = engine_of(settings(), made_split(), groups_of(4, 4))
    train(engine, server, rounds=1)
    before = {k: v.clone() for k, v in server.state["centre"].items()}
    everyone = engine.client(np.arange(2), 1, remember=False)
    with torch.no_grad():
        engine.trainer.load(server.weights)
        f, g = everyone.encode_step(0).encodings
    server.round = 1
    engine.algorithm.round(server, engine.cohort(np.arange(2), 1))
    centre = server.state["centre"]
    torch.testing.assert_close(centre["f"], f.mean(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(centre["g"], g.mean(0), rtol=1e-9, atol=1e-9)
    assert relative(centre["f"], before["f"]) > 1e-6


def test_moments_cover_every_batch_of_the_pass_weighed_by_contribution() -> None:
    """Clients of 1 and 8 with batches of 2: the moments are those of the 3 samples used."""
    config = settings("algorithm.batch=2")
    engine, server = engine_of(config, made_split(), groups_of(1, 8))
    centre = {k: torch.zeros(16, dtype=torch.float64) for k in "fg"}
    moments = engine.cohort(np.arange(2), 0).mean(engine.algorithm.encode, server.weights, centre)  # type: ignore[attr-defined]
    engine.trainer.load(server.weights)
    with torch.no_grad():
        parts = [engine.client(np.array([k]), 0, remember=False).encode_step(0) for k in range(2)]
    union = tuple(torch.cat([p.encodings[i] for p in parts]) for i in range(2))
    assert len(union[0]) == 3
    expected = engine.trainer.objective.moments(union, centre)
    for name, value in expected.items():
        torch.testing.assert_close(moments[name], value, rtol=1e-9, atol=1e-12)

    several = settings("algorithm.local_epochs=1", "algorithm.batch=2")
    engine, server = engine_of(several, made_split(), groups_of(8))
    client = engine.client(np.array([0]), 0, remember=False)
    seen = client.mean(server.weights, lambda e: {"n": e.encodings[0][0, 0]})
    with torch.no_grad():
        engine.trainer.load(server.weights)
        each = [client.encode_step(step).encodings[0][0, 0] for step in range(4)]
    assert float(seen["n"]) == pytest.approx(float(sum(each) / 4))


def test_a_remembered_pass_is_not_used_for_other_weights() -> None:
    config = settings()
    engine, server = engine_of(config, made_split(), groups_of(4, 4))
    algorithm = engine.algorithm
    ids = np.arange(2)
    centre = {k: torch.zeros(16, dtype=torch.float64) for k in "fg"}
    other = server.weights * 1.1

    def update(disturb: bool, remember: bool) -> torch.Tensor:
        client = engine.client(ids, 0, remember)
        moments = algorithm.encode(client, server.weights, centre)
        if disturb:  # someone else used the network in between
            engine.trainer.load(other)
        return algorithm.descend(client, server.weights, centre, moments)["change"]

    plain = update(disturb=False, remember=False)
    assert relative(update(disturb=False, remember=True), plain) < 1e-12
    assert relative(update(disturb=True, remember=True), plain) < 1e-12
    client = engine.client(ids, 0, remember=True)
    moments = algorithm.encode(client, server.weights, centre)
    moved = algorithm.descend(client, other, centre, moments)["change"]
    assert relative(moved, plain) > 1e-3
    algorithm.descend(client, server.weights, centre, moments)
    again = algorithm.descend(client, server.weights, centre, moments)["change"]
    assert relative(again, plain) < 1e-12


def test_chunks_keep_to_their_limit() -> None:
    engine, _ = engine_of(settings("engine.chunk=6"), made_split(), groups_of(4, 4, 1, 4, 7, 2))
    cohort = engine.cohort(np.arange(6), 0)
    assert [c.tolist() for c in cohort._chunks()] == [[0], [1, 2], [3], [4], [5]]


def test_groups_select() -> None:
    groups = Groups(np.array([5, 3, 9, 1, 0]), np.array([0, 2, 2, 5]))
    members, sizes = groups.select(np.array([2, 0]))
    assert members.tolist() == [9, 1, 0, 5, 3] and sizes.tolist() == [3, 2]


ONE_STEP = [
    ("algorithm.name=dcco", "sgd"),
    ("algorithm.name=dcco engine.merge=off", "lars"),
    ("algorithm.name=fedavg objective.name=simclr algorithm.batch=2", "sgd"),
    ("algorithm.name=fedavg objective.name=byol objective.predictor=32,16", "lars"),
    ("algorithm.name=fedema objective.name=simsiam objective.predictor=32,16", "sgd"),
    ("algorithm.name=ditto", "sgd"),
    ("algorithm.name=ccl algorithm.lambda=0 algorithm.remote=off objective.name=moco", "sgd"),
    ("algorithm.name=standalone", "sgd"),
]


@pytest.mark.parametrize(("words", "rule"), ONE_STEP)
def test_momentum_does_nothing_in_one_local_step(words: str, rule: str) -> None:
    found: dict[tuple[int, float], list[torch.Tensor]] = {}
    for steps in (1, 2):
        for momentum in (0.0, 0.9):
            more = (
                f"client.optimizer={rule} client.momentum={momentum} algorithm.local_steps={steps}"
            )
            own = settings(*words.split(), "objective.projector=32,16", *more.split())
            engine, server = engine_of(own, made_split(), groups_of(4, 4, 4))
            train(engine, server, 3)
            read = engine.algorithm.personal_weights
            states = [read(server, engine.states[k]) for k in range(3)]
            found[steps, momentum] = [server.weights, *(s for s in states if s is not None)]

    def same(steps: int) -> list[bool]:
        return [torch.equal(a, b) for a, b in zip(found[steps, 0], found[steps, 0.9], strict=True)]

    assert all(same(1)) and not all(same(2))
