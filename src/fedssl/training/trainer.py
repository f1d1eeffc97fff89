"""One network and its training step."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.config import Config
from fedssl.data.augment import Augmentation
from fedssl.data.dataset import Census, ImageArray, Split
from fedssl.data.squares import MiddleSquares
from fedssl.models.flat_weights import FlatWeights, differentiate
from fedssl.models.network import Network
from fedssl.models.norms import NORMS
from fedssl.models.trainable import find_depths
from fedssl.objectives.base import Encodings, Networks, Objective
from fedssl.objectives.batch import EncodedBatch
from fedssl.training import optim
from fedssl.training.batches import Batches
from fedssl.training.compiled import CapturedEncoder, CompiledSteps, compile_function
from fedssl.training.feed import Feed
from fedssl.training.optim import Pull

State = dict[str, Any]  # a tree of tensors


def precision_on(device: torch.device, asked: str) -> str:
    """Return the precision of networks; losses, moments and updates are never in bfloat16."""
    automatic = "bf16" if device.type == "cuda" else "fp32"
    return automatic if asked == "auto" else asked


class Trainer:
    """The network that the clients of this process train, one after another.

    Everything that training changes lives in tensors that stay in place: the flat vectors of the
    network and of its target, the optimizer's state, the objective's memory. To switch clients,
    their values are copied into these tensors.
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
        self.augmentation = augmentation
        self.dtype = torch.float64 if config.precision == "fp64" else torch.float32
        self.precision = precision_on(device, config.precision)
        self.device = device
        self.feed = Feed(split, device, config.data.stream, objective.views)
        self._split = split
        labels = split.labels if objective.needs_labels else None
        self.labels = labels.to(device) if labels is not None else None
        self.batches = Batches.from_config(config.algorithm, config.seed, self.feed.numbers_on)
        self._allocate(network.to(device=device, dtype=self.dtype).train())
        self.initial = self.flat.vector.clone()
        self.halted = threading.Event()  # when set, training in any thread stops
        self.compiles = False  # whether local training uses compiled steps
        self.announce_compiling: Callable[[], object] = lambda: None  # before the first step
        self._encoder: Callable[..., tuple[Tensor, ...]] | None = None  # compiled
        self.watched: dict[int, Tensor] | None = None  # local models of a round, where asked for
        self.census: Census | None = None  # of a simulation, for measures that only it can make
        # Positions of the weights that stay with a client (FedBN), and of those that are sent.
        self.kept: Tensor | None = None
        self.shared: Tensor | None = None
        if config.algorithm.norm_policy == "local":
            sent = torch.ones(len(self.initial), dtype=torch.bool)
            for span in self.flat.of(*NORMS):
                sent[span.start : span.stop] = False
            self.kept, self.shared = (chosen.nonzero()[:, 0].to(device) for chosen in (~sent, sent))

    def _allocate(self, network: Network) -> None:
        """Create everything that training changes."""
        self.network, rule = network, self.config.client
        follows = self.objective.memory.target
        self.target: FlatWeights | None = None
        if follows is not None:
            self.target = FlatWeights(Network(copy.deepcopy(list(network.towers))))
        self.flat = FlatWeights(network)
        flats = [self.flat] if self.target is None else [self.flat, self.target]
        for flat in flats if min(rule.layer_decay, self.config.server.layer_decay) < 1 else ():
            flat.depths = find_depths(flat, cast(Network, flat.module).towers)
        self.loads = 0
        self.memory = self.objective.memory.start(self.flat.vector)
        encode_targets = None if self.target is None else self._encode_targets
        self.networks = Networks(network, encode_targets, self.memory)
        # The networks that follow a gradient.
        self.learning: tuple[FlatWeights, ...] = (self.flat,)
        self.rule_state = optim.start(rule, self.flat.params)
        self.target_state: optim.State = {}
        if self.target is not None and follows is not None and follows.learns:
            self.learning = (self.flat, self.target)
            self.target_state = optim.start(rule, self.target.params)
        self.compiled_steps = CompiledSteps(self)

    def twin(self) -> Trainer:
        """Return a trainer with a second network, for another client at the same time."""
        other = copy.copy(self)
        other._encoder = None  # the first network's
        other._allocate(copy.deepcopy(self.network))
        return other

    @property
    def keeps_state(self) -> bool:
        """True if training leaves something with the client that the next round needs."""
        return self.target is not None or bool(self.memory) or self.kept is not None

    @property
    def images(self) -> tuple[ImageArray, ...]:
        """The images of each modality: on the device, unless they are streamed."""
        return self.feed.images

    @property
    def passes(self) -> int:
        """Batches of inputs that a tower's batch norm sees in a step."""
        small = self.augmentation.small
        if self.network.joint:
            return len({self.augmentation.size, *(each.size for each in small)})
        return -(-(self.objective.views + len(small)) // len(self.network.towers))

    # A client's round: begin, steps, end.

    def load(self, weights: Tensor) -> None:
        """Put ``weights`` into the network."""
        self.flat.vector.copy_(weights)
        self.loads += 1

    def begin(self, weights: Tensor, state: State) -> None:
        """Load a client's target network and memory, and reset the optimizer.

        A client without a target network of its own starts it from ``weights``.
        """
        if self.target is not None:
            target = state.get("target", weights[: self.target.parameter_count])
            self.target.params.copy_(target)
        if self.memory:
            before = state.get("memory") or self.objective.memory.start(self.initial)
            for name, tensor in self.memory.items():
                tensor.copy_(before[name])
        for rule_state in (self.rule_state, self.target_state):
            for tensor in rule_state.values():
                tensor.zero_()

    def end(self, state: State) -> None:
        """Save the target network and the memory in a client's state."""
        if self.target is not None:
            state["target"] = self.target.params.clone()
        if self.memory:
            state["memory"] = {name: tensor.clone() for name, tensor in self.memory.items()}

    # A step: views, encodings, loss (the caller's), gradient, update.

    def encode_batch(
        self,
        members: Tensor,
        state: Tensor,
        sizes: NDArray[np.int64] | None = None,
        draw: Tensor | None = None,
    ) -> EncodedBatch:
        """Augment and encode some samples; ``state`` seeds each sample's views."""
        streamed = self.feed.send(members)
        encodings = (self._encoder or self.encode_samples)(members, state, *streamed)
        labels = None if self.labels is None else self.labels[members]
        return EncodedBatch(encodings, labels, sizes, self.memory, draw)

    def encode_samples(self, members: Tensor, state: Tensor, *streamed: Tensor) -> Encodings:
        """Return the encodings of some samples' views; their images may be ``streamed``."""
        of_modalities, sizes_of = self.feed.choose(members, streamed)
        order = [view % len(of_modalities) for view in range(self.objective.views)]
        images = [of_modalities[k] for k in order]
        sizes = None if sizes_of is None else [sizes_of[k] for k in order]
        views = self.augmentation.each(images, state, self.dtype, sizes)
        views += self.augmentation.small_views(images, state, self.dtype, sizes)
        return self.encode(views, state)

    def plain_images(self, members: Tensor, modality: int = 0) -> Tensor:
        """Return uint8 images without augmentation, in the size of a view.

        They are the middle squares of stored images that have another shape.
        """
        split, (height, width) = self._split, self.augmentation.size
        if split.sizes is None and split.images[modality].shape[2:] == (height, width):
            index = members.cpu() if self.feed.streams else members
            return self.feed.images[modality][index].to(self.device)
        sizes = None if split.sizes is None else split.sizes[modality]
        how = self.augmentation.interpolation
        squares = MiddleSquares(split.images[modality], sizes, height, how)
        return squares[members.cpu()].to(self.device)

    def encode(self, views: tuple[Tensor, ...], state: Tensor | None = None) -> Encodings:
        """Return the network's encodings: bfloat16 inside if asked, at least float32 outside."""
        with self.autocast():
            encodings = self.objective.encode(self.networks, views, state)
        return tuple(e.to(self.dtype) for e in encodings)

    def _encode_targets(self, views: tuple[Tensor, ...]) -> Encodings:
        assert self.target is not None
        with torch.set_grad_enabled(torch.is_grad_enabled() and len(self.learning) > 1):
            return cast("Encodings", self.target.module(views))

    def step(
        self,
        loss: Tensor,
        encodings: tuple[Tensor, ...],
        lr: float | Tensor,
        pull: Pull | None = None,
    ) -> Tensor:
        """Train one step on a batch's loss; return the change of the network's parameters."""
        self.differentiate(loss)
        change = self.update(lr, pull)
        self.objective.memory.update(self.memory, encodings)
        return change

    def differentiate(self, loss: Tensor) -> None:
        """Compute the gradients of all networks that learn."""
        for flat, gradients in zip(self.learning, differentiate(loss, *self.learning), strict=True):
            flat.take(gradients)

    def update(self, lr: float | Tensor, pull: Pull | None) -> Tensor:
        """Step along the gradients; return the change of the network's parameters."""
        flat, target, rule = self.flat, self.target, self.config.client
        if pull is not None:
            pull.add_to(flat.gradient, flat.params)
        state, gradient = self.rule_state, flat.gradient
        change = optim.step(rule, state, flat.params, gradient, lr, flat.layers, flat.depths)
        flat.params.add_(change)
        follows = self.objective.memory.target
        if target is None or follows is None:
            return change
        if follows.learns:
            state, gradient = self.target_state, target.gradient
            target.params.add_(
                optim.step(rule, state, target.params, gradient, lr, target.layers, target.depths)
            )
        target.params.lerp_(flat.params[: target.parameter_count], 1 - follows.momentum)
        return change

    # How the device computes it.

    @property
    def compiles_passes(self) -> bool:
        """True if ``encode_batch`` is compiled."""
        return self._encoder is not None

    def compile_passes(self) -> None:
        """Compile ``encode_batch``, for merged cohorts of one size."""
        self.augmentation.constants(self.device)
        on_gpu = self.device.type == "cuda"
        self._encoder = CapturedEncoder(self) if on_gpu else compile_function(self.encode_samples)

    def tuned(self) -> contextlib.AbstractContextManager[object]:
        """Let cuDNN try which convolutions are fastest while merged cohorts of one shape train."""
        cudnn = torch.backends.cudnn
        if not self.compiles_passes or self.device.type != "cuda":
            return contextlib.nullcontext()
        return cudnn.flags(enabled=True, benchmark=True, allow_tf32=cudnn.allow_tf32)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore afterwards everything that training changes."""
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
    def stacked_views(self) -> Iterator[None]:
        """Encode both views in one pass of each network, with the same numbers."""
        alike = len({each.shape for each in self.images}) == 1 and not self.augmentation.small
        networks = [self.network] if self.target is None else [self.network, self.target.module]
        with contextlib.ExitStack() as stack:
            for network in networks if alike else ():
                stack.enter_context(cast(Network, network).stacked(self.objective.views))
            yield

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which a network computes in the run's precision."""
        if self.precision == "bf16":
            # Its cache of casts would be shared by all threads, and emptied by the first to end.
            return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        return contextlib.nullcontext()
