"""Trees of tensors as plain bytes with a type and a shape, and back: what messages hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedssl.util.trees import Tree, flatten, unflatten

_TYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.uint8, torch.bool),
    )
}
_LONE = "."  # the name of a tensor that is not in a tree


class Malformed(Exception):
    """A payload that is not what was asked for; the text says how."""


@dataclass(frozen=True)
class Packed:
    """One tensor: little-endian, row by row."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def pack(tree: Tree, half: tuple[str, ...] = ()) -> dict[str, Packed]:
    """The tensors of a tree by their paths; leaves named in ``half`` travel as float16.

    >>> pack({"a": {"b": torch.ones(2)}})["a/b"].shape
    (2,)
    """
    return {
        name or _LONE: _pack(leaf.half() if name in half else leaf)
        for name, leaf in flatten(tree).items()
    }


def _pack(tensor: Tensor) -> Packed:
    plain = tensor.detach().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Packed(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw)


def unpack(packed: Mapping[str, Packed], device: torch.device | None = None) -> Tree:
    """The inverse of :func:`pack`, whatever types were sent."""
    flat = {name: _unpack(name, item).to(device) for name, item in packed.items()}
    return flat[_LONE] if flat.keys() == {_LONE} else cast(Tree, unflatten(flat))


def _unpack(name: str, item: Packed) -> Tensor:
    if item.dtype not in _TYPES:
        raise Malformed(f"{name}: unknown type {item.dtype}")
    kind = _TYPES[item.dtype]
    if any(length < 0 for length in item.shape):
        raise Malformed(f"{name}: shape {list(item.shape)}")
    expected = math.prod(item.shape) * kind.itemsize
    if len(item.data) != expected:
        word = "truncated" if len(item.data) < expected else "oversized"
        raise Malformed(f"{name}: {word}, {len(item.data)} bytes where there should be {expected}")
    if not expected:
        return torch.empty(item.shape, dtype=kind)
    return torch.from_numpy(np.frombuffer(item.data, np.uint8).copy()).view(kind).view(item.shape)


def described(tree: Any) -> dict[str, Packed]:
    """Names, types and shapes of what somebody's code returned, without the numbers."""
    if isinstance(tree, Tensor):
        tree = {_LONE: tree}
    if not isinstance(tree, Mapping):
        raise Malformed(f"{type(tree).__name__} where there should be tensors by name")
    found: dict[str, Packed] = {}
    for name, item in tree.items():
        if isinstance(item, Tensor):
            found[name] = Packed(str(item.dtype).removeprefix("torch."), tuple(item.shape), b"")
        elif isinstance(item, Mapping):
            found |= {f"{name}/{below}": own for below, own in described(item).items()}
        else:
            raise Malformed(f"{name}: {type(item).__name__} where there should be a tensor")
    return found


def expect(
    packed: Mapping[str, Packed], like: Tree, half: tuple[str, ...] = (), varying: bool = False
) -> None:
    """Refuse names, types and shapes other than those of ``like``.

    With ``varying`` there may be fewer rows than in ``like``, but not none.
    """
    wanted = {name or _LONE: leaf for name, leaf in flatten(like).items()}
    if packed.keys() != wanted.keys():
        raise Malformed(f"holds {_listed(packed)} where there should be {_listed(wanted)}")
    for name, leaf in wanted.items():
        kind = torch.float16 if name in half else leaf.dtype
        dtype, shape = str(kind).removeprefix("torch."), tuple(leaf.shape)
        if packed[name].dtype != dtype:
            raise Malformed(f"{name}: type {packed[name].dtype} where there should be {dtype}")
        got = tuple(packed[name].shape)
        if varying and got and got[1:] == shape[1:] and 1 <= got[0] <= shape[0]:
            continue
        if got != shape:
            most = "at most " * varying
            raise Malformed(f"{name}: shape {list(got)} where there should be {most}{list(shape)}")


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)[:6]) or "nothing"


def unpack_like(
    packed: Mapping[str, Packed], like: Tree, half: tuple[str, ...] = (), varying: bool = False
) -> dict[str, Tree]:
    """A reply, checked against what was asked for, in the types of ``like``; finite throughout."""
    expect(packed, like, half, varying)
    wanted = flatten(like)
    flat: dict[str, Tensor] = {}
    for name, item in packed.items():
        leaf = wanted[name]
        flat[name] = _unpack(name, item).to(leaf.device, leaf.dtype)
        if not bool(torch.isfinite(flat[name]).all()):
            raise Malformed(f"{name}: not finite")
    return unflatten(flat)


def tensors(packed: Mapping[str, Packed]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor by its path."""
    return ((name, _unpack(name, item)) for name, item in packed.items())
