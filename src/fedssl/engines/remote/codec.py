"""Write trees of tensors as plain bytes with a type and a shape, and read them back."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
WHOLE = "."  # the name of a tensor that is not in a tree


class MalformedError(Exception):
    """A message that is not as expected; the text says how."""


@dataclass(frozen=True)
class Packed:
    """One tensor as bytes: little-endian, row by row."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def pack(tree: Tree, half: tuple[str, ...] = ()) -> dict[str, Packed]:
    """Pack a tree's tensors by their paths; leaves named in ``half`` travel as float16.

    >>> pack({"a": {"b": torch.ones(2)}})["a/b"].shape
    (2,)
    """
    return {
        name or WHOLE: _pack(leaf.half() if name in half else leaf)
        for name, leaf in flatten(tree).items()
    }


def _pack(tensor: Tensor) -> Packed:
    plain = tensor.detach().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Packed(_type_name(tensor.dtype), tuple(tensor.shape), raw)


def unpack(packed: Mapping[str, Packed]) -> Tree:
    """Unpack a tree, whatever types were sent."""
    return build_tree(unpack_flat(packed))


def build_tree(flat: dict[str, Tensor]) -> Tree:
    """Return the tree of tensors that are named by their paths."""
    return flat[WHOLE] if flat.keys() == {WHOLE} else cast(Tree, unflatten(flat))


def unpack_flat(packed: Mapping[str, Packed]) -> dict[str, Tensor]:
    """Unpack the tensors by their paths."""
    return {name: _unpack(name, item) for name, item in packed.items()}


def _unpack(name: str, item: Packed) -> Tensor:
    if item.dtype not in _TYPES:
        raise MalformedError(f"{name}: unknown type {item.dtype}")
    kind = _TYPES[item.dtype]
    if any(length < 0 for length in item.shape):
        raise MalformedError(f"{name}: shape {list(item.shape)}")
    expected = math.prod(item.shape) * kind.itemsize
    if len(item.data) != expected:
        word = "truncated" if len(item.data) < expected else "oversized"
        raise MalformedError(f"{name}: {word}, {len(item.data)} bytes, expected {expected}")
    if not expected:
        return torch.empty(item.shape, dtype=kind)
    return torch.from_numpy(np.frombuffer(item.data, np.uint8).copy()).view(kind).view(item.shape)


def describe_tree(tree: Any) -> dict[str, Packed]:
    """Return names, types and shapes of a reply, without its numbers."""
    if isinstance(tree, Tensor):
        tree = {WHOLE: tree}
    if not isinstance(tree, Mapping):
        raise MalformedError(f"{type(tree).__name__}, expected tensors by name")
    described: dict[str, Packed] = {}
    for name, item in tree.items():
        if isinstance(item, Tensor):
            described[name] = Packed(_type_name(item.dtype), tuple(item.shape), b"")
        elif isinstance(item, Mapping):
            described |= {f"{name}/{below}": leaf for below, leaf in describe_tree(item).items()}
        else:
            raise MalformedError(f"{name}: {type(item).__name__}, expected a tensor")
    return described


def check_like(
    packed: Mapping[str, Packed], like: Tree, half: tuple[str, ...] = (), varying: bool = False
) -> None:
    """Refuse names, types and shapes other than those of ``like``.

    With ``varying`` there may be fewer rows than in ``like``, but at least one.
    """
    wanted = {name or WHOLE: leaf for name, leaf in flatten(like).items()}
    if packed.keys() != wanted.keys():
        raise MalformedError(f"holds {_list_names(packed)}, expected {_list_names(wanted)}")
    for name, leaf in wanted.items():
        dtype = _type_name(torch.float16 if name in half else leaf.dtype)
        if packed[name].dtype != dtype:
            raise MalformedError(f"{name}: type {packed[name].dtype}, expected {dtype}")
        sent, shape = tuple(packed[name].shape), tuple(leaf.shape)
        if varying and sent and sent[1:] == shape[1:] and 1 <= sent[0] <= shape[0]:
            continue
        if sent != shape:
            most = "at most " * varying
            raise MalformedError(f"{name}: shape {list(sent)}, expected {most}{list(shape)}")


def unpack_like(
    packed: Mapping[str, Packed], like: Tree, half: tuple[str, ...] = (), varying: bool = False
) -> dict[str, Tree]:
    """Unpack a finite reply of the names and shapes of ``like``, in its types."""
    check_like(packed, like, half, varying)
    wanted = flatten(like)
    flat: dict[str, Tensor] = {}
    for name, tensor in unpack_flat(packed).items():
        flat[name] = tensor.to(wanted[name].device, wanted[name].dtype)
        if not bool(torch.isfinite(flat[name]).all()):
            raise MalformedError(f"{name}: not finite")
    return unflatten(flat)


def _type_name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _list_names(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)[:6]) or "nothing"
