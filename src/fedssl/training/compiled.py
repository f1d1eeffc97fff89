"""Compiled training steps, and on a GPU the CUDA graphs that hold them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fedssl.models.bf16_weights import BF16Weights
from fedssl.models.flat_weights import differentiate
from fedssl.objectives.batch import EncodedBatch, Steps
from fedssl.training.optim import Pull

if TYPE_CHECKING:
    from fedssl.training.trainer import Trainer

MAX_SHAPES = 6  # compiled steps of a run whose inputs vary; torch gives up after eight
RARE = 64  # steps of the same shapes, up to which they are not compiled
Function = TypeVar("Function", bound=Callable[..., Any])
Shapes = tuple[Any, ...]


class CompiledSteps:
    """A trainer's compiled steps: one for each batch size, pull and loss with its inputs' shapes.

    Each is compiled once and reused for every client.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.by_shape: dict[Shapes, CompiledStep] = {}
        self.may_capture = True  # False while other networks run, which a capture would break
        self._uses: Counter[Shapes] = Counter()

    def find(
        self,
        batch: int,
        pull: Pull | None,
        loss: Steps | None = None,
        inputs: tuple[Tensor, ...] = (),
    ) -> CompiledStep | None:
        """Return the compiled step for these shapes, or ``None`` while they are rare."""
        term = None if pull is None else (pull.weight, pull.is_constant)
        function = None if loss is None else loss.function
        shapes = (batch, term, function, *(i.shape for i in inputs))
        self._uses[shapes] += loss is None or loss.recurs
        fits = self.may_capture and len(self.by_shape) < MAX_SHAPES
        if shapes not in self.by_shape and (loss is None or (fits and self._uses[shapes] > RARE)):
            if not self.by_shape:
                self.trainer.announce_compiling()
            self.by_shape[shapes] = CompiledStep(self.trainer, batch, pull, function, inputs)
        return self.by_shape.get(shapes)

    @property
    def is_complete(self) -> bool:
        """True if all recurring shapes have a compiled step."""
        return bool(self.by_shape) and (+self._uses).keys() <= self.by_shape.keys()

    def copy_from(self, other: CompiledSteps) -> None:
        """Make the steps that a twin's trainer has; other shapes take the plain way."""
        for shapes, step in other.by_shape.items():
            if shapes not in self.by_shape:
                settings = (step.pull, step.function, step.inputs)
                self.by_shape[shapes] = CompiledStep(self.trainer, len(step.members), *settings)

    def clear(self) -> None:
        """Free the memory of all compiled steps."""
        self.by_shape.clear()


