"""Payloads, replies and states are trees: nested dictionaries with tensors at their leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

Tree: TypeAlias = "Tensor | Mapping[str, Tree]"


def leaves(tree: Tree) -> Iterator[Tensor]:
    """The tensors of a tree."""
    if isinstance(tree, Tensor):
        yield tree
    else:
        for child in tree.values():
            yield from leaves(child)


def scaled(tree: Tree, factor: float) -> Tree:
    """Every leaf times ``factor``, detached."""
    found = [leaf.detach() for leaf in leaves(tree)]
    # All at once: on a GPU it is one kernel.
    return _like(tree, iter(torch._foreach_mul(found, factor) if found else ()))


def _like(tree: Tree, new: Iterator[Tensor]) -> Tree:
    """A tree of the same names with other leaves."""
    if isinstance(tree, Tensor):
        return next(new)
    return {name: _like(child, new) for name, child in tree.items()}


def add_scaled(total: Tree, tree: Tree, factor: float) -> None:
    """``total += factor · tree``, in place; leaves meet by name, since messages keep no order."""
    if isinstance(total, Tensor) and isinstance(tree, Tensor) and total.shape == tree.shape:
        total.add_(tree.detach(), alpha=factor)
    elif isinstance(total, Mapping) and isinstance(tree, Mapping) and total.keys() == tree.keys():
        for name, child in total.items():
            add_scaled(child, tree[name], factor)
    else:
        raise TypeError("two replies to one task differ in their names or shapes")


class NothingToAverage(Exception):
    """No reply came."""


def add_up(weighted: Iterable[tuple[float, Tree]]) -> tuple[Tree, float, int]:
    """Σ weight · tree, Σ weight, and how many there were; one tree at a time is held."""
    total: Tree | None = None
    weights, count = 0.0, 0
    for weight, tree in weighted:
        if total is None:
            total = scaled(tree, weight)
        else:
            add_scaled(total, tree, weight)
        weights += weight
        count += 1
    if total is None:
        raise NothingToAverage
    return total, weights, count


def mean(weighted: Iterable[tuple[float, Tree]]) -> tuple[Tree, float]:
    """The weighted mean of trees, and the total weight."""
    total, weights, _ = add_up(weighted)
    return scaled(total, 1 / weights), weights


def count_bytes(tree: Tree) -> int:
    """The bytes that the tensors of a tree take when sent."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def flatten(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """``{"a": {"b": t}}`` as ``{"a/b": t}``: the form that files hold."""
    if isinstance(tree, Tensor):
        return {prefix: tree}
    out: dict[str, Tensor] = {}
    for name, child in tree.items():
        out.update(flatten(child, f"{prefix}/{name}" if prefix else name))
    return out


def misfits(tree: object, name: str) -> Iterator[str]:
    """What a file cannot hold of ``tree``, which somebody's code made and calls ``name``."""
    if not isinstance(tree, (Tensor, Mapping)):
        yield f"{name} is of type {type(tree).__name__}, not a tensor; keep torch.tensor(…)"
    for key, child in tree.items() if isinstance(tree, Mapping) else ():
        own = f"{name}[{key!r}]"
        if not isinstance(key, str) or "/" in key:
            yield f"{own} has no name that a file can hold; use a text without /"
        yield from misfits(child, own)


def unflatten(flat: dict[str, Tensor]) -> dict[str, Tree]:
    """The inverse of :func:`flatten`."""
    out: dict[str, Tree] = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})  # type: ignore[assignment]
        node[last] = leaf
    return out
