import copy

import numpy as np
import pytest
import torch
from evaluation import blind, data_of, evaluate, hidden, labelled, with_features
from torch import nn

from fedssl.config import Evaluate
from fedssl.data.dataset import Split
from fedssl.evaluate import finetune, linear
from fedssl.evaluate.features import extract
from fedssl.evaluate.finetune import choose_training, fine_tune, new_head
from fedssl.models.flat_weights import FlatWeights
from fedssl.training.optim import cosine


def fit(encoder, train, seed=0):
    training = choose_training(len(train.groups), "dcco")
    return fine_tune(encoder, new_head(encoder, 2), train, training, seed)


def accuracy(encoder, train, test):
    settings = Evaluate(protocols=("finetune",), preset="dcco")
    return evaluate(encoder, data_of(settings, train, test, 2))["finetune_top1"]


@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm1d])
def test_learns_what_the_frozen_encoder_cannot_see(norm):
    encoder, train, test = blind(norm), hidden(200, 0), hidden(200, 1)
    features = [extract(encoder, side.images[0]) for side in (train, test)]
    probe = linear.accuracy(features[0], train.labels, features[1], test.labels, classes=2)
    assert probe < 65.0
    assert accuracy(encoder, train, test) > 95.0


@pytest.mark.parametrize("flat", [False, True])
def test_the_encoder_stays_as_it_is(flat):
    encoder = blind().eval().requires_grad_(False)
    # A trained encoder is a view of one vector, which must not be shared with the copy.
    holder = FlatWeights(encoder) if flat else None
    before = copy.deepcopy(encoder.state_dict())
    model = fit(encoder, labelled(hidden(40)))
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, before[name]), name
        assert not torch.equal(model.encoder.state_dict()[name], value), name
    assert not encoder.training
    assert not any(p.requires_grad for p in encoder.parameters())
    assert holder is None or not holder.gradient.any()


def test_the_same_seed_gives_the_same_bits():
    train = labelled(hidden(60))
    first, again, other = (fit(blind(), train, seed).encoder[1].weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_cases_are_judged_by_the_mean_of_their_images():
    """Two images of a case differ from the case's own brightness by opposite amounts."""

    class Plain(nn.Module):
        features = 16

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x):
            return (x - 0.5).flatten(1) * self.scale

    def cases(seed, with_cases):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(200) % 2
        away = torch.randint(-90, 90, (200, 1, 1, 1), generator=generator)
        own = 118 + 20 * labels[:, None, None, None]
        images = torch.cat((own + away, own - away)).to(torch.uint8).expand(-1, 1, 4, 4)
        numbers = np.arange(400) % 200 if with_cases else None
        return Split((images.contiguous(),), labels.repeat(2), cases=numbers)

    assert accuracy(Plain(), cases(0, True), cases(1, True)) > 95.0
    assert accuracy(Plain(), cases(0, False), cases(1, False)) < 65.0


def test_flips_each_image_by_its_own_number():
    images = torch.arange(12.0).view(1, 1, 3, 4).expand(1000, 1, 3, 4)
    index = torch.arange(1000)
    flipped = finetune.flip(images, index, state=7)
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    assert torch.equal(mirrored, ~(flipped == images).flatten(1).all(1))
    assert 420 < mirrored.sum() < 580
    alone = finetune.flip(images[:10], index[500:510], state=7)
    assert torch.equal(alone, flipped[500:510])
    assert not torch.equal(finetune.flip(images, index, state=8), flipped)


def test_every_step_flips_anew_the_images_of_its_cases(monkeypatch):
    calls = []

    def spy(images, index, state):
        assert torch.equal(images, train.images[index].float() / 255)
        calls.append((sorted(index.tolist()), state))
        return images

    split = hidden(12)
    train = labelled(
        Split(split.images, split.labels, cases=np.arange(12) // 4 * 2 + np.arange(12) % 2)
    )
    monkeypatch.setattr(finetune, "flip", spy)
    fit(blind(), train)
    assert [index for index, _ in calls] == [list(range(12))] * 40
    assert len({state for _, state in calls}) == 40


def test_crops_each_image_by_its_own_number():
    """The image is brighter from left to right, so the crop's mean tells its place."""
    images = torch.linspace(0, 1, 16).expand(200, 1, 16, 16)
    index = torch.arange(200)
    cropped = finetune.crop(images, index, 7, (0.08, 1.0))
    assert cropped.shape == images.shape and cropped.min() >= 0 and cropped.max() <= 1 + 1e-6
    places = cropped.mean((1, 2, 3))
    assert 0.05 < places.std() < 0.3 and len(places.unique()) > 20  # a crop has whole pixels
    alone = finetune.crop(images[:10], index[50:60], 7, (0.08, 1.0))
    torch.testing.assert_close(alone, cropped[50:60])
    assert not torch.equal(finetune.crop(images, index, 8, (0.08, 1.0)), cropped)
    torch.testing.assert_close(finetune.crop(images, index, 7, (1.0, 1.0)), images)


def test_every_step_crops_anew(monkeypatch):
    states = []
    spy = lambda images, index, state, area: states.append((state, area)) or images  # noqa: E731
    monkeypatch.setattr(finetune, "crop", spy)
    encoder, train = blind(), labelled(hidden(12))
    training = finetune.choose_training(12, "dcco")
    finetune.fine_tune(encoder, new_head(encoder, 2), train, training, 0)
    assert not states
    finetune.fine_tune(encoder, new_head(encoder, 2), train, training, 0, area=(0.2, 1.0))
    assert len({state for state, _ in states}) == 40 and {a for _, a in states} == {(0.2, 1.0)}


def test_every_step_starts_from_no_gradient(monkeypatch):
    seen = []
    monkeypatch.setattr(finetune, "make_step", lambda flat, *_: seen.append(flat.gradient.clone()))
    uneven = Split((hidden(30).images[0] * 0,), (torch.arange(30) % 3 == 0).long())
    fit(blind(), labelled(uneven))
    assert seen[0].any()
    torch.testing.assert_close(seen[-1], seen[0])


def test_works_in_the_encoders_own_precision():
    assert fit(blind().double(), labelled(hidden(20))).head.weight.dtype == torch.float64


@pytest.mark.parametrize(("n", "steps", "batch"), [(2499, 40, 128), (2500, 100, 256)])
def test_the_paper_has_two_rows(n, steps, batch, monkeypatch):
    seen = []
    monkeypatch.setattr(
        finetune, "make_step", lambda _, __, training, lr: seen.append((training, lr))
    )
    train = labelled(Split((torch.zeros(n, 1, 1, 1, dtype=torch.uint8),), torch.arange(n) % 2))
    fit(with_features(nn.Sequential(nn.Flatten(), nn.Linear(1, 1)), 1), train)
    assert [lr for _, lr in seen] == [5e-3 * cosine(step, steps) for step in range(steps)]
    assert {(t.batch, t.rule.optimizer) for t, _ in seen} == {(batch, "adam")}


def test_each_preset_has_its_rate():
    presets = ("dcco", "logistic", "fedema", "ccl")
    assert [choose_training(20, preset).rule.lr for preset in presets] == [5e-3, *[1e-3] * 3]
