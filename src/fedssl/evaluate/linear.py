"""Linear probe: a classifier on frozen features of plain images; the last step is reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedssl.config import Optimizer
from fedssl.data import random
from fedssl.evaluate.features import top1
from fedssl.models.flat_weights import FlatWeights
from fedssl.training import optim
from fedssl.util.device import to_device

C = 1.0  # inverse weight of the penalty, as in scikit-learn and with its default
Head = tuple[Tensor, Tensor]  # weights and biases
Step = Callable[[Tensor, float | Tensor], None]  # takes the samples and the learning rate
# From this number of steps on, a CUDA graph is faster; capturing it costs about 100 plain steps.
WORTH_CAPTURING = 200
_SMALL = 1 << 22  # features up to this many numbers are fitted in float64 on the CPU
_ROWS = 1 << 17  # more samples are standardized in parts, in every step: no second table of them


def stairs(step: int, total: int, factor: float = 0.1) -> float:
    """Return the factor of a learning rate that falls after three and four fifths of the steps."""
    return factor ** ((5 * step >= 3 * total) + (5 * step >= 4 * total))


@dataclass(frozen=True)
class Training:
    """The training of a classifier: a row of DCCO's appendix B, or epochs as in other papers."""

    rule: Optimizer
    steps: int = 0  # 0: given by the epochs, see ``over``
    batch: int = 1
    epochs: int = 0
    schedule: Callable[[int, int], float] = optim.cosine
    head: float = 1.0  # learning rate of a new classifier, as a multiple of the encoder's
    norm: float | None = None  # frozen features are centred and scaled to this mean norm

    def over(self, count: int) -> Training:
        """Return the training on ``count`` samples, with its number of steps."""
        return replace(self, steps=self.epochs * (len(self.cuts(count)) - 1) or self.steps)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.rule.lr * self.schedule(step, self.steps)

    def cuts(self, count: int) -> NDArray[np.int64]:
        """Return the bounds of the batches in an epoch's shuffle.

        Steps take full batches only. Epochs take every sample, in batches of nearly equal size:
        with 129 samples, a last batch of one would be too small for batch norm.
        """
        if self.epochs:
            batches = math.ceil(count / self.batch)
            return np.arange(batches + 1) * count // batches
        size = min(self.batch, count)
        return np.arange(count // size + 1) * size


# DCCO, appendix B: LARS steps from zero. LARS scales a step by the weights' norm, which would keep
# zero weights at zero. There the ratio is one (see ``optim``), so the first step is a plain
# gradient step. Its length depends on the size of the features, which the paper does not state. A
# mean norm of three did best of 0.3, 1, 3, 10 and 30 on training images held out of CIFAR-10
# (JPEG). The paper has rows for 5,000 and for 500 labels. Below ``FEW`` labels, the second is used.
FEW = 2500
DCCO_MANY = Training(Optimizer("lars", 2.0, momentum=0.9), steps=1000, batch=512, norm=3.0)
DCCO_FEW = Training(Optimizer("lars", 2.5, momentum=0.9), steps=400, batch=128, norm=3.0)
# FedEMA, appendix B.3: epochs of Adam on features as they are. The paper names neither a schedule
# nor weight decay, so there is none.
FEDEMA = Training(Optimizer("adam", 3e-3), epochs=200, batch=512, schedule=optim.constant)
# CCL, section 6: 100 epochs of SGD as in MoCo (He et al. 2020, section 4.1), whose rate of 30 falls
# at epochs 60 and 80. The rate suits MoCo's features, whose size is not stated. A mean norm of one
# did best of 0.1, 0.3, 1 and 3 on training images held out of digits, Fashion-MNIST and CIFAR-10
# (JPEG), 1 to 7 points better than unscaled features. Unscaled features of small encoders, with a
# norm of four, ended at training losses of 3 and 13.
MOCO = Optimizer("sgd", 30.0, momentum=0.9)
CCL = Training(MOCO, epochs=100, batch=256, schedule=stairs, norm=1.0)


def accuracy(
    features: Tensor,
    labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    classes: int,
    preset: str = "logistic",
    seed: int = 0,
) -> float:
    """Return the top-1 in percent of a linear classifier on the features."""
    head = fit(features, labels, classes, preset, seed)
    return top1(predict(head, test_features), test_labels)


def fit(
    features: Tensor, labels: Tensor, classes: int, preset: str = "logistic", seed: int = 0
) -> Head:
    """Return the preset's linear classifier.

    ``logistic`` solves a convex problem and needs no seed. ``dcco``, ``fedema`` and ``ccl`` are the
    papers' trainings (``derm`` is ``dcco``), whose batches depend on the seed. Features are
    computed once, from plain images; DCCO's flips are for its fine-tuning only.
    """
    if preset == "logistic":
        return fit_logistic(features, labels, classes)
    dcco = DCCO_FEW if len(features) < FEW else DCCO_MANY
    training = {"dcco": dcco, "derm": dcco, "fedema": FEDEMA, "ccl": CCL}[preset]
    return train(features, labels, classes, training, seed)


def predict(head: Head, features: Tensor) -> Tensor:
    """Predict the class of each sample."""
    weight, bias = head
    return F.linear(features.to(weight.dtype), weight, bias).argmax(dim=1)


def fit_logistic(features: Tensor, labels: Tensor, classes: int) -> Head:
    """Fit multinomial logistic regression with L-BFGS.

    Minimizes mean cross-entropy + ‖W‖² / (2 C n) over standardized features. This is scikit-learn's
    objective with C = 1, a standard normal prior on each weight. The prior counts for less with
    more labels, so one constant works for 10 labels and for 50,000 without tuning on test data. The
    result applies to the unstandardized features.
    """
    small = features.device.type == "cpu" and features.numel() <= _SMALL
    dtype = torch.float64 if small else torch.float32
    parts = features.split(_ROWS)
    center, scale, axes = _standardize(parts, classes)
    whole = ((features.double() - center) / scale @ axes).to(dtype) if len(parts) == 1 else None
    stretch = torch.linalg.vector_norm(axes, dim=0).to(dtype)
    weight = stretch.new_zeros(classes, axes.shape[1], requires_grad=True)
    bias = stretch.new_zeros(classes, requires_grad=True)
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
        if whole is not None:
            total = F.cross_entropy(F.linear(whole, weight, bias), labels)
            total = total + (weight * stretch).square().sum() / (2 * C * len(features))
            total.backward()
            return total
        total = (weight * stretch).square().sum() / (2 * C * len(features))
        total.backward()
        for part, owned in zip(parts, labels.split(_ROWS), strict=True):
            x = (part.to(dtype) - center.to(dtype)).div_(scale.to(dtype))
            loss = F.cross_entropy(F.linear(x, weight @ axes.to(dtype).T, bias), owned)
            loss = loss * (len(part) / len(features))
            loss.backward()
            total = total + loss.detach()
        return total

    solver.step(objective)
    plain = weight.detach().double() @ axes.T / scale
    return plain, bias.detach().double() - plain @ center


def _standardize(parts: Sequence[Tensor], classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return means, standard deviations and axes (see ``_scale_axes``) of features."""
    if len(parts) == 1:
        x = parts[0].double()
        center, scale = x.mean(dim=0), _floor(x.std(dim=0, correction=0))
        x = (x - center) / scale
        n, width = x.shape
        if n < width:
            _, singular, axes = torch.linalg.svd(x, full_matrices=False)
            return center, scale, _scale_axes(singular.square() / n, axes.T, n, classes)
        variance, axes = torch.linalg.eigh(x.T @ x / n)
        return center, scale, _scale_axes(variance, axes, n, classes)
    n = sum(map(len, parts))
    center = torch.stack([part.double().sum(dim=0) for part in parts]).sum(dim=0) / n
    products = torch.zeros_like(torch.outer(center, center))
    for part in parts:
        x = part.double() - center
        products += x.T @ x / n
    scale = _floor(products.diagonal().sqrt())
    variance, axes = torch.linalg.eigh(products / scale / scale[:, None])
    return center, scale, _scale_axes(variance, axes, n, classes)


def _floor(spread: Tensor) -> Tensor:
    """Return standard deviations with a floor, so that dead features are not magnified."""
    floor = 0.01 * spread.square().mean().sqrt()
    return spread.clamp(min=max(floor.item(), torch.finfo(torch.float32).tiny))


def _scale_axes(variance: Tensor, axes: Tensor, n: int, classes: int) -> Tensor:
    """Return principal axes as columns, without empty ones, scaled so that L-BFGS converges fast.

    A rotation changes neither the penalty nor the solution. The curvature along an axis of variance
    v is v/classes + 1/n while the weights are small, and about 1/n once the classes are separated.
    The scale equalizes the geometric mean of the two, which saves up to five of six steps.
    """
    full = variance > 1e-12 * variance.max()
    return axes[:, full] * (variance[full] / classes + 1 / (C * n)).pow(-0.25)


def train(features: Tensor, labels: Tensor, classes: int, training: Training, seed: int) -> Head:
    """Train a linear classifier from zero; return it for the unscaled features."""
    if training.norm is None:
        head = _descend(features, labels, classes, training, seed)
        return head.weight.detach(), head.bias.detach()
    center = features.mean(dim=0)
    x = features - center
    scale = x.square().sum(dim=1).mean().sqrt().clamp(min=torch.finfo(x.dtype).tiny)
    scale = scale / training.norm
    head = _descend(x / scale, labels, classes, training, seed)
    weight = head.weight.detach().double() / scale
    return weight, head.bias.detach() - weight @ center.double()


def _descend(x: Tensor, labels: Tensor, classes: int, training: Training, seed: int) -> nn.Linear:
    """Take the steps of a training."""
    training = training.over(len(x))
    head = zero_head(x.shape[1], classes, x)
    flat = FlatWeights(head)
    state = optim.start(training.rule, flat.params)

    def plain(chosen: Tensor, lr: float | Tensor) -> None:
        # On the CPU index_select copies rows twice as fast as indexing does.
        loss = F.cross_entropy(head(x.index_select(0, chosen)), labels[chosen])
        gradients = torch.autograd.grad(loss, list(head.parameters()))
        torch.cat([g.reshape(-1) for g in gradients], out=flat.gradient)
        make_step(flat, state, training, lr)

    step: Step = plain
    if x.device.type == "cuda" and training.steps >= WORTH_CAPTURING:
        step = captured(plain, set(np.diff(training.cuts(len(x))).tolist()), x.device)
        for tensor in (flat.vector, *state.values()):
            tensor.zero_()  # undo the steps of the capture
    for number, index in enumerate(batches(seed, "probe", len(x), training)):
        step(to_device(index, x.device), training.rate(number))
    return head


def captured(step: Step, sizes: Iterable[int], device: torch.device) -> Step:
    """Capture a step as one CUDA graph per batch size, so that the host makes one call per step.

    Capturing runs some steps, which change the weights.
    """
    lr = torch.zeros((), dtype=torch.float64, device=device)
    places = {size: torch.zeros(size, dtype=torch.int64, device=device) for size in sizes}
    graphs = {size: torch.cuda.CUDAGraph() for size in places}
    here, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    for size, graph in graphs.items():
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(3):
                step(places[size], lr)
        here.wait_stream(aside)
        with torch.cuda.graph(graph, stream=aside):  # each graph has its own memory
            step(places[size], lr)

    def replay(chosen: Tensor, rate: float | Tensor) -> None:
        places[len(chosen)].copy_(chosen)
        lr.fill_(rate)
        graphs[len(chosen)].replay()

    return replay


def zero_head(width: int, classes: int, like: Tensor) -> nn.Linear:
    """Return a linear classifier of zeros, which prefers no class."""
    head = nn.Linear(width, classes, device="meta").to_empty(device=like.device).to(like.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def batches(seed: int, purpose: str, count: int, training: Training) -> Iterator[NDArray[np.int64]]:
    """Yield the samples of each step: a new shuffle every epoch, cut into batches."""
    cuts = training.cuts(count)
    for step in range(training.steps):
        epoch, place = divmod(step, len(cuts) - 1)
        if place == 0:
            order = random.permutation(random.key(seed, purpose, epoch), count)
        yield order[cuts[place] : cuts[place + 1]]


def make_step(
    flat: FlatWeights, state: optim.State, training: Training, lr: float | Tensor
) -> None:
    """Make one step along the gradient in ``flat``."""
    rule = training.rule
    flat.params.add_(optim.step(rule, state, flat.params, flat.gradient, lr, flat.layers))
