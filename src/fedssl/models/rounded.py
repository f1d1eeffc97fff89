"""The weights of a network in bfloat16, made once a step: what autocast does layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fedssl.models.flat import Flat, Span

ROUNDED = (nn.Conv2d, nn.Linear)  # not what is made of them, which may do more with a weight


class Rounded:
    """Copies of the weights that autocast would round, in the order that convolutions want.

    The numbers are autocast's. It would round each weight by itself and turn each gradient back:
    some 150 small kernels a step of ResNet-18.
    """

    def __init__(self, flat: Flat) -> None:
        plain = [s for s in flat.learned if type(s.owner) in ROUNDED]
        spans = [s for s in plain if s.last in ("weight", "bias")]  # weight norm has others
        self._exact = [s.of(flat.vector) for s in spans]
        self._places = [
            (s.owner, s.last, getattr(s.owner, s.last), _like(s, flat.vector)) for s in spans
        ]

    @property
    def pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Copies, and what they are copies of."""
        return [copy.detach() for *_, copy in self._places], self._exact

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """The module computes with the copies."""
        for owner, name, _, copy in self._places:
            owner._parameters[name] = copy
        try:
            yield
        finally:
            for owner, name, exact, _ in self._places:
                owner._parameters[name] = exact


def _like(span: Span, vector: Tensor) -> nn.Parameter:
    order = torch.channels_last if len(span.shape) == 4 else torch.contiguous_format
    copy = torch.empty(span.shape, dtype=torch.bfloat16, device=vector.device, memory_format=order)
    return nn.Parameter(copy)
