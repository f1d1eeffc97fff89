"""bfloat16 copies of a network's weights, made once a step instead of layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fedssl.models.flat_weights import FlatWeights, Span

COPIED = (nn.Conv2d, nn.Linear)  # exactly these types: a subclass may use its weight otherwise


class BF16Weights:
    """Copies of the weights that autocast would round, in the memory layout of convolutions.

    The numbers are autocast's. Autocast rounds each weight and converts each gradient back by
    itself: about 150 small kernels per step of ResNet-18.
    """

    def __init__(self, flat: FlatWeights) -> None:
        plain = [s for s in flat.learned if type(s.owner) in COPIED]
        spans = [s for s in plain if s.last in ("weight", "bias")]  # weight norm has other names
        self._exact = [s.of(flat.vector) for s in spans]
        self._places = [
            (s.owner, s.last, getattr(s.owner, s.last), _copy_like(s, flat.vector)) for s in spans
        ]

    @property
    def pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """The copies, and the exact weights they are copies of."""
        return [copy.detach() for *_, copy in self._places], self._exact

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the module compute with the copies."""
        for owner, name, _, copy in self._places:
            owner._parameters[name] = copy
        try:
            yield
        finally:
            for owner, name, exact, _ in self._places:
                owner._parameters[name] = exact


def _copy_like(span: Span, vector: Tensor) -> nn.Parameter:
    order = torch.channels_last if len(span.shape) == 4 else torch.contiguous_format
    copy = torch.empty(span.shape, dtype=torch.bfloat16, device=vector.device, memory_format=order)
    return nn.Parameter(copy)
