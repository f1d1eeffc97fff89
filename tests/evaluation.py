"""Evaluate given images by protocols, without a run; and a task for fine-tuning."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedssl import config as configuration
from fedssl.config import Evaluate
from fedssl.data.dataset import Dataset, Groups, Split
from fedssl.evaluate.base import EvaluatedModel, EvaluationData
from fedssl.evaluate.features import Labelled, units
from fedssl.evaluate.registry import check_protocols, choose_protocols, parse_protocol


def data_of(
    settings: Evaluate,
    train: Split,
    test: Split | None,
    classes: int,
    holdout: float = 0.0,
    seed: int = 0,
    clients: Groups | None = None,
) -> EvaluationData:
    config = configuration.build({"seed": seed, "data": {"holdout": holdout}})
    dataset = Dataset("made", train, test, tuple(map(str, range(classes))))
    one = Groups(np.arange(len(train)), np.array([0, len(train)]))
    clients = one if clients is None else clients
    names = [str(k) for k in range(len(clients))]
    return EvaluationData(replace(config, evaluate=settings), dataset, clients, names)


def check(
    settings: Evaluate, train: Split, test: Split | None, classes: int, holdout: float = 0.0
) -> None:
    check_protocols(data_of(settings, train, test, classes, holdout), has_head=True)


def evaluate(encoder: nn.Module, data: EvaluationData, views: Any = None) -> dict[str, float]:
    """Evaluate; ``views`` are a function of training images, their numbers and the view."""
    tower: Any = SimpleNamespace(encoder=encoder)
    images = data.train.images[data.modality]
    model = EvaluatedModel(data, tower, lambda index, view: views(images[index], index, view))
    results: dict[str, float] = {}
    for spec in choose_protocols(data.settings, data.train, data.test):
        results |= parse_protocol(spec).evaluate(model)
    return results


def hidden(n: int, seed: int = 0, classes: int = 2) -> Split:
    """The class is in the brightness of the lower rows; the upper rows are noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    images = torch.randint(0, 256, (n, 1, 8, 4), dtype=torch.uint8, generator=generator)
    bright = 60 + 140 // (classes - 1) * labels[:, None, None, None]
    noise = torch.randint(-20, 20, (n, 1, 4, 4), generator=generator)
    images[:, :, 4:] = (bright + noise).to(torch.uint8)
    return Split((images,), labels)


def labelled(split: Split) -> Labelled:
    return Labelled(split.images[0], *units(split.full_labels, split.cases))


def blind(norm: type[nn.Module] = nn.BatchNorm1d) -> Any:
    """An encoder that does not look at the lower rows."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(32, 8)
    with torch.no_grad():
        layer.weight.copy_(0.3 * torch.randn(8, 32, generator=generator))
        layer.weight[:, 16:] = 0
        layer.bias.zero_()
    return with_features(nn.Sequential(nn.Flatten(), layer, norm(8), nn.ReLU()), 8)


def with_features(encoder: Any, count: int) -> Any:
    """The encoder, which now says how many features it has."""
    encoder.features = count
    return encoder
