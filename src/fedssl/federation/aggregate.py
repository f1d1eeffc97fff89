"""Turn the clients' replies into their mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from torch import Tensor

from fedssl.training.batches import Batches
from fedssl.util.trees import Tree, add_up, scale

Weight = Literal["samples", "used", "uniform"]


def count_samples(weight: Weight, batches: Batches, held: int) -> int:
    """Return how many of a client's samples count in a mean: all, or those in its statistics."""
    return batches.averaged(held) if weight == "used" else batches.contributing(held)


class TooFewReplies(Exception):
    """The round is skipped and the model stays unchanged: too few clients replied."""


class Aggregator:
    """Compute the weighted mean of replies; subclasses add robustness, noise, or secrecy.

    :meth:`contribute` runs at the client, before anything leaves it. :meth:`combine` runs at the
    server. Under secure sums the server sees only the sum, so only :meth:`release` runs there.
    """

    allows_merging: ClassVar[bool] = True  # a merged cohort's reply may stand for its clients'
    allows_client_logs: ClassVar[bool] = True  # single numbers of a client may go to the log

    def contribute(
        self, task: str, samples: int, reply: Tree, weight: Weight
    ) -> tuple[float, Tree]:
        """Return a client's weight in the mean, and the tree that it sends."""
        return (1 if weight == "uniform" else samples), reply

    def combine(self, task: str, contributions: Iterator[tuple[float, Tree]]) -> Tree:
        """Aggregate the contributions; raise ``NothingToAverage`` if there are none."""
        return self.release(task, *add_up(contributions))

    def release(self, task: str, total: Tree, weight: float, replies: int) -> Tree:
        """Compute the mean from the sum, Σ weight, and the number of replies."""
        return scale(total, 1 / weight)

    def compute_privacy(self) -> dict[str, float]:
        """Return the (ε, δ) spent so far, if this aggregator adds noise."""
        return {}

    def save_state(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed run needs."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`save_state` returned."""
