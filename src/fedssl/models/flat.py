"""All parameters of a network as one vector: loading, averaging and sending are one copy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Flat:
    """One vector that a module's parameters (first) and float buffers (after them) are views of.

    >>> layer = nn.Linear(2, 1)
    >>> flat = Flat(layer)
    >>> flat.vector.zero_(), layer.weight
    (tensor([0., 0., 0.]), Parameter containing:
    tensor([[0., 0.]], requires_grad=True))

    ``gradient`` is the flat vector of the parameters' ``.grad``; zero it before a backward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        tensors = list(module.parameters())
        self.layers: list[torch.Size] = [p.shape for p in tensors]
        self.parameters = sum(p.numel() for p in tensors)
        buffers = list(_float_buffers(module))
        self.vector = torch.cat(
            [t.detach().reshape(-1) for t in [*tensors, *(m._buffers[n] for m, n in buffers)]]  # type: ignore[union-attr]
        )
        self.gradient = torch.zeros_like(self.vector[: self.parameters])
        start = 0
        for p in tensors:
            stop = start + p.numel()
            p.data = self.vector[start:stop].view(p.shape)
            p.grad = self.gradient[start:stop].view(p.shape)
            start = stop
        for owner, name in buffers:
            shape = owner._buffers[name].shape  # type: ignore[union-attr]
            stop = start + math.prod(shape)
            owner._buffers[name] = self.vector[start:stop].view(shape)
            start = stop

    @property
    def params(self) -> Tensor:
        """The part of the vector that is learned."""
        return self.vector[: self.parameters]

    def named(self, vector: Tensor | None = None) -> dict[str, Tensor]:
        """The module's state by name, read from ``vector`` (laid out as ours) or from our own."""
        source = self.vector if vector is None else vector
        out: dict[str, Tensor] = {}
        start = 0
        named = [*self.module.named_parameters(), *self._named_buffers()]
        for name, tensor in named:
            stop = start + tensor.numel()
            out[name] = source[start:stop].view(tensor.shape)
            start = stop
        return out

    def _named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return ((n, b) for n, b in self.module.named_buffers() if b.is_floating_point())


def _float_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Owner and name of each float buffer; integer counters (batch norm's) are left alone."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                yield owner, name
