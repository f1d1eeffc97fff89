"""Replies that do not come: ``cohort.dropout``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, record_task, relative, settings
from rounds import RUN

from fedssl import config
from fedssl.algorithms.dcco import DCCO
from fedssl.engines.local import LocalEngine
from fedssl.federation.cohort import Cohort
from fedssl.federation.driver import RoundResult, run_round
from fedssl.federation.server import Server
from fedssl.federation.task import client_task
from fedssl.runs import loop, metrics

SIZES = (1, 5, 2, 7, 1, 4)
DROPOUT = "cohort.dropout=0.3"


def made(*words: str) -> tuple[LocalEngine, Server]:
    return engine_of(settings(DROPOUT, *words), made_split(), groups_of(*SIZES))


def rounds_of(engine: LocalEngine, server: Server, count: int) -> list[RoundResult]:
    ids = np.arange(len(SIZES))
    return [run_round(engine.algorithm, server, engine.cohort(ids, r)) for r in range(count)]


def clients(seen: dict[tuple[int, int], object], round: int) -> set[int]:
    return {client for r, client in seen if r == round}


def test_a_lost_client_is_not_asked_again_and_stays_in_what_was_averaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand: moments over the clients of the first exchange, the update over those left."""
    sent = record_task(monkeypatch, DCCO, "encode")
    changed = record_task(monkeypatch, DCCO, "descend")
    engine, server = made("engine.merge=off", "objective.bound=1", "seed=1")
    (result, *_) = rounds_of(engine, server, 3)
    assert result.skipped is None
    first, second = clients(sent, 0), clients(changed, 0)
    assert second < first < set(range(len(SIZES)))  # with this seed both exchanges lose one
    assert result.missing == len(SIZES) - len(second)
    assert result.answered.tolist() == sorted(second)
    weight = {k: SIZES[k] / sum(SIZES[j] for j in first) for k in first}
    for name, total in changed[0, min(second)][2].items():
        expected = sum(weight[k] * sent[0, k][-1][name] for k in first)
        assert relative(total, expected) < 1e-12
    weight = {k: SIZES[k] / sum(SIZES[j] for j in second) for k in second}
    step = sum(weight[k] * changed[0, k][-1]["change"] for k in second)
    after = engine.trainer.initial + step
    assert relative(changed[1, min(clients(changed, 1))][0], after) < 1e-12


@pytest.mark.parametrize("words", ["engine.merge=auto", "engine.chunk=6"])
def test_a_merged_round_with_lost_replies_is_the_round_client_by_client(words: str) -> None:
    few = ("seed=1", "client.lr=0.001")  # 1: no round is left with a single sample
    plain, server = made("engine.merge=off", *few)
    results = rounds_of(plain, server, 4)
    assert sum(result.missing for result in results) > 4
    merged, other = made(words, *few)
    assert merged.merges
    again = rounds_of(merged, other, 4)
    assert [r.answered.tolist() for r in again] == [r.answered.tolist() for r in results]
    moved = server.weights - plain.trainer.initial
    assert moved.norm() > 1e-3 and relative(other.weights - merged.trainer.initial, moved) < 1e-9


class Asking:
    """A task without a body."""

    @client_task(seen="mean", reveals="update")
    def average(self, client: object) -> None:
        """Averaged."""


class Numbers(Cohort):
    """Clients who reply with a number."""

    def ask(self, task, payload):
        for k in self.ids:
            yield np.array([k]), 1.0, {"x": torch.tensor(1.0)}


def test_replies_are_lost_at_this_rate_in_every_exchange_anew() -> None:
    def left(draw: int) -> list[set[int]]:
        cohort, found = Numbers(np.arange(4000), 1, dropout=0.25, draw=draw), []
        for _ in range(3):
            cohort.mean(Asking().average)
            found.append(set(cohort.ids.tolist()))
        assert cohort.missing == 4000 - len(cohort.ids)
        return found

    found = left(5)
    for exchange, ids in enumerate(found, 1):
        expected = 4000 * 0.75**exchange
        assert abs(len(ids) - expected) < 5 * (expected * 0.25) ** 0.5
    assert left(5) == found != left(6)


def test_rounds_with_too_few_clients_left_are_skipped_and_counted(tmp_path: Path) -> None:
    words = [*RUN, "algorithm.name=fedavg", "objective.name=simclr", "cohort.dropout=0.6"]
    tree = config.read_recipe(None)
    loop.run(config.resolve(tree, [*words, "cohort.minimum=2", "seed=1"]), tmp_path)
    lines = [line for line in metrics.read(tmp_path) if line["round"]]
    skipped = [line for line in lines if line.get("skipped")]
    assert 0 < len(skipped) < len(lines) and sum(line["missing"] for line in lines) > 2
