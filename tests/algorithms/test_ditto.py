"""Ditto (the second paper's Algorithm 1): personal models beside an undisturbed global one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, refused, relative, siamese, step
from plain import Plain, assert_network, loops_of
from rounds import run_of
from safetensors.torch import load_file
from torch import Tensor

from fedssl.config import Config
from fedssl.data.random import choose, key
from fedssl.evaluate import linear
from fedssl.evaluate.evaluator import MOST_EVALUATED
from fedssl.runs import loop
from fedssl.runs.build import Experiment, build_experiment
from fedssl.runs.result import format_result
from fedssl.training.optim import Pull

SIZES = (6, 9)


def ditto(objective: str, *words: str) -> Config:
    return siamese(objective, "algorithm.name=ditto", "algorithm.local_epochs=1", *words)


def trained(config: Config, rounds: int = 3) -> tuple[list[Tensor], list[Any]]:
    """The global model after each round, and what the clients have at the end."""
    engine, server = engine_of(config, made_split(), groups_of(*SIZES))
    path = []
    for round in range(rounds):
        step(engine, server, round)
        path.append(server.weights)
    return path, [engine.states[k] for k in range(len(SIZES))]


@pytest.mark.parametrize("objective", ["byol", "moco", "simclr"])
def test_lambda_0_is_standalone_training(objective: str) -> None:
    _, personal = trained(ditto(objective, "algorithm.lambda=0"))
    _, alone = trained(ditto(objective, "algorithm.name=standalone"))
    for own, other in zip(personal, alone, strict=True):
        assert relative(own["personal"]["weights"], other["weights"]) < 1e-9
        assert own["personal"].keys() - {"weights"} == other.keys() - {"weights", "rule"}
        if objective != "simclr":
            assert relative(own["personal"]["target"], other["target"]) < 1e-9
        if objective == "moco":
            queues = (state["memory"]["queue"] for state in (own["personal"], other))
            assert relative(*queues) < 1e-7


@pytest.mark.parametrize("objective", ["byol", "moco"])
def test_the_global_model_is_fedavgs_whatever_lambda(objective: str) -> None:
    expected, states = trained(ditto(objective, "algorithm.name=fedavg"), rounds=2)
    for lambda_ in (0, 0.1, 5):
        path, own = trained(ditto(objective, f"algorithm.lambda={lambda_}"), rounds=2)
        assert all(map(torch.equal, path, expected))
        for mine, other in zip(own, states, strict=True):
            assert "target" not in other or torch.equal(mine["target"], other["target"])


def test_a_large_lambda_holds_personal_models_to_the_global_one() -> None:
    distances = []
    for lambda_ in (0, 0.1, 1, 5):
        path, own = trained(ditto("byol", f"algorithm.lambda={lambda_}"))
        # What v was pulled to last is the model that the last round began with.
        distances.append([float((s["personal"]["weights"] - path[-2]).norm()) for s in own])
    for of_one in zip(*distances, strict=True):
        assert list(of_one) == sorted(of_one, reverse=True) and of_one[-1] < 0.9 * of_one[0]


@pytest.mark.parametrize("objective", ["byol", "moco"])
def test_one_run_serves_several_lambdas(objective: str) -> None:
    """Bit for bit the models that a run for each λ has, beside one global model."""
    path, states = trained(ditto(objective, "algorithm.lambda=0", "algorithm.also=[0.5,5]"))
    for lambda_, name in ((0, "personal"), (0.5, "lambda-0.5"), (5, "lambda-5")):
        alone, expected = trained(ditto(objective, f"algorithm.lambda={lambda_}"))
        assert all(map(torch.equal, path, alone))
        for mine, other in zip(states, expected, strict=True):
            assert mine[name].keys() == other["personal"].keys()
            assert torch.equal(mine[name]["weights"], other["personal"]["weights"])
            assert torch.equal(mine[name]["target"], other["personal"]["target"])


def test_each_further_lambda_is_evaluated_in_the_clients() -> None:
    session = small("algorithm.lambda=0", "algorithm.also=[0.5,5]")
    result = step(session.engine, session.server, 0)
    assert result.passes == 4
    models, evaluator = session.models, session.evaluator
    results, further = evaluator.evaluate_clients(models), dict[str, dict[int, Tensor]]()
    for name, client, weights in models.list_client_models():
        further.setdefault(name, {})[client] = weights
    assert [*further] == ["personal", "lambda-0.5", "lambda-5"] and models.has_further
    for name, own in further.items():
        scores = [evaluator._score_clients(weights)[k] for k, weights in own.items()]
        assert results[f"per-client_{name}_top1"] == pytest.approx(float(np.mean(scores)))
        assert evaluator.client_scores[name].keys() == evaluator.client_scores["personal"].keys()


@pytest.mark.parametrize("also", ["[0.5,0.5]", "[0.1]"])
def test_a_lambda_is_given_once(also: str) -> None:
    with refused("algorithm.also"):
        ditto("byol", "algorithm.lambda=0.1", f"algorithm.also={also}")


@pytest.mark.parametrize("objective", ["byol", "simclr"])
def test_the_proximal_term_is_part_of_the_loss(objective: str) -> None:
    """λ/2 ‖v − w‖² added to a plain loop's loss, with momentum and weight decay; buffers too."""
    config = ditto(objective, "algorithm.lambda=2")
    engine, server = engine_of(config, made_split(), groups_of(*SIZES))
    _, loop = loops_of(Plain, config, *SIZES)
    for round in range(3):
        w = engine.trainer.flat.named(server.weights.clone())
        loop.pull = (2.0, [w[name] for name, _ in loop.network.named_parameters()])
        step(engine, server, round)
        loop.round(round)
        own = engine.states[1]["personal"]["weights"]
        assert_network(engine, own, loop.network.state_dict())


