"""Choose which parameters of a network train: all, the last blocks, norms, low-rank updates."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedssl.config import Encoder
from fedssl.data.random import key, mix, uniform
from fedssl.models.encoders import Timm
from fedssl.models.flat_weights import FlatWeights
from fedssl.models.norms import NORMS, BatchNorm, freeze_batch_norms
from fedssl.util.errors import UserError

Module = TypeVar("Module", bound=nn.Module)


class LowRank(nn.Module):
    """A weight plus the product of two small factors (LoRA, Hu et al. 2022).

    ``up`` starts at 0. ``down`` has random signs, which are the same on every machine, in rows of
    length 1. If it is constant, the mean of several clients' products is the product of the mean
    (Sun et al. 2024, FFA-LoRA), and a step changes the weight as a step of all of it would, within
    the rows' directions.
    """

    def __init__(self, weight: Tensor, rank: int, state: int, trains_both: bool) -> None:
        super().__init__()
        outputs, inputs = weight.flatten(1).shape
        rank = min(rank, outputs, inputs)
        drawn = uniform(mix(state, torch.arange(rank)), inputs)
        self.up = nn.Parameter(weight.new_zeros(outputs, rank))
        signs = torch.where(drawn < 0.5, -1.0, 1.0).to(weight)
        self.down = nn.Parameter(signs / math.sqrt(inputs), requires_grad=trains_both)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight that the layer uses."""
        return weight + (self.up @ self.down).view_as(weight)


def choose_trainable(encoder: nn.Module, settings: Encoder, seed: int) -> None:
    """Let the parameters train that ``encoder.train`` names, and freeze all others.

    Batch norm stays at its statistics if its weights do not train, or if ``encoder.norm`` says so.
    Whoever averages, sends or stores weights follows ``requires_grad`` (:class:`FlatWeights`).
    """
    kind, _, number = settings.train.partition(":")
    if kind != "all":
        chosen = {
            "last": lambda: _last_blocks(encoder, int(number)),
            "norms": lambda: _norm_parameters(encoder),
        }.get(kind, lambda: set[str]())()
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(name in chosen and parameter.requires_grad)
    if kind == "lora":
        _add_low_rank(encoder, int(number), settings.factors == "both", seed)
    for module in encoder.modules():
        frozen = not any(p.requires_grad for p in module.parameters())
        if isinstance(module, BatchNorm) and (frozen or settings.norm == "frozen"):
            freeze_batch_norms(module)


def _last_blocks(encoder: nn.Module, count: int) -> set[str]:
    blocks = number_blocks(encoder)
    there = max(blocks.values()) + 1
    if count > there:
        raise UserError(
            f"the encoder has {there} blocks",
            key="encoder.train",
            value=f"last:{count}",
            fix=f"Use last:{there} or fewer.",
        )
    return {name for name, number in blocks.items() if number >= there - count}


def _norm_parameters(encoder: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}"
        for prefix, module in encoder.named_modules()
        if isinstance(module, (*NORMS, nn.RMSNorm))
        for name, _ in module.named_parameters(recurse=False)
    }


def _add_low_rank(encoder: nn.Module, rank: int, trains_both: bool, seed: int) -> None:
    """Add factors to linear layers and 1 × 1 convolutions."""
    layers = {name: each for name, each in encoder.named_modules() if _takes_factors(each)}
    if not layers:
        raise UserError(
            "the encoder has no linear layer and no 1 × 1 convolution",
            key="encoder.train",
            value=f"lora:{rank}",
            fix="Use encoder.train=last:1, or another encoder.",
        )
    for name, layer in layers.items():
        state = key(seed, "low rank", zlib.crc32(name.encode()))
        factors = LowRank(layer.weight, rank, state, trains_both)
        parametrize.register_parametrization(layer, "weight", factors)


def _takes_factors(layer: nn.Module) -> bool:
    pointwise = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.groups == 1
    return pointwise or isinstance(layer, nn.Linear)


def merge_factors(module: Module) -> Module:
    """Put the products of low-rank factors into the weights, and let all weights train again.

    Torch's own removal would change the class that a copied layer shares with the original.
    """
    for each in list(module.modules()):
        if parametrize.is_parametrized(each, "weight"):
            weight = nn.Parameter(each.weight.detach().clone())  # type: ignore[operator]
            each.__class__ = type(each).__mro__[1]
            del each.parametrizations
            each._parameters = {"weight": weight, **each._parameters}
    return module.requires_grad_(True)


def number_blocks(encoder: nn.Module) -> dict[str, int]:
    """Return the block of each parameter by name, counted from the input.

    A norm that is not in a block belongs to the block before it, as in timm.
    """
    if isinstance(encoder, Timm):
        from timm.models import group_parameters

        body: Any = encoder.body
        matcher = body.group_matcher(coarse=False)
        groups = group_parameters(encoder.body, matcher, reverse=True)
        return {f"body.{name}": int(number) for name, number in groups.items()}
    root, prefix = encoder, ""
    while len(children := _children(root)) == 1 and _children(children[0][1]):
        prefix, root = f"{prefix}{children[0][0]}.", children[0][1]
    numbers, count = dict[str, int](), -1
    for start, part in _list_parts(root, prefix):
        count += count < 0 or not isinstance(part, NORMS)
        numbers |= {f"{start}{name}": count for name, _ in part.named_parameters()}
    return {name: numbers.get(name, 0) for name, _ in encoder.named_parameters()}


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the named children that have parameters."""
    return [(name, c) for name, c in module.named_children() if any(True for _ in c.parameters())]


def _list_parts(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a network, those of sequences one by one, and their prefixes."""
    for name, child in _children(module):
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            yield from _list_parts(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}.", child


def find_depths(flat: FlatWeights, towers: Iterable[nn.Module]) -> Tensor:
    """Return how many blocks lie between each parameter and its encoder's last; 0 for heads."""
    depths = dict[str, int]()
    for number, tower in enumerate(towers):
        blocks = number_blocks(cast(nn.Module, tower.encoder))
        last = max(blocks.values())
        depths |= {f"towers.{number}.encoder.{n}": last - block for n, block in blocks.items()}
    sizes = [(depths.get(span.name, 0), span.stop - span.start) for span in flat.learned]
    return torch.cat([flat.gradient.new_full((size,), depth) for depth, size in sizes])
