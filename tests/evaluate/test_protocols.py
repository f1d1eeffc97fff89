from dataclasses import replace

import numpy as np
import pytest
import torch
from evaluation import check, data_of, evaluate
from helpers import refused
from torch import nn

from fedssl.config import Evaluate
from fedssl.data.dataset import Split
from fedssl.evaluate import knn, linear, semi
from fedssl.evaluate.registry import choose_protocols, parse_protocol

SHARE = "collaborative@10%"

UNLABELED = {"effective_rank", "alignment", "uniformity", "views_matched"}


def views(images, index, view):
    return images.float() / 255 + 0.1 * view


def split(n=60, classes=3, seed=0, noise=60, modalities=1):
    """Class c is bright in row c, so a flip changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    images = torch.randint(0, noise, (n, 1, classes, 4), generator=generator)
    images += 120 * nn.functional.one_hot(labels, classes)[:, None, :, None]
    blank = torch.zeros_like(images)
    both = (images.to(torch.uint8), blank.to(torch.uint8))
    return Split(both[:modalities], labels)


class Encoder(nn.Module):
    features = 12

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(12))
        self.images = 0

    def forward(self, x):
        self.images += len(x)
        return self.layer(x.flatten(1) - 0.5)


def run(settings, train, test, classes=3, seed=0, encoder=None):
    data = data_of(settings, train, test, classes, seed=seed)
    return evaluate(encoder or Encoder().eval(), data, views)


@pytest.mark.parametrize(
    ("spec", "name", "amount"),
    [
        *((name, name, None) for name in ("knn", "head", "per-client", "unlabeled")),
        ("linear@500", "linear", 500),
        ("linear@10%", "linear", 0.1),
        ("semi@0.7%", "semi", 0.007),
        ("collaborative@1%", "collaborative", 0.01),
    ],
)
def test_parse(spec, name, amount):
    protocol = parse_protocol(spec)
    assert (protocol.name, protocol.amount) == (name, amount)


@pytest.mark.parametrize(
    ("message", "specs"),
    [
        ("did you mean linear", ("liner", "liner@5")),
        ("did you mean per-client", ("per-cleint",)),
        ("unknown", ("svm", "")),
        (
            "whole number above 0",
            ("knn@", "knn@0", "knn@-5", "knn@1.5", "knn@five", "knn@5@6"),
        ),
        ("takes no number", ("unlabeled@5", "head@5", "per-client@5", "head@10%")),
        ("needs the share", ("linear@0%", "finetune@100%", "semi", "collaborative", "semi@500")),
        ("needs the share", [f"semi@{share}" for share in ("", "%", "-1%", "1e0%", "1%%", "x%")]),
    ],
)
def test_bad_specs_are_refused_in_one_line(message, specs):
    for spec in specs:
        with refused("evaluate.protocols", spec, says=message):
            parse_protocol(spec)


def test_protocols_by_default_and_by_name():
    labelled, bare = split(), Split(split().images)
    unknown = Split(split().images, torch.full((60,), -1))
    one_class = Split(split().images, torch.zeros(60, dtype=torch.int64))
    assert choose_protocols(Evaluate(), labelled, labelled) == ("knn", "linear")
    for train, test in (
        (labelled, None),
        (labelled, bare),
        (bare, labelled),
        (unknown, labelled),
        (labelled, unknown),
        (one_class, labelled),
    ):
        assert choose_protocols(Evaluate(), train, test) == ("unlabeled", "transfer")
        check(Evaluate(), train, test, 3)
    assert choose_protocols(Evaluate(protocols=("finetune",)), bare, None) == ("finetune",)


@pytest.mark.parametrize("key", ["protocols", "monitor"])
@pytest.mark.parametrize(
    "spec",
    ["knn", "linear", "finetune", "head", "per-client", "linear@30", "semi@10%", SHARE],
)
def test_labelled_protocols_without_labels_are_refused(spec, key):
    settings = Evaluate(**{"protocols": ("unlabeled",), key: (spec,)})
    labelled, bare = split(), Split(split().images)
    one_class = Split(split().images, torch.zeros(60, dtype=torch.int64))
    check(settings, labelled, labelled, 3)
    for train, test, message in (
        (labelled, None, "there is no test split"),
        (labelled, bare, "the test split has no labels"),
        (bare, labelled, "needs labels of at least two classes"),
        (one_class, labelled, "needs labels of at least two classes"),
    ):
        with refused(f"evaluate.{key}", spec, says=message):
            check(settings, train, test, 3)


@pytest.mark.parametrize(
    ("monitor", "value", "message"),
    [
        (("knnn",), "knnn", "unknown"),
        (("knn", "linear@1%"), "linear@1%", "less than one"),
        (("linear@31",), "linear@31", "31 labels"),
        (("semi@1%",), "semi@1%", "less than one"),
        (("semi@20%",), "semi@20%", "data.holdout=0.1 keeps fewer"),
        ((), (), "no protocol"),
    ],
)
def test_monitored_protocols_follow_the_same_rules(monitor, value, message):
    check(Evaluate(monitor=("knn", "linear@30", "semi@10%")), split(), split(), 3, holdout=0.1)
    with refused("evaluate.monitor", value, says=message):
        check(Evaluate(monitor=monitor), split(), split(), 3, holdout=0.1)


def test_targets_need_evaluations_between_rounds_and_an_accuracy():
    data = split()

    def settings(**keys):
        return Evaluate(targets=(70.0, 75.5), **keys)

    for good in (
        settings(every=1),
        settings(every=5, monitor=("linear",)),
        settings(every=5, protocols=("finetune", "knn")),
        Evaluate(monitor=("unlabeled",)),
    ):
        check(good, data, data, 3)
    for bad, fix in (
        (settings(), "Set evaluate.every"),
        (settings(every=1, monitor=("unlabeled", "semi@10%")), "Add linear or knn"),
        (settings(every=1, protocols=("finetune",)), "Add linear or knn"),
        (settings(every=1, monitor=("linear@30",)), "Add linear or knn, of all labels"),
        (settings(every=1, protocols=("knn",), monitor=("finetune",)), "Add linear or knn"),
    ):
        with refused("evaluate.targets", says=fix):
            check(bad, data, data, 3)
    with refused("evaluate.targets", says="only unlabeled"):
        check(settings(every=1), Split(data.images), None, 3)


@pytest.mark.parametrize("name", ["knn", "linear", "finetune"])
def test_labels_that_cannot_be_drawn_are_refused(name):
    data = split(60)
    cases = replace(data, cases=np.arange(60) % 30)
    check(Evaluate(protocols=(f"{name}@60",)), data, data, 3)
    check(Evaluate(protocols=(f"{name}@30",)), cases, data, 3)
    for train, count, message in (
        (data, 63, "21 samples of each class"),
        (data, 31, "between 3 classes"),
        (cases, 33, "class 0 has 10"),
    ):
        with refused("evaluate.protocols", f"{name}@{count}", says=message):
            check(Evaluate(protocols=(f"{name}@{count}",)), train, data, 3)


@pytest.mark.parametrize("side", [0, 1])
def test_a_case_with_two_labels_is_refused_before_training(side):
    data = [split(60), split(60)]
    data[side] = replace(data[side], cases=np.arange(60) // 2)
    with refused(None, says="case 0"):
        check(Evaluate(protocols=("knn",)), *data, 3)


def test_one_image_is_too_few_for_unlabeled():
    with refused("evaluate.protocols", says="at least two training images, not 1"):
        check(Evaluate(), Split((torch.zeros(1, 1, 2, 2, dtype=torch.uint8),)), None, 0)


def test_a_protocol_that_changes_what_it_gets_changes_no_other(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "def spoil(*sides):\n    [side.zero_() for side in sides[:4]]\n    return {'top1': 1}\n"
    )
    both = run(Evaluate(protocols=(f"{path}:spoil", "knn", "linear")), split(), split(seed=1))
    assert both.pop("spoil_top1") == 1
    assert both == run(Evaluate(protocols=("knn", "linear")), split(), split(seed=1))


@pytest.mark.parametrize("preset", ["logistic", "dcco", "fedema", "ccl"])
def test_judges_by_every_protocol_and_names_each(preset, monkeypatch):
    monkeypatch.setattr(semi, "HIDDEN", 64)
    names = ("knn", "linear", "linear@6", "knn@6", "semi@20%", "finetune@30")
    names += ("per-client", "unlabeled")
    result = run(Evaluate(protocols=names, preset=preset), split(), split(seed=1))
    accuracies = {k: v for k, v in result.items() if k.endswith("_top1")}
    assert list(accuracies) == [f"{name}_top1" for name in names[:6]]
    assert min(accuracies.values()) > 90.0
    assert set(result) - set(accuracies) == UNLABELED


def test_settings_reach_their_protocols(monkeypatch):
    seen = {}
    monkeypatch.setattr(knn, "accuracy", lambda *a: seen.setdefault("knn", a[-2:]) and 0.0)
    fit = linear.fit
    monkeypatch.setattr(linear, "fit", lambda *a: (seen.setdefault("linear", a[-2:]), fit(*a))[1])
    run(Evaluate(k=3, temperature=0.7, preset="dcco"), split(), split(), seed=5)
    assert seen == {"knn": (3, 0.7), "linear": ("dcco", 5)}


@pytest.mark.parametrize(
    ("protocols", "images"),
    [
        (("knn", "linear", "knn@6"), 90),
        (("unlabeled", "knn"), 90 + 2 * 60),
        (("unlabeled",), 60 * 3),  # plain and both views, no test images
    ],
)
def test_features_are_computed_once_for_all_protocols_and_only_where_needed(protocols, images):
    encoder = Encoder()
    run(Evaluate(protocols=protocols), split(60), split(30), encoder=encoder)
    assert encoder.images == images


def test_without_labels_it_says_what_can_be_said():
    result = run(Evaluate(), Split(split().images), None, classes=0)
    assert set(result) == {*UNLABELED, "transfer_to_digits"}


def test_few_labels_are_drawn_by_seed():
    train, test = split(noise=250), split(noise=250, seed=1, n=300)
    settings = Evaluate(protocols=("knn@3", "linear@3", "finetune@3"))
    scores = [run(settings, train, test, seed=seed) for seed in (0, 0, 1, 2)]
    assert scores[0] == scores[1]
    for name in scores[0]:
        assert len({score[name] for score in scores}) > 1, name


def test_a_share_of_the_labels_is_that_many_of_each_class():
    """The share of 60 that linear@30 takes, and so the same images in both."""
    train, test = split(), split(seed=1)
    found = run(Evaluate(protocols=("linear@50%", "linear@30", "knn@10%", "knn@6")), train, test)
    assert found["linear@50%_top1"] == found["linear@30_top1"]
    assert found["knn@10%_top1"] == found["knn@6_top1"]


def test_samples_without_a_label_are_never_used():
    data, test = split(60), split(60, seed=1)
    wrong = torch.where(torch.arange(60) < 30, data.labels, -1)
    mixed = Split((data.images[0].clone(),), wrong)
    mixed.images[0][30:] = 255 - mixed.images[0][30:]
    half = Split((data.images[0][:30],), data.labels[:30])
    settings = Evaluate(protocols=("knn", "linear", "finetune", "linear@6"))
    assert run(settings, mixed, test) == run(settings, half, test)
    unlabelled = Split(test.images, torch.where(torch.arange(60) < 6, test.labels, -1))
    six = Split((test.images[0][:6],), test.labels[:6])
    assert run(settings, half, unlabelled) == run(settings, half, six)


def test_the_second_modality():
    settings = Evaluate(protocols=("linear", "knn", "finetune", "unlabeled"))
    train, test = split(modalities=2), split(modalities=2)
    good, blank = (run(replace(settings, tower=t), train, test) for t in ("first", "second"))
    assert good["linear_top1"] > 90 and good["finetune_top1"] > 90 and good["knn_top1"] > 90
    for name in ("linear_top1", "finetune_top1", "knn_top1"):
        assert blank[name] == pytest.approx(100 / 3)
    assert blank["effective_rank"] == 0
    assert blank["alignment"] != good["alignment"]


@pytest.mark.parametrize("count", ["", "@20"])
def test_the_mean_of_a_case_decides_where_single_images_are_ambiguous(count):
    def cases(seed, with_cases):
        generator = torch.Generator().manual_seed(seed)
        n = 120
        labels = torch.arange(n) % 2
        away = torch.randint(-90, 90, (n, 1, 2, 6), generator=generator)
        own = 116 + 24 * labels[:, None, None, None]
        images = torch.cat((own + away, own - away)).to(torch.uint8)
        numbers = np.arange(2 * n) % n
        return Split((images,), labels.repeat(2), cases=numbers if with_cases else None)

    settings = Evaluate(protocols=(f"linear{count}", f"knn{count}"))
    pooled = run(settings, cases(0, True), cases(1, True), classes=2)
    single = run(settings, cases(0, False), cases(1, False), classes=2)
    assert min(pooled.values()) > 99.0
    assert max(single.values()) < 85.0
