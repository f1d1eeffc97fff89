"""Payloads, replies and states are trees: nested dictionaries with tensors at their leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

Tree: TypeAlias = "Tensor | Mapping[str, Tree]"


class NothingToAverage(Exception):
    """No reply came."""


def leaves(tree: Tree) -> Iterator[Tensor]:
    """Yield the tensors of a tree."""
    if isinstance(tree, Tensor):
        yield tree
    else:
        for child in tree.values():
            yield from leaves(child)


def scale(tree: Tree, factor: float) -> Tree:
    """Return the detached tree times ``factor``."""
    tensors = [leaf.detach() for leaf in leaves(tree)]
    # One call for all leaves: one kernel on a GPU.
    return _replace_leaves(tree, iter(torch._foreach_mul(tensors, factor) if tensors else ()))


def map_leaves(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """Return the tree of the changed leaves."""
    return _replace_leaves(tree, map(change, leaves(tree)))


def _replace_leaves(tree: Tree, new: Iterator[Tensor]) -> Tree:
    if isinstance(tree, Tensor):
        return next(new)
    return {name: _replace_leaves(child, new) for name, child in tree.items()}


def add_scaled(total: Tree, tree: Tree, factor: float) -> None:
    """Add ``factor · tree`` to ``total`` in place, by name: messages keep no order."""
    if isinstance(total, Tensor) and isinstance(tree, Tensor) and total.shape == tree.shape:
        total.add_(tree.detach(), alpha=factor)
    elif isinstance(total, Mapping) and isinstance(tree, Mapping) and total.keys() == tree.keys():
        for name, child in total.items():
            add_scaled(child, tree[name], factor)
    else:
        raise TypeError("two replies to one task differ in their names or shapes")


def add_up(weighted: Iterable[tuple[float, Tree]]) -> tuple[Tree, float, int]:
    """Return Σ weight · tree, Σ weight and the number of trees, with one tree in memory."""
    total: Tree | None = None
    weights, count = 0.0, 0
    for weight, tree in weighted:
        if total is None:
            total = scale(tree, weight)
        else:
            add_scaled(total, tree, weight)
        weights += weight
        count += 1
    if total is None:
        raise NothingToAverage
    return total, weights, count


def mean(weighted: Iterable[tuple[float, Tree]]) -> tuple[Tree, float]:
    """Return the weighted mean of trees, and the total weight."""
    total, weights, _ = add_up(weighted)
    return scale(total, 1 / weights), weights


def cast_like(tree: Tree, like: Tree) -> Tree:
    """Convert a tree to the types and devices of ``like``."""
    if isinstance(tree, Tensor):
        assert isinstance(like, Tensor)
        return tree.to(like)
    assert isinstance(like, Mapping)
    return {name: cast_like(child, like[name]) for name, child in tree.items()}


def count_bytes(tree: Tree) -> int:
    """Return the bytes that the tensors of a tree take in a message."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def flatten(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """Return ``{"a/b": t}`` for ``{"a": {"b": t}}``: the form that files hold."""
    if isinstance(tree, Tensor):
        return {prefix: tree}
    flat: dict[str, Tensor] = {}
    for name, child in tree.items():
        flat.update(flatten(child, f"{prefix}/{name}" if prefix else name))
    return flat


def unflatten(flat: dict[str, Tensor]) -> dict[str, Tree]:
    """Return the inverse of :func:`flatten`."""
    tree: dict[str, Tree] = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})  # type: ignore[assignment]
        node[last] = leaf
    return tree


def find_unsavable(tree: object, name: str) -> Iterator[str]:
    """Yield what a file cannot hold of ``tree``, which a user's code made and calls ``name``."""
    if not isinstance(tree, (Tensor, Mapping)):
        yield f"{name} is of type {type(tree).__name__}, not a tensor; keep torch.tensor(…)"
    for key, child in tree.items() if isinstance(tree, Mapping) else ():
        full = f"{name}[{key!r}]"
        if not isinstance(key, str) or "/" in key:
            yield f"{full} has no name that a file can hold; use a text without /"
        yield from find_unsavable(child, full)
