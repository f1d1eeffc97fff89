"""The one network of a process, and the training step that every client's work goes through."""

from __future__ import annotations

import contextlib
import copy
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedssl.config import Config
from fedssl.data.augment import Augmentation
from fedssl.data.dataset import Census, Split
from fedssl.models.flat import Flat, differentiate, positions
from fedssl.models.network import Network
from fedssl.models.norms import NORMS
from fedssl.models.rounded import Rounded
from fedssl.objectives.base import Memory, Objective
from fedssl.training import optim
from fedssl.training.plan import Plan, on_device
from fedssl.util.trees import Tree

PairLoss = Callable[[tuple[Tensor, ...], Tensor | None, Memory | None], Tensor]
State = dict[str, Tree]
WATCHED = 10  # clients of a round whose models are kept for a look at them
MOST_SHAPES = 6  # compiled steps of a run whose inputs vary; torch gives up after eight
SELDOM = 64  # steps of the same shapes, up to which they are not compiled
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Encoded:
    """A batch after the network, labels if there are any, and whose samples they are.

    Encodings are F and G, and for Siamese objectives what these are compared with.
    """

    encodings: tuple[Tensor, ...]
    labels: Tensor | None
    sizes: NDArray[np.int64]  # samples of each client, in order; one entry for a single client
    memory: Memory = field(default_factory=dict)  # the objective's, of a single client

    def within(self, loss: PairLoss) -> Tensor:
        """Each client's own ``loss``, averaged by samples: what FedAvg of one step descends.

        A merged cohort goes through the network as one batch and is taken apart here: clients of
        the same size are one vectorized call.
        """
        if len(self.sizes) == 1:
            return loss(self.encodings, self.labels, self.memory)
        total = self.encodings[0].new_zeros(())
        starts = np.cumsum(self.sizes) - self.sizes
        for size in np.unique(self.sizes):
            rows = starts[self.sizes == size][:, None] + np.arange(size)
            index = on_device(rows, self.encodings[0].device)
            encodings = tuple(e[index] for e in self.encodings)
            if self.labels is None:
                losses = torch.vmap(lambda *e: loss(e, None, None))(*encodings)
            else:
                losses = torch.vmap(lambda y, *e: loss(e, y, None))(self.labels[index], *encodings)
            total = total + losses.sum() * float(size)
        return total / float(self.sizes.sum())


@dataclass(frozen=True)
class Pull:
    """A proximal term weight/2 ‖v − anchor‖² on the parameters (Eq. 9 of the second paper)."""

    weight: float
    anchor: Tensor


class Steps(ABC):
    """The loss of one client's steps, one after another, where it looks at more than their batch.

    ``function`` depends on the batch and on ``inputs`` only and is the same object for all clients,
    so that steps whose inputs have the same shapes can share a compiled one.
    """

    function: Callable[..., Tensor]
    lasting = True  # whether inputs of these shapes will come again

    @abstractmethod
    def inputs(self) -> tuple[Tensor, ...]:
        """What the next step needs besides its batch."""

    @abstractmethod
    def done(self, encodings: tuple[Tensor, ...]) -> None:
        """A step was made, of a batch with these encodings."""

    def __call__(self, encoded: Encoded) -> Tensor:
        """The next step's loss."""
        loss = self.function(encoded, *self.inputs())
        self.done(encoded.encodings)
        return loss


def precision_on(device: torch.device, asked: str) -> str:
    """What networks compute in (``precision``); losses, moments and updates are never in bf16."""
    automatic = "bf16" if device.type == "cuda" else "fp32"
    return automatic if asked == "auto" else asked


