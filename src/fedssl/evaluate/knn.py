"""kNN: the nearest training samples vote for the class of each test sample."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl.config import Evaluate
from fedssl.evaluate.base import EvaluatedModel, EvaluationData, Protocol
from fedssl.evaluate.features import top1

_CELLS = 1 << 24  # the most numbers in one chunk's table of similarities
_BANK = 1 << 18  # the most training samples in it


Found = tuple[Tensor, Tensor]  # similarities of neighbours, nearest first, and their labels


class KNN(Protocol):
    """Accuracy of a vote of the nearest training cases."""

    name = "knn"
    option = "labels"

    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Vote on each test case."""
        data = model.data
        everything = self.amount is None  # no copy: there may be millions
        train = model.train.pooled if everything else model.train.take(self.draw(data))
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
    queries = F.normalize(test_features)
    rows = max(1, _CELLS // (min(len(features), _BANK) + k * classes))
    parts = list(queries.split(rows))
    found = [(part.new_empty((len(part), 0)), labels.new_empty((len(part), 0))) for part in parts]
    for start in range(0, len(features), _BANK):
        bank, owners = F.normalize(features[start : start + _BANK]), labels[start : start + _BANK]
        for i, part in enumerate(parts):
            nearest, index = (part @ bank.T).topk(min(k, len(bank)))
            found[i] = _merge(found[i], (nearest, owners[index]), k)
    predicted = []
    for nearest, neighbours in found:
        # Relative to the nearest one, no temperature overflows or loses every vote.
        weights = ((nearest - nearest[:, :1]) / temperature).exp()
        # A sum, unlike scatter_add, adds in the same order on every run.
        ballots = F.one_hot(neighbours, classes).to(weights.dtype)
        predicted.append((ballots * weights[..., None]).sum(dim=1).argmax(dim=1))
    return top1(torch.cat(predicted), test_labels)


def _merge(one: Found, other: Found, k: int) -> Found:
    """Return the ``k`` nearest of two sets of neighbours, nearest first."""
    if not one[0].shape[1]:
        return other
    nearest, index = torch.cat((one[0], other[0]), dim=1).topk(k)
    return nearest, torch.cat((one[1], other[1]), dim=1).gather(1, index)
