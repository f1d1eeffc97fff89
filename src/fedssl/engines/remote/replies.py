"""Check replies when they arrive: a client's mistake must cost only its own reply."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedssl.engines.base import Engine
from fedssl.engines.remote.codec import MalformedError, Packed, unpack, unpack_like
from fedssl.engines.remote.messages import CHANGE, Reply, half_precision_leaves
from fedssl.federation.aggregate import count_samples
from fedssl.federation.task import ClientTask
from fedssl.util.trees import Tree, flatten


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
            self._check_share(task, client, reply.share, like)
        tree = unpack_like(reply.tensors, like, self.half, task.reveals == "features")
        self._check_norm(tree)
        for name, leaf in flatten(tree).items():
            largest = float(leaf.abs().max()) if leaf.numel() else 0.0
            if largest * reply.share * cohort > torch.finfo(leaf.dtype).max / 16:
                raise MalformedError(f"{name}: {largest:.3g} is too large to be averaged")
        return reply.share, tree

    def _contribute(self, task: ClientTask, samples: int, like: Tree) -> tuple[float, Tree]:
        weight = self.engine.algorithm.weight
        return self.engine.aggregator.contribute(task.name, samples, like, weight)

    def _check_share(self, task: ClientTask, client: int, share: float, like: Tree) -> None:
        """Refuse a share other than that of the images that the client is known to have."""
        size = int(self.engine.groups.sizes[client])
        weight, batches = self.engine.algorithm.weight, self.engine.trainer.batches
        samples = count_samples(weight, batches, size)
        expected = self._contribute(task, samples, like)[0]
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
