"""Check replies when they arrive: a client's mistake must cost only its own reply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedssl.engines.base import Engine
from fedssl.engines.remote.codec import MalformedError, Packed, unpack, unpack_like
from fedssl.engines.remote.messages import CHANGE, Reply, half_precision_leaves
from fedssl.federation.aggregate import count_samples
from fedssl.federation.task import ClientTask
from fedssl.util.trees import Tree, flatten

# Below it most clients sent rounding errors, as with objectives that a small batch gives nothing to
# learn from. The few other replies may be far larger than the model, but not anything.
ZERO = 1e-8


class ReplyChecker:
    """Checks replies against what the algorithm, the data and the configuration allow."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.config = engine.trainer.config
        self.half = half_precision_leaves(self.config)
        self._expected: dict[str, Tree] = {}

    def expected_reply(self, task: ClientTask) -> Tree:
        """Return a tree with the names, shapes and types of a reply."""
        if task.name not in self._expected:
            like: Tree = task.expected_reply(self.engine.algorithm, self.engine.trainer)
            if task.seen == "mean":
                like = self._contribute(task, 1, like)[1]
            self._expected[task.name] = like
        return self._expected[task.name]

    def check(self, task: ClientTask, client: int, reply: Reply, cohort: int) -> tuple[float, Tree]:
        """Return a reply's share and tensors; ``cohort`` is how many clients a mean is over."""
        if reply.fault is not None:
            raise MalformedError(reply.fault)
        if task.is_logged:
            return 1.0, _unpack_numbers(reply.tensors, task.measures)
        like = self.expected_reply(task)
        if task.seen == "mean":
            expected = self._expected_share(task, client, like)
            if reply.share != expected:
                raise MalformedError(f"a weight of {reply.share:g}, expected {expected:g}")
        tree = unpack_like(reply.tensors, like, self.half, task.reveals == "features")
        self._check_norm(tree)
        self._check_bound(task, tree)
        for name, leaf in flatten(tree).items():
            largest = float(leaf.abs().max()) if leaf.numel() else 0.0
            if largest * reply.share * cohort > torch.finfo(leaf.dtype).max / 16:
                raise MalformedError(f"{name}: {largest:.3g} is too large to be averaged")
        return reply.share, tree

    def _contribute(self, task: ClientTask, samples: int, like: Tree) -> tuple[float, Tree]:
        weight = self.engine.algorithm.weight
        return self.engine.aggregator.contribute(task.name, samples, like, weight)

    def check_sum(
        self, task: ClientTask, clients: Sequence[int], share: float, total: Tree
    ) -> None:
        """Refuse a secure sum that honest clients cannot have; nobody can tell who was not."""
        like = self.expected_reply(task)
        expected = sum(self._expected_share(task, client, like) for client in clients)
        if not math.isclose(share, expected, abs_tol=len(clients) * 2.0**-32):  # their rounding
            raise MalformedError(f"the clients' weights are {share:g}, expected {expected:g}")
        has_noise = self.config.privacy.noise is not None  # then replies have their weights already
        self._check_bound(task, total, len(clients) if has_noise else share)

    def _expected_share(self, task: ClientTask, client: int, like: Tree) -> float:
        """Return the share of the images that the client is known to have."""
        size = int(self.engine.groups.sizes[client])
        weight, batches = self.engine.algorithm.weight, self.engine.trainer.batches
        return self._contribute(task, count_samples(weight, batches, size), like)[0]

    def _check_norm(self, tree: Mapping[str, Tree]) -> None:
        limit, change = self.config.engine.max_norm, tree.get(CHANGE)
        is_clipped = self.config.privacy.noise is not None
        if limit is None or is_clipped or not isinstance(change, Tensor):
            return
        norm = float(torch.linalg.vector_norm(change))
        if norm > limit:
            raise MalformedError(f"a change of norm {norm:.4g}, above engine.max_norm={limit:g}")

    def _check_bound(self, task: ClientTask, tree: Tree, weight: float = 1) -> None:
        """Refuse what no honest client can send; rounding may add a little."""
        bound, norm = task.bound(self.engine.algorithm), Size.of(tree).norm / weight
        if self.config.privacy.noise is not None and task.seen == "mean":
            bound = 1.0  # contributions are in units of the norm that they are clipped to
        if bound is not None and norm > 1.01 * bound:
            raise MalformedError(f"a norm of {norm:.4g}, above the bound of {bound:.4g}")

    def find_outliers(self, task: ClientTask, sizes: Mapping[int, Size]) -> dict[int, str]:
        """Return the clients whose replies are far larger than the others', and why.

        The measure is the median of the round's replies. Of two replies nobody can tell which one
        is false, so neither counts. A robust mean withstands outliers by itself.
        """
        ratio, robust = self.config.engine.max_ratio, self.config.cohort.average != "mean"
        if ratio is None or robust or task.is_logged or len(sizes) < 2:
            return {}
        scale = {client: size.scale for client, size in sizes.items()}
        loss = {client: max(1.0, size.loss) for client, size in sizes.items()}  # 0 is usual, too
        outliers = dict[int, str]()
        for name, each in (("loss", loss), ("scale", scale)):
            usual = sorted(each.values())[(len(each) - 1) // 2]
            if usual < ZERO:
                usual = ratio * Size.of({"weights": self.engine.trainer.initial}).scale
            for client, value in each.items():
                if value > ratio * usual * self._count_steps(task, client):
                    outliers[client] = (
                        f"its {name} is {value:.3g}, above engine.max_ratio={ratio:g} times the "
                        f"usual {usual:.3g}"
                    )
        if outliers and len(sizes) == 2:
            reason = f"of two replies one is {ratio:g} times larger (engine.max_ratio)"
            return dict.fromkeys(sizes, reason)
        return outliers

    def _count_steps(self, task: ClientTask, client: int) -> float:
        """Return how many times more steps than usual a client may make for its update."""
        sizes = self.engine.groups.sizes
        return max(1.0, sizes[client] / np.median(sizes)) if task.reveals == "update" else 1.0


@dataclass(frozen=True)
class Size:
    """How large the numbers of a reply are."""

    loss: float  # the largest
    norm: float  # of everything else
    count: int  # numbers in it

    @classmethod
    def of(cls, tree: Tree) -> Size:
        """Measure a reply."""
        losses, norms, count = [0.0], [0.0], 0
        for name, leaf in flatten(tree).items():
            if name.endswith("loss"):
                losses.append(float(leaf.abs().max()))
            else:
                numbers = leaf if leaf.is_floating_point() else leaf.double()
                norms.append(float(torch.linalg.vector_norm(numbers, dtype=torch.float64)))
                count += leaf.numel()
        return cls(max(losses), math.hypot(*norms), count)

    @property
    def scale(self) -> float:
        """Root mean square: replies may have more or fewer rows."""
        return self.norm / math.sqrt(max(1, self.count))


def _unpack_numbers(packed: Mapping[str, Packed], names: tuple[str, ...]) -> Tree:
    """Unpack single numbers for the log. They need not be finite: some are not known yet."""
    if sorted(packed) != sorted(names) or any(item.shape for item in packed.values()):
        raise MalformedError(f"expected the numbers {', '.join(names)}")
    return unpack(packed)
