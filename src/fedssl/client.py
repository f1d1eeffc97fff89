"""A client's side of a round: its batches, the mean over its samples, and local training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl import optim
from fedssl.config import AlgorithmParams, Config
from fedssl.data.augment import Augmentation
from fedssl.data.dataset import Split
from fedssl.data.random import key, mix, permutation
from fedssl.models.flat import Flat
from fedssl.models.network import Network
from fedssl.objectives.base import Objective
from fedssl.trees import Tree, mean

PairLoss = Callable[[tuple[Tensor, ...], Tensor | None], Tensor]


@dataclass(frozen=True)
class Encoded:
    """A batch after the network: F and G, labels if there are any, and whose samples they are."""

    encodings: tuple[Tensor, ...]
    labels: Tensor | None
    sizes: NDArray[np.int64]  # samples of each client, in order; one entry for a single client

    def within(self, loss: PairLoss) -> Tensor:
        """Each client's own ``loss``, averaged by samples: what FedAvg of one step descends.

        A merged cohort goes through the network as one batch and is taken apart here: clients of
        the same size are one vectorized call.
        """
        if len(self.sizes) == 1:
            return loss(self.encodings, self.labels)
        total = self.encodings[0].new_zeros(())
        starts = np.cumsum(self.sizes) - self.sizes
        for size in np.unique(self.sizes):
            rows = starts[self.sizes == size][:, None] + np.arange(size)
            index = torch.from_numpy(rows).to(self.encodings[0].device)
            encodings = tuple(e[index] for e in self.encodings)
            if self.labels is None:
                losses = torch.vmap(lambda *e: loss(e, None))(*encodings)
            else:
                losses = torch.vmap(lambda y, *e: loss(e, y))(self.labels[index], *encodings)
            total = total + losses.sum() * float(size)
        return total / float(self.sizes.sum())


@dataclass(frozen=True)
class Plan:
    """Which samples a client uses in which step of a round: a pure function of the round."""

    steps: int | None
    epochs: int | None
    batch: int | None
    seed: int

    @classmethod
    def from_config(cls, algorithm: AlgorithmParams, seed: int) -> Plan:
        """One step on all samples unless the algorithm's keys say otherwise."""
        steps = algorithm.local_steps
        if steps is None and algorithm.local_epochs is None:
            steps = 1
        return cls(steps, algorithm.local_epochs, algorithm.batch, seed)

    @property
    def one_full_step(self) -> bool:
        """Whether a round is one step on everything that a client holds."""
        return (self.steps == 1 or self.epochs == 1) and self.batch is None

    def batches(self, size: int) -> int:
        """Batches in one pass; the last partial one is dropped unless it is the only one."""
        return 1 if self.batch is None else max(1, size // self.batch)

    def count(self, size: int) -> int:
        """Steps in a round."""
        return self.steps if self.steps is not None else (self.epochs or 1) * self.batches(size)

    def images(self, size: int) -> int:
        """Samples that one round trains on, repeats counted."""
        return self.count(size) * min(size, self.batch or size)

    def contributing(self, size: int) -> int:
        """Different samples that a round uses: N_k of the DCCO paper's Eq. 3."""
        if self.batch is None or self.steps is None:
            return size
        return min(size, self.steps * self.batch)

    def indices(self, round: int, step: int, client: int, size: int) -> tuple[int, slice | Tensor]:
        """The epoch that a step belongs to and the positions of its samples within the client.

        Steps walk through an endless row of shuffled epochs, so that a client asked in every round
        (centralized training) sees each sample once an epoch.
        """
        epoch, place = divmod(round * self.count(size) + step, self.batches(size))
        if self.batch is None or self.batch >= size:
            return epoch, slice(None)
        order = _order(key(self.seed, "shuffle", client, epoch), size)
        return epoch, order[place * self.batch : (place + 1) * self.batch]


@lru_cache(maxsize=4)
def _order(state: int, size: int) -> Tensor:
    return torch.from_numpy(permutation(state, size))


class Workspace:
    """The one network of this process, which every client's work goes through."""

    def __init__(
        self,
        config: Config,
        network: Network,
        objective: Objective,
        augmentation: Augmentation,
        split: Split,
        device: torch.device,
    ) -> None:
        self.config = config
        self.objective = objective
        self.augmentation = augmentation
        self.dtype = torch.float64 if config.precision == "fp64" else torch.float32
        self.network = network.to(device=device, dtype=self.dtype).train()
        self.flat = Flat(self.network)
        self.device = device
        self.images = tuple(images.to(device) for images in split.images)
        labels = split.labels if objective.needs_labels else None
        self.labels = labels.to(device) if labels is not None else None
        self.plan = Plan.from_config(config.algorithm, config.seed)
        self.initial = self.flat.vector.clone()
        self.loads = 0

    def load(self, weights: Tensor) -> None:
        """Put ``weights`` into the network."""
        self.flat.vector.copy_(weights)
        self.loads += 1

    def encode(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The network's encodings: bfloat16 inside if asked, at least float32 outside."""
        with self._autocast():
            encodings = self.network(inputs)
        return tuple(e.to(self.dtype) for e in encodings)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.config.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()


class Client:
    """What an algorithm's task sees: one client, or a merged cohort that acts as one.

    ``ids`` and ``positions`` say for each sample whose it is and its index there; random numbers
    depend on these only, so merging changes none.
    """

    def __init__(
        self,
        work: Workspace,
        members: NDArray[np.int64],
        ids: NDArray[np.int64],
        sizes: NDArray[np.int64],
        round: int,
        lr: float,
        state: dict[str, Tree],
        remember: bool = False,
    ) -> None:
        self.work = work
        self.members = torch.from_numpy(members).to(work.device)
        self.sizes = sizes
        self.round = round
        self.lr = lr
        self.state = state
        self.remember = remember
        self.id = int(ids[0])
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        self._owner = torch.from_numpy(np.repeat(ids, sizes)).to(work.device)
        self._position = torch.from_numpy(np.arange(len(members)) - starts).to(work.device)
        self._kept: tuple[Tensor, int, Encoded] | None = None

    @property
    def samples(self) -> int:
        """How many samples the client holds."""
        return len(self.members)

    @property
    def weight(self) -> int:
        """Its weight in a mean: the samples that contribute to the round."""
        return self.work.plan.contributing(self.samples)

    def average(self, weights: Tensor, function: Callable[[Encoded], Tree]) -> Tree:
        """The mean of ``function`` over the round's first pass; nothing is learned."""
        work = self.work
        steps = min(work.plan.count(self.samples), work.plan.batches(self.samples))
        with torch.set_grad_enabled(self.remember and steps == 1):
            each = self._batches(weights, steps)
            return mean((len(e.encodings[0]), function(e)) for e in each)[0]

    def descend(self, weights: Tensor, loss: Callable[[Encoded], Tensor]) -> dict[str, Tree]:
        """Train for the round's local steps: the change of the weights, and the mean loss."""
        work, flat = self.work, self.work.flat
        rule, steps = work.config.client, work.plan.count(self.samples)
        total = weights.new_zeros(())
        change: Tensor | None = None
        for step, encoded in enumerate(self._batches(weights, steps)):
            flat.gradient.zero_()
            value = loss(encoded)
            value.backward()
            total += value.detach()
            if step == 0:
                state = optim.start(rule, flat.params)
            delta = optim.step(rule, state, flat.params, flat.gradient, self.lr, flat.layers)
            flat.params.add_(delta)
            change = delta if change is None else change.add_(delta)
        assert change is not None
        buffers = flat.vector[flat.parameters :] - weights[flat.parameters :]
        work.loads += 1  # the network no longer holds `weights`
        return {
            "change": torch.cat((change, buffers)) if len(buffers) else change,
            "loss": total / steps,
        }

    def _batches(self, weights: Tensor, steps: int) -> Iterator[Encoded]:
        """The batches of a round after the network; a remembered forward pass is not made again."""
        kept = self._kept
        if kept is None or kept[0] is not weights or kept[1] != self.work.loads:
            self.work.load(weights)
            kept = (weights, self.work.loads, self._encode(0))
        self._kept = kept if self.remember and steps == 1 else None
        yield kept[2]
        for step in range(1, steps):
            yield self._encode(step)

    def random_state(self, epoch: int, chosen: slice | Tensor) -> Tensor:
        """Where the random numbers of some samples' views come from."""
        start = key(self.work.config.seed, "augment", epoch)
        return mix(mix(start, self._owner[chosen]), self._position[chosen])

    def _encode(self, step: int) -> Encoded:
        work = self.work
        epoch, chosen = work.plan.indices(self.round, step, self.id, self.samples)
        if isinstance(chosen, Tensor):
            chosen = chosen.to(work.device)
        members = self.members[chosen]
        state = self.random_state(epoch, chosen)
        inputs = tuple(
            work.augmentation.views(
                work.images[view % len(work.images)][members], state, view, work.dtype
            )
            for view in range(work.objective.inputs)
        )
        labels = (
            work.labels[members]
            if work.objective.needs_labels and work.labels is not None
            else None
        )
        sizes = self.sizes if len(self.sizes) > 1 else np.array([len(members)])
        return Encoded(work.encode(inputs), labels, sizes)
