"""The protocol ``linear``: a linear classifier on frozen features."""

from __future__ import annotations

from fedssl.evaluate import linear
from fedssl.evaluate.base import EvaluatedModel, Protocol
from fedssl.evaluate.features import top1


class LinearProbe(Protocol):
    """Accuracy of a linear classifier on frozen features."""

    name = "linear"
    option = "labels"

    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Fit on labelled training cases, and predict the test cases."""
        data, (features, labels) = model.data, model.test.pooled
        if self.amount is None:
            head = model.probe
        else:
            train, seed = model.train.take(self.draw(data)), data.config.seed
            head = linear.fit(*train, data.classes, data.settings.preset, seed)
        return {self.measure: top1(linear.predict(head, features), labels)}