class CompiledStep:
    """One whole training step on tensors that stay in place.

    Augmentation, forward pass and loss are compiled. On a GPU the step, with its backward pass and
    its update, is also captured as a graph, so that a step is one call for the host.
    """

    def __init__(
        self,
        trainer: Trainer,
        batch: int,
        pull: Pull | None,
        function: Callable[..., Tensor] | None,
        inputs: tuple[Tensor, ...],
    ) -> None:
        self.trainer = trainer
        self.function = function
        self.inputs = tuple(i.clone() for i in inputs)
        self.encodings: tuple[Tensor, ...] = ()  # of the last step
        self.members = torch.zeros(batch, dtype=torch.int64, device=trainer.device)
        self.state = torch.zeros_like(self.members)
        self.streamed = trainer.feed.places(batch)
        self.draw = torch.zeros_like(self.state[0]) if trainer.objective.draws else None
        self.lr = torch.zeros((), dtype=trainer.dtype, device=trainer.device)
        self.total = torch.zeros_like(self.lr)
        self.pull = None
        if pull is not None:
            self.pull = replace(pull, anchor=torch.zeros_like(pull.anchor))
        trainer.augmentation.constants(self.state.device)
        networks = [trainer.flat] if trainer.target is None else [trainer.flat, trainer.target]
        rounding = (BF16Weights(flat) for flat in networks if trainer.precision == "bf16")
        self.bf16_weights = [each for each in rounding if each.pairs[0]]
        # Of all networks in one list: each list of its own would be compiled by itself.
        self.rounded = [copy for each in self.bf16_weights for copy in each.pairs[0]]
        self.exact = [weight for each in self.bf16_weights for weight in each.pairs[1]]
        self.gradients = [[s.of(flat.gradient) for s in flat.learned] for flat in trainer.learning]
        self._forward = compile_function(self._loss)
        self._copy = compile_function(copy_tensors, only_copies=True)
        self._update = compile_function(self._update_weights)
        self._graph: torch.cuda.CUDAGraph | None = None
        if trainer.device.type == "cuda":
            with trainer.restored():
                self._graph = self._capture()

    def begin(self, lr: float, pull: Pull | None, draw: Tensor | None = None) -> None:
        """Prepare for a client's first step."""
        self.lr.fill_(lr)
        if self.draw is not None and draw is not None:
            self.draw.copy_(draw)
        self.total.zero_()
        if self.pull is not None and pull is not None:
            self.pull.anchor.copy_(pull.anchor)

    def __call__(self, members: Tensor, state: Tensor, *inputs: Tensor) -> None:
        """Train on these samples and add the loss to ``total``."""
        self.members.copy_(members)
        self.state.copy_(state)
        for place, tensor in zip(self.streamed, self.trainer.feed.fetch(members), strict=True):
            place.copy_(tensor, non_blocking=True)
        for place, tensor in zip(self.inputs, inputs, strict=True):
            place.copy_(tensor)
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def _step(self) -> None:
        """Do what ``Trainer.step`` does, from the views to the update."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.trainer.stacked_views())
            if self.rounded:
                self._copy(self.rounded, self.exact)
            for weights in self.bf16_weights:
                stack.enter_context(weights.in_use())
            samples = (self.members, self.state)
            loss, encodings = self._forward(*samples, self.draw, self.streamed, *self.inputs)
            gradients = differentiate(loss, *self.trainer.learning)
        for places, tensors in zip(self.gradients, gradients, strict=True):
            self._copy(places, list(tensors))
        self._update()
        self.encodings = tuple(e.detach() for e in encodings)
        self.trainer.objective.memory.update(self.trainer.memory, self.encodings)
        self.total += loss.detach()

    def _loss(
        self,
        members: Tensor,
        state: Tensor,
        draw: Tensor | None,
        streamed: tuple[Tensor, ...],
        *inputs: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        trainer = self.trainer
        encodings = trainer.encode_samples(members, state, *streamed)
        labels = None if trainer.labels is None else trainer.labels[members]
        batch = EncodedBatch(encodings, labels, memory=trainer.memory, draw=draw)
        loss = self.function or trainer.objective.loss
        return loss(batch, *inputs), encodings

    def _update_weights(self) -> None:
        self.trainer.update(self.lr, self.pull)

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Capture the step as a graph, after a few steps that compile it.

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


class CapturedEncoder:
    """The compiled forward and backward pass of merged cohorts, a graph each.

    Their results lie in the graphs' memory: encodings until the next forward pass of as many
    images, gradients until the next backward pass.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._by_size: dict[int, nn.Module] = {}

    def __call__(self, members: Tensor, state: Tensor, *streamed: Tensor) -> tuple[Tensor, ...]:
        """Encode like :meth:`Trainer.encode_samples`."""
        given = (members, state, *streamed)
        if len(members) not in self._by_size:
            sample = tuple(each.clone() for each in given)
            with torch.enable_grad():  # a first pass may be for moments alone, the next is not
                module = torch.cuda.make_graphed_callables(_EncoderModule(self.trainer), sample)
            self._by_size[len(members)] = cast(nn.Module, module)
        return cast("tuple[Tensor, ...]", self._by_size[len(members)](*given))


class _EncoderModule(nn.Module):
    """The forward pass as a module whose parameters the graphs are differentiated by."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.network = trainer.network
        self.encode = compile_function(trainer.encode_samples)

    def forward(self, members: Tensor, state: Tensor, *streamed: Tensor) -> tuple[Tensor, ...]:
        return self.encode(members, state, *streamed)


def copy_tensors(places: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy tensors to their places; compiled, one kernel that changes types and layouts."""
    torch._foreach_copy_(places, tensors)


def compile_function(function: Function, only_copies: bool = False) -> Function:
    """Compile a function as a whole, for one shape."""
    from torch._inductor import config as inductor

    # Passes that fail in torch 2.11, each with an AssertionError: on statistics of several views,
    # on copies of many tensors at once.
    options: dict[str, Any] = {}
    if hasattr(inductor.triton, "mix_order_reduction"):
        options["triton.mix_order_reduction"] = False
    if only_copies:
        options["loop_ordering_after_fusion"] = False
    return cast(Function, torch.compile(function, dynamic=False, fullgraph=True, options=options))
