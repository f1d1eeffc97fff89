import math

import pytest
import torch

from fedssl.evaluate import knn


def cloud(n, d, seed):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def by_hand(features, labels, queries, truth, classes, k, temperature):
    right = 0
    for query, target in zip(queries.tolist(), truth.tolist(), strict=True):
        cosines = []
        for row, label in zip(features.tolist(), labels.tolist(), strict=True):
            dot = sum(a * b for a, b in zip(row, query, strict=True))
            cosines.append((dot / math.hypot(*row) / math.hypot(*query), label))
        votes = [0.0] * classes
        for cosine, label in sorted(cosines, reverse=True)[:k]:
            votes[label] += math.exp(cosine / temperature)
        right += votes.index(max(votes)) == target
    return 100 * right / len(truth)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.1), (7, 0.07), (20, 0.5), (20, 5.0)])
@pytest.mark.parametrize(("cells", "bank"), [(1, 1 << 18), (1 << 24, 1 << 18), (1 << 24, 13)])
def test_agrees_with_a_loop_over_everything(k, temperature, cells, bank, monkeypatch):
    monkeypatch.setattr(knn, "_CELLS", cells)
    monkeypatch.setattr(knn, "_BANK", bank)
    labels, truth = torch.arange(60) % 3, torch.arange(40) % 3
    features, queries = cloud(60, 4, 0), cloud(40, 4, 1)
    # Different lengths, so that a forgotten normalization shows.
    features = features * torch.linspace(0.1, 10, 60)[:, None]
    ours = knn.accuracy(features, labels, queries, truth, 3, k, temperature)
    assert ours == pytest.approx(by_hand(features, labels, queries, truth, 3, k, temperature))


def test_one_near_neighbour_outvotes_two_far_ones_only_when_weighted():
    features = torch.tensor([[1.0, 0.0], [0.5, 1.0], [0.5, 1.0]])
    labels = torch.tensor([0, 1, 1])
    query, truth = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    assert knn.accuracy(features, labels, query, truth, 2, k=3, temperature=0.1) == 100.0
    assert knn.accuracy(features, labels, query, truth, 2, k=3, temperature=100.0) == 0.0


def test_more_neighbours_than_samples_means_all_of_them():
    features, labels = torch.eye(3), torch.arange(3)
    assert knn.accuracy(features, labels, torch.eye(3), labels, 3, k=50) == 100.0


def test_a_very_low_temperature_is_the_nearest_neighbour():
    features, labels = cloud(50, 3, 0), torch.arange(50) % 5
    queries = features + 1e-3 * cloud(50, 3, 1)
    assert knn.accuracy(features, labels, queries, labels, 5, k=50, temperature=1e-4) == 100.0
