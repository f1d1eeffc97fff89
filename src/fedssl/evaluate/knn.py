"""kNN: the nearest training samples vote for the class of each test sample."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl.config import Evaluate
from fedssl.evaluate.base import EvaluatedModel, EvaluationData, Protocol
from fedssl.evaluate.features import top1

_CELLS = 1 << 24  # the most numbers in one chunk's table of similarities


class KNN(Protocol):
    """Accuracy of a vote of the nearest training cases."""

    name = "knn"
    option = "labels"

    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Vote on each test case."""
        data = model.data
        train = model.train.take(self.draw(data))
        k, temperature = data.settings.k, data.settings.temperature
        score = accuracy(*train, *model.test.pooled, data.classes, k, temperature)
        return {self.measure: score}

    def list_warnings(self, data: EvaluationData) -> list[str]:
        """Warn of a ``k`` above the number of samples, unless nobody chose it."""
        k, count = data.settings.k, len(self.draw(data))
        if k == Evaluate.k or k <= count:
            return []
        return [f"evaluate.k={k}: {self.spec} has only {count} labelled samples; all vote"]


def accuracy(
    features: Tensor,
    labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    classes: int,
    k: int = 20,
    temperature: float = 0.1,
) -> float:
    """Return the top-1 in percent of a vote weighted by exp(cosine / temperature).

    (Wu et al. 2018, section 3.4.)
    """
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
