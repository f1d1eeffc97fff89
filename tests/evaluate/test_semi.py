import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from evaluation import check, data_of, evaluate
from torch import nn

from fedssl.config import Evaluate
from fedssl.data.dataset import Split
from fedssl.data.labels import draw_labels, draw_share
from fedssl.evaluate import finetune, linear, semi
from fedssl.evaluate.features import Labelled, extract, units
from fedssl.evaluate.registry import check_protocols
from fedssl.util.errors import UserError

HEADS = ("mlp", "linear")


def hidden(n, seed, classes=2):
    """The class is in the brightness of the lower rows; the upper rows are noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    images = torch.randint(0, 256, (n, 1, 8, 4), dtype=torch.uint8, generator=generator)
    bright = 60 + 140 // (classes - 1) * labels[:, None, None, None]
    noise = torch.randint(-20, 20, (n, 1, 4, 4), generator=generator)
    images[:, :, 4:] = (bright + noise).to(torch.uint8)
    return images, labels


def labelled(n, seed=0, classes=2):
    images, labels = hidden(n, seed, classes)
    return Labelled(images, *units(labels, None))


def blind(norm=nn.BatchNorm1d):
    """An encoder that does not look at the lower rows."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(32, 8)
    with torch.no_grad():
        layer.weight.copy_(0.3 * torch.randn(8, 32, generator=generator))
        layer.weight[:, 16:] = 0
        layer.bias.zero_()
    return nn.Sequential(nn.Flatten(), layer, norm(8), nn.ReLU())


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(semi, "HIDDEN", 64)


@pytest.fixture
def calls(monkeypatch):
    """What ``descent`` is called with, instead of training."""
    seen = []
    monkeypatch.setattr(semi, "descent", lambda *a, **k: seen.append((*a, k)))
    return seen


@pytest.mark.parametrize("head", HEADS)
def test_learns_what_the_frozen_encoder_cannot_see_and_leaves_it_as_it_is(head, narrow):
    encoder, train, test = blind().eval(), labelled(600), labelled(100, seed=1)
    features = extract(encoder, train.images), train.labels
    frozen = extract(encoder, test.images), test.labels
    assert linear.accuracy(*features, *frozen, classes=2) < 65.0
    before = copy.deepcopy(encoder.state_dict())
    assert semi.accuracy(encoder, train, test, 2, head, 0, "cpu") > 95.0
    assert not encoder.training
    assert all(torch.equal(v, before[k]) for k, v in encoder.state_dict().items())


@pytest.mark.parametrize(
    ("head", "rule", "epochs", "batch", "factor", "flips"),
    [
        ("mlp", ("adam", 1e-3, 0.0, 0.0), 100, 128, 1.0, False),
        ("linear", ("sgd", 0.01, 0.9, 0.0), 20, 256, 20.0, True),
    ],
)
def test_each_head_is_trained_as_in_its_paper(head, rule, epochs, batch, factor, flips, calls):
    train = labelled(40)
    semi.accuracy(blind(), train, train, 2, head, 3, "cpu")
    ((model, data, training, seed, _, options),) = calls
    r = training.rule
    assert (r.optimizer, r.lr, r.momentum, r.weight_decay) == rule
    assert (training.epochs, training.batch, training.head) == (epochs, batch, factor)
    assert options.get("flips", True) is flips
    assert data is train and seed == 3
    shapes = [tuple(w.shape) for w in model.head.parameters()]
    if head == "mlp":
        assert shapes == [(4096, 8), (4096,), (4096,), (4096,), (2, 4096), (2,)]
    else:
        assert shapes == [(2, 8), (2,)]


def test_the_rate_is_constant_with_an_mlp_and_falls_in_stairs_without():
    assert {semi.MLP.schedule(step, 100) for step in range(100)} == {1.0}
    factors = [semi.LINEAR.schedule(step, 40) for step in range(40)]
    assert factors == pytest.approx([1.0] * 24 + [0.2] * 8 + [0.04] * 8)


