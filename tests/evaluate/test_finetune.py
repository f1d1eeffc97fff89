import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedssl.data.dataset import Groups
from fedssl.evaluate import finetune, linear
from fedssl.evaluate.features import Labelled, extract, units
from fedssl.models.flat_weights import FlatWeights
from fedssl.training.optim import cosine


def hidden(n, seed):
    """The class is in the brightness of the lower rows; the upper rows are noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2
    images = torch.randint(0, 256, (n, 1, 8, 4), dtype=torch.uint8, generator=generator)
    bright = 60 + 140 * labels[:, None, None, None]
    noise = torch.randint(-40, 40, (n, 1, 4, 4), generator=generator)
    images[:, :, 4:] = (bright + noise).to(torch.uint8)
    return Labelled(images, *units(labels, None))


def blind(norm: type[nn.Module] | None = None) -> nn.Sequential:
    """An encoder that does not look at the lower rows."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(32, 8)
    with torch.no_grad():
        layer.weight.copy_(0.3 * torch.randn(8, 32, generator=generator))
        layer.weight[:, 16:] = 0
        layer.bias.zero_()
    return nn.Sequential(nn.Flatten(), layer, *([norm(8)] if norm else []), nn.ReLU())


@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d])
def test_learns_what_the_frozen_encoder_cannot_see(norm):
    encoder, train, test = blind(norm), hidden(200, 0), hidden(200, 1)
    probe = linear.accuracy(
        extract(encoder, train.images),
        train.labels,
        extract(encoder, test.images),
        test.labels,
        classes=2,
    )
    assert probe < 65.0
    assert finetune.accuracy(encoder, train, test, 2, seed=0, device="cpu") > 95.0


@pytest.mark.parametrize("flat", [False, True])
def test_the_encoder_stays_as_it_is(flat):
    encoder = blind(nn.BatchNorm1d).eval().requires_grad_(False)
    # A trained encoder is a view of one vector, which must not be shared with the copy.
    holder = FlatWeights(encoder) if flat else None
    before = copy.deepcopy(encoder.state_dict())
    model = finetune.fit(encoder, hidden(40, 0), 2, seed=0, device="cpu")
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, before[name]), name
        assert not torch.equal(model.encoder.state_dict()[name], value), name
    assert not encoder.training
    assert not any(p.requires_grad for p in encoder.parameters())
    assert holder is None or not holder.gradient.any()


def test_the_same_seed_gives_the_same_bits():
    train = hidden(60, 0)

    def weights(seed):
        return finetune.fit(blind(), train, 2, seed=seed, device="cpu").encoder[1].weight

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_cases_are_judged_by_the_mean_of_their_images():
    """Two images of a case differ from the case's own brightness by opposite amounts."""

    def cases(n, seed):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(n) % 2
        away = torch.randint(-90, 90, (n, 1, 1, 1), generator=generator)
        own = 118 + 20 * labels[:, None, None, None]
        images = torch.cat((own + away, own - away)).to(torch.uint8).expand(-1, 1, 4, 4)
        return images.contiguous(), labels.repeat(2), np.arange(2 * n) % n

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x):
            return (x - 0.5).flatten(1) * self.scale

    def score(with_cases):
        sides = [cases(200, 0), cases(200, 1)]
        train, test = (Labelled(x, *units(y, c if with_cases else None)) for x, y, c in sides)
        return finetune.accuracy(Plain(), train, test, 2, seed=0, device="cpu")

    assert score(with_cases=True) > 95.0
    assert score(with_cases=False) < 65.0


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


@pytest.mark.parametrize(("n", "steps", "batch"), [(2499, 40, 128), (2500, 100, 256)])
def test_the_paper_has_two_rows(n, steps, batch, monkeypatch):
    seen = []

    def spy(flat, state, training, step):
        seen.append((training.steps, training.batch, training.rule.optimizer, training.rule.lr))

    monkeypatch.setattr(finetune, "descend", spy)
    groups = Groups(np.arange(n), np.arange(n + 1))
    train = Labelled(torch.zeros(n, 1, 1, 1, dtype=torch.uint8), groups, torch.arange(n) % 2)
    finetune.fit(nn.Sequential(nn.Flatten(), nn.Linear(1, 1)), train, 2, seed=0, device="cpu")
    assert seen == [(steps, batch, "adam", 5e-3)] * steps


def test_every_step_flips_anew_the_images_of_its_cases(monkeypatch):
    calls = []

    def spy(images, index, state):
        assert torch.equal(images, train.images[index].float() / 255)
        calls.append((sorted(index.tolist()), state))
        return images

    train = hidden(12, 0)
    train = Labelled(train.images, *units(train.labels, np.arange(12) // 4 * 2 + np.arange(12) % 2))
    monkeypatch.setattr(finetune, "flip", spy)
    finetune.fit(blind(), train, 2, seed=0, device="cpu")
    assert [index for index, _ in calls] == [list(range(12))] * 40
    assert len({state for _, state in calls}) == 40


def test_every_step_starts_from_no_gradient(monkeypatch):
    seen = []
    monkeypatch.setattr(finetune, "descend", lambda flat, *rest: seen.append(flat.gradient.clone()))
    train = hidden(30, 0)
    uneven = Labelled(train.images * 0, train.groups, (torch.arange(30) % 3 == 0).long())
    finetune.fit(blind(), uneven, 2, seed=0, device="cpu")
    assert seen[0].any()
    torch.testing.assert_close(seen[-1], seen[0])


def test_works_in_the_encoders_own_precision():
    model = finetune.fit(blind().double(), hidden(20, 0), 2, seed=0, device="cpu")
    assert model.head.weight.dtype == torch.float64


def test_each_preset_has_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []
    monkeypatch.setattr(finetune, "descend", lambda flat, state, training, lr: rates.append(lr))
    for preset in ("dcco", "logistic", "fedema", "ccl"):
        finetune.fit(blind(), hidden(20, 0), 2, seed=0, device="cpu", preset=preset)
    assert rates == [lr * cosine(step, 40) for lr in (5e-3, *[1e-3] * 3) for step in range(40)]
