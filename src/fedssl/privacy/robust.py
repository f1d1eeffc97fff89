"""Means that withstand some hostile clients: coordinate-wise median, trimmed mean, and Krum."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fedssl.config import Cohort
from fedssl.federation.aggregate import Aggregator, TooFewReplies, Weight
from fedssl.util.errors import UserError
from fedssl.util.trees import NothingToAverage, Tree, flatten, unflatten

SLICE = 1 << 18  # coordinates that are brought together at once: all clients' in float64


class Robust(Aggregator):
    """All clients count the same, whatever weight they claim; every reply is seen by the server."""

    allows_merging = False

    def __init__(self, settings: Cohort, cohort: int) -> None:
        self.rule = settings.average
        self.hostile = f = settings.hostile
        self.fewest = {"median": 1, "trimmed": 2 * f + 1, "krum": 2 * f + 3}[self.rule]
        if cohort < self.fewest:
            raise UserError(
                f"needs at least {self.fewest} clients per round with cohort.hostile={f}, and "
                f"there are {cohort}",
                key="cohort.average",
                value=self.rule,
                fix="Lower cohort.hostile, or use more clients per round.",
            )

    def contribute(
        self, task: str, samples: int, reply: Tree, weight: Weight
    ) -> tuple[float, Tree]:
        """Return the reply, with the same weight for all."""
        return 1, reply

    def combine(self, task: str, contributions: Iterator[tuple[float, Tree]]) -> Tree:
        """Compute the robust mean; the round is skipped if too few replied for it."""
        replies = [reply for _, reply in contributions]
        if not replies:
            raise NothingToAverage
        if len(replies) < self.fewest:
            raise TooFewReplies(
                f"{len(replies)} replies to {task}, and cohort.average={self.rule} with "
                f"cohort.hostile={self.hostile} needs {self.fewest}"
            )
        if self.rule == "krum":
            return replies[krum(replies, self.hostile)]
        cut = (len(replies) - 1) // 2 if self.rule == "median" else self.hostile
        return trimmed_mean(replies, cut)

    def release(self, task: str, total: Tree, weight: float, replies: int) -> Tree:
        """Refuse a sum: secure sums are excluded by :mod:`fedssl.privacy.checks`."""
        raise NotImplementedError(f"cohort.average={self.rule} needs each client's reply")


def trimmed_mean(replies: list[Tree], cut: int) -> Tree:
    """Average each coordinate without its ``cut`` smallest and largest values.

    If that leaves one or two, it is the median. Rounding keeps it in their range.
    """
    each = [flatten(reply) for reply in replies]
    out: dict[str, Tensor] = {}
    for name, like in each[0].items():
        parts = []
        for values in slices([flat[name] for flat in each]):
            kept = values.sort(0).values[cut : len(values) - cut]
            parts.append(kept.mean(0).clamp(kept[0], kept[-1]))
        out[name] = torch.cat(parts).reshape(like.shape).to(like.dtype)
    return out[""] if isinstance(replies[0], Tensor) else unflatten(out)


def slices(leaves: list[Tensor]) -> Iterator[Tensor]:
    """Yield the clients' values of one leaf in float64, some coordinates at a time."""
    flat = [leaf.detach().reshape(-1) for leaf in leaves]
    for start in range(0, len(flat[0]), SLICE):
        yield torch.stack([leaf[start : start + SLICE].double() for leaf in flat])


def krum(replies: list[Tree], hostile: int) -> int:
    """Choose the reply nearest to its n − f − 2 nearest others (Blanchard et al. 2017, section 4).

    Of equals the first. A reply that is not finite is far from all.
    """
    near = len(replies) - hostile - 2
    scores = distances(replies).sort(1).values[:, :near].sum(1)
    return int(scores.argmin())


def distances(replies: list[Tree]) -> Tensor:
    """Compute squared L2 distances ``[n, n]`` without losses; the diagonal is infinite."""
    n = len(replies)
    squares = torch.zeros(n, n, dtype=torch.float64)
    each = [flatten(reply) for reply in replies]
    for name in each[0]:
        if name.endswith("loss"):
            continue
        for values in slices([flat[name] for flat in each]):
            for i in range(n):
                squares[i] += (values - values[i]).square().sum(1).cpu()
    return squares.fill_diagonal_(math.inf).nan_to_num(nan=math.inf, posinf=math.inf)