def test_the_mlp_depends_on_the_seed_alone_and_takes_the_features_type(narrow):
    like = torch.zeros(1, 8, dtype=torch.float64)

    def weights(seed):
        return semi.mlp(like, 3, seed)[3].weight

    assert weights(0).dtype == torch.float64
    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_only_the_head_takes_the_heads_rate():
    seen = {}
    train, training = labelled(12), replace(semi.LINEAR, epochs=1)
    for factor in (1.0, 20.0):
        model = finetune.Classifier(blind(nn.Identity), nn.Linear(8, 2))
        nn.init.eye_(model.head.weight)
        nn.init.zeros_(model.head.bias)
        start = copy.deepcopy(dict(model.named_parameters()))
        finetune.descent(model, train, replace(training, head=factor), 0, "cpu")
        seen[factor] = {k: w.detach() - start[k].detach() for k, w in model.named_parameters()}
    for name, change in seen[20.0].items():
        times = 20.0 if name.startswith("head") else 1.0
        torch.testing.assert_close(change, times * seen[1.0][name], atol=1e-6, rtol=1e-3)
    assert seen[1.0]["head.weight"].any() and seen[1.0]["encoder.1.weight"].any()


def test_flips_can_be_left_out(monkeypatch):
    monkeypatch.setattr(finetune, "flip", None)
    model = finetune.Classifier(blind(), nn.Linear(8, 2))
    finetune.descent(model, labelled(4), replace(semi.MLP, epochs=1), 0, "cpu", flips=False)
    with pytest.raises(TypeError):
        finetune.descent(model, labelled(4), replace(semi.MLP, epochs=1), 0, "cpu")


def test_one_image_more_than_a_batch_is_no_batch_of_one(narrow, monkeypatch):
    sizes = []
    forward = finetune.Classifier.forward

    def spy(self, images, cases):
        sizes.append(len(cases))
        return forward(self, images, cases)

    monkeypatch.setattr(finetune.Classifier, "forward", spy)
    monkeypatch.setattr(semi, "MLP", replace(semi.MLP, epochs=2))
    train = labelled(129)
    semi.accuracy(blind(), train, train, 2, "mlp", 0, "cpu")
    assert sizes == [64, 65] * 2


def test_the_head_is_judged_in_evaluation_mode():
    """By its running statistics (mean 0), not by those of the test images, class 1 wins always."""
    head = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    with torch.no_grad():
        head[1].weight.copy_(torch.eye(2))
        head[1].bias.zero_()
    model = finetune.Classifier(nn.Flatten(), head).train()
    images = torch.tensor([[10, 20], [11, 200], [30, 40], [31, 50]], dtype=torch.uint8)
    test = Labelled(images.view(4, 1, 1, 2), *units(torch.ones(4, dtype=torch.int64), None))
    assert finetune.score(model, test, "cpu") == 100.0
    assert model.training and head[0].num_batches_tracked == 0


# Which images -----------------------------------------------------------------------------------


def numbers():
    labels = torch.arange(1000) % 10
    labels[::7] = -1
    return labels


def test_held_out_is_even_sorted_nested_and_seeded():
    labels = numbers()  # 857 have a label
    drawn = {share: draw_share(labels, share, 10, seed=3) for share in (0.02, 0.1, 0.5)}
    for share, each in ((0.02, 1), (0.1, 8), (0.5, 42)):
        index = drawn[share]
        assert torch.bincount(labels[index], minlength=10).tolist() == [each] * 10
        assert index.tolist() == sorted(set(index.tolist()))
    assert set(drawn[0.02].tolist()) < set(drawn[0.1].tolist()) < set(drawn[0.5].tolist())
    assert torch.equal(drawn[0.1], draw_share(labels, 0.1, 10, seed=3))
    assert not torch.equal(drawn[0.1], draw_share(labels, 0.1, 10, seed=4))
    assert torch.equal(drawn[0.1], draw_labels(labels, 80, 10, seed=3))
    assert len(draw_share(labels, 0.0, 10, 0)) == 0
    assert len(draw_share(torch.full((5,), -1), 0.0, 0, 0)) == 0


def test_a_share_that_no_float_holds_is_not_rounded_down():
    assert len(draw_share(torch.zeros(100, dtype=torch.int64), 0.29, 1, 0)) == 29


@pytest.mark.parametrize(
    ("labels", "share", "value", "fix"),
    [
        *((numbers(), share, None, "below 1.") for share in (-0.1, 1.0, 1.5, float("nan"))),
        (torch.full((50,), -1), 0.1, None, "Leave it out."),
        (torch.arange(10), 0.99, None, "Leave it out."),
        (torch.arange(360) % 10, 0.01, None, "Use at least 0.0278."),
        (torch.arange(360) % 10, 0.01, "semi@1%", "Use at least 2.78%."),
    ],
)
def test_shares_that_cannot_be_drawn(labels, share, value, fix):
    with pytest.raises(UserError) as caught:
        draw_share(labels, share, 10, 0, value=value)
    error = caught.value
    assert (error.key, str(error.value)) == ("data.holdout", str(value or share))
    assert error.fix.endswith(fix)


