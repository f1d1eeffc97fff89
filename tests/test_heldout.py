"""What settings are chosen by: training images that no client has, and never a test image."""

from __future__ import annotations

import numpy as np
import torch

from fedssl import config, evaluate
from fedssl.evaluate import linear
from fedssl.heldout import heldout
from fedssl.session import client_data, held_out, load_data


def test_the_images_are_those_that_no_client_has() -> None:
    words = ["data.holdout=0.2", "partition.name=iid", "partition.clients=3", "seed=5"]
    settings = config.resolve(config.read_recipe("default"), words)
    dataset = load_data(settings)
    spec = "fedssl.heldout:heldout@20%"
    drawn = evaluate._draw(dataset.train, spec, len(dataset.classes), settings.seed)
    assert len(drawn) == len(held_out(settings, dataset)) > 200
    assert np.array_equal(drawn, held_out(settings, dataset))
    assert not set(drawn) & set(client_data(settings, dataset).members)


def test_one_half_judges_the_other_and_test_images_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 3
    features = torch.eye(3, 40)[labels] + 0.8 * torch.randn(600, 40, generator=generator)
    none = torch.full((5, 40), torch.nan), torch.zeros(5, dtype=torch.int64)
    # The images of a class in turn: 0, 3, 6 … are of class 0, so that 0, 6, 12 … are one half.
    first = torch.arange(600) % 6 < 3
    scores = [
        linear.accuracy(features[a], labels[a], features[b], labels[b], 3, "dcco", 1)
        for a, b in ((first, ~first), (~first, first))
    ]
    assert scores[0] != scores[1]
    assert heldout(features, labels, *none, 3, 1) == {"top1": sum(scores) / 2}
    alike = torch.randint(3, (600,), generator=generator)  # labels that features say nothing of
    assert heldout(features, alike, *none, 3, 1)["top1"] < 45 < sum(scores) / 2
    assert heldout(features, labels, *none, 3, 2) != {"top1": sum(scores) / 2}  # its batches
