"""Things that change from round to round, and things that must not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import encode, engine_of, groups_of, made_split, relative, settings, step, train

from fedssl.config import Config
from fedssl.data.dataset import Groups
from fedssl.data.random import key, mix
from fedssl.engines.local import LocalCohort, LocalEngine
from fedssl.federation.server import Server, learning_rates
from fedssl.objectives.batch import EncodedBatch
from fedssl.runs import build, loop
from fedssl.runs.build import Experiment

ORIGIN = {k: torch.zeros(16, dtype=torch.float64) for k in "fg"}


def made(*words: str, sizes: tuple[int, ...] = (4, 4)) -> tuple[LocalEngine, Server]:
    return engine_of(settings(*words), made_split(), groups_of(*sizes))


def experiment_of_twenty() -> Experiment:
    engine, server = made("cohort.size=5", sizes=(2,) * 20)
    return Experiment(engine.trainer.config, None, engine.groups, [], engine, server)


def test_every_round_step_and_view_is_augmented_anew() -> None:
    engine, _ = made("algorithm.local_steps=2")
    f, g = encode(engine, 0)
    assert torch.equal(f, encode(engine, 0)[0])
    for other in (g, encode(engine, 1)[0], encode(engine, 0, step=1)[0]):
        assert relative(other, f) > 0.01


def test_a_samples_random_state_is_its_clients_whoever_is_merged_with_it() -> None:
    engine, _ = made(sizes=(3, 2, 4))
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
    session = experiment_of_twenty()
    engine = session.engine
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
    session = experiment_of_twenty()
    cohorts = [session.draw_cohort(r) for r in range(40)]
    assert all(len(set(c.tolist())) == 5 for c in cohorts)
    assert len({tuple(c.tolist()) for c in cohorts}) > 30
    assert set(np.concatenate(cohorts).tolist()) == set(range(20))


def with_server(config: Config, **keys: object) -> Config:
    return replace(config, server=replace(config.server, **keys))


def test_the_schedule_acts_on_the_server_or_where_that_only_adds_on_the_clients() -> None:
    config = replace(settings("client.lr=0.5"), schedule="cosine", rounds=4)
    half = 2
    assert learning_rates(config, half) == pytest.approx((1.0, 0.25))
    adam = with_server(config, optimizer="adam", lr=0.1)
    assert learning_rates(adam, half) == pytest.approx((0.05, 0.5))
    assert learning_rates(with_server(config, momentum=0.9), half) == pytest.approx((0.5, 0.5))
    constant = replace(adam, schedule="constant")
    assert learning_rates(constant, half) == pytest.approx((0.1, 0.5))
    steps = replace(adam, schedule="steps")
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


@pytest.mark.parametrize(
    ("words", "merges", "shares"),
    [
        ("objective.name=simclr", True, (0.25, 0.75)),
        ("objective.name=cco", True, (0.25, 0.75)),
        ("objective.name=cco encoder.norm=batch", False, (0.25, 0.75)),  # with its statistics
        ("objective.name=simclr algorithm.weight=uniform", False, (0.5, 0.5)),
        ("objective.name=cco algorithm.weight=uniform", False, (0.5, 0.5)),
    ],
)
def test_clients_count_by_their_samples_or_all_the_same(
    words: str, merges: bool, shares: tuple[float, float]
) -> None:
    """One step each, where a cohort may be merged; with ``uniform`` it must not be."""
    engine, server = made("algorithm.name=fedavg", *words.split(), sizes=(4, 12))
    assert engine.merges == merges
    start, own = server.weights, []
    for k in range(2):
        client = engine.client(np.array([k]), 0, remember=False)
        own.append(engine.algorithm.train(client, start)["change"])
    moved, expected = train(engine, server, 1) - start, shares[0] * own[0] + shares[1] * own[1]
    assert relative(moved, expected) < 1e-10 and relative(own[0], own[1]) > 1e-3
    if "norm=batch" in words:
        n = engine.trainer.flat.parameter_count
        assert moved[n:].norm() > 0.01 and relative(moved[n:], expected[n:]) < 1e-12


def test_the_centre_follows_the_encodings() -> None:
    engine, server = made()
    train(engine, server, rounds=1)
    before = dict(server.state["centre"])
    everyone = engine.client(np.arange(2), 1, remember=False)
    with torch.no_grad():
        engine.trainer.load(server.weights)
        f, g = everyone.encode_step(0).encodings
    step(engine, server, 1)
    expected = {"f": f.mean(0), "g": g.mean(0)}
    torch.testing.assert_close(server.state["centre"], expected, rtol=1e-9, atol=1e-9)
    assert relative(expected["f"], before["f"]) > 1e-6


def test_moments_cover_every_batch_of_the_pass_weighed_by_contribution() -> None:
    """Clients of 1 and 8 with batches of 2: the moments are those of the 3 samples used."""
    engine, server = made("algorithm.batch=2", sizes=(1, 8))
    cohort = engine.cohort(np.arange(2), 0)
    moments = cohort.mean(engine.algorithm.encode, server.weights, ORIGIN)
    parts = [encode(engine, 0, client=k) for k in range(2)]
    union = EncodedBatch(tuple(torch.cat(views) for views in zip(*parts, strict=True)))
    assert len(union.encodings[0]) == 3
    expected = engine.trainer.objective.moments(union, ORIGIN)
    torch.testing.assert_close(moments, expected, rtol=1e-9, atol=1e-12)

    engine, server = made("algorithm.local_epochs=1", "algorithm.batch=2", sizes=(8,))
    client = engine.client(np.array([0]), 0, remember=False)
    seen = client.mean(server.weights, lambda e: {"n": e.encodings[0][0, 0]})
    each = [float(encode(engine, 0, step)[0][0, 0]) for step in range(4)]
    assert float(seen["n"]) == pytest.approx(sum(each) / 4)


def test_a_remembered_pass_is_not_used_for_other_weights() -> None:
    engine, server = made()
    algorithm, ids, other = engine.algorithm, np.arange(2), server.weights * 1.1

    def update(disturb: bool, remember: bool) -> torch.Tensor:
        client = engine.client(ids, 0, remember)
        moments = algorithm.encode(client, server.weights, ORIGIN)
        if disturb:  # someone else used the network in between
            engine.trainer.load(other)
        return algorithm.descend(client, server.weights, ORIGIN, moments)["change"]

    plain = update(disturb=False, remember=False)
    assert relative(update(disturb=False, remember=True), plain) < 1e-12
    assert relative(update(disturb=True, remember=True), plain) < 1e-12
    client = engine.client(ids, 0, remember=True)
    moments = algorithm.encode(client, server.weights, ORIGIN)
    moved = algorithm.descend(client, other, ORIGIN, moments)["change"]
    assert relative(moved, plain) > 1e-3
    algorithm.descend(client, server.weights, ORIGIN, moments)
    again = algorithm.descend(client, server.weights, ORIGIN, moments)["change"]
    assert relative(again, plain) < 1e-12


def test_chunks_keep_to_their_limit() -> None:
    engine, _ = made("engine.chunk=6", sizes=(4, 4, 1, 4, 7, 2))
    cohort = engine.cohort(np.arange(6), 0)
    assert [c.tolist() for c in cohort._chunks()] == [[0], [1, 2], [3], [4], [5]]


def test_groups_select() -> None:
    groups = Groups(np.array([5, 3, 9, 1, 0]), np.array([0, 2, 2, 5]))
    members, sizes = groups.select(np.array([2, 0]))
    assert members.tolist() == [9, 1, 0, 5, 3] and sizes.tolist() == [3, 2]


ONE_STEP = [
    ("algorithm.name=dcco algorithm.radius=1e9", "sgd"),
    ("algorithm.name=dcco algorithm.radius=1e9 engine.merge=off", "lars"),
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
            more = (f"client.momentum={momentum}", f"algorithm.local_steps={steps}")
            given = ("objective.projector=32,16", f"client.optimizer={rule}", *more)
            engine, server = made(*words.split(), *given, sizes=(4, 4, 4))
            train(engine, server, 3)
            read = engine.algorithm.personal_weights
            states = [read(server, engine.states[k]) for k in range(3)]
            found[steps, momentum] = [server.weights, *(s for s in states if s is not None)]

    def same(steps: int) -> list[bool]:
        return [torch.equal(a, b) for a, b in zip(found[steps, 0], found[steps, 0.9], strict=True)]

    assert all(same(1)) and not all(same(2))