@pytest.mark.parametrize(
    ("common", "rare", "classes", "most"),
    [(95, 5, 2, 0.1), (6, 1, 2, 0.2858), (10**5, 10**4 + 1, 2, 0.18184)],
)
def test_the_share_that_an_error_names_takes_all_of_the_rarest_class(common, rare, classes, most):
    labels = (torch.arange(common + rare) < rare).long()
    assert len(draw_share(torch.arange(360) % 10, 0.0278, 10, 0)) == 10
    for value, named in ((None, f"{most}"), ("semi", f"{100 * most:g}%")):
        with pytest.raises(UserError) as caught:
            draw_share(labels, 0.7, classes, 0, value=value)
        assert caught.value.fix == f"Use at most {named}."
    assert len(draw_share(labels, most, classes, 0)) == rare * classes


def sides(n=300, unlabelled=0):
    images, labels = hidden(n, 0, classes=3)
    labels[:unlabelled] = -1
    test_images, test_labels = hidden(60, 1, classes=3)
    return Split((images,), labels), Split((test_images,), test_labels)


def run(specs, train, test, holdout=0.0, **settings):
    settings = Evaluate(protocols=specs, **settings)
    data = data_of(settings, train, test, 3, holdout, seed=5)
    check_protocols(data)
    return evaluate(blind(), data)


def test_the_labels_are_part_of_what_no_client_was_given(monkeypatch):
    train, test = sides(unlabelled=30)
    kept = set(draw_share(train.labels, 0.1, 3, seed=5).tolist())
    seen = []

    def spy(encoder, part, *rest):
        seen.append(part.groups.members.tolist())
        assert part.labels.tolist() == train.labels[part.groups.members].tolist()
        return 50.0

    monkeypatch.setattr(semi, "accuracy", spy)
    result = run(("semi@10%", "semi@2%"), train, test, holdout=0.1)
    assert result == {"semi@10%_top1": 50.0, "semi@2%_top1": 50.0}
    assert set(seen[0]) == kept and len(seen[0]) == 27
    assert set(seen[1]) < kept and len(seen[1]) == 3
    seen.clear()
    run(("semi@20%",), train, test)  # nothing held out: of all
    assert set(seen[0]) > kept and len(seen[0]) == 54


@pytest.mark.parametrize("head", HEADS)
def test_the_head_of_the_settings_is_used(head, calls):
    run(("semi@10%",), *sides(), head=head)
    ((model, *_),) = calls
    assert isinstance(model.head, nn.Linear if head == "linear" else nn.Sequential)


def test_shares_count_cases(monkeypatch):
    train, test = sides()
    cases = replace(train, cases=np.arange(300) % 150)
    seen = []
    monkeypatch.setattr(semi, "accuracy", lambda encoder, part, *rest: seen.append(part) or 0.0)
    run(("semi@10%",), cases, test)
    (part,) = seen
    assert len(part.groups) == 15 and part.groups.sizes.tolist() == [2] * 15
    with pytest.raises(UserError, match=r"^evaluate.protocols=semi@10%: .*Set data\.holdout=0"):
        run(("semi@10%",), cases, test, holdout=0.1)


@pytest.mark.parametrize(
    ("share", "holdout", "fix"),
    [("10%", 0.01, "Set data.holdout=0.1"), ("0.9%", 0.0, "Use at least 1%.")],
)
def test_shares_that_cannot_be_drawn_are_refused_before_training(share, holdout, fix):
    settings = Evaluate(protocols=(f"semi@{share}",))
    with pytest.raises(UserError) as caught:
        check(settings, *sides(), 3, holdout=holdout)
    error = caught.value
    assert (error.key, str(error.value)) == ("evaluate.protocols", f"semi@{share}")
    assert error.fix.startswith(fix)


def test_the_share_may_be_as_large_as_what_is_held_out():
    train, test = sides()
    for share, holdout in (("7%", 0.07), ("10%", 0.1), ("1.7%", 0.017), ("10%", 0.5)):
        check(Evaluate(protocols=(f"semi@{share}",)), train, test, 3, holdout=holdout)