class Trainer:
    """The one network of this process, which every client's work goes through.

    All that training changes lives in tensors that stay in place: the flat vectors of the network
    and of its target, the optimizer's state, the objective's memory. Switching clients copies
    values into them.
    """

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
        objective.check_images(*split.images[0].shape[2:])
        self.augmentation = augmentation
        self.dtype = torch.float64 if config.precision == "fp64" else torch.float32
        self.precision = precision_on(device, config.precision)
        self.device = device
        self.images = tuple(images.to(device) for images in split.images)
        labels = split.labels if objective.needs_labels else None
        self.labels = labels.to(device) if labels is not None else None
        self.plan = Plan.from_config(config.algorithm, config.seed, device)
        self._place(network.to(device=device, dtype=self.dtype).train())
        self.initial = self.flat.vector.clone()
        self.halted = threading.Event()  # set: whoever trains, in whichever thread, stops
        self.compiles = False  # whether local training goes through ``replay``
        self._compiled: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None = None
        self.watched: dict[int, Tensor] | None = None  # local models of a round, where asked for
        self.census: Census | None = None  # of a simulation, for measures that only it can make
        # Places of the numbers that stay with a client (FedBN), and of those that are sent.
        self.kept: Tensor | None = None
        self.shared: Tensor | None = None
        if config.algorithm.norm_policy == "local":
            sent = torch.ones(len(self.initial), dtype=torch.bool)
            sent[positions(self.flat.of(*NORMS))] = False
            self.kept, self.shared = (chosen.nonzero()[:, 0].to(device) for chosen in (~sent, sent))

    def _place(self, network: Network) -> None:
        """All that training changes."""
        self.network, rule = network, self.config.client
        self.target: Flat | None = None
        if self.objective.momentum is not None:
            self.target = Flat(Network(copy.deepcopy(list(network.towers))))
        self.flat = Flat(network)
        self.loads = 0
        self.memory = self.objective.memory(self.flat.vector)
        self.rule_state = optim.start(rule, self.flat.params)
        self.target_state: optim.State = {}
        if self.target is not None and not self.objective.stop_gradient:
            self.target_state = optim.start(rule, self.target.params)
        self.alone = True  # no other network is at work, so that a step can be captured
        self._replays: dict[tuple[Any, ...], Replay] = {}
        self._met: Counter[tuple[Any, ...]] = Counter()

    def twin(self) -> Trainer:
        """A second network, for another client at the same time; all else is shared."""
        other = copy.copy(self)
        other._compiled = None  # the first network's
        other._place(copy.deepcopy(self.network))
        return other

    @property
    def stateful(self) -> bool:
        """Whether training leaves something with the client that the next round needs."""
        return self.target is not None or bool(self.memory) or self.kept is not None

    def load(self, weights: Tensor) -> None:
        """Put ``weights`` into the network."""
        self.flat.vector.copy_(weights)
        self.loads += 1

    def begin(self, weights: Tensor, keep: State) -> None:
        """Before a client trains: its target and memory in place, a fresh optimizer.

        A client without a target network of its own starts it from ``weights``.
        """
        if self.target is not None:
            own = keep.get("target", weights[: self.target.parameters])
            self.target.params.copy_(cast(Tensor, own))
        if self.memory:
            before = cast(Memory, keep.get("memory") or self.objective.memory(self.initial))
            for name, tensor in self.memory.items():
                tensor.copy_(before[name])
        for state in (self.rule_state, self.target_state):
            for tensor in state.values():
                tensor.zero_()

    def end(self, keep: State) -> None:
        """After it: what stays with the client."""
        if self.target is not None:
            keep["target"] = self.target.params.clone()
        if self.memory:
            keep["memory"] = {name: tensor.clone() for name, tensor in self.memory.items()}

    def look(
        self, members: Tensor, state: Tensor, sizes: NDArray[np.int64] | None = None
    ) -> Encoded:
        """Some samples after augmentation and the network; ``state`` seeds each sample's views."""
        encodings = (self._compiled or self.passes)(members, state)
        labels = None if self.labels is None else self.labels[members]
        one = np.array([len(members)]) if sizes is None else sizes
        return Encoded(encodings, labels, one, self.memory)

    def passes(self, members: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        """The encodings of some samples' views."""
        chosen = [images[members] for images in self.images[: self.objective.inputs]]
        inputs = [chosen[view % len(chosen)] for view in range(self.objective.inputs)]
        views = self.augmentation.each(inputs, state, self.dtype)
        return self.encode(self.objective.present(views), state)

    @property
    def compiles_passes(self) -> bool:
        """Whether ``look`` is compiled."""
        return self._compiled is not None

    def compile_passes(self) -> None:
        """From now on: for merged cohorts of one size, whose loss is not theirs alone."""
        self.augmentation.table(self.device)
        self._compiled = Captured(self) if self.device.type == "cuda" else compiled(self.passes)

    def encode(self, inputs: tuple[Tensor, ...], state: Tensor | None = None) -> tuple[Tensor, ...]:
        """The network's encodings: bfloat16 inside if asked, at least float32 outside."""
        with self.autocast():
            projections = self.objective.project(self.network, inputs, state)
            encodings = self.network.predict(projections + self.objective.recall(self.memory))
            if self.objective.siamese:
                encodings += projections if self.target is None else self._targets(inputs)
        return tuple(e.to(self.dtype) for e in encodings)

    def _targets(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self.target is not None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.objective.stop_gradient):
            return cast("tuple[Tensor, ...]", self.target.module(inputs))

    def descend(
        self,
        loss: Tensor,
        encodings: tuple[Tensor, ...],
        lr: float | Tensor,
        pull: Pull | None = None,
    ) -> Tensor:
        """One step down ``loss`` of all that learns: the change of the network's parameters."""
        self.differentiate(loss)
        delta = self.advance(lr, pull)
        self.objective.remember(self.memory, encodings)
        return delta

    @property
    def learning(self) -> tuple[Flat, ...]:
        """The networks that follow a gradient."""
        if self.target is None or self.objective.stop_gradient:
            return (self.flat,)
        return self.flat, self.target

    def differentiate(self, loss: Tensor) -> None:
        """Put the gradients of all that learns in their place."""
        for flat, gradients in zip(self.learning, differentiate(loss, *self.learning), strict=True):
            flat.take(gradients)

    def advance(self, lr: float | Tensor, pull: Pull | None) -> Tensor:
        """One step along the gradients that are there: the change of the network's parameters."""
        flat, target, rule = self.flat, self.target, self.config.client
        if pull is not None:
            flat.gradient.add_(flat.params - pull.anchor[: flat.parameters], alpha=pull.weight)
        delta = optim.step(rule, self.rule_state, flat.params, flat.gradient, lr, flat.layers)
        flat.params.add_(delta)
        if target is not None and not self.objective.stop_gradient:
            state, own = self.target_state, target.params
            own.add_(optim.step(rule, state, own, target.gradient, lr, target.layers))
        if target is not None and self.objective.momentum is not None:
            target.params.lerp_(flat.params[: target.parameters], 1 - self.objective.momentum)
        return delta

    def replay(
        self,
        batch: int,
        pull: Pull | None,
        loss: Steps | None = None,
        inputs: tuple[Tensor, ...] = (),
    ) -> Replay | None:
        """The compiled step for these shapes: made once, reused for every client.

        None: shapes that were met only a few times may not come again.
        """
        weight = None if pull is None else pull.weight
        function = None if loss is None else loss.function
        shapes = (batch, weight, function, *(i.shape for i in inputs))
        self._met[shapes] += loss is None or loss.lasting
        often = self.alone and len(self._replays) < MOST_SHAPES and self._met[shapes] > SELDOM
        if shapes not in self._replays and (loss is None or often):
            self._replays[shapes] = Replay(self, batch, weight, function, inputs)
        return self._replays.get(shapes)

    @property
    def shares_steps(self) -> bool:
        """Whether there are compiled steps, of all shapes that were met and will come again."""
        return bool(self._replays) and (+self._met).keys() <= self._replays.keys()

    def adopt_steps(self, other: Trainer) -> None:
        """Have the compiled steps that a twin has; other shapes take the plain way."""
        for shapes, replay in other._replays.items():
            if shapes not in self._replays:
                weight = None if replay.pull is None else replay.pull.weight
                own = (weight, replay.function, replay.inputs)
                self._replays[shapes] = Replay(self, len(replay.members), *own)

    def forget_steps(self) -> None:
        """Give the memory of compiled steps back."""
        self._replays.clear()

    def tuned(self) -> contextlib.AbstractContextManager[object]:
        """While merged cohorts of one shape train, cuDNN tries which convolutions are fastest."""
        cudnn = torch.backends.cudnn
        if not self.compiles_passes or self.device.type != "cuda":
            return contextlib.nullcontext()
        return cudnn.flags(enabled=True, benchmark=True, allow_tf32=cudnn.allow_tf32)

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """All that training changes is after it as it was before."""
        states = (self.rule_state, self.target_state, self.memory)
        tensors = [self.flat.vector, *(t for state in states for t in state.values())]
        if self.target is not None:
            tensors.append(self.target.vector)
        before = [tensor.clone() for tensor in tensors]
        try:
            yield
        finally:
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)

    @contextlib.contextmanager
    def stacked(self) -> Iterator[None]:
        """Both views in one pass of each network, with the same numbers (``Network.stacked``)."""
        alike = len({images.shape for images in self.images}) == 1
        networks = [self.network] if self.target is None else [self.network, self.target.module]
        with contextlib.ExitStack() as stack:
            for network in networks if alike else ():
                stack.enter_context(cast(Network, network).stacked(self.objective.inputs))
            yield

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Where a network computes, in the run's precision."""
        if self.precision == "bf16":
            # Its cache of casts would be one for all threads, and emptied by whoever ends first.
            return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        return contextlib.nullcontext()


