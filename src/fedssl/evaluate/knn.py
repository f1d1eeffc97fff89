"""kNN: each test sample takes the class that its nearest training samples vote for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl.evaluate.features import top1

_CELLS = 1 << 24  # the most numbers in one chunk's table of similarities


def accuracy(
    features: Tensor,
    labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    classes: int,
    k: int = 20,
    temperature: float = 0.1,
) -> float:
    """Top-1 in percent of a vote weighted by exp(cosine / temperature) (Wu et al. 2018, 3.4)."""
    k = min(k, len(features))
    bank, queries = F.normalize(features), F.normalize(test_features)
    ballots = F.one_hot(labels, classes).to(bank.dtype)
    rows = max(1, _CELLS // (len(bank) + k * classes))
    predicted = []
    for part in queries.split(rows):
        nearest, index = (part @ bank.T).topk(k)
        # Relative to the nearest one, no temperature overflows or loses every vote.
        weights = ((nearest - nearest[:, :1]) / temperature).exp()
        # A sum, unlike scatter_add, adds in the same order on every run.
        votes = (ballots[index] * weights[..., None]).sum(dim=1)
        predicted.append(votes.argmax(dim=1))
    return top1(torch.cat(predicted), test_labels)
