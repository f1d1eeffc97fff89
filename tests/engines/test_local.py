"""The rules of a cohort, whatever the engine, and what the local engine promises."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, settings, train

from fedssl.engines.local import LocalCohort
from fedssl.federation.aggregate import TooFewReplies
from fedssl.federation.cohort import Cohort
from fedssl.federation.traffic import per_client


@pytest.mark.parametrize("algorithm", ["dcco", "fedavg", "standalone"])
def test_order_of_clients_does_not_matter(algorithm: str) -> None:
    results = []
    for order in (np.arange(5), np.array([3, 0, 4, 2, 1])):
        config = settings(f"algorithm.name={algorithm}", "engine.merge=off", "precision=fp32")
        engine, server = engine_of(config, made_split(), groups_of(3, 5, 2, 7, 2))
        train(engine, server, rounds=2, order=order)
        personal = [engine.states[k].get("weights", server.weights) for k in range(5)]
        results.append(torch.cat([server.weights, *personal]))
    assert torch.equal(*results)


def test_number_of_threads_does_not_matter() -> None:
    """One thread and two: the same numbers up to the order of additions inside a kernel."""
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        engine, server = engine_of(settings(), made_split(), groups_of(3, 5, 2, 7, 2))
        results.append(train(engine, server, 3))
    assert relative(*results) < 1e-10


class Scripted(Cohort):
    """A cohort whose clients reply as a table says; None is a reply that never came."""

    def __init__(self, table: dict[str, dict[int, Any]], minimum: int = 1) -> None:
        declares_all = SimpleNamespace(check_asked=lambda *_: None)
        super().__init__(np.array([2, 0, 1]), cast(Any, declares_all), minimum)
        self.table = table
        self.asked: list[tuple[str, list[int]]] = []

    def ask(self, task: str, payload: tuple[Any, ...], weight: Any) -> Iterator[Any]:
        self.asked.append((task, self.ids.tolist()))
        for k in self.ids:
            reply = self.table[task][int(k)]
            if reply is not None:
                tree = {"x": torch.tensor(float(reply))}
                yield np.array([k]), int(k) + 1 if weight == "samples" else 1, tree


def test_mean_by_samples_and_uniform() -> None:
    table = {"a": {0: 1, 1: 2, 2: 6}}
    assert float(Scripted(table).mean("a")["x"]) == pytest.approx((1 * 1 + 2 * 2 + 3 * 6) / 6)
    assert float(Scripted(table).mean("a", weight="uniform")["x"]) == pytest.approx(3)


def test_a_missing_reply_is_not_in_the_mean_and_its_client_is_not_asked_again() -> None:
    cohort = Scripted({"a": {0: 1, 1: None, 2: 6}, "b": {0: 1, 1: 1, 2: None}})
    assert float(cohort.mean("a")["x"]) == pytest.approx((1 + 18) / 4)
    assert list(cohort.gather("b")) == [0]
    assert cohort.asked == [("a", [0, 1, 2]), ("b", [0, 2])]
    assert cohort.missing == 2


@pytest.mark.parametrize("verb", ["mean", "gather"])
def test_too_few_replies_skip_the_round(verb: str) -> None:
    cohort = Scripted({"a": {0: 1, 1: None, 2: None}}, minimum=2)
    with pytest.raises(TooFewReplies, match=r"1 replies to a, fewer than cohort.minimum=2"):
        getattr(cohort, verb)("a")
    with pytest.raises(TooFewReplies):
        getattr(Scripted({"a": {0: None, 1: None, 2: None}}), verb)("a")


def test_traffic_of_a_dcco_round() -> None:
    """Model once down, moments up and down, change up; 4-byte numbers, the loss is one of them."""
    for merge in ("auto", "off"):
        config = settings("precision=fp32", f"engine.merge={merge}")
        engine, server = engine_of(config, made_split(), groups_of(3, 5, 2))
        train(engine, server, rounds=1)
        cohort = engine.cohort(np.arange(3), 1)
        engine.algorithm.round(server, cohort)
        d, parameters = 16, engine.trainer.flat.parameter_count
        moments = 4 * (4 * d + d * d)
        assert dict(cohort.traffic.up) == {
            "encode": 3 * moments,
            "descend": 3 * 4 * (parameters + 1),
        }
        assert dict(cohort.traffic.down) == {
            "encode": 3 * 4 * (parameters + 2 * d),
            "descend": 3 * moments,
        }


def test_centralized_training_moves_nothing() -> None:
    engine, server = engine_of(
        settings("algorithm.name=centralized"), made_split(), groups_of(5, 5)
    )
    cohort = engine.cohort(np.array([0]), 0)
    engine.algorithm.round(server, cohort)
    assert not any(cohort.traffic.up.values()) and not any(cohort.traffic.down.values())


def test_payloads_per_client_reach_their_client_and_are_never_merged() -> None:
    engine, _ = engine_of(settings(), made_split(), groups_of(3, 5, 2))
    seen: dict[int, float] = {}

    def task(client: Any, own: torch.Tensor, same: torch.Tensor) -> dict[str, torch.Tensor]:
        seen[client.id] = float(own)
        return {"x": own + same}

    algorithm = cast(Any, engine.algorithm)
    algorithm.task, algorithm.means, algorithm.gathers = task, ("task",), ("task",)
    algorithm.reply_like = lambda task, trainer: {"x": torch.zeros(())}
    cohort: LocalCohort = engine.cohort(np.arange(3), 0)
    own = per_client({k: torch.tensor(10.0 * k) for k in range(3)})
    replies = cohort.gather("task", own, torch.tensor(1.0))
    assert {k: float(v["x"]) for k, v in replies.items()} == {0: 1.0, 1: 11.0, 2: 21.0}
    assert seen == {0: 0.0, 1: 10.0, 2: 20.0}
    assert float(cohort.mean("task", own, torch.tensor(0.0))["x"]) == pytest.approx(
        (0 * 3 + 10 * 5 + 20 * 2) / 10
    )
