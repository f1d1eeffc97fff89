"""Evaluation takes the right weights, at the right size, of the right tower."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import replace_task
from PIL import Image
from torch._inductor.runtime.cache_dir_utils import cache_dir as torch_cache

from fedssl import config
from fedssl.data.dataset import Split
from fedssl.data.labels import draw_share
from fedssl.runs import loop
from fedssl.runs.build import build_experiment, compiles_steps
from fedssl.runs.reevaluate import evaluate
from fedssl.runs.validate import list_warnings
from fedssl.util.errors import UserError

SMALL = (
    *("rounds=2", "cohort.size=6", "objective.projector=32,32,16", "evaluate.protocols=knn"),
    *("evaluate.baselines=[]", "engine.threads=1"),
)
QUIET = "algorithm.name=fedavg"  # of whose clients there is nothing to say


def small(*words: str) -> config.Config:
    return config.resolve(config.read_recipe(None), [*SMALL, *words])


def notes(*words: str) -> list[str]:
    """The warnings before the first round."""
    return list(list_warnings(build_experiment(small(QUIET, *words))))


def test_judging_at_another_size_and_without_labels() -> None:
    same, other = build_experiment(small()), build_experiment(small("evaluate.size=24"))
    assert other.evaluator.data.train.images[0].shape[2:] == (24, 24)
    weights = same.trainer.initial
    assert same.evaluator.evaluate(weights) != other.evaluator.evaluate(weights)
    unlabeled = build_experiment(small("evaluate.size=24", "evaluate.protocols=unlabeled"))
    assert unlabeled.evaluator.evaluate(weights)["effective_rank"] > 1


def test_more_neighbours_than_there_are_is_said_unless_nobody_chose_them() -> None:
    few = (
        *("data.labels=100", "evaluate.protocols=knn,knn@10,linear@10"),
        "evaluate.monitor=knn@50",
    )
    assert notes(*few, "evaluate.k=60") == [
        "evaluate.k=60: knn@10 has only 10 labelled samples; all vote",
        "evaluate.k=60: knn@50 has only 50 labelled samples; all vote",
    ]
    assert not notes(*few) and not notes("evaluate.protocols=linear@10", "evaluate.k=60")


def test_rounds_that_never_come_are_said() -> None:
    for rounds, every, said in ((3, 4, True), (4, 4, False), (0, 4, False), (3, 0, False)):
        line = "evaluate.every=4: there are 3 rounds, so only the end is evaluated"
        assert notes(f"rounds={rounds}", f"evaluate.every={every}") == [line] * said


KINDS = {"cat": 6, "newt": 2, "owl": 6}


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("data.labels=9", "data.labels=9: needs 3 samples of each class, but class newt has 2"),
        ("data.holdout=0.7", "data.holdout=0.7: takes 3 samples of each class, but class newt has"),
        ("evaluate.protocols=linear@9", "linear@9: needs 3 samples of each class, but c"),
        ("evaluate.protocols=linear@70%", "linear@70%: takes 3 samples of each class, but class n"),
        ("evaluate.monitor=semi@70%", "evaluate.monitor=semi@70%: takes 3 samples of each class, "),
    ],
)
def test_a_class_of_which_there_are_too_few_is_called_by_its_name(
    tmp_path: Path, word: str, line: str
) -> None:
    files = [f"train/{name}/{k}.png" for name, n in KINDS.items() for k in range(n)]
    for number, file in enumerate([*files, *(f"test/{name}/0.png" for name in KINDS)]):
        path = tmp_path / "photos" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 10 * number).save(path)
    where = ("data.name=folder", f"data.root={tmp_path / 'photos'}", f"data.cache={tmp_path}")
    given = ("partition.name=iid", "partition.clients=2", "cohort.size=2", *where, word)
    with pytest.raises(UserError) as error:
        build_experiment(small(*given))
    assert line in str(error.value) and "class newt has 2. " in str(error.value)


def test_the_second_tower_is_judged_by_its_own_weights() -> None:
    words = ("encoder.towers=2", "data.halves=true")
    first = build_experiment(small(*words))
    second = build_experiment(small(*words, "evaluate.tower=second"))
    weights = first.trainer.initial
    scores = first.evaluator.evaluate(weights), second.evaluator.evaluate(weights)
    assert scores[0] != scores[1]
    spoilt = weights.clone()
    named = first.trainer.flat.named(spoilt)
    for name, tensor in named.items():
        if name.startswith("towers.1."):
            tensor.zero_()
    assert first.evaluator.evaluate(spoilt) == scores[0]
    assert second.evaluator.evaluate(spoilt)["knn_top1"] < 30


@pytest.mark.parametrize("towers", [1, 2])
def test_rows_of_untrained_and_given_weights(towers: int, tmp_path: Path) -> None:
    words = ("server.lr=0.01", f"encoder.towers={towers}")
    plain = loop.run(small(*words, "rounds=20"), tmp_path / "a")
    assert plain["untrained"] != plain["result"]
    given = small(*words, f"encoder.init={tmp_path / 'a'}")
    after = loop.run(given, tmp_path / "b")
    assert after["untrained"] == plain["untrained"]
    assert after["initial"] == plain["result"]
    starts = [next(t.encoder.parameters()) for t in build_experiment(given).trainer.network.towers]
    assert towers == 1 or not torch.equal(*starts), "each tower has a file of its own"


def test_standalone_is_judged_by_its_clients_models() -> None:
    words = ("algorithm.name=standalone", "partition.name=iid", "partition.clients=8")
    session = build_experiment(small(*words, "server.lr=0.05"))
    for round in range(3):
        session.server.round = round
        cohort = session.engine.cohort(session.draw_cohort(round), round)
        session.algorithm.round(session.server, cohort)
    assert len(session.models.personal_models(3)) == 3
    evaluator, models = session.evaluator, session.models
    five = models.personal_models(5).values()
    score = evaluator.evaluate_result(models)["knn_top1"]
    assert score == pytest.approx(np.mean([evaluator.evaluate(w)["knn_top1"] for w in five]))
    assert score != evaluator.evaluate(session.trainer.initial)["knn_top1"]


@pytest.mark.parametrize("cases", [False, True])
def test_the_heads_accuracy_by_hand(cases: bool) -> None:
    words = ("algorithm.name=centralized", "objective.name=supervised", "evaluate.protocols=head")
    session = build_experiment(config.resolve(config.read_recipe(None), words))
    test = session.dataset.test
    assert test is not None and test.labels is not None
    order = torch.argsort(test.labels, stable=True)[:348]
    groups = np.arange(348) // 2 if cases else None
    labels = test.labels[order]
    if cases:  # a case has one label
        labels = labels[::2].repeat_interleave(2)
    made = Split((test.images[0][order],), labels, cases=groups)
    dataset = replace(session.dataset, test=made)
    session.evaluator.data = replace(session.evaluator.data, dataset=dataset)
    score = session.evaluator.evaluate(session.trainer.initial)["head_top1"]
    with torch.no_grad():
        logits = session.tower().eval()(made.images[0].float() / 255)
    if cases:
        logits, labels = (logits[::2] + logits[1::2]) / 2, labels[::2]
    assert score == pytest.approx(100 * float((logits.argmax(1) == labels).double().mean()))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("encoder.norm=batch", "partition.samples=1"), "encoder.norm=batch: needs batches"),
        (("encoder.norm=batch", "algorithm.batch=1"), "encoder.norm=batch: needs batches"),
        (("partition.samples=1", "cohort.size=1"), "cohort.size=1: a round may have only 1"),
        (
            ("objective.name=supervised", "algorithm.name=fedavg", "encoder.towers=2"),
            "encoder.towers=2",
        ),
        (("evaluate.every=1", "evaluate.monitor=head"), "evaluate.monitor=head"),
        (("evaluate.every=1", "evaluate.monitor=unlabeled", "evaluate.targets=7"), "of all labels"),
        (("device=meta",), "device=meta: not available"),
    ],
)
def test_what_could_not_work_is_refused(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_experiment(config.resolve(config.read_recipe(None), words))


def test_a_cpu_may_have_a_number() -> None:
    assert build_experiment(small("device=cpu:0")).trainer.device == torch.device("cpu", 0)


def test_an_error_in_a_clients_work_is_not_a_missing_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    session = build_experiment(small())

    def broken(*_: object) -> None:
        raise ValueError("a bug")

    replace_task(monkeypatch, session.algorithm, "encode", broken)
    with pytest.raises(ValueError, match="a bug"):
        session.algorithm.round(session.server, session.engine.cohort(session.draw_cohort(0), 0))


@pytest.mark.parametrize(
    "partition",
    ["iid partition.clients=3", "classes partition.clients=5", "dirichlet partition.clients=3",
     "samples partition.samples=8"],
)  # fmt: skip
def test_held_out_images_are_nobodys(partition: str) -> None:
    """FedEMA, appendix B.3: what semi fine-tunes on was not pretrained on."""
    words = ["data.holdout=0.1", f"partition.name={partition.split()[0]}", partition.split()[1]]
    words += ["cohort.size=null"]
    session = build_experiment(config.resolve(config.read_recipe(None), words))
    train = session.dataset.train
    assert train.labels is not None
    out = draw_share(train.labels, 0.1, 10, 0).numpy()
    members = session.engine.groups.members
    assert len(np.unique(members)) == len(members)
    assert not np.intersect1d(members, out).size
    if not partition.startswith("samples"):
        assert len(members) + len(out) == len(train)


def test_the_norm_layers_of_a_run_judged_on_other_data(tmp_path: Path) -> None:
    """The new data has other clients; the mean is by the samples of the run's own."""
    words = [
        "algorithm.norm_policy=local", "algorithm.name=fedavg", "partition.name=iid",
        "partition.clients=3", "cohort.size=null", "rounds=1", "evaluate.baselines=[]",
        "evaluate.protocols=knn", "objective.projector=64,32",
    ]  # fmt: skip
    loop.run(config.resolve(config.read_recipe(None), words), tmp_path / "run")
    assert evaluate(tmp_path / "run", ["data.size=12"])["result"]["knn_top1"] > 50


