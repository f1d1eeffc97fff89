"""Client-level differential privacy: clipped contributions, Gaussian noise on their sum."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.config import Config
from fedssl.federation.aggregate import Aggregator, TooFewReplies, Weight
from fedssl.federation.algorithm import Algorithm
from fedssl.privacy.accountant import Account, Release, Releases, compute_epsilon
from fedssl.privacy.gaussian import sample_gaussian
from fedssl.util.errors import refuse
from fedssl.util.trees import NothingToAverage, Tree, add_scaled, cast_like, leaves, map_leaves

RUN = ".run"  # in a checkpoint, beside the names of tasks
STEPS = 1 << 22  # of the grid, within the norm that contributions are clipped to; float32 has 2²⁴
SLACK = 1e-9  # share of that norm, for the rounding of float64 before the grid

Sample = Callable[[int, int], NDArray[np.int64]]


class Noisy(Aggregator):
    """Each client's contribution has a bounded L2 norm; the sum gets noise in proportion to it.

    A contribution is weight · reply as one vector. With weights of its own (``most_samples`` above
    1) the sum of the weights is data too: it is released as one more coordinate. Contributions are
    in units of the norm that they are clipped to, and on a grid. So their sum loses nothing, and
    noise on the same grid has no bits that tell the sum.
    """

    allows_merging = False
    allows_client_logs = False

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        clients: int,
        cohort: int,
        sample: Sample = sample_gaussian,
    ) -> None:
        self.privacy = config.privacy
        self.bounds = {task.name: task.bound(algorithm) for task in algorithm.tasks().values()}
        self.sample = sample
        refuse(
            config,
            (
                self.privacy.delta * clients >= 1,
                "privacy.delta",
                f"must be below 1/clients = {1 / clients:g}, or publishing one client's data would "
                "pass as private",
                f"Set privacy.delta={0.1 / clients:.0e}.",
            ),
            (
                importlib.util.find_spec("dp_accounting") is None,
                "privacy.noise",
                "the package dp-accounting is not installed",
                "Run pip install 'fedssl[privacy]'.",
            ),
        )
        sampled = cohort if is_stateless(algorithm) else clients
        self.account = Account(self.multiplier, clients, sampled)
        self.asked = [task.name for task in algorithm.asked(self.privacy.secure, "mean")]

    def clip(self, task: str) -> float:
        """Return the L2 norm that weight · reply is clipped to."""
        bound = self.bounds[task]
        return self.privacy.clip if bound is None else bound

    @property
    def sensitivity(self) -> float:
        """The largest norm of a client's part over the clip, with the coordinate of its weight."""
        return math.sqrt(2) if self.privacy.most_samples > 1 else 1.0

    def multiplier(self, task: str) -> float:
        """Return the noise's standard deviation over the sensitivity."""
        noise, moments_noise = self.privacy.noise, self.privacy.moments_noise
        assert noise is not None
        return noise if moments_noise is None or self.bounds[task] is None else moments_noise

    def contribute(
        self, task: str, samples: int, reply: Tree, weight: Weight
    ) -> tuple[float, Tree]:
        """Return the capped weight, and weight · reply / clip, on the grid and not above 1.

        Losses stay with the client: each would be one more release.
        """
        share = 1.0
        if weight != "uniform":
            most = self.privacy.most_samples
            share = math.floor(min(samples, most) / most * STEPS) / STEPS
        if isinstance(reply, Mapping):
            reply = {name: leaf for name, leaf in reply.items() if not name.endswith("loss")}
        each = list(leaves(reply))
        norms = [float(torch.linalg.vector_norm(leaf, dtype=torch.float64)) for leaf in each]
        length = share * math.hypot(*norms) / self.clip(task)
        # A number is rounded by at most half a step.
        limit = 1 - SLACK - math.sqrt(sum(leaf.numel() for leaf in each)) / 2 / STEPS
        factor = share / self.clip(task) * (1.0 if length <= limit else limit / length)
        return share, round_to_grid(reply, factor)

    def combine(self, task: str, contributions: Iterator[tuple[float, Tree]]) -> Tree:
        """Release the sum of contributions; float64 adds numbers of the grid without an error."""
        total, like = None, None
        weights: list[float] = []
        for weight, tree in contributions:
            exact = map_leaves(tree, lambda leaf: leaf.to(torch.float64, copy=True))
            if total is None:
                total, like = exact, tree
            else:
                add_scaled(total, exact, 1.0)
            weights.append(weight)
        if total is None or like is None:
            raise NothingToAverage
        return cast_like(self.release(task, total, sum(weights), len(weights)), like)

    def release(self, task: str, total: Tree, weight: float, replies: int) -> Tree:
        """Count the release, then compute the noisy mean, in float64."""
        self.account.note(task)
        sigma = math.ceil(self.multiplier(task) * self.sensitivity * STEPS)
        # A site that keeps to nothing may have sent numbers that are not on the grid.
        steps = map_leaves(total, lambda leaf: leaf.mul(STEPS).round_())
        noisy = map_leaves(steps, lambda leaf: leaf + self._noise(leaf.shape, sigma).to(leaf))
        divisor = float(replies)
        if self.privacy.most_samples > 1:
            divisor = weight + float(self._noise((1,), sigma)) / STEPS
            if divisor <= 0:
                raise TooFewReplies(
                    f"the noise on the sum of the weights of {task} left nothing to divide by; "
                    "use more clients per round, or a lower privacy.most_samples"
                )
        return map_leaves(noisy, lambda leaf: leaf * (self.clip(task) / STEPS / divisor))

    def _noise(self, shape: Sequence[int], sigma: int) -> Tensor:
        """Draw noise in steps of the grid; float64 holds every such number."""
        return torch.from_numpy(self.sample(math.prod(shape), sigma)).double().reshape(shape)

    def compute_privacy(self) -> dict[str, float]:
        """Return the (ε, δ) of all releases so far."""
        return {"epsilon": self.epsilon(self.account.releases()), "delta": self.privacy.delta}

    def epsilon(self, releases: Releases) -> float:
        """Return ε at the configured δ."""
        return compute_epsilon(releases, self.privacy.delta, self.privacy.accountant)

    @property
    def whole_round(self) -> Release:
        """The release of a round that asks all of its tasks."""
        return self.account.release(self.asked)

    def save_state(self) -> dict[str, Tensor]:
        """Return the run's number, and its rounds by the tasks that they released."""
        run = torch.tensor(list(bytes.fromhex(self.account.run)), dtype=torch.uint8)
        counts = self.account.counts().items()
        return {RUN: run} | {"+".join(tasks): torch.tensor(count) for tasks, count in counts}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`save_state` returned."""
        counts = {tuple(k.split("+")): int(count) for k, count in state.items() if k != RUN}
        self.account.rounds, self.account.current = Counter(counts), ()
        self.account.run = bytes(state[RUN].tolist()).hex()


def round_to_grid(tree: Tree, factor: float) -> Tree:
    """Multiply by ``factor`` and round to the grid, in a type that holds its numbers up to 1."""

    def convert(leaf: Tensor) -> Tensor:
        exact = leaf.detach().double().mul(factor * STEPS).round().div_(STEPS)
        return exact.to(torch.promote_types(leaf.dtype, torch.float32))

    return map_leaves(tree, convert)


def is_stateless(algorithm: Algorithm) -> bool:
    """Return whether replies depend on nothing that clients kept from earlier rounds.

    Only then are rounds fresh draws, and the draw of a cohort can count. A client's state reveals
    whether it was drawn before, which ties a round's output to earlier draws.
    """
    objective = algorithm.objective
    stateless = all(task.stateless for task in algorithm.asked())
    return stateless and objective.memory.is_empty
