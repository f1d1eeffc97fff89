"""The protocol ``transfer``: a sanity check on labelled images of another kind."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl.config import Data
from fedssl.data.load import load_dataset
from fedssl.evaluate import knn
from fedssl.evaluate.base import EvaluatedModel, EvaluationData, Protocol
from fedssl.evaluate.features import extract

TRAIN = 500  # digits that vote; a large encoder on a CPU takes long for all of them


class Transfer(Protocol):
    """Accuracy of kNN on scikit-learn's digits, which come with the package.

    It shows whether the encoder still tells simple shapes apart. It says little about the images
    that the encoder was trained on.
    """

    name = "transfer"

    def check(self, data: EvaluationData) -> None:
        """The digits fit every encoder: they are resized and coloured as its images."""

    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Vote on each of the digits' test images."""
        _, channels, height, width = model.train.images.shape
        digits = load_dataset(Data(name="digits", size=max(height, width)))
        assert digits.test is not None
        pairs: list[tuple[Tensor, Tensor]] = []
        for split in (digits.train.select(torch.arange(TRAIN)), digits.test):
            sized = F.interpolate(split.images[0][:].float(), (height, width), mode="area")
            images = sized.round().to(torch.uint8).expand(-1, channels, -1, -1)
            features = extract(model.encoder, images)
            pairs.append((features, split.full_labels.to(features.device)))
        train, test = pairs
        return {"transfer_to_digits": knn.accuracy(*train, *test, len(digits.classes))}
