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
_SMALL = 1 << 22  # features up to this many numbers are fitted in float64 on the CPU


@dataclass(frozen=True)
class Training:
    """How a classifier is trained by steps: a row of DCCO's appendix B."""

    rule: Optimizer
    steps: int
    batch: int


# The paper has a row for 5,000 and one for 500 labels; below this number the second is used.
FEW = 2500
LARS_NORM = 3.0
DCCO_MANY = Training(Optimizer("lars", 2.0, momentum=0.9), steps=1000, batch=512)
DCCO_FEW = Training(Optimizer("lars", 2.5, momentum=0.9), steps=400, batch=128)


def accuracy(
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
    x = features.double()
    center, scale = x.mean(dim=0), _spread(x)
    x = (x - center) / scale
    axes = _axes(x, classes)
    x = (x @ axes).to(torch.float64 if small else torch.float32)
    stretch = torch.linalg.vector_norm(axes, dim=0).to(x.dtype)
    weight = x.new_zeros(classes, x.shape[1], requires_grad=True)
    bias = x.new_zeros(classes, requires_grad=True)
    solver = torch.optim.LBFGS(
        (weight, bias),
        max_iter=1000,
        history_size=20,
        tolerance_grad=1e-7 if small else 1e-5,
        tolerance_change=1e-11 if small else 1e-8,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        solver.zero_grad()
        loss = F.cross_entropy(F.linear(x, weight, bias), labels)
        loss = loss + (weight * stretch).square().sum() / (2 * C * len(x))
        loss.backward()
        return loss

    solver.step(objective)
    plain = weight.detach().double() @ axes.T / scale
    return plain, bias.detach().double() - plain @ center


def _spread(x: Tensor) -> Tensor:
    """Standard deviations, with a floor that keeps dead features from being blown up."""
    spread = x.std(dim=0, correction=0)
    floor = 0.01 * spread.square().mean().sqrt()
    return spread.clamp(min=max(floor.item(), torch.finfo(x.dtype).tiny))


def _axes(x: Tensor, classes: int) -> Tensor:
    """Principal axes as columns, stretched so that L-BFGS needs few steps; empty ones left out.

    A rotation changes neither the penalty nor the solution. The curvature along an axis of
    variance v is v/classes + 1/n while the weights are small and about 1/n once the classes are
    apart; the stretch evens out the geometric mean of the two. Measured: up to six times fewer
    steps.
    """
    n, width = x.shape
    if n < width:
        _, singular, axes = torch.linalg.svd(x, full_matrices=False)
        variance, axes = singular.square() / n, axes.T
    else:
        variance, axes = torch.linalg.eigh(x.T @ x / n)
    full = variance > 1e-12 * variance.max()
    return axes[:, full] * (variance[full] / classes + 1 / (C * n)).pow(-0.25)


def train_lars(features: Tensor, labels: Tensor, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights and biases after the paper's LARS steps, from zero.

    LARS scales a step by the weights' norm, which would hold zero weights at zero: there the
    ratio is one (see ``optim``), so the first step is a plain gradient step. How far it goes
    depends on the size of the features, of which the paper says nothing; here they are centred
    and brought to a norm of three on average, and the result applies to the features as given.
    Three did best of 0.3, 1, 3, 10 and 30 on training images held out of CIFAR-10 (JPEG).
    """
    training = DCCO_FEW if len(features) < FEW else DCCO_MANY
    center = features.mean(dim=0)
    x = features - center
    scale = x.square().sum(dim=1).mean().sqrt().clamp(min=torch.finfo(x.dtype).tiny)
    scale = scale / LARS_NORM
    x = x / scale
    head = zero_head(x.shape[1], classes, x)
    flat = Flat(head)
    state = optim.start(training.rule, flat.params)
    for step, index in enumerate(batches(seed, "probe", len(x), training)):
        chosen = torch.as_tensor(index, device=x.device)
        flat.gradient.zero_()
        F.cross_entropy(head(x[chosen]), labels[chosen]).backward()
        descend(flat, state, training, step)
    weight = head.weight.detach().double() / scale
    return weight, head.bias.detach() - weight @ center.double()


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
