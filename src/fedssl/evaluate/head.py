"""The accuracy of a network's own classifier, which it was trained with."""

from __future__ import annotations

from fedssl.evaluate.base import EvaluatedModel, Protocol


class Head(Protocol):
    """Accuracy of the network's own classifier on the test images."""

    name = "head"

    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Predict the test cases."""
        assert model.data.test is not None
        return {self.measure: model.head_accuracy(model.data.test)}