def small(*words: str) -> Experiment:
    return build_experiment(run_of("ditto", *words))


@pytest.mark.parametrize(
    ("words", "models"),
    [
        ([], {"global", "personal"}),
        (["algorithm.name=fedavg"], {"global"}),
        (["algorithm.name=fedavg", "algorithm.norm_policy=local"], {"global", "personal"}),
        (["algorithm.name=standalone"], {"personal"}),
    ],
    ids=["ditto", "fedavg", "fedbn", "standalone"],
)
def test_every_client_is_judged_by_each_model_there_is(words: list[str], models: set[str]) -> None:
    session = small(*words)
    evaluator = session.evaluator
    untrained = evaluator.evaluate_untrained(session.untrained())  # one model is everybody's
    assert untrained.keys() == {f"per-client_{what}" for what in ("top1", "worst", "spread")}
    scores = list(evaluator._score_clients(session.trainer.initial))
    assert untrained["per-client_top1"] == pytest.approx(float(np.mean(scores)))
    step(session.engine, session.server, 0)
    results = evaluator.evaluate_clients(session.models)
    assert results.keys() == {
        f"per-client_{model}_{what}" for model in models for what in ("top1", "worst", "spread")
    }
    if models != {"global", "personal"}:
        return
    own = [session.models.personal_model(k) for k in range(4)]
    for k, state in enumerate(map(session.engine.states.on_host, range(4))):
        assert "personal/weights" not in state or torch.equal(own[k], state["personal/weights"])
    scores = [evaluator._score_clients(model)[k] for k, model in enumerate(own)]
    assert results["per-client_personal_top1"] == pytest.approx(float(np.mean(scores)))
    assert results["per-client_personal_worst"] == min(scores)


SOME = '''
from fedssl.algorithms.fedavg import FedAvg
from fedssl.federation.algorithm import Result
from fedssl.federation.task import client_task


class Some(FedAvg):
    """Only the first client keeps a model of its own; the others have the global one."""

    result = Result("personal")

    def personal_weights(self, server, state):
        return state.get("own")

    @client_task(seen="mean", reveals="update")
    def train(self, client, received):
        reply = super().train(client, received)
        client.state["met"] = received[:1]
        if client.id == 0:
            client.state["own"] = client.trainer.flat.vector.clone()
        return reply
'''


