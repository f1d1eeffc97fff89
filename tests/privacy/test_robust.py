"""Means among hostile clients: what the papers claim of them, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from helpers import engine_of, groups_of, made_split, refused, settings, timeless, train
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from torch import Tensor

from fedssl import config
from fedssl.config import Cohort
from fedssl.federation.aggregate import Aggregator, TooFewReplies
from fedssl.privacy import robust
from fedssl.privacy.robust import Robust
from fedssl.runs import loop
from fedssl.runs.build import build_experiment
from fedssl.util.trees import NothingToAverage, Tree, flatten

RULES = ("median", "trimmed", "krum")
SMALL = (
    "rounds=8", "data.size=8", "data.labels=80", "partition.name=iid", "partition.clients=6",
    "cohort.size=null", "objective.projector=32,16", "evaluate.protocols=knn",
    "evaluate.baselines=[]", "engine.threads=1", "schedule=constant",
)  # fmt: skip


def small(*words: str) -> config.Config:
    return config.resolve(config.read_recipe(None), [*SMALL, *words])


def rule(name: str, hostile: int = 1, cohort: int = 100) -> Robust:
    return Robust(Cohort(average=name, hostile=hostile), cohort)  # type: ignore[arg-type]


def combined(average: Aggregator, replies: list[Tree]) -> dict[str, Tensor]:
    """By the way that an engine takes, clients having very different numbers of samples."""
    each = (average.contribute("train", 10**i, reply, "samples") for i, reply in enumerate(replies))
    return flatten(average.combine("train", each))


def drawn(count: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=dtype)

    return [{"change": leaf(7), "more": {"a": leaf(2, 3)}, "loss": leaf()} for _ in range(count)]


@pytest.mark.parametrize("name", RULES)
@budget(max_examples=60)
@given(hostile=st.integers(0, 3), extra=st.integers(0, 3), seed=st.integers(0, 2**31))
def test_hostile_clients_cannot_leave_the_honest_range(
    name: str, hostile: int, extra: int, seed: int
) -> None:
    honest = drawn(hostile + 3 + extra, seed)
    attack = drawn(hostile, seed + 1, scale=1e6)
    replies = [*attack[:1], *honest, *attack[1:]]
    result = combined(rule(name, hostile), replies)
    for leaf, value in result.items():
        values = torch.stack([flatten(reply)[leaf] for reply in honest])
        assert bool((values.amin(0) <= value).all() and (value <= values.amax(0)).all())
    if hostile:
        mean = flatten(Aggregator().combine("train", ((1, reply) for reply in replies)))["change"]
        assert float(mean.abs().max()) > 1e3


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [5, 6, 13])
def test_equal_replies_give_exactly_that_reply(name: str, dtype: torch.dtype, count: int) -> None:
    one = drawn(1, seed=3, scale=0.1, dtype=dtype)
    result = combined(rule(name), one * count)
    for leaf, value in flatten(one[0]).items():
        assert torch.equal(result[leaf], value) and result[leaf].dtype == dtype


def columns(*values: float) -> list[Tree]:
    return [{"x": torch.tensor([v, -v], dtype=torch.float64)} for v in values]


def test_values_by_hand() -> None:
    odd, even = columns(4, 1, 100, 2, 3), columns(4, 1, 100, 2)
    assert combined(rule("median"), odd)["x"].tolist() == [3, -3]
    assert combined(rule("median"), even)["x"].tolist() == [3, -3]  # between 2 and 4
    assert combined(rule("trimmed", 1), odd)["x"].tolist() == [3, -3]
    assert combined(rule("trimmed", 1), columns(0, 1, 2, 6, 100))["x"].tolist() == [3, -3]
    assert combined(rule("trimmed", 0), even)["x"][0] == pytest.approx(107 / 4)
    # The 5 − 1 − 2 = 2 nearest of 2.4 are 3 and 1.5 (0.36 + 0.81), of 3 they are 2.4 and 4.
    assert combined(rule("krum", 1), columns(4, 1.5, 100, 3, 2.4))["x"].tolist() == [2.4, -2.4]


def test_large_numbers_that_cancel_leave_the_small_ones() -> None:
    replies: list[Tree] = [{"x": torch.tensor([v])} for v in (1e8, 1.0, 9e9, 1.0, -1e8, -9e9)]
    assert float(combined(rule("trimmed"), replies)["x"]) == 0.5


def test_krum_counts_exactly_its_nearest() -> None:
    """With n − f − 2 = 3 neighbours the pair at 0 loses to the four at 10; with 1 it would win."""
    replies = columns(0, 0, 10, 10.5, 11, 11.5)
    assert combined(rule("krum", 1), replies)["x"][0] in (10.5, 11)


def test_krum_does_not_look_at_the_loss_and_gives_one_clients_whole_reply() -> None:
    replies = [
        {"x": torch.tensor([float(x)]), "loss": torch.tensor(1e9 * (x == 3))}
        for x in (0, 2, 3, 4, 6)
    ]
    result = combined(rule("krum", 1), replies)
    assert result == {"x": torch.tensor([3.0]), "loss": torch.tensor(1e9)}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_reply_that_is_not_finite_is_one_more_hostile_one(name: str, poison: float) -> None:
    honest = drawn(4, seed=5)
    bad = {"change": torch.full((7,), poison), "more": {"a": torch.full((2, 3), poison)}}
    result = combined(rule(name), [bad | {"loss": torch.tensor(poison)}, *honest])
    assert all(bool(torch.isfinite(value).all()) for value in result.values())


@pytest.mark.parametrize("name", RULES)
def test_leaves_are_cut_into_slices_without_a_trace(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = drawn(6, seed=8)
    whole = combined(rule(name), replies)
    monkeypatch.setattr(robust, "SLICE", 2)
    cut = combined(rule(name), replies)
    assert all(torch.equal(whole[leaf], cut[leaf]) for leaf in whole)


def test_a_bare_tensor_is_a_reply_too() -> None:
    replies: list[Tree] = [torch.tensor([float(i)]) for i in (1, 2, 9)]
    assert rule("median").combine("t", ((1, r) for r in replies)) == torch.tensor([2.0])


@pytest.mark.parametrize(("name", "need"), [("trimmed", 5), ("krum", 7)])
def test_too_few_replies_skip_the_round(name: str, need: int) -> None:
    combined(rule(name, 2), drawn(need, seed=0))
    with pytest.raises(TooFewReplies, match=rf"{need - 1} replies to train.*needs {need}"):
        combined(rule(name, 2), drawn(need - 1, seed=0))
    with pytest.raises(NothingToAverage):
        rule(name, 2).combine("train", iter(()))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("cohort.average=trimmed cohort.hostile=3", "cohort.average"),  # 6 clients, of 7
        ("cohort.average=krum cohort.hostile=2", "cohort.average"),
        ("cohort.average=krum cohort.hostile=1 cohort.size=4", "cohort.average"),
        ("cohort.average=median cohort.hostile=-1", "cohort.hostile"),
        ("cohort.average=median algorithm.name=centralized", "cohort.average"),
        ("cohort.average=krum algorithm.name=standalone", "cohort.average"),
        ("cohort.average=median privacy.noise=1 objective.bound=1", "cohort.average"),
        ("cohort.average=krum privacy.secure=true", "cohort.average"),
    ],
)
def test_robust_means_that_do_not_protect_are_refused(words: str, key: str) -> None:
    with refused(key):
        build_experiment(small(*words.split()))


@pytest.mark.parametrize("words", ["trimmed cohort.hostile=2", "krum cohort.hostile=1"])
def test_the_smallest_cohorts_that_are_enough(words: str) -> None:
    engine = build_experiment(small("cohort.size=5", *f"cohort.average={words}".split())).engine
    assert isinstance(engine.aggregator, Robust) and not engine.merges


@pytest.mark.parametrize("name", RULES)
def test_a_run_learns(name: str, tmp_path: Path) -> None:
    loop.run(small(f"cohort.average={name}", "server.lr=0.003"), tmp_path / "run")
    losses = [row["loss"] for row in timeless(tmp_path / "run")]
    assert len(losses) == 8 and sum(losses[-2:]) < 0.9 * sum(losses[:2])


@pytest.mark.parametrize("name", RULES)
def test_a_poisoned_run_stays_near_the_honest_one(name: str) -> None:
    """One of eight clients sends a million times its change: only the plain mean runs away."""
    honest = moved(Aggregator(), factor=1.0)
    assert 0.1 * honest < moved(rule(name), factor=-1e6) < 3 * honest
    assert moved(Aggregator(), factor=-1e6) > 1000 * honest


def moved(average: Aggregator, factor: float) -> float:
    """How far a round goes in which client 3 sends ``factor`` times its change."""
    config = settings("algorithm.name=fedavg", "engine.merge=off")
    engine, server = engine_of(config, made_split(), groups_of(*[5] * 8))
    engine.aggregator = average
    honest = engine.algorithm.train  # type: ignore[attr-defined]

    @functools.wraps(honest)
    def attacked(client, received):  # type: ignore[no-untyped-def]
        reply = honest(client, received)
        return reply | {"change": reply["change"] * (factor if client.id == 3 else 1)}

    engine.algorithm.train = attacked  # type: ignore[attr-defined]
    return float((train(engine, server, 1) - engine.trainer.initial).norm())
