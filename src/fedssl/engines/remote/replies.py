"""Check replies when they arrive: a client's mistake must cost only its own reply."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedssl.engines.base import Engine
from fedssl.engines.remote.codec import MalformedError, Packed, unpack, unpack_like
from fedssl.engines.remote.messages import CHANGE, Reply, half_precision_leaves
from fedssl.federation.aggregate import Weight
from fedssl.util.trees import Tree, flatten


class ReplyChecker:
    """Checks replies against what the algorithm, the data and the configuration allow."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.config = engine.trainer.config
        self.half = half_precision_leaves(self.config)
        self._expected: dict[tuple[str, Weight | None], Tree] = {}

    def expected_reply(self, task: str, weight: Weight | None) -> Tree:
        """Return a tree with the names, shapes and types of a reply."""
        if (task, weight) not in self._expected:
            like: Tree = self.engine.algorithm.reply_like(task, self.engine.trainer)
            if weight is not None:
                _, like = self.engine.aggregator.contribute(task, 1, like, weight)
            self._expected[task, weight] = like
        return self._expected[task, weight]

    def check(
        self, task: str, client: int, reply: Reply, weight: Weight | None, cohort: int
    ) -> tuple[float, Tree]:
        """Return a reply's share and tensors; ``cohort`` is how many clients a mean is over."""
        algorithm = self.engine.algorithm
        if reply.fault is not None:
            raise MalformedError(reply.fault)
        if task in algorithm.logs:
            return 1.0, _unpack_numbers(reply.tensors, algorithm.logs[task])
        like = self.expected_reply(task, weight)
        if weight is not None:
            self._check_share(task, client, reply.share, like, weight)
        tree = unpack_like(reply.tensors, like, self.half, task in algorithm.varying)
        self._check_norm(tree)
        for name, leaf in flatten(tree).items():
            largest = float(leaf.abs().max()) if leaf.numel() else 0.0
            if largest * reply.share * cohort > torch.finfo(leaf.dtype).max / 16:
                raise MalformedError(f"{name}: {largest:.3g} is too large to be averaged")
        return reply.share, tree

    def _check_share(
        self, task: str, client: int, share: float, like: Tree, weight: Weight
    ) -> None:
        """Refuse a share other than that of the images that the client is known to have."""
        size = int(self.engine.groups.sizes[client])
        samples = self.engine.trainer.batches.contributing(size)
        expected = self.engine.aggregator.contribute(task, samples, like, weight)[0]
        if share != expected:
            raise MalformedError(f"a weight of {share:g}, expected {expected:g}")

    def _check_norm(self, tree: Mapping[str, Tree]) -> None:
        limit, change = self.config.engine.max_norm, tree.get(CHANGE)
        if limit is None or not isinstance(change, Tensor):
            return
        norm = float(torch.linalg.vector_norm(change))
        if norm > limit:
            raise MalformedError(f"a change of norm {norm:.4g}, above engine.max_norm={limit:g}")


def _unpack_numbers(packed: Mapping[str, Packed], names: tuple[str, ...]) -> Tree:
    """Unpack single numbers for the log. They need not be finite: some are not known yet."""
    if sorted(packed) != sorted(names) or any(item.shape for item in packed.values()):
        raise MalformedError(f"expected the numbers {', '.join(names)}")
    return unpack(packed)
