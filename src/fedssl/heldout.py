"""The accuracy that settings may be chosen by: on training images that no client has.

A protocol as a user's own are, with the share that ``data.holdout`` keeps from the clients:
``data.holdout=0.1 evaluate.protocols=[linear@5000,fedssl.heldout:heldout@10%]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedssl.evaluate import linear


def heldout(
    features: Tensor,
    labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    classes: int,
    seed: int,
) -> dict[str, float]:
    """Top-1 of a linear probe on one half of the held-out images, judged on the other; both ways.

    The test images are not looked at: what is chosen by this is not chosen by them. The probe is
    DCCO's (appendix B), whose number of steps is fixed, since it is asked for often.
    """
    first = _every_other(labels)
    halves = [(first, ~first), (~first, first)]
    scores = [
        linear.accuracy(features[a], labels[a], features[b], labels[b], classes, "dcco", seed)
        for a, b in halves
    ]
    return {"top1": sum(scores) / 2}


def _every_other(labels: Tensor) -> Tensor:
    """Every second image of each class."""
    order = torch.sort(labels, stable=True).indices
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[order[::2]] = True
    return mask
