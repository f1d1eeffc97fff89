"""Draw labelled samples evenly from the classes: few labels to train on, or a held-out share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedssl.data import random
from fedssl.data.dataset import Ints
from fedssl.util.errors import UserError


def draw_labels(
    labels: Tensor,
    count: int,
    classes: int,
    seed: int,
    *,
    key: str = "data.labels",
    value: object = None,
    names: Sequence[str] = (),
) -> Tensor:
    """Draw ``count`` labelled samples, equally many of each class; return their sorted indices.

    A pure function of the seed, and nested: ``draw_labels(y, 10, 10, seed)`` is part of
    ``draw_labels(y, 50, 10, seed)``. Errors name ``key`` and its ``value`` (``None``: the count)
    and the classes by ``names``.
    """
    value = count if value is None else value
    numbers = labels.cpu().numpy()
    available = np.bincount(numbers[numbers >= 0], minlength=classes)
    each, rest = divmod(count, classes)
    if rest:
        problem = f"{count} labels cannot be divided evenly between {classes} classes"
        fix = f"Use a multiple of {classes}, for example {max(each, 1) * classes}."
        raise UserError(problem, key=key, value=value, fix=fix)
    if each > available.min():
        problem = f"needs {each} samples of each class, but {_describe_rarest(available, names)}"
        fix = f"Use at most {available.min() * classes} labels."
        raise UserError(problem, key=key, value=value, fix=fix)
    ranks = random.mix(random.key(seed, "labels"), np.arange(len(numbers), dtype=np.uint64))
    order = np.lexsort((ranks, numbers))[np.count_nonzero(numbers < 0) :]
    starts = np.cumsum(available) - available
    chosen = order[(starts[:, None] + np.arange(each)).ravel()]
    return torch.from_numpy(np.sort(chosen))


def draw_any(labels: Tensor, count: int, seed: int, *, key: str, value: object) -> Tensor:
    """Draw ``count`` labelled samples regardless of their class; return their sorted indices.

    Nested, as in ``draw_labels``. DERM's classes are far from equal in size (DCCO, section 4.1).
    """
    labelled = np.flatnonzero(labels.cpu().numpy() >= 0)
    if count > len(labelled):
        problem = f"there are only {len(labelled)} labelled samples"
        raise UserError(problem, key=key, value=value, fix=f"Use at most {len(labelled)}.")
    order = random.permutation(random.key(seed, "labels"), len(labelled))
    return torch.from_numpy(np.sort(labelled[order[:count]]))


def draw_share(
    labels: Tensor,
    share: float,
    classes: int,
    seed: int,
    *,
    key: str = "data.holdout",
    value: object = None,
    names: Sequence[str] = (),
) -> Tensor:
    """Draw a share of the labelled samples, equally many of each class; return sorted indices.

    Drawn as in ``draw_labels``, so a larger share contains a smaller one. A protocol's share is in
    percent: its errors name the protocol as ``value``.
    """
    available = torch.bincount(labels[labels >= 0].cpu(), minlength=classes).numpy()
    total = int(available.sum())
    # Up, by less than any share that a person writes: 0.29 × 100 is 28.999999999999996.
    each = math.floor(share * total / classes + 1e-9) if total else 0
    if 1 <= each <= available.min():
        return draw_labels(labels, each * classes, classes, seed)
    if each < 1:
        problem = f"less than one of {total} labelled samples for each of {classes} classes"
        limit = "at least " + _format_share(1, classes, total, value) if total > classes else ""
    else:
        problem = f"takes {each} samples of each class, but {_describe_rarest(available, names)}"
        limit = "at most " + _format_share(int(available.min()), classes, total, value)
    fix = f"Use {limit}." if limit else "Leave it out."
    raise UserError(problem, key=key, value=share if value is None else value, fix=fix)


def _describe_rarest(available: Ints, names: Sequence[str]) -> str:
    rarest = int(available.argmin())
    name = names[rarest] if names else f"number {rarest}"
    return f"class {name} has {available[rarest]}"


def _format_share(each: int, classes: int, total: int, value: object) -> str:
    """Format the smallest round share of ``total`` samples with ``each`` of every class."""
    grid = 10**4  # rounding up to a multiple of 1 / grid adds less than one sample
    while grid * classes <= total:
        grid *= 10
    share = -(-grid * each * classes // total) / grid
    return f"{share:g}" if value is None else f"{100 * share:g}%"
