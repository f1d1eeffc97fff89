"""Optimizers on one flat parameter vector: they take their state and return the change to add.

Server, clients and probes share them. They never write to the parameters, so that a client's first
step can be sent as exactly ``-lr · gradient``, not as a difference of two nearby vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedssl.config import Optimizer

State = dict[str, Tensor]
Shape = Sequence[int]

LARS_TRUST = 0.001  # η of You et al. 2017, section 4


@dataclass(frozen=True)
class Pull:
    """A term of every step's gradient that does not come from images: weight · (v − anchor).

    It is the gradient of the proximal term weight/2 ‖v − anchor‖² (Eq. 9 of the second paper).
    With ``is_constant`` it is −weight · anchor, whatever the parameters v are.
    """

    weight: float
    anchor: Tensor
    is_constant: bool = False

    def add_to(self, gradient: Tensor, params: Tensor) -> None:
        """Add the term to a gradient."""
        anchor = self.anchor[: len(params)]
        gradient.add_(-anchor if self.is_constant else params - anchor, alpha=self.weight)


def start(rule: Optimizer, params: Tensor) -> State:
    """Return the state before the first step."""
    if rule.optimizer in ("adam", "adamw"):
        steps = torch.zeros((), dtype=torch.float64, device=params.device)
        return {"m": torch.zeros_like(params), "v": torch.zeros_like(params), "steps": steps}
    return {"momentum": torch.zeros_like(params)} if rule.momentum else {}


def step(
    rule: Optimizer,
    state: State,
    params: Tensor,
    gradient: Tensor,
    lr: float | Tensor,
    layers: Sequence[Shape],
    depths: Tensor | None = None,
) -> Tensor:
    """Return the change of one step of ``rule``; ``layers`` are the shapes in the flat vector.

    ``depths`` counts the blocks between each parameter and the last block, for ``layer_decay``.

    >>> rule = Optimizer("sgd", lr=0.1)
    >>> params, gradient = torch.ones(2), torch.ones(2)
    >>> step(rule, start(rule, params), params, gradient, rule.lr, [(2,)])
    tensor([-0.1000, -0.1000])
    """
    if rule.clip_norm is not None:
        norm = torch.linalg.vector_norm(gradient)
        gradient = gradient * (rule.clip_norm / (norm + 1e-6)).clamp(max=1)
    change = _step(rule, state, params, gradient, lr, layers)
    if rule.layer_decay == 1 or depths is None:
        return change
    return change.mul_(rule.layer_decay**depths)


def _step(
    rule: Optimizer,
    state: State,
    params: Tensor,
    gradient: Tensor,
    lr: float | Tensor,
    layers: Sequence[Shape],
) -> Tensor:
    if rule.optimizer == "lars":
        gradient = _trusted(gradient, params, rule.weight_decay, layers)
    elif rule.weight_decay and rule.optimizer != "adamw":
        gradient = gradient.add(_decaying(rule, params, layers), alpha=rule.weight_decay)
    if rule.optimizer == "adam":
        return _adam(state, gradient, lr)
    if rule.optimizer == "adamw":
        # Loshchilov and Hutter 2019, Algorithm 2: the decay does not go through the moments.
        decayed = _decaying(rule, params, layers)
        return _adam(state, gradient, lr).sub_(decayed * (lr * rule.weight_decay))
    if "momentum" in state:
        gradient = state["momentum"].mul_(rule.momentum).add_(gradient)
    return gradient * -lr


def _decaying(rule: Optimizer, params: Tensor, layers: Sequence[Shape]) -> Tensor:
    """Return the parameters, with 0 in the place of those that do not decay."""
    if rule.decay == "all":
        return params
    parts = params.split([math.prod(shape) for shape in layers])
    pairs = zip(layers, parts, strict=True)
    return torch.cat([p if len(shape) > 1 else torch.zeros_like(p) for shape, p in pairs])


def _adam(state: State, gradient: Tensor, lr: float | Tensor) -> Tensor:
    """Return a step of Adam (Kingma and Ba 2015, Algorithm 1, with its constants)."""
    beta1, beta2, epsilon = 0.9, 0.999, 1e-8
    t = state["steps"].add_(1)  # on the device: reading it would make the host wait
    m = state["m"].lerp_(gradient, 1 - beta1)
    v = state["v"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = v.sqrt().div_((1 - beta2**t).sqrt()).add_(epsilon)
    return (m / denominator).mul_(-lr / (1 - beta1**t))


def _trusted(
    gradient: Tensor, params: Tensor, weight_decay: float, layers: Sequence[Shape]
) -> Tensor:
    """Scale each weight tensor's gradient to its norm: LARS (You et al. 2017, Eq. 6).

    Biases and norm parameters (one dimension) keep plain gradients without decay. A tensor of zeros
    (a new classifier) has a ratio of one, as in SimCLR's and BYOL's optimizers.
    """
    out = gradient.clone()
    sizes = [math.prod(shape) for shape in layers]
    for shape, g, w in zip(layers, out.split(sizes), params.split(sizes), strict=True):
        if len(shape) < 2:
            continue
        norm_w, norm_g = torch.linalg.vector_norm(w), torch.linalg.vector_norm(g)
        ratio = LARS_TRUST * norm_w / (norm_g + weight_decay * norm_w)
        g.add_(w, alpha=weight_decay).mul_(
            torch.where((norm_w > 0) & (norm_g > 0), ratio, torch.ones_like(ratio))
        )
    return out


def constant(step: int, total: int) -> float:
    """Return the factor of a constant learning rate."""
    return 1.0


def steps(step: int, total: int) -> float:
    """Return the factor of a rate that falls to 30% at 30%, 60% and 90% of the rounds.

    >>> [round(steps(i, 10), 3) for i in (0, 2, 3, 6, 9)]
    [1.0, 1.0, 0.3, 0.09, 0.027]
    """
    return 0.3 ** sum(step >= tenths * total // 10 > 0 for tenths in (3, 6, 9))


def cosine(step: int, total: int) -> float:
    """Return the factor of a cosine decay from 1 at step 0 towards 0 at ``total``.

    >>> [round(cosine(i, 4), 3) for i in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """
    return 0.5 * (1 + math.cos(math.pi * step / total))
