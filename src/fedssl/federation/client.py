"""A client's side of a round: its batches, the mean over its samples, and local training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data.random import key, mix
from fedssl.models.norms import STATISTICS_MOMENTUM
from fedssl.objectives.base import Memory
from fedssl.training.plan import on_device
from fedssl.training.trainer import WATCHED, Encoded, Pull, Replay, State, Steps, Trainer
from fedssl.util.errors import UserError
from fedssl.util.trees import Tree, mean

Loss = Callable[[Encoded], Tensor]


@dataclass(frozen=True)
class Trained:
    """What local training gives: the network before and after it, the way, and the mean loss."""

    start: Tensor
    weights: Tensor
    moved: Tensor
    loss: Tensor


class Client:
    """What an algorithm's task sees: one client, or a merged cohort that acts as one.

    A sample's random numbers depend on whose it is and on its index there only, so merging changes
    none.
    """

    def __init__(
        self,
        trainer: Trainer,
        members: NDArray[np.int64],
        ids: NDArray[np.int64],
        sizes: NDArray[np.int64],
        round: int,
        lr: float,
        state: State,
        remember: bool = False,
    ) -> None:
        self.trainer = trainer
        self.members = on_device(members, trainer.device)
        self.sizes = sizes
        self.round = round
        self.lr = lr
        self.state = state
        self.remember = remember
        self.id = int(ids[0])
        self._owners = (ids, sizes)
        self._drawn: tuple[int, Tensor] | None = None  # an epoch, and its random states
        self._kept: tuple[Tensor, int, Encoded] | None = None

    @property
    def samples(self) -> int:
        """How many samples the client holds."""
        return len(self.members)

    @property
    def weight(self) -> int:
        """Its weight in a mean: the samples that contribute to the round."""
        return self.trainer.plan.contributing(self.samples)

    def own_loss(self, encoded: Encoded) -> Tensor:
        """The objective's loss within one client."""
        return encoded.within(self._loss)

    def _loss(
        self, encodings: tuple[Tensor, ...], labels: Tensor | None, memory: Memory | None
    ) -> Tensor:
        """Checked: an objective may be somebody's own."""
        value: object = self.trainer.objective.loss(encodings, labels, memory)
        if not isinstance(value, Tensor):
            raise self._no_loss(type(value).__name__)
        if value.ndim:
            raise self._no_loss(f"a tensor of shape {list(value.shape)}")
        return value

    def _no_loss(self, kind: str) -> UserError:
        named = self.trainer.config
        return UserError(
            f"algorithm.name={named.algorithm.name} with objective.name={named.objective.name}: "
            f"the loss is {kind}; return a tensor of one number, computed from the encodings"
        )

    def open(self, received: Tensor) -> Tensor:
        """The whole network from what was sent (``algorithm.norm_policy``).

        Normalization layers that stay here are the client's own; statistics that start anew every
        round are those of an untrained network.
        """
        trainer = self.trainer
        if trainer.kept is not None and trainer.shared is not None:
            full = torch.empty_like(trainer.initial)
            full[trainer.shared] = received
            full[trainer.kept] = cast(Tensor, self.state.get("norm", trainer.initial[trainer.kept]))
            return full
        if trainer.config.algorithm.norm_policy == "reset":
            n = trainer.flat.parameters
            return torch.cat((received[:n], trainer.initial[n:]))
        return received

    def average(self, received: Tensor, function: Callable[[Encoded], Tree]) -> Tree:
        """The mean of ``function`` over the round's first pass; nothing is learned."""
        steps = self.trainer.plan.first_pass(self.samples)
        with torch.set_grad_enabled(self.remember and steps == 1):
            each = self._batches(self.open(received), steps)
            return mean((len(e.encodings[0]), function(e)) for e in each)[0]

    def descend(self, received: Tensor, loss: Loss | None = None) -> dict[str, Tree]:
        """Train from what was sent for the round's local steps: the change, and the mean loss."""
        return self.reply(self.train(self.open(received), self.state, loss), received)

    def reply(self, trained: Trained, received: Tensor) -> dict[str, Tree]:
        """What the server gets to see: the change from what it sent, and the mean loss."""
        trainer, change = self.trainer, trained.moved
        if trainer.watched is not None and len(self.sizes) == 1 and len(trainer.watched) < WATCHED:
            trainer.watched[self.id] = trained.weights
        if trained.start is not received:
            change = change + (trained.start - self.open(received))
        if trainer.config.algorithm.norm_policy == "reset":
            n = trainer.flat.parameters
            change = torch.cat((change[:n], self._statistics(trained) - received[n:]))
        if trainer.kept is not None and trainer.shared is not None:
            self.state["norm"] = trained.weights[trainer.kept]
            self.state["samples"] = torch.tensor(self.samples)  # its weight in a mean of these
            change = change[trainer.shared]
        return {"change": change, "loss": trained.loss}

    def _statistics(self, trained: Trained) -> Tensor:
        """Running statistics of this round alone: what is left of their start is taken out."""
        trainer, n = self.trainer, self.trainer.flat.parameters
        inputs = 1 if trainer.network.joint else trainer.objective.inputs
        passes = -(-inputs // len(trainer.network.towers))
        left = (1 - STATISTICS_MOMENTUM) ** (passes * trainer.plan.count(self.samples))
        return (trained.weights[n:] - left * trained.start[n:]) / (1 - left)

    def train(
        self, start: Tensor, keep: State, loss: Loss | None = None, pull: Pull | None = None
    ) -> Trained:
        """The round's local steps from ``start``, with a fresh optimizer (FedEMA, lines 19 to 22).

        Target network and memory come from ``keep`` and go back there.
        """
        trainer, steps = self.trainer, self.trainer.plan.count(self.samples)
        batch = trainer.plan.batch
        if loss is None:
            loss = trainer.objective.local(self, start)
        fits = batch is not None and batch <= self.samples
        if trainer.compiles and fits and (loss is None or isinstance(loss, Steps)):
            step, total = None, self._replay(start, keep, steps, loss, pull)
        else:
            step, total = self._steps(start, keep, steps, loss or self.own_loss, pull)
        trainer.end(keep)
        trainer.loads += 1  # the network no longer holds `start`
        after = trainer.flat.vector.clone()
        moved = after - start
        if steps == 1 and step is not None:
            moved[: trainer.flat.parameters] = step  # not a difference of two nearby vectors
        return Trained(start, after, moved, total / steps)

    def _steps(
        self, start: Tensor, keep: State, steps: int, loss: Loss, pull: Pull | None
    ) -> tuple[Tensor, Tensor]:
        """The last step's change, and the sum of the losses."""
        trainer, total = self.trainer, start.new_zeros(())
        trainer.begin(start, keep)
        for encoded in self._batches(start, steps):
            value = loss(encoded)
            if not (isinstance(value, Tensor) and value.requires_grad):
                raise self._no_loss("nothing that has a gradient")
            change = trainer.descend(value, encoded.encodings, self.lr, pull)
            total += value.detach()
        return change, total

    def _replay(
        self, start: Tensor, keep: State, steps: int, loss: Steps | None, pull: Pull | None
    ) -> Tensor:
        """The same through compiled steps, for all shapes that are worth one."""
        trainer, total = self.trainer, start.new_zeros(())
        trainer.load(start)
        trainer.begin(start, keep)
        used: list[Replay] = []
        for step in range(steps):
            members, state = self._samples(step)
            inputs = () if loss is None else loss.inputs()
            replay = trainer.replay(len(members), pull, loss, inputs)
            if replay is not None and replay not in used:
                replay.begin(self.lr, pull)
                used.append(replay)
            if replay is not None:
                replay(members, state, *inputs)
                encodings = replay.encodings
            else:
                assert loss is not None
                value, encodings = self._plain(loss, inputs, members, state, pull)
                total += value
            if loss is not None:
                loss.done(encodings)
        return sum((replay.total for replay in used), total)

    def _plain(
        self,
        loss: Steps,
        inputs: tuple[Tensor, ...],
        members: Tensor,
        state: Tensor,
        pull: Pull | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A step of shapes that are not compiled: its loss and encodings, as mere values.

        A graph of operations that outlives its step would be in the way of the next one's capture.
        """
        encoded = self.trainer.look(members, state)
        value = loss.function(encoded, *inputs)
        self.trainer.descend(value, encoded.encodings, self.lr, pull)
        return value.detach(), tuple(e.detach() for e in encoded.encodings)

    def _batches(self, weights: Tensor, steps: int) -> Iterator[Encoded]:
        """The batches of a round after the network; a remembered forward pass is not made again."""
        kept = self._kept
        if kept is None or kept[0] is not weights or kept[1] != self.trainer.loads:
            self.trainer.load(weights)
            kept = (weights, self.trainer.loads, self._encode(0))
        self._kept = kept if self.remember and steps == 1 else None
        yield kept[2]
        for step in range(1, steps):
            yield self._encode(step)

    def random_state(self, epoch: int, chosen: slice | Tensor) -> Tensor:
        """Where the random numbers of some samples' views come from."""
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = (epoch, on_device(self._random_states(epoch), self.trainer.device))
        return self._drawn[1][chosen]

    def _random_states(self, epoch: int) -> NDArray[np.int64]:
        """Of all its samples: on the host, since on a GPU each step's would be 28 small kernels."""
        ids, sizes = self._owners
        start = mix(key(self.trainer.config.seed, "augment", epoch), ids)
        positions = np.arange(self.samples) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return mix(np.repeat(start, sizes), positions).view(np.int64)

    def _samples(self, step: int) -> tuple[Tensor, Tensor]:
        """The samples of a step, and where the random numbers of their views come from."""
        if self.trainer.halted.is_set():
            raise KeyboardInterrupt
        epoch, chosen = self.trainer.plan.indices(self.round, step, self.id, self.samples)
        return self.members[chosen], self.random_state(epoch, chosen)

    def _encode(self, step: int) -> Encoded:
        return self.trainer.look(*self._samples(step), self.sizes if len(self.sizes) > 1 else None)
