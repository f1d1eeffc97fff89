import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from evaluation import blind, check, data_of, evaluate, hidden, labelled
from helpers import refused
from torch import nn

from fedssl.config import Evaluate
from fedssl.data.dataset import Split
from fedssl.data.labels import draw_labels, draw_share
from fedssl.evaluate import finetune, linear, semi
from fedssl.evaluate.features import extract
from fedssl.evaluate.finetune import Classifier, fine_tune, new_head
from fedssl.evaluate.registry import check_protocols
from fedssl.util.errors import UserError


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(semi, "HIDDEN", 64)


@pytest.fixture
def calls(monkeypatch):
    """Record the arguments of ``fine_tune`` instead of training."""
    seen = []

    def spy(encoder, head, *rest, **options):
        seen.append((head, *rest, options))
        return Classifier(encoder, head).eval()

    monkeypatch.setattr(semi, "fine_tune", spy)
    return seen


def run(specs, train, test, holdout=0.0, seed=5, **settings):
    settings = Evaluate(protocols=specs, **settings)
    data = data_of(settings, train, test, 3, holdout, seed=seed)
    check_protocols(data)
    return evaluate(blind(), data)


def sides(n=300, unlabelled=0):
    train, test = hidden(n, 0, classes=3), hidden(60, 1, classes=3)
    train.labels[:unlabelled] = -1
    return train, test


@pytest.mark.parametrize("head", ["mlp", "linear"])
def test_learns_what_the_frozen_encoder_cannot_see_and_leaves_it_as_it_is(head, narrow):
    encoder, train, test = blind().eval(), hidden(600), hidden(100, seed=1)
    features = [extract(encoder, side.images[0]) for side in (train, test)]
    assert linear.accuracy(features[0], train.labels, features[1], test.labels, 2) < 65.0
    before = copy.deepcopy(encoder.state_dict())
    settings = Evaluate(protocols=("semi@99%",), head=head)
    assert evaluate(encoder, data_of(settings, train, test, 2))["semi@99%_top1"] > 95.0
    assert not encoder.training
    assert all(torch.equal(v, before[k]) for k, v in encoder.state_dict().items())


@pytest.mark.parametrize(
    ("name", "rule", "epochs", "batch", "factor", "flips", "area", "shapes"),
    [
        (
            "mlp", ("adam", 1e-3, 0.0, 0.0), 100, 128, 1.0, False, None,
            [(4096, 8), (4096,), (4096,), (4096,), (3, 4096), (3,)],
        ),
        ("linear", ("sgd", 0.01, 0.9, 0.0), 20, 256, 20.0, True, (0.08, 1.0), [(3, 8), (3,)]),
    ],
)  # fmt: skip
def test_each_head_is_trained_as_in_its_paper(
    name, rule, epochs, batch, factor, flips, area, shapes, calls
):
    run(("semi@10%",), *sides(), head=name)
    ((head, part, training, seed, options),) = calls
    r = training.rule
    assert (r.optimizer, r.lr, r.momentum, r.weight_decay) == rule
    assert (training.epochs, training.batch, training.head) == (epochs, batch, factor)
    assert options.get("flips", True) is flips and options.get("area") == area
    assert len(part.groups) == 30 and seed == 5
    assert [tuple(w.shape) for w in head.parameters()] == shapes


def test_the_rate_is_constant_with_an_mlp_and_falls_in_stairs_without():
    assert {semi.MLP.schedule(step, 100) for step in range(100)} == {1.0}
    factors = [semi.LINEAR.schedule(step, 40) for step in range(40)]
    assert factors == pytest.approx([1.0] * 24 + [0.2] * 8 + [0.04] * 8)


def test_the_mlp_depends_on_the_seed_alone_and_takes_the_encoders_type(narrow):
    first, again, other = (semi.build_mlp(blind().double(), 3, s)[3].weight for s in (0, 0, 1))
    assert first.dtype == torch.float64
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_only_the_head_takes_the_heads_rate():
    seen = {}
    for factor in (1.0, 20.0):
        encoder, head = blind(nn.Identity), nn.Linear(8, 2)
        nn.init.eye_(head.weight)
        nn.init.zeros_(head.bias)
        start = copy.deepcopy(Classifier(encoder, head).state_dict())
        training = replace(semi.LINEAR, epochs=1, head=factor)
        model = fine_tune(encoder, head, labelled(hidden(12)), training, 0)
        seen[factor] = {k: w.detach() - start[k] for k, w in model.named_parameters()}
    for name, change in seen[20.0].items():
        times = 20.0 if name.startswith("head") else 1.0
        torch.testing.assert_close(change, times * seen[1.0][name], atol=1e-6, rtol=1e-3)
    assert seen[1.0]["head.weight"].any() and seen[1.0]["encoder.1.weight"].any()


