"""The accuracy that settings may be chosen by: on training images that no client has."""

from __future__ import annotations

import torch
from torch import Tensor

from fedssl.evaluate import linear


def accuracy(features: Tensor, labels: Tensor, classes: int, seed: int) -> float:
    """Top-1 of a linear probe on one half of the held-out images, judged on the other; both ways.

    The probe is always DCCO's (appendix B), whatever ``evaluate.preset`` says: its number of steps
    is fixed, and it is asked for often. A network that is judged by its own classifier (``head``)
    needs no probe: there all of these images judge the classifier (``ModelEvaluator``).
    """
    first = _every_other(labels)
    halves = [(first, ~first), (~first, first)]
    scores = [
        linear.accuracy(features[a], labels[a], features[b], labels[b], classes, "dcco", seed)
        for a, b in halves
    ]
    return sum(scores) / 2


def _every_other(labels: Tensor) -> Tensor:
    """Every second image of each class."""
    order = torch.sort(labels, stable=True).indices
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[order[::2]] = True
    return mask