def test_centralized_training_is_judged_on_the_clients_of_the_partition() -> None:
    words = [
        "algorithm.name=centralized", "partition.name=classes", "partition.clients=5",
        "cohort.size=null", "evaluate.protocols=per-client", "rounds=0",
    ]  # fmt: skip
    session = build_experiment(config.resolve(config.read_recipe(None), words))
    session.evaluator.evaluate_clients(session.models)
    assert len(session.evaluator.client_scores["global"]) == 5


@pytest.mark.parametrize(
    "words",
    [
        "algorithm.name=ccl objective.name=moco objective.projector=[16,8] algorithm.neighbours=4",
        "algorithm.name=featarc objective.name=simclr objective.projector=[16,8]",
    ],
)
def test_long_runs_compile_by_themselves_on_a_gpu(words: str) -> None:
    local = "partition.name=iid partition.clients=10 algorithm.batch=16 algorithm.local_epochs=1"
    experiment = build_experiment(small(*words.split(), *local.split()))
    trainer, algorithm = experiment.trainer, experiment.engine.algorithm
    found = {}
    for device, rounds, choice in product(("cpu", "cuda"), (5, 50), ("auto", "off")):
        trainer.device = torch.device(device)
        engine = replace(trainer.config.engine, compile=choice)
        trainer.config = replace(trainer.config, rounds=rounds, engine=engine)
        found[device, rounds, choice] = compiles_steps(trainer, algorithm, experiment.clients)
    assert [case for case, compiles in found.items() if compiles] == [("cuda", 50, "auto")]


def test_compiled_code_is_kept_beside_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in torch's temporary folder; a folder that the user has named stays."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "theirs"))
    words = "algorithm.name=fedavg", "algorithm.batch=8", "engine.compile=on"
    build_experiment(small(*words, f"data.cache={tmp_path}"))
    assert torch_cache() == str(tmp_path / "theirs")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    build_experiment(small(*words, f"data.cache={tmp_path}"))
    assert torch_cache() == str(tmp_path / "compiled")
