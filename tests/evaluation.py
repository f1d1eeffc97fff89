"""Evaluate given images by protocols, without a run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn

from fedssl import config as configuration
from fedssl.config import Evaluate
from fedssl.data.dataset import Dataset, Groups, Split
from fedssl.evaluate.base import EvaluatedModel, EvaluationData
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


def evaluate(
    encoder: nn.Module, data: EvaluationData, views: Any = None, has_head: bool = False
) -> dict[str, float]:
    tower: Any = SimpleNamespace(encoder=encoder)
    model = EvaluatedModel(data, tower, "cpu", views, has_head)
    specs = choose_protocols(data.settings, data.train, data.test)
    results: dict[str, float] = {}
    for spec in specs:
        results |= parse_protocol(spec).evaluate(model)
    return results
