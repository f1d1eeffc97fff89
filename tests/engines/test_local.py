"""The rules of a cohort, whatever the engine, and what the local engine promises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, settings, train

from fedssl.algorithms.fedavg import FedAvg
from fedssl.engines.local import LocalCohort
from fedssl.federation.aggregate import TooFewReplies, Weight
from fedssl.federation.cohort import Cohort
from fedssl.federation.task import ClientTask, client_task
from fedssl.federation.traffic import Argument, per_client
from fedssl.util.errors import UserError


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


class Asking:
    """Tasks without a body: cohorts of :class:`Scripted` know their replies."""

    @client_task(seen="mean", reveals="update")
    def average(self, client: Any) -> None:
        """Averaged."""

    @client_task(seen="each", reveals="update")
    def route(self, client: Any) -> None:
        """Seen by the server."""


ASKING = Asking()


class Scripted(Cohort):
    """A cohort whose clients reply as a table says; None is a reply that never came."""

    def __init__(
        self, table: dict[str, dict[int, Any]], minimum: int = 1, weight: Weight = "samples"
    ) -> None:
        super().__init__(np.array([2, 0, 1]), minimum, weight)
        self.table = table
        self.asked: list[tuple[str, list[int]]] = []

    def ask(self, task: ClientTask, payload: tuple[Argument, ...]) -> Iterator[Any]:
        self.asked.append((task.name, self.ids.tolist()))
        for k in self.ids:
            reply = self.table[task.name][int(k)]
            if reply is not None:
                tree = {"x": torch.tensor(float(reply))}
                yield np.array([k]), int(k) + 1 if self.weight == "samples" else 1, tree


@pytest.mark.parametrize(
    ("weight", "mean"), [("samples", (1 * 1 + 2 * 2 + 3 * 6) / 6), ("uniform", 3)]
)
def test_means_are_weighted(weight: Weight, mean: float) -> None:
    cohort = Scripted({"average": {0: 1, 1: 2, 2: 6}}, weight=weight)
    assert float(cohort.mean(ASKING.average)["x"]) == pytest.approx(mean)


def test_a_missing_reply_is_not_in_the_mean_and_its_client_is_not_asked_again() -> None:
    cohort = Scripted({"average": {0: 1, 1: None, 2: 6}, "route": {0: 1, 1: 1, 2: None}})
    assert float(cohort.mean(ASKING.average)["x"]) == pytest.approx((1 + 18) / 4)
    assert list(cohort.gather(ASKING.route)) == [0]
    assert cohort.asked == [("average", [0, 1, 2]), ("route", [0, 2])]
    assert cohort.missing == 2


@pytest.mark.parametrize(("verb", "task"), [("mean", "average"), ("gather", "route")])
@pytest.mark.parametrize("replies", [(1, None, None), (None, None, None)])
def test_too_few_replies_skip_the_round(verb: str, task: str, replies: tuple[Any, ...]) -> None:
    cohort = Scripted({task: dict(enumerate(replies))}, minimum=2)
    with pytest.raises(TooFewReplies, match=r"fewer than cohort\.minimum=2"):
        getattr(cohort, verb)(getattr(ASKING, task))


@pytest.mark.parametrize(
    ("verb", "task", "payload"),
    [
        ("mean", lambda client: None, ()),
        ("mean", "average", ()),
        ("mean", ASKING.route, ()),
        ("gather", ASKING.average, ()),
        ("mean", ASKING.average, (1, 2)),
    ],
    ids=["not declared", "a name", "seen one by one", "seen as a mean", "arguments"],
)
def test_misuse_of_a_task_is_a_clear_error(verb: str, task: Any, payload: tuple[Any, ...]) -> None:
    with pytest.raises(UserError) as refused:
        getattr(Scripted({}), verb)(task, *payload)
    assert refused.value.key == "algorithm.name" and refused.value.fix


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

    class Sums(FedAvg):
        @client_task(seen="mean", reveals="update", reply=lambda *_: {"x": torch.zeros(())})
        def average(self, client: Any, own: Any, same: Any) -> dict[str, torch.Tensor]:
            """Averaged."""
            return self.route(client, own, same)

        @client_task(seen="each", reveals="update", reply=lambda *_: {"x": torch.zeros(())})
        def route(self, client: Any, own: Any, same: Any) -> dict[str, torch.Tensor]:
            """Seen by the server."""
            seen[client.id] = float(own)
            return {"x": own + same}

    algorithm = engine.algorithm = Sums(FedAvg.Params("fedavg"), engine.algorithm.objective)
    cohort: LocalCohort = engine.cohort(np.arange(3), 0)
    own = per_client({k: torch.tensor(10.0 * k) for k in range(3)})
    replies = cohort.gather(algorithm.route, own, torch.tensor(1.0))
    assert {k: float(v["x"]) for k, v in replies.items()} == {0: 1.0, 1: 11.0, 2: 21.0}
    assert seen == {0: 0.0, 1: 10.0, 2: 20.0}
    mean = cohort.mean(algorithm.average, own, torch.tensor(0.0))
    assert float(mean["x"]) == pytest.approx((0 * 3 + 10 * 5 + 20 * 2) / 10)
