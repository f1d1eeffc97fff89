"""The accuracy by which settings may be chosen: on training images that no client has."""

from __future__ import annotations

import torch
from torch import Tensor

from fedssl.evaluate import linear
from fedssl.evaluate.base import EvaluatedModel, EvaluationData, Protocol
from fedssl.evaluate.features import head_accuracy


class HeldOut(Protocol):
    """Accuracy on held-out training images."""

    name = "heldout"
    option = "share"
    needs = "held-out images"

    def check(self, data: EvaluationData) -> None:
        """Check that the images are held out, and enough to compare halves of them."""
        check_held_out(self, data)
        self.check_train(data)
        if len(self.draw(data)) >= 2 * data.classes:
            return
        labels, fix = data.train.full_labels, "Use a larger share, here and as data.holdout."
        if torch.bincount(labels[labels >= 0]).min() < 2:
            fix = "Use other protocols: a class has no second image."
        raise self.error("is one image of each class, and halves of them are compared", fix)

    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Fit a probe on each half, or use the network's own classifier on all of them."""
        data, chosen = model.data, self.draw(model.data)
        if model.has_head:
            split = data.train.select(torch.as_tensor(model.train.labelled.groups.members[chosen]))
            return {self.measure: head_accuracy(model.tower, split, data.modality)}
        train = model.train.take(chosen)
        return {self.measure: accuracy(*train, data.classes, data.config.seed)}


def check_held_out(protocol: Protocol, data: EvaluationData) -> None:
    """Check that ``data.holdout`` keeps the images of a protocol out of training."""
    check_share(protocol, data.config.data.holdout)
    if data.train.cases is not None:
        problem = "labels are drawn by case here, and data.holdout keeps single images"
        raise protocol.error(problem, "Set data.holdout=0, and leave heldout out.")


def check_share(protocol: Protocol, holdout: float) -> None:
    """Check that ``data.holdout`` is large enough."""
    if protocol.share > holdout:
        raise protocol.error(
            f"data.holdout={holdout} keeps fewer images out of training",
            f"Set data.holdout={protocol.share:g} when the run starts.",
        )


def accuracy(features: Tensor, labels: Tensor, classes: int, seed: int) -> float:
    """Return the top-1 of a probe on one half of the images, evaluated on the other; both ways.

    The probe is always DCCO's (appendix B), whatever ``evaluate.preset`` is: its number of steps
    is fixed, and it is fitted often.
    """
    first = torch.zeros_like(labels, dtype=torch.bool)
    first[torch.sort(labels, stable=True).indices[::2]] = True  # every second image of each class
    scores = [
        linear.accuracy(features[a], labels[a], features[b], labels[b], classes, "dcco", seed)
        for a, b in ((first, ~first), (~first, first))
    ]
    return sum(scores) / 2
