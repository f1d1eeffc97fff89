"""A protocol of the user's own: a function of features and labels."""

from __future__ import annotations

from fedssl.config import plugins
from fedssl.evaluate.base import EvaluatedModel, Protocol, split_spec


class PluginProtocol(Protocol):
    """Measures of a user's function.

    It takes the features and labels of training cases, those of the test cases, the number of
    classes and the seed, and returns numbers by name.
    """

    name = "plugin"
    option = "labels"

    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Call the function with copies, which it may change."""
        data, name = model.data, split_spec(self.spec)[0]
        function = plugins.load("protocol", name, (self.key, self.spec), ())
        train = model.train.take(self.draw(data))
        test = (part.clone() for part in model.test.pooled)
        seed = data.config.seed
        return plugins.call_protocol(function, self.spec, *train, *test, data.classes, seed)