def test_the_one_client_that_has_a_model_is_judged_with_its_own_probe(tmp_path: Path) -> None:
    """Though it is not among the few that an evaluation would draw of all."""
    (tmp_path / "some.py").write_text(SOME)
    words = (f"algorithm.name={tmp_path / 'some.py'}:Some", "partition.clients=8", "seed=4")
    more = ("evaluate.protocols=linear,per-client", "client.lr=3", "algorithm.local_steps=3")
    session = small(*words, *more)
    assert 0 not in choose(key(4, "judged"), 8, MOST_EVALUATED)
    step(session.engine, session.server, 0)
    own = session.engine.states.on_host(0)["own"]
    results = session.evaluator.evaluate_result(session.models)
    assert results["linear_top1"] == session.evaluator.evaluate(own)["linear_top1"]
    alone = session.evaluator._score_clients(own)[0]
    assert results["per-client_personal_top1"] == alone
    other = session.evaluator._score_clients(session.trainer.initial)[0]
    assert alone != other


@pytest.mark.parametrize(
    ("words", "fits", "few"),
    [
        # Four models, the global one and an untrained one; linear@40 has others.
        ([], 6, 6),
        (["algorithm.name=fedavg", "algorithm.norm_policy=local"], 6, 2),
        (["algorithm.name=standalone"], 5, 5),
    ],
    ids=["ditto", "fedbn", "standalone"],
)
def test_a_model_has_one_probe_for_both_protocols(
    words: list[str], fits: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = small(*words, "evaluate.protocols=[linear,per-client,linear@40]")
    evaluator = session.evaluator
    step(session.engine, session.server, 0)
    fitted, fit = [], linear.fit
    monkeypatch.setattr(linear, "fit", lambda *given: fitted.append(0) or fit(*given))
    untrained = evaluator.evaluate_untrained(session.untrained())
    result = evaluator.evaluate_result(session.models)
    assert len(fitted) == fits + few
    alone = evaluator.evaluate_clients(session.models)  # every model again, with its own probe
    assert alone.items() <= result.items() and len({*alone.values()}) > 1
    scores = evaluator._score_clients(session.trainer.initial)
    assert untrained["per-client_top1"] == pytest.approx(float(scores.mean()))
    assert len(fitted) == 2 * fits + few


def test_a_client_that_joins_late_starts_its_own_model_at_the_beginning() -> None:
    """Algorithm 1 initializes every v_k before the first round."""
    config = siamese("byol", "algorithm.name=ditto", "algorithm.lambda=0.5")
    engine, server = engine_of(config, made_split(), groups_of(9, 8, 8))
    step(engine, server, 0, 0, 1)
    step(engine, server, 1, 0, 1)
    client = engine.client(np.array([2]), 2, remember=False)
    alone, _ = engine_of(config, made_split(), groups_of(9, 8, 8))
    expected = alone.client(np.array([2]), 2, remember=False)
    pull = Pull(0.5, server.weights)
    wanted = expected.train_from(alone.trainer.initial, {}, pull=pull).weights
    engine.algorithm.personalize(client, server.weights)
    assert relative(client.state["personal"]["weights"], wanted) < 1e-12


def test_the_global_row_and_file_are_those_of_fedavg(tmp_path: Path) -> None:
    words = (
        "partition.clients=3", "rounds=2", "evaluate.protocols=knn", "evaluate.every=1",
        "evaluate.monitor=knn", "engine.merge=off",
    )  # fmt: skip
    summaries = {}
    for name in ("fedavg", "ditto"):
        experiment = small(*words, f"algorithm.name={name}")
        summaries[name] = loop.run(experiment.config, tmp_path / name)
    assert summaries["ditto"]["global_knn_top1"] == summaries["fedavg"]["knn_top1"]
    one, other = ((tmp_path / n / "encoder.safetensors").read_bytes() for n in summaries)
    assert one == other
    trained = load_file(tmp_path / "ditto" / "encoder.safetensors")
    untrained = experiment.tower().encoder.state_dict()
    assert any(not torch.equal(trained[name], untrained[name]) for name in trained)
    lines = [json.loads(line) for line in (tmp_path / "ditto" / "metrics.jsonl").open()]
    assert all({"knn_top1", "global_knn_top1"} <= line.keys() for line in lines)
    rows = format_result(summaries["ditto"], experiment.config).splitlines()
    assert [line.split("  ")[0] for line in rows[2:]] == ["ditto, global", "ditto, personal"]
