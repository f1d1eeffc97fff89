"""Draw labelled samples evenly from the classes: few labels to train on, or a held-out share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data import random
from fedssl.util.errors import UserError

Ints = NDArray[np.int64]


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
    if rest or count <= 0:
        raise UserError(
            f"{count} labels cannot be divided evenly between {classes} classes",
            key=key,
            value=value,
            fix=f"Use a multiple of {classes}, for example {max(each, 1) * classes}.",
        )
    if each > available.min():
        raise UserError(
            f"needs {each} samples of each class, but {_describe_rarest(available, names)}",
            key=key,
            value=value,
            fix=f"Use at most {available.min() * classes} labels.",
        )
    ranks = random.mix(random.key(seed, "labels"), np.arange(len(numbers), dtype=np.uint64))
    order = np.lexsort((ranks, numbers))[np.count_nonzero(numbers < 0) :]
    starts = np.cumsum(available) - available
    chosen = order[(starts[:, None] + np.arange(each)).ravel()]
    return torch.from_numpy(np.sort(chosen))


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

    ``data.holdout`` keeps such a share from the clients, for fine-tuning alone (FedEMA, appendix
    B.3). Drawn as in ``draw_labels``, so a larger share contains a smaller one. A protocol's share
    is in percent: its errors name the protocol as ``value``.
    """
    percent, value = value is not None, share if value is None else value
    if not 0 <= share < 1:
        fix = "Use a share of at least 0 and below 1."
        raise UserError("not a share", key=key, value=value, fix=fix)
    if share == 0:
        return torch.empty(0, dtype=torch.int64)
    labelled = labels[labels >= 0].cpu()
    if not len(labelled):
        raise UserError(
            "the share is drawn evenly from the classes, but no sample has a label",
            key=key,
            value=value,
            fix="Leave it out.",
        )
    available = torch.bincount(labelled, minlength=classes).numpy()
    # Up, by less than any share that a person writes: 0.29 × 100 is 28.999999999999996.
    each = math.floor(share * len(labelled) / classes + 1e-9)
    if each < 1:
        least = f"Use at least {_smallest_share(1, classes, len(labelled), percent)}."
        raise UserError(
            f"less than one of {len(labelled)} labelled samples for each of {classes} classes",
            key=key,
            value=value,
            fix=least if len(labelled) > classes else "Leave it out.",
        )
    if each > available.min():
        most = _smallest_share(int(available.min()), classes, len(labelled), percent)
        raise UserError(
            f"takes {each} samples of each class, but {_describe_rarest(available, names)}",
            key=key,
            value=value,
            fix=f"Use at most {most}.",
        )
    return draw_labels(labels, each * classes, classes, seed)


def _describe_rarest(available: Ints, names: Sequence[str]) -> str:
    rarest = int(available.argmin())
    name = names[rarest] if names else f"number {rarest}"
    return f"class {name} has {available[rarest]}"


def _smallest_share(each: int, classes: int, total: int, percent: bool) -> str:
    """Return the smallest round share of ``total`` samples with ``each`` of every class."""
    grid = 10**4  # rounding up to a multiple of 1 / grid adds less than one sample
    while grid * classes <= total:
        grid *= 10
    share = -(-grid * each * classes // total) / grid
    return f"{100 * share:g}%" if percent else f"{share:g}"