class Captured:
    """The compiled passes of merged cohorts, forward and backward a graph each.

    What they give lies in the graphs' memory: encodings until the next forward pass of as many
    images, gradients until the next backward one.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._by_size: dict[int, nn.Module] = {}

    def __call__(self, members: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        """As :meth:`Trainer.passes`."""
        if len(members) not in self._by_size:
            sample = (members.clone(), state.clone())
            with torch.enable_grad():  # a first pass may be for moments alone, the next is not
                module = torch.cuda.make_graphed_callables(_Passes(self.trainer), sample)
            self._by_size[len(members)] = cast(nn.Module, module)
        return cast("tuple[Tensor, ...]", self._by_size[len(members)](members, state))


class _Passes(nn.Module):
    """A trainer's passes as a module, whose parameters their graphs are differentiated by."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.network = trainer.network
        self.passes = compiled(trainer.passes)

    def forward(self, members: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return self.passes(members, state)


class Replay:
    """One whole training step on tensors that stay in place.

    Augmentation, passes and loss are compiled; on a GPU the step, with its backward pass and
    its update, is also captured as a graph, so that a step is one call for the host.
    """

    def __init__(
        self,
        trainer: Trainer,
        batch: int,
        pull: float | None,
        function: Callable[..., Tensor] | None,
        inputs: tuple[Tensor, ...],
    ) -> None:
        self.trainer = trainer
        self.function = function
        self.inputs = tuple(i.clone() for i in inputs)
        self.encodings: tuple[Tensor, ...] = ()  # of the last step
        self.members = torch.zeros(batch, dtype=torch.int64, device=trainer.device)
        self.state = torch.zeros_like(self.members)
        self.lr = torch.zeros((), dtype=trainer.dtype, device=trainer.device)
        self.total = torch.zeros_like(self.lr)
        self.anchor = torch.zeros_like(trainer.initial) if pull is not None else None
        self.pull = None if pull is None or self.anchor is None else Pull(pull, self.anchor)
        trainer.augmentation.table(self.state.device)
        networks = [trainer.flat] if trainer.target is None else [trainer.flat, trainer.target]
        rounded = (Rounded(flat) for flat in networks if trainer.precision == "bf16")
        self.rounded = [each for each in rounded if each.pairs[0]]
        self.gradients = [[s.of(flat.gradient) for s in flat.learned] for flat in trainer.learning]
        self._forward = compiled(self._loss)
        self._copy = compiled(copy_all, copies=True)
        self._advance = compiled(self._update)
        self._graph: torch.cuda.CUDAGraph | None = None
        if trainer.device.type == "cuda":
            with trainer.untouched():
                self._graph = self._captured()

    def begin(self, lr: float, pull: Pull | None) -> None:
        """Before a client's first step."""
        self.lr.fill_(lr)
        self.total.zero_()
        if self.anchor is not None and pull is not None:
            self.anchor.copy_(pull.anchor)

    def __call__(self, members: Tensor, state: Tensor, *inputs: Tensor) -> None:
        """One step on these samples; its loss is added to ``total``."""
        self.members.copy_(members)
        self.state.copy_(state)
        for place, tensor in zip(self.inputs, inputs, strict=True):
            place.copy_(tensor)
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def _loss(
        self, members: Tensor, state: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        trainer, encodings = self.trainer, self.trainer.passes(members, state)
        labels = None if trainer.labels is None else trainer.labels[members]
        if self.function is None:
            return trainer.objective.loss(encodings, labels, trainer.memory), encodings
        one = np.array([len(members)])
        return self.function(Encoded(encodings, labels, one, trainer.memory), *inputs), encodings

    def _update(self) -> None:
        self.trainer.advance(self.lr, self.pull)

    def _step(self) -> None:
        """As ``Trainer.descend``."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.trainer.stacked())
            for rounded in self.rounded:
                self._copy(*rounded.pairs)
                stack.enter_context(rounded.used())
            loss, encodings = self._forward(self.members, self.state, *self.inputs)
            found = differentiate(loss, *self.trainer.learning)
        for places, gradients in zip(self.gradients, found, strict=True):
            self._copy(places, list(gradients))
        self._advance()
        self.encodings = tuple(e.detach() for e in encodings)
        self.trainer.objective.remember(self.trainer.memory, self.encodings)
        self.total += loss.detach()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The step as a graph, after a few steps that compile it.

        cuDNN tries which of its convolutions are fastest, and the graph keeps these.
        """
        here, aside = torch.cuda.current_stream(self.trainer.device), torch.cuda.Stream()
        # On a stream of its own: graphs of one stream share room for matrix products, and those of
        # several networks run at the same time.
        graph, cudnn = torch.cuda.CUDAGraph(), torch.backends.cudnn
        with cudnn.flags(enabled=True, benchmark=True, allow_tf32=cudnn.allow_tf32):
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                for _ in range(3):
                    self._step()
            here.wait_stream(aside)
            with torch.cuda.graph(graph, stream=aside):
                self._step()
        return graph


def copy_all(places: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy tensors to their places; compiled, this is one kernel that changes types and orders."""
    torch._foreach_copy_(places, tensors)


def compiled(function: Function, copies: bool = False) -> Function:
    """By torch, for one shape, as a whole; ``copies``: a function that only copies."""
    from torch._inductor import config as inductor

    # Passes that fail in torch 2.11, each with an AssertionError: on statistics of several views,
    # on copies of many tensors at once.
    options: dict[str, Any] = {}
    if hasattr(inductor.triton, "mix_order_reduction"):
        options["triton.mix_order_reduction"] = False
    if copies:
        options["loop_ordering_after_fusion"] = False
    return cast(Function, torch.compile(function, dynamic=False, fullgraph=True, options=options))