def test_flips_can_be_left_out(monkeypatch):
    monkeypatch.setattr(finetune, "flip", None)
    words = (blind(), new_head(blind(), 2), labelled(hidden(4)), replace(semi.MLP, epochs=1), 0)
    fine_tune(*words, flips=False)
    with pytest.raises(TypeError):
        fine_tune(*words)


def test_one_image_more_than_a_batch_is_no_batch_of_one(narrow, monkeypatch):
    sizes = []
    forward = Classifier.forward

    def spy(self, images, cases):
        sizes.append(len(cases))
        return forward(self, images, cases)

    monkeypatch.setattr(Classifier, "forward", spy)
    training = replace(semi.MLP, epochs=2)
    fine_tune(blind(), semi.build_mlp(blind(), 2, 0), labelled(hidden(129)), training, 0)
    assert sizes == [64, 65] * 2


def test_the_head_is_judged_in_evaluation_mode():
    """By its running statistics (mean 0), not by those of the test images, class 1 wins always."""
    head = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    with torch.no_grad():
        head[1].weight.copy_(torch.eye(2))
        head[1].bias.zero_()
    model = Classifier(nn.Flatten(), head).train()
    images = torch.tensor([[10, 20], [11, 200], [30, 40], [31, 50]], dtype=torch.uint8)
    test = Split((images.view(4, 1, 1, 2),), torch.ones(4, dtype=torch.int64))
    assert finetune.score(model, labelled(test)) == 100.0
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
    # A share that no float holds is not rounded down.
    assert len(draw_share(torch.zeros(100, dtype=torch.int64), 0.29, 1, 0)) == 29


@pytest.mark.parametrize(
    ("labels", "share", "value", "fix"),
    [
        (torch.full((50,), -1), 0.1, None, "Leave it out."),
        (torch.arange(10), 0.99, None, "Leave it out."),
        (torch.arange(360) % 10, 0.01, None, "Use at least 0.0278."),
        (torch.arange(360) % 10, 0.01, "semi@1%", "Use at least 2.78%."),
    ],
)
def test_shares_that_cannot_be_drawn(labels, share, value, fix):
    with refused("data.holdout", value or share, says=fix):
        draw_share(labels, share, 10, 0, value=value)


@pytest.mark.parametrize(
    ("common", "rare", "most"), [(95, 5, 0.1), (6, 1, 0.2858), (10**5, 10**4 + 1, 0.18184)]
)
def test_the_share_that_an_error_names_takes_all_of_the_rarest_class(common, rare, most):
    labels = (torch.arange(common + rare) < rare).long()
    for value, named in ((None, f"{most}"), ("semi", f"{100 * most:g}%")):
        with pytest.raises(UserError) as caught:
            draw_share(labels, 0.7, 2, 0, value=value)
        assert caught.value.fix == f"Use at most {named}."
    assert len(draw_share(labels, most, 2, 0)) == rare * 2
    assert len(draw_share(torch.arange(360) % 10, 0.0278, 10, 0)) == 10


def test_the_labels_are_part_of_what_no_client_was_given(calls):
    train, test = sides(unlabelled=30)
    kept = set(draw_share(train.labels, 0.1, 3, seed=5).tolist())
    run(("semi@10%", "semi@2%"), train, test, holdout=0.1)
    run(("semi@20%",), train, test)  # nothing held out: of all
    for _, part, *_ in calls:
        assert part.labels.tolist() == train.labels[part.groups.members].tolist()
    ten, two, twenty = (part.groups.members.tolist() for _, part, *_ in calls)
    assert set(ten) == kept and len(ten) == 27
    assert set(two) < kept and len(two) == 3
    assert set(twenty) > kept and len(twenty) == 54


def test_shares_count_cases(calls):
    train, test = sides()
    cases = replace(train, cases=np.arange(300) % 150)
    run(("semi@10%",), cases, test)
    ((_, part, *_),) = calls
    assert len(part.groups) == 15 and part.groups.sizes.tolist() == [2] * 15
    with refused("evaluate.protocols", "semi@10%", says="Set data.holdout=0"):
        run(("semi@10%",), cases, test, holdout=0.1)


@pytest.mark.parametrize(
    ("share", "holdout", "fix"),
    [("10%", 0.01, "Set data.holdout=0.1"), ("0.9%", 0.0, "Use at least 1%.")],
)
def test_shares_that_cannot_be_drawn_are_refused_before_training(share, holdout, fix):
    with refused("evaluate.protocols", f"semi@{share}", says=fix):
        check(Evaluate(protocols=(f"semi@{share}",)), *sides(), 3, holdout=holdout)


def test_the_share_may_be_as_large_as_what_is_held_out():
    train, test = sides()
    for share, holdout in (("7%", 0.07), ("10%", 0.1), ("1.7%", 0.017), ("10%", 0.5)):
        check(Evaluate(protocols=(f"semi@{share}",)), train, test, 3, holdout=holdout)
