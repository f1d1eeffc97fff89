"""The sanity check on scikit-learn's digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evaluation import data_of, evaluate
from sklearn import datasets
from torch import Tensor, nn

from fedssl.config import Evaluate
from fedssl.data.dataset import Split
from fedssl.evaluate.transfer import TRAIN


class Seen(nn.Module):
    """Pixels of the first channel, and the shapes of all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def forward(self, images: Tensor) -> Tensor:
        self.shapes.add(tuple(images.shape[1:]))
        return images[:, 0].flatten(1)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 24, 24), (3, 16, 8)])
def test_digits_come_in_the_shape_of_the_training_images(shape: tuple[int, ...]) -> None:
    train = Split((torch.zeros(2, *shape, dtype=torch.uint8),))
    encoder = Seen()
    score = evaluate(encoder, data_of(Evaluate(protocols=("transfer",)), train, None, 0))
    assert encoder.shapes == {shape}
    assert list(score) == ["transfer_to_digits"] and score["transfer_to_digits"] > 90


def test_the_score_is_that_of_scikit_learns_nearest_neighbours() -> None:
    from sklearn.neighbors import KNeighborsClassifier

    images, labels = datasets.load_digits(return_X_y=True)
    is_test = np.arange(len(labels)) % 5 == 4
    train, target = images[~is_test][:TRAIN], labels[~is_test][:TRAIN]
    vote = KNeighborsClassifier(20, metric="cosine", weights=lambda d: np.exp(-d / 0.1))
    expected = 100 * vote.fit(train, target).score(images[is_test], labels[is_test])
    split = Split((torch.zeros(2, 1, 8, 8, dtype=torch.uint8),))
    score = evaluate(Seen(), data_of(Evaluate(protocols=("transfer",)), split, None, 0))
    assert score["transfer_to_digits"] == pytest.approx(expected, abs=0.6)  # rounding to bytes
