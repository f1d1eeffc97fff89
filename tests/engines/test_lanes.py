"""Clients side by side give what they give one after another."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers import engine_of, groups_of, made_split, settings, train

from fedssl import workspace
from fedssl.client import Client
from fedssl.engines.lanes import Lanes
from fedssl.engines.local import LocalEngine
from fedssl.trees import flatten

BYOL = ["objective.name=byol", "objective.projector=32,16", "objective.predictor=32,16"]
MOCO = ["objective.name=moco", "objective.projector=32,16", "objective.queue=20"]
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA"))
SIZES = (20, 24, 5, 20, 16)  # one is smaller than a batch


@pytest.fixture(autouse=True)
def no_code_for_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    if request.node.callspec.params["device"] == "cpu":
        monkeypatch.setattr(
            workspace,
            "compiled",
            lambda f, **_: torch.compile(f, dynamic=False, backend="aot_eager"),
        )


def engine_with(words: list[str], lanes: int, device: str) -> tuple[LocalEngine, torch.Tensor]:
    config = settings(
        "algorithm.local_epochs=2", "algorithm.batch=8", "client.momentum=0.9",
        "encoder.norm=batch", "augment.name=flip", *words,
    )  # fmt: skip
    engine, server = engine_of(config, made_split(sum(SIZES), 3, 8), groups_of(*SIZES), device)
    engine.work.compiles = True
    engine.lanes = Lanes(engine.work, lanes) if lanes else None
    return engine, train(engine, server, 3)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.name=fedavg", *BYOL],
        ["algorithm.name=fedema", *BYOL],
        ["algorithm.name=ditto", "algorithm.lambda=0.5", *MOCO],
        ["algorithm.name=fedavg", "algorithm.norm_policy=local", *MOCO],
    ],
    ids=["fedavg", "fedema", "ditto", "norms"],
)
def test_side_by_side_as_one_by_one(
    words: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, str, int]] = []
    inner = Client.train

    def train(self: Client, *args: object, **kwargs: object) -> object:
        seen.append((self.round, threading.current_thread().name, id(self.work)))
        return inner(self, *args, **kwargs)  # type: ignore[arg-type]

    alone, plain = engine_with(words, 0, device)
    monkeypatch.setattr(Client, "train", train)
    engine, fast = engine_with(words, 3, device)
    close = 0.0 if device == "cpu" else 1e-9
    torch.testing.assert_close(fast, plain, rtol=close, atol=close)
    for client in alone.states:
        found, expected = (flatten(e.states[client]) for e in (engine, alone))
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=close, atol=close)
    # All is compiled by the first round's clients, one after another; then there are three
    # networks.
    assert {name for round, name, _ in seen if round == 0} == {"MainThread"}
    assert {name.startswith("client") for round, name, _ in seen if round > 0} == {True}
    assert [len({work for r, _, work in seen if r == round}) for round in range(3)] == [1, 3, 3]


@pytest.mark.parametrize("device", ["cpu"])
def test_waves_are_even_and_a_watched_round_is_not_shared(device: str) -> None:
    engine, _ = engine_with(["algorithm.name=fedavg", *BYOL], 5, device)
    lanes = engine.lanes
    assert lanes is not None and lanes.knows("train") and not lanes.knows("other")
    assert [lanes.width(n) for n in (1, 2, 5, 6, 7, 8, 11, 100)] == [1, 2, 5, 3, 4, 4, 4, 5]
    engine.work.watched = {}
    assert not lanes.knows("train")


@pytest.mark.parametrize("device", ["cpu"])
def test_what_fails_beside_others_is_told(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_with(["algorithm.name=fedavg", *BYOL], 3, device)

    def broken(work: workspace.Workspace) -> None:
        raise torch.OutOfMemoryError("no memory")

    assert engine.lanes is not None
    with pytest.raises(torch.OutOfMemoryError):
        engine.lanes.run([lambda work: None, broken])
