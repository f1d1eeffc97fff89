"""Client-level differential privacy: clipped contributions, Gaussian noise on their sum."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.config import Config
from fedssl.federation.aggregate import Aggregator, TooFewReplies, Weight
from fedssl.federation.algorithm import Algorithm
from fedssl.util.errors import refuse
from fedssl.util.secrets import system_generator
from fedssl.util.trees import Tree, leaves, scale

ROUNDINGS = 8  # after clipping, a number is rounded a few times, each time by at most eps


class Noisy(Aggregator):
    """Each client's contribution has a bounded L2 norm; the sum gets noise in proportion to it.

    A contribution is weight · reply as one vector. With weights of its own (``most_samples`` above
    1) the sum of the weights is data too: it is released as one more coordinate, clip · weight.
    """

    allows_merging = False
    allows_client_logs = False

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        clients: int,
        cohort: int,
        generator: Callable[[], np.random.Generator] = system_generator,
    ) -> None:
        self.privacy = config.privacy
        self.bounds = {task.name: task.bound(algorithm) for task in algorithm.tasks().values()}
        self.generator = generator
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
        self.ledger = Ledger(self.multiplier, clients, sampled, self.privacy.delta)

    def clip(self, task: str) -> float:
        """Return the L2 norm that weight · reply is clipped to."""
        bound = self.bounds[task]
        return self.privacy.clip if bound is None else bound

    def sensitivity(self, task: str) -> float:
        """Return the largest L2 norm of a client's part, with the coordinate of its weight."""
        return self.clip(task) * (math.sqrt(2) if self.privacy.most_samples > 1 else 1)

    def multiplier(self, task: str) -> float:
        """Return the noise's standard deviation over the sensitivity."""
        noise, moments_noise = self.privacy.noise, self.privacy.moments_noise
        assert noise is not None
        return noise if moments_noise is None or self.bounds[task] is None else moments_noise

    def contribute(
        self, task: str, samples: int, reply: Tree, weight: Weight
    ) -> tuple[float, Tree]:
        """Return the capped weight, and the reply scaled so that their product is within the clip.

        Losses stay with the client: each would be one more release.
        """
        most = self.privacy.most_samples
        share = 1.0 if weight == "uniform" else min(samples, most) / most
        if isinstance(reply, Mapping):
            reply = {name: leaf for name, leaf in reply.items() if not name.endswith("loss")}
        each, clip = list(leaves(reply)), self.clip(task)
        norms = [float(torch.linalg.vector_norm(leaf, dtype=torch.float64)) for leaf in each]
        limit = clip * (1 - ROUNDINGS * max(torch.finfo(leaf.dtype).eps for leaf in each))
        length = share * math.hypot(*norms)
        return share, scale(reply, 1.0 if length <= limit else limit / length)

    def release(self, task: str, total: Tree, weight: float, replies: int) -> Tree:
        """Count the release, then compute the noisy mean."""
        self.ledger.note(task)
        spread, generator = self.multiplier(task) * self.sensitivity(task), self.generator()
        noisy, divisor = add_noise(total, spread, generator), float(replies)
        if self.privacy.most_samples > 1:
            divisor = weight + spread / self.clip(task) * float(generator.standard_normal())
            if divisor <= 0:
                raise TooFewReplies(
                    f"the noise on the sum of the weights of {task} left nothing to divide by; "
                    "use more clients per round, or a lower privacy.most_samples"
                )
        return scale(noisy, 1 / divisor)

    def compute_privacy(self) -> dict[str, float]:
        """Return the (ε, δ) of all releases so far."""
        return self.ledger.spent()

    def save_state(self) -> dict[str, Tensor]:
        """Return the number of rounds by the tasks that they released."""
        return {"+".join(tasks): torch.tensor(n) for tasks, n in self.ledger.counts().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the counts of :meth:`save_state`."""
        self.ledger.rounds = Counter({tuple(k.split("+")): int(n) for k, n in state.items()})
        self.ledger.current = ()


def add_noise(tree: Tree, spread: float, generator: np.random.Generator) -> Tree:
    """Add Gaussian noise with standard deviation ``spread`` to every number."""
    if isinstance(tree, Tensor):
        noise = torch.from_numpy(np.asarray(generator.standard_normal(tuple(tree.shape))))
        return (tree.double() + spread * noise.to(tree.device)).to(tree.dtype)
    return {name: add_noise(child, spread, generator) for name, child in tree.items()}


def is_stateless(algorithm: Algorithm) -> bool:
    """Return whether replies depend on nothing that clients kept from earlier rounds.

    Only then are rounds fresh draws, and the draw of a cohort can count. A client's state reveals
    whether it was drawn before, which ties a round's output to earlier draws.
    """
    objective = algorithm.objective
    stateless = all(task.stateless for task in algorithm.asked())
    return stateless and objective.memory.is_empty


class Ledger:
    """Count the sums released in each round, and the privacy that they cost.

    A client is replaced by another (replace-one), which moves a sum by at most twice the
    sensitivity: the noise counts half. The exchanges of a round are asked of the same cohort, so
    they are composed first and only their composition is amplified by the draw (a fixed number of
    clients without replacement).
    """

    def __init__(
        self, multiplier: Callable[[str], float], clients: int, cohort: int, delta: float
    ) -> None:
        self.multiplier, self.delta = multiplier, delta
        self.clients, self.cohort = clients, cohort
        self.rounds: Counter[tuple[str, ...]] = Counter()  # by the exchanges that they released
        self.current: tuple[str, ...] = ()
        self._curves: dict[tuple[str, ...], NDArray[np.float64]] = {}

    def note(self, task: str) -> None:
        """Count a release; the task that comes a second time belongs to the next round."""
        if task in self.current:
            self.rounds[self.current] += 1
            self.current = ()
        self.current += (task,)

    def counts(self) -> Counter[tuple[str, ...]]:
        """Return rounds by the tasks that they released, with the current one."""
        return self.rounds + Counter([self.current] if self.current else [])

    def spent(self) -> dict[str, float]:
        """Return ε at the configured δ."""
        from dp_accounting import rdp

        orders = rdp.RdpAccountant().orders
        total = np.zeros(len(orders))
        for tasks, count in self.counts().items():
            total += count * self._curve(tasks)
        epsilon, _ = rdp.compute_epsilon(orders, total, self.delta)
        return {"epsilon": float(epsilon), "delta": self.delta}

    def _curve(self, tasks: tuple[str, ...]) -> NDArray[np.float64]:
        """Compute the Rényi divergences of one round; cached, since they take 0.3 seconds."""
        import dp_accounting

        if tasks not in self._curves:
            together = sum(self.multiplier(task) ** -2 for task in tasks) ** -0.5
            event = dp_accounting.GaussianDpEvent(together / 2)
            curve = divergences(event)
            if self.cohort < self.clients:
                sampled = dp_accounting.SampledWithoutReplacementDpEvent
                # A draw never costs privacy (the divergence is quasi-convex), but the library's
                # bound for it is the larger one where there is little noise.
                amplified = divergences(sampled(self.clients, self.cohort, event))
                curve = np.minimum(curve, amplified)
            self._curves[tasks] = curve
        return self._curves[tasks]


def divergences(event: Any) -> NDArray[np.float64]:
    """Compute the Rényi divergences of an event between data sets that differ in one client."""
    from dp_accounting import NeighboringRelation, rdp

    accountant = rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    return accountant.compose(event).rdp
