"""The vector of a client: its reply and its weight as integers, whose sum loses nothing."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.util.trees import Tree, flatten, unflatten

SCALE = 2.0**32

Vector: TypeAlias = NDArray[np.int64]  # two's complement: sums are mod 2⁶⁴


def size(like: Tree) -> int:
    """Count the numbers in the vector of a tree: its weight and its leaves."""
    return 1 + sum(leaf.numel() for leaf in flatten(like).values())


def encode(tree: Tree, weight: float, participants: int, weigh: bool = True) -> Vector:
    """``[weight, weight · leaves …]`` in fixed point, 2⁻³² a unit; leaves in the order of names.

    Leaves that have their weight already are not to be weighed.

    Rounding costs a client at most 2⁻³³ a number. The mean of n clients differs from the plain one
    by at most n · 2⁻³³ / Σ weights (times 1 + |mean| if weights are no multiples of 2⁻³²), and by
    the float64 rounding of products and of the decoded sum. What could overflow the sum of
    ``participants`` such vectors is refused.
    """
    flat = flatten(tree)
    parts = [torch.ones(1, dtype=torch.float64)]
    parts += [flat[name].detach().to("cpu", torch.float64).reshape(-1) for name in sorted(flat)]
    numbers = torch.cat(parts)
    (numbers if weigh else numbers[:1]).mul_(weight)
    units = numbers.mul_(SCALE).round_().numpy()
    largest = float(np.abs(units).max())
    if not math.isfinite(largest):
        raise ValueError("a number to be summed is not finite")
    if int(largest) * participants >= 2**63:
        raise ValueError(
            f"a number to be summed is {largest / SCALE:.3g} with its weight: a secure sum of "
            f"{participants} clients holds less than {2**31 / participants:.3g}"
        )
    return units.astype(np.int64)


def decode(total: Vector, like: Tree) -> tuple[Tree, float]:
    """Σ weight · tree (in float64, with the names and shapes of ``like``) and Σ weight."""
    numbers = torch.from_numpy(total / SCALE)
    flat, start = flatten(like), 1
    out: dict[str, Tensor] = {}
    for name in sorted(flat):
        end = start + flat[name].numel()
        out[name] = numbers[start:end].reshape(flat[name].shape)
        start = end
    return out[""] if isinstance(like, Tensor) else unflatten(out), float(numbers[0])
