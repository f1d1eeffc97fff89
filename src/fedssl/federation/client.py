"""A client's side of a round: its batches, means over its samples, and local training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data.random import key, mix
from fedssl.federation.task import Reply
from fedssl.models.norms import STATISTICS_MOMENTUM
from fedssl.objectives.batch import EncodedBatch, Loss, Steps
from fedssl.training.compiled import CompiledStep
from fedssl.training.feed import AHEAD
from fedssl.training.optim import Pull
from fedssl.training.trainer import State, Trainer
from fedssl.util.device import to_device
from fedssl.util.errors import UserError
from fedssl.util.trees import Tree, mean

Accept = Callable[[int], bool]  # whether a step's result may stay

MAX_WATCHED = 10  # clients of a round whose local models are kept for a comparison


@dataclass(frozen=True)
class Trained:
    """The result of local training: the weights before and after it, and the mean loss.

    ``change`` is their difference, or more exactly the update itself after a single step.
    """

    start: Tensor
    weights: Tensor
    change: Tensor
    loss: Tensor


@dataclass(eq=False, repr=False)
class Client:
    """One client as an algorithm's tasks see it, or a merged cohort that acts as one.

    A sample's random numbers depend only on its client and its index there, so merging changes
    none.
    """

    trainer: Trainer
    images: InitVar[NDArray[np.int64]]
    ids: InitVar[NDArray[np.int64]]
    sizes: NDArray[np.int64]  # of the clients that it acts for
    round: int
    lr: float
    state: State
    remember: bool = False  # reuse a round's only forward pass in its next exchange

    def __post_init__(self, images: NDArray[np.int64], ids: NDArray[np.int64]) -> None:
        self.members = to_device(images, self.trainer.device)
        self._numbers = torch.from_numpy(images)  # the same, on the host
        self.id = int(ids[0])
        self._owners = (ids, self.sizes)  # of the samples, for their random numbers
        self._epoch_states: tuple[int, Tensor] | None = None  # an epoch, and its random states
        self._ahead: dict[int, tuple[Tensor, Tensor]] = {}  # samples of steps to come
        self._first: tuple[Tensor, int, EncodedBatch] | None = None  # see ``_encoded_batches``

    @property
    def samples(self) -> int:
        """How many samples the client holds."""
        return len(self.members)

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.trainer.config.seed

    @property
    def steps(self) -> int:
        """How many local steps a round has."""
        return self.trainer.batches.per_round(self.samples)

    @property
    def batches_per_epoch(self) -> int:
        """How many batches one epoch of its samples has."""
        return self.trainer.batches.per_epoch(self.samples)

    # Exchanges with the server.

    def mean(self, model: Tensor, function: Callable[[EncodedBatch], Tree]) -> Tree:
        """Average ``function`` over the round's first epoch, without learning."""
        steps = self.trainer.batches.first_epoch(self.samples)
        with torch.set_grad_enabled(self.remember and steps == 1):
            each = self._encoded_batches(self.full_weights(model), steps)
            return mean((len(e.encodings[0]), function(e)) for e in each)[0]

    def train(self, model: Tensor, loss: Loss | None = None, accept: Accept | None = None) -> Reply:
        """Train the model that the server sent for the round's local steps; return the reply."""
        start = self.full_weights(model)
        return self.reply(self.train_from(start, self.state, loss, accept=accept), model)

    def full_weights(self, model: Tensor) -> Tensor:
        """Complete the model that the server sent (``algorithm.norm_policy``).

        Normalization layers that stay here are the client's own. Statistics that start anew every
        round are those of an untrained network.
        """
        trainer = self.trainer
        if trainer.kept is not None and trainer.shared is not None:
            full = torch.empty_like(trainer.initial)
            full[trainer.shared] = model
            full[trainer.kept] = self.state.get("norm", trainer.initial[trainer.kept])
            return full
        if trainer.config.algorithm.norm_policy == "reset":
            n = trainer.flat.parameter_count
            return torch.cat((model[:n], trainer.initial[n:]))
        return model

    def reply(self, trained: Trained, model: Tensor) -> Reply:
        """Return the change from the model that the server sent, and the mean loss."""
        trainer, change = self.trainer, trained.change
        watched = trainer.watched
        if watched is not None and len(self.sizes) == 1 and len(watched) < MAX_WATCHED:
            watched[self.id] = trained.weights
        if trained.start is not model:
            change = change + (trained.start - self.full_weights(model))
        if trainer.config.algorithm.norm_policy == "reset":
            n = trainer.flat.parameter_count
            change = torch.cat((change[:n], self._statistics(trained) - model[n:]))
        if trainer.kept is not None and trainer.shared is not None:
            self.state["norm"] = trained.weights[trainer.kept]
            self.state["samples"] = torch.tensor(self.samples)  # its weight in a mean of these
            change = change[trainer.shared]
        return {"change": change, "loss": trained.loss}

    def _statistics(self, trained: Trained) -> Tensor:
        """Return the running statistics of this round alone, without the rest of their start."""
        trainer, n = self.trainer, self.trainer.flat.parameter_count
        left = (1 - STATISTICS_MOMENTUM) ** (trainer.passes * self.steps)
        return (trained.weights[n:] - left * trained.start[n:]) / (1 - left)

    def numbers(self, *names: str) -> dict[str, Tensor]:
        """Return numbers of the state, for the log; NaN for those that are not there."""
        nan = torch.tensor(torch.nan)
        return {name: self.state.get(name, nan) for name in names}

    # Local training.

    def train_from(
        self,
        start: Tensor,
        state: State,
        loss: Loss | None = None,
        pull: Pull | None = None,
        accept: Accept | None = None,
    ) -> Trained:
        """Train for the round's local steps from ``start`` (FedEMA, lines 19 to 22).

        The optimizer starts afresh. Target network and memory come from ``state`` and return there.
        With ``accept``, a step after the first that it refuses is undone and ends the training.
        """
        trainer, steps = self.trainer, self.steps
        loss = loss or trainer.objective.round_loss(self, start)
        trainer.begin(start, state)
        if self._can_compile(loss):
            change, total = None, self._compiled_steps(start, steps, loss, pull)
        else:
            change, total, steps = self._steps(start, steps, loss or self.batch_loss, pull, accept)
        trainer.end(state)
        trainer.loads += 1  # the network no longer holds `start`
        weights = trainer.flat.vector.clone()
        difference = weights - start
        if steps == 1 and change is not None:
            difference[: trainer.flat.parameter_count] = change  # exact: no two nearby vectors
        return Trained(start, weights, difference, total / steps)

    def _steps(
        self, start: Tensor, steps: int, loss: Loss, pull: Pull | None, accept: Accept | None
    ) -> tuple[Tensor, Tensor, int]:
        """Train step by step; return the last step's change, and the losses' sum and number."""
        trainer, total = self.trainer, start.new_zeros(())
        for step, batch in enumerate(self._encoded_batches(start, steps)):
            value = loss(batch)
            if not (isinstance(value, Tensor) and value.requires_grad):
                raise self._no_loss("nothing that has a gradient")
            before = trainer.flat.vector.clone() if accept and step else None
            latest = trainer.step(value, batch.encodings, self.lr, pull)
            if accept and before is not None and not accept(step):
                trainer.flat.vector.copy_(before)
                steps = step
                break
            change, total = latest, total + value.detach()
        return change, total, steps

    def _can_compile(self, loss: Loss | None) -> bool:
        """Return whether the steps have full batches and a loss that can be compiled."""
        size = self.trainer.batches.size
        fits = size is not None and size <= self.samples
        return self.trainer.compiles and fits and (loss is None or isinstance(loss, Steps))

    def _compiled_steps(
        self, start: Tensor, steps: int, loss: Loss | None, pull: Pull | None
    ) -> Tensor:
        """Train through compiled steps where shapes recur; return the sum of the losses."""
        assert loss is None or isinstance(loss, Steps)
        trainer, total = self.trainer, start.new_zeros(())
        trainer.load(start)
        used: list[CompiledStep] = []
        for number in range(steps):
            members, state = self._samples_of(number)
            inputs = () if loss is None else loss.inputs()
            step = trainer.compiled_steps.find(len(members), pull, loss, inputs)
            if step is not None:
                if step not in used:
                    step.begin(self.lr, pull, self.draw)
                    used.append(step)
                step(members, state, *inputs)
                encodings = step.encodings
            else:
                assert loss is not None
                batch = trainer.encode_batch(members, state, None, self.draw)
                value = loss.function(batch, *inputs)
                trainer.step(value, batch.encodings, self.lr, pull)
                # A graph of operations that outlives its step would disturb the next one's capture.
                encodings = tuple(e.detach() for e in batch.encodings)
                total += value.detach()
                del batch, value
            if loss is not None:
                loss.done(encodings)
        return sum((step.total for step in used), total)

    def batch_loss(self, batch: EncodedBatch) -> Tensor:
        """Return the objective's loss within each client."""
        return batch.mean_over_clients(self._checked_loss)

    def _checked_loss(self, batch: EncodedBatch) -> Tensor:
        """Return the objective's loss of one client; a user's own may return anything."""
        value: object = self.trainer.objective.loss(batch)
        if not isinstance(value, Tensor):
            raise self._no_loss(type(value).__name__)
        if value.ndim:
            raise self._no_loss(f"a tensor of shape {list(value.shape)}")
        return value

    def _no_loss(self, kind: str) -> UserError:
        named = self.trainer.config
        return UserError(
            f"with algorithm.name={named.algorithm.name} the loss is {kind}",
            key="objective.name",
            value=named.objective.name,
            fix="Return a tensor of one number, computed from the encodings.",
        )

    # Samples and their encodings.

    def _encoded_batches(self, weights: Tensor, steps: int) -> Iterator[EncodedBatch]:
        """Encode the batches of a round, which starts from ``weights``.

        The first one is encoded anew only if the network no longer holds these weights.
        """
        first = self._first
        if first is None or first[0] is not weights or first[1] != self.trainer.loads:
            self.trainer.load(weights)
            first = (weights, self.trainer.loads, self.encode_step(0))
        self._first = first if self.remember and steps == 1 else None
        yield first[2]
        del first
        for step in range(1, steps):
            yield self.encode_step(step)

    def encode_step(self, step: int) -> EncodedBatch:
        """Encode the batch of a step with the network as it is."""
        sizes = self.sizes if len(self.sizes) > 1 else None
        return self.trainer.encode_batch(*self._samples_of(step), sizes, self.draw)

    def load(self, weights: Tensor) -> None:
        """Put weights into the network."""
        self.trainer.load(weights)

    def encode(self, epoch: int, chosen: slice | Tensor) -> EncodedBatch:
        """Encode some samples' views of an epoch with the network as it is."""
        members, state = self._samples_at(epoch, chosen)
        return self.trainer.encode_batch(members, state, None, self.draw)

    def _samples_of(self, step: int) -> tuple[Tensor, Tensor]:
        """Return a step's samples, and the random states of their views."""
        if self.trainer.halted.is_set():
            raise KeyboardInterrupt
        feed = self.trainer.feed
        if not feed.streams:
            return self._samples_at(*self.positions(step))
        for each in range(step, min(step + 1 + AHEAD, self.steps)):
            if each not in self._ahead:
                epoch, chosen = self.positions(each)
                self._ahead[each] = self._samples_at(epoch, chosen)
                feed.prefetch(self._ahead[each][0], self._numbers[chosen])
        return self._ahead.pop(step)

    def _samples_at(self, epoch: int, chosen: slice | Tensor) -> tuple[Tensor, Tensor]:
        return self.members[chosen], self.random_state(epoch, chosen)

    def positions(self, step: int) -> tuple[int, slice | Tensor]:
        """Return a step's epoch, and the positions of its samples within the client."""
        return self.trainer.batches.positions(self.round, step, self.id, self.samples)

    @functools.cached_property
    def draw(self) -> Tensor | None:
        """The random state that all clients of the round share, if the loss draws numbers."""
        if not self.trainer.objective.draws:
            return None
        state = np.array(key(self.seed, "round", self.round), np.uint64)
        return to_device(state.view(np.int64), self.trainer.device)

    def random_state(self, epoch: int, chosen: slice | Tensor) -> Tensor:
        """Return the random states of some samples' views in an epoch."""
        if self._epoch_states is None or self._epoch_states[0] != epoch:
            # All samples at once on the host: on a GPU each step would need 28 small kernels.
            ids, sizes = self._owners
            first = mix(key(self.seed, "augment", epoch), ids)
            positions = np.arange(self.samples) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            drawn = mix(np.repeat(first, sizes), positions).view(np.int64)
            self._epoch_states = (epoch, to_device(drawn, self.trainer.device))
        return self._epoch_states[1][chosen]
