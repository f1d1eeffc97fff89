"""Settings are chosen on training images that no client has, and never on a test image."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from evaluation import check, data_of, evaluate
from helpers import refused
from torch import nn

from fedssl import config
from fedssl.config import Evaluate
from fedssl.data.dataset import Split
from fedssl.data.labels import draw_share
from fedssl.evaluate import heldout, linear
from fedssl.evaluate.features import extract
from fedssl.evaluate.registry import check_holdout, find_chooser
from fedssl.runs.build import build_experiment
from fedssl.runs.split import held_out_images, load_run_dataset, split_clients

SPEC = "heldout@20%"


def resolved(*words):
    common = ("partition.name=iid", "partition.clients=3", "cohort.size=null", "seed=5")
    return config.resolve(config.read_recipe("default"), [*common, *words])


def test_the_images_are_those_that_no_client_has(monkeypatch):
    settings = resolved("data.holdout=0.2", f"evaluate.protocols={SPEC}")
    dataset = load_run_dataset(settings)
    kept = held_out_images(settings, dataset)
    assert len(kept) > 200 and not set(kept) & set(split_clients(settings, dataset).members)
    session = build_experiment(settings)
    seen = []

    def spy(features, labels, *rest):
        seen.append((features, labels, rest))
        return 50.0

    monkeypatch.setattr(heldout, "accuracy", spy)
    assert session.evaluator.evaluate(session.trainer.initial) == {f"{SPEC}_top1": 50.0}
    ((features, labels, rest),) = seen
    assert rest == (10, 5)
    assert np.array_equal(labels, dataset.train.labels[kept])
    encoder = session.evaluator.tower(session.trainer.initial).encoder
    images = dataset.train.images[0][kept]
    torch.testing.assert_close(features, extract(encoder, images))


def test_a_network_with_a_classifier_is_chosen_by_it(monkeypatch):
    """And not by a probe, which says nothing about the number that is shown: none is taught."""
    monkeypatch.setattr(heldout, "accuracy", lambda *_: pytest.fail("a probe"))
    words = ("objective.name=supervised", "algorithm.name=centralized", "algorithm.batch=64")
    session = build_experiment(
        resolved(*words, "data.holdout=0.3", f"evaluate.protocols=[head,{SPEC}]")
    )
    weights, train = session.trainer.initial, session.dataset.train
    kept = draw_share(train.labels, 0.2, 10, 5)
    logits = extract(session.evaluator.tower(weights), train.images[0][kept])
    right = (logits.argmax(1) == train.labels[kept]).double()
    judged = session.evaluator.evaluate(weights)
    assert judged[f"{SPEC}_top1"] == pytest.approx(100 * float(right.mean()))
    # While it trains, where head is not watched.
    assert session.evaluator.evaluate(weights, (SPEC,)) == {f"{SPEC}_top1": judged[f"{SPEC}_top1"]}


def test_one_half_judges_the_other():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 3
    features = torch.eye(3, 40)[labels] + 0.8 * torch.randn(600, 40, generator=generator)
    # The images of a class in turn: 0, 3, 6 … are of class 0, so that 0, 6, 12 … are one half.
    first = torch.arange(600) % 6 < 3
    scores = [
        linear.accuracy(features[a], labels[a], features[b], labels[b], 3, "dcco", 1)
        for a, b in ((first, ~first), (~first, first))
    ]
    assert scores[0] != scores[1]
    assert heldout.accuracy(features, labels, 3, 1) == sum(scores) / 2
    alike = torch.randint(3, (600,), generator=generator)  # labels that features say nothing of
    assert heldout.accuracy(features, alike, 3, 1) < 45 < sum(scores) / 2
    assert heldout.accuracy(features, labels, 3, 2) != sum(scores) / 2  # its batches


def split():
    images = torch.randint(256, (300, 1, 4, 4), dtype=torch.uint8)
    return Split((images,), torch.arange(300) % 3)


def test_no_test_image_is_needed():
    settings, encoder = Evaluate(protocols=(SPEC,)), nn.Flatten()
    found = [
        evaluate(encoder, data_of(settings, split(), test, 3, holdout=0.2))
        for test in (None, replace(split(), labels=None))
    ]
    assert all(row.keys() == {f"{SPEC}_top1"} for row in found)


@pytest.mark.parametrize("key", ["protocols", "monitor"])
@pytest.mark.parametrize("holdout", [0.0, 0.1])
def test_images_that_are_trained_on_do_not_choose(key, holdout):
    settings = Evaluate(**{"protocols": ("knn",), key: (SPEC,)})
    fix = "Set data.holdout=0.2 when the run starts."
    with refused(f"evaluate.{key}", SPEC, says=fix):
        check_holdout(settings, holdout)
    with refused(f"evaluate.{key}", SPEC, says=fix):
        check(settings, split(), split(), 3, holdout=holdout)
    check(settings, split(), split(), 3, holdout=0.2)


def test_halves_that_cannot_be_made_are_refused():
    check(Evaluate(protocols=("heldout@2%",)), split(), split(), 3, holdout=0.1)
    rare = replace(split(), labels=torch.arange(300).clamp(max=2))  # where a larger share fails
    cases = replace(split(), cases=np.arange(300) % 150)
    for train, spec, holdout, says in (
        (split(), "heldout@1%", 0.1, "Use a larger share"),
        (rare, "heldout@1%", 0.1, "Use other protocols"),
        (cases, SPEC, 0.2, "labels are drawn by case here"),
    ):
        with refused("evaluate.protocols", spec, says=says):
            check(Evaluate(protocols=(spec,)), train, split(), 3, holdout)


def test_only_this_protocol_chooses():
    assert find_chooser(Evaluate(protocols=("knn", SPEC))) == f"{SPEC}_top1"
    for protocols in (None, ("knn", "semi@20%", "linear@20%")):
        assert find_chooser(Evaluate(protocols=protocols)) == ""
