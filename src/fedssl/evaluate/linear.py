"""Linear probe: a linear classifier on frozen features, never augmented, last iterate reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedssl import optim
from fedssl.config import Optimizer
from fedssl.data import random
from fedssl.evaluate.features import top1
from fedssl.models.flat import Flat

C = 1.0  # inverse weight of the penalty, in scikit-learn's meaning and with its default
_SMALL = 1 << 24  # features up to this many numbers are fitted in float64 on the CPU


@dataclass(frozen=True)
class Training:
    """How a classifier is trained by steps: a row of DCCO's appendix B."""

    rule: Optimizer
    steps: int
    batch: int


# The paper has rows for 5,000 and for 500 labels; what is nearer to 500 takes the second.
FEW = 2500
DCCO_MANY = Training(Optimizer("lars", 2.0, momentum=0.9), steps=1000, batch=512)
DCCO_FEW = Training(Optimizer("lars", 2.5, momentum=0.9), steps=400, batch=128)


def linear(
    features: Tensor,
    labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    classes: int,
    preset: str = "logistic",
    seed: int = 0,
) -> float:
    """Top-1 in percent of a linear classifier on the features.

    ``logistic`` fits a convex problem to its one solution and needs no seed; ``dcco`` is the
    paper's own training (appendix B), whose batches depend on the seed. The paper's flip
    augmentation is part of its fine-tuning only: features are computed once, from plain images.
    """
    if preset == "dcco":
        weight, bias = train_lars(features, labels, classes, seed)
    else:
        weight, bias = fit_logistic(features, labels, classes)
    scores = F.linear(test_features.to(weight.dtype), weight, bias)
    return top1(scores.argmax(dim=1), test_labels)


def fit_logistic(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Weights and biases of multinomial logistic regression, by L-BFGS to convergence.

    Minimizes mean cross-entropy + ‖W‖² / (2 C n) over standardized features. This is
    scikit-learn's objective with C = 1: a standard normal prior on each weight, which counts for
    less the more labels there are, so that one constant serves 10 labels and 50,000 with nothing
    tuned on test data. The result applies to the features as given.
    """
    small = features.device.type == "cpu" and features.numel() <= _SMALL
    x = features.to(torch.float64 if small else torch.float32)
    mean, scale = x.mean(dim=0), _scale(x)
    x = (x - mean) / scale
    weight = x.new_zeros(classes, x.shape[1], requires_grad=True)
    bias = x.new_zeros(classes, requires_grad=True)
    solver = torch.optim.LBFGS(
        (weight, bias),
        max_iter=1000,
        history_size=20,
        tolerance_grad=1e-7 if small else 1e-5,
        tolerance_change=1e-12 if small else 1e-8,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        solver.zero_grad()
        loss = F.cross_entropy(F.linear(x, weight, bias), labels)
        loss = loss + weight.square().sum() / (2 * C * len(x))
        loss.backward()
        return loss

    solver.step(objective)
    plain = weight.detach() / scale
    return plain, bias.detach() - plain @ mean


def _scale(x: Tensor) -> Tensor:
    """Standard deviations, with a floor that keeps dead features from being blown up."""
    spread = x.std(dim=0, correction=0)
    floor = 0.01 * spread.square().mean().sqrt()
    return spread.clamp(min=max(floor.item(), torch.finfo(x.dtype).tiny))


def train_lars(features: Tensor, labels: Tensor, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights and biases after the paper's LARS steps, from zero.

    LARS scales a step by the weights' norm, which would hold zero weights at zero: there the
    ratio is one (see ``optim``), so the first step is a plain gradient step.
    """
    training = DCCO_FEW if len(features) < FEW else DCCO_MANY
    head = zero_head(features.shape[1], classes, features)
    flat = Flat(head)
    state = optim.start(training.rule, flat.params)
    for step, index in enumerate(batches(seed, "probe", len(features), training)):
        chosen = torch.as_tensor(index, device=features.device)
        flat.gradient.zero_()
        F.cross_entropy(head(features[chosen]), labels[chosen]).backward()
        descend(flat, state, training, step)
    return head.weight.detach(), head.bias.detach()


def zero_head(width: int, classes: int, like: Tensor) -> nn.Linear:
    """A linear classifier of zeros: no class is preferred and nothing is drawn."""
    head = nn.Linear(width, classes, device="meta").to_empty(device=like.device).to(like.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def batches(seed: int, purpose: str, count: int, training: Training) -> Iterator[NDArray[np.int64]]:
    """The samples of each step: a new shuffle every epoch, of which full batches are taken."""
    size = min(training.batch, count)
    per_epoch = count // size
    for step in range(training.steps):
        epoch, place = divmod(step, per_epoch)
        if place == 0:
            order = random.permutation(random.key(seed, purpose, epoch), count)
        yield order[place * size : (place + 1) * size]


def descend(flat: Flat, state: optim.State, training: Training, step: int) -> None:
    """One step along the gradient that ``flat`` holds, on the cosine schedule."""
    rule = training.rule
    lr = rule.lr * optim.cosine(step, training.steps)
    flat.params.add_(optim.step(rule, state, flat.params, flat.gradient, lr, flat.layers))
