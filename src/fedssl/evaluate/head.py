"""The accuracy of a network's own classifier, which it was trained with."""

from __future__ import annotations

from fedssl.evaluate.base import EvaluatedModel, Protocol
from fedssl.evaluate.features import head_accuracy


class Head(Protocol):
    """Accuracy of the network's own classifier on the test images."""

    name = "head"

    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Predict the test cases."""
        data = model.data
        assert data.test is not None
        return {self.measure: head_accuracy(model.tower, data.test, data.modality)}
