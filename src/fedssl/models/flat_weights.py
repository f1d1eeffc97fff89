"""All weights of a network as one vector: loading, averaging and sending are one copy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Span:
    """The place of one parameter or buffer in the vector, and the module that owns it."""

    owner: nn.Module
    name: str
    start: int
    stop: int
    shape: torch.Size

    @property
    def last(self) -> str:
        """Its name in the module that owns it."""
        return self.name.rpartition(".")[2]

    @property
    def tensor(self) -> Tensor:
        """The parameter or buffer."""
        return getattr(self.owner, self.last)

    def of(self, vector: Tensor) -> Tensor:
        """Return its part of a vector."""
        return vector[self.start : self.stop].view(self.shape)


class FlatWeights:
    """One vector that holds what training changes of a module: the parameters that require a
    gradient and, after them, the float buffers of its state.

    The module's tensors become views of it. Everything else of the module is constant: it is not
    sent, averaged or stored. So ``requires_grad`` decides what trains and what travels.

    >>> layer = nn.Linear(2, 1)
    >>> flat = FlatWeights(layer)
    >>> flat.vector.zero_(), layer.weight
    (tensor([0., 0., 0.]), Parameter containing:
    tensor([[0., 0.]], requires_grad=True))

    ``gradient`` is the flat vector of the parameters' ``.grad``; zero it before a backward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.spans = list(_spans(module))
        self.layers = [s.shape for s in self.spans if isinstance(s.tensor, nn.Parameter)]
        self.parameter_count = sum(shape.numel() for shape in self.layers)
        self.vector = torch.cat([s.tensor.detach().reshape(-1) for s in self.spans])
        self.gradient = torch.zeros_like(self.vector[: self.parameter_count])
        self.depths: Tensor | None = None  # of each parameter, for rates that decay by layer
        for span in self.spans:
            view, tensor = span.of(self.vector), span.tensor
            if isinstance(tensor, nn.Parameter):
                tensor.data = view
                tensor.grad = span.of(self.gradient)
            else:
                span.owner._buffers[span.last] = view

    @property
    def params(self) -> Tensor:
        """The parameters, without buffers."""
        return self.vector[: self.parameter_count]

    @property
    def learned(self) -> list[Span]:
        """The places of the parameters."""
        return self.spans[: len(self.layers)]

    def constants(self) -> dict[str, Tensor]:
        """Return what does not change of the module's state, such as pretrained weights."""
        return {
            f"{prefix}.{name}": tensor.detach()
            for prefix, owner in self.module.named_modules()
            for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
            if tensor is not None and tensor.is_floating_point()
            if name not in owner._non_persistent_buffers_set and not _changes(owner, name, tensor)
        }

    def digest_constants(self) -> str:
        """Return a hash of what does not change, empty if all of it does."""
        constants = self.constants()
        digest = hashlib.sha256()
        for name, tensor in constants.items():
            digest.update(name.encode())
            digest.update(tensor.float().contiguous().cpu().numpy().tobytes())
        return digest.hexdigest() if constants else ""

    def take(self, gradients: Sequence[Tensor]) -> None:
        """Copy the parameters' gradients into ``gradient`` at once."""
        torch.cat([g.reshape(-1) for g in gradients], out=self.gradient)

    def of(self, *kinds: type[nn.Module]) -> list[Span]:
        """Return the places of all parameters and buffers of modules of these types."""
        return [span for span in self.spans if isinstance(span.owner, kinds)]

    def named(self, vector: Tensor | None = None) -> dict[str, Tensor]:
        """Return the module's state by name, from another vector of the same layout if given."""
        return {s.name: s.of(self.vector if vector is None else vector) for s in self.spans}


def _spans(module: nn.Module) -> Iterator[Span]:
    """Yield the parameters that train, then the buffers that follow them."""
    start = 0
    for kind in ("_parameters", "_buffers"):
        for prefix, owner in module.named_modules():
            for name, tensor in getattr(owner, kind).items():
                if tensor is None or not _changes(owner, name, tensor):
                    continue
                full = f"{prefix}.{name}" if prefix else name
                yield Span(owner, full, start, start + tensor.numel(), tensor.shape)
                start += tensor.numel()


def _changes(owner: nn.Module, name: str, tensor: Tensor) -> bool:
    """Return whether training changes a tensor, and the network's state has it.

    Integers are batch norm's counters, which nothing reads.
    """
    if isinstance(tensor, nn.Parameter):
        return tensor.requires_grad
    is_constant = name in owner._non_persistent_buffers_set or getattr(owner, "is_frozen", False)
    return tensor.is_floating_point() and not is_constant


def differentiate(loss: Tensor, *flats: FlatWeights) -> list[tuple[Tensor, ...]]:
    """Return the gradients of ``loss`` with respect to each network's parameters."""
    params = [s.tensor for flat in flats for s in flat.learned]
    gradients = iter(torch.autograd.grad(loss, params, materialize_grads=True))
    return [tuple(next(gradients) for _ in flat.layers) for flat in flats]
