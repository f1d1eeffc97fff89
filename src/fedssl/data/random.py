"""Random numbers as a pure function of their purpose: no generator, no stream, no state.

Every random number in training is ``uniform(key(seed, "purpose", round, …), counters)``, so a run
gives the same numbers on either engine, in any client order, on the CPU and the GPU, and after a
resume. The hash is the 64-bit finalizer of SplitMix (Steele, Lea and Flood 2014), written in
integer operations that Python, numpy and torch all have.
"""

from __future__ import annotations

import math
import zlib
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]
Ints = NDArray[np.int64] | Words

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB


def _signed(x: int) -> int:
    """Return the int64 with the bits of the unsigned ``x``: torch has no unsigned multiply."""
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift an int64 tensor logically to the right (torch's shift is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@overload
def mix(state: int, part: int) -> int: ...
@overload
def mix(state: int | Tensor, part: Tensor) -> Tensor: ...
@overload
def mix(state: Tensor, part: int | Tensor) -> Tensor: ...
@overload
def mix(state: int | Words, part: Ints) -> Words: ...
def mix(state: int | Tensor | Words, part: int | Tensor | Ints) -> int | Tensor | Words:
    """Absorb ``part`` into ``state``; integers, tensors and arrays give the same bits."""
    if isinstance(state, Tensor) or isinstance(part, Tensor):
        if isinstance(state, int):
            state = _signed(state)
        term: Tensor | int
        if isinstance(part, Tensor):
            term = part * _signed(_GOLDEN)
        else:
            term = _signed(int(part) * _GOLDEN & _MASK)
        z: Tensor = (state ^ term) + _signed(_GOLDEN)  # type: ignore[assignment]
        z = (z ^ _shift(z, 30)) * _signed(_M1)
        z = (z ^ _shift(z, 27)) * _signed(_M2)
        return z ^ _shift(z, 31)
    if isinstance(part, np.ndarray):
        u = np.uint64
        a = part.astype(u)  # a copy, changed in place
        a *= u(_GOLDEN)
        a ^= state if isinstance(state, np.ndarray) else u(state)
        a += u(_GOLDEN)
        a ^= a >> u(30)
        a *= u(_M1)
        a ^= a >> u(27)
        a *= u(_M2)
        a ^= a >> u(31)
        return a
    assert not isinstance(state, np.ndarray)
    y = ((state ^ ((part & _MASK) * _GOLDEN & _MASK)) + _GOLDEN) & _MASK
    y = (y ^ (y >> 30)) * _M1 & _MASK
    y = (y ^ (y >> 27)) * _M2 & _MASK
    return y ^ (y >> 31)


def key(seed: int, purpose: str, *parts: int) -> int:
    """Return the state for one purpose, for example ``key(seed, "augment", round, step)``."""
    state = mix(mix(0, seed), zlib.crc32(purpose.encode()))
    for part in parts:
        state = mix(state, part)
    return state


def uniform(state: Tensor, draws: int) -> Tensor:
    """Draw numbers in [0, 1) for each entry of ``state``: shape ``[*state.shape, draws]``.

    They are multiples of 2⁻²⁴, so float32 holds them exactly and every device agrees.
    """
    return _opaque(state, draws) if torch.compiler.is_compiling() else _uniform(state, draws)


def _uniform(state: Tensor, draws: int) -> Tensor:
    counter = torch.arange(draws, device=state.device)
    return _shift(mix(state[..., None], counter), 40).to(torch.float32) * 2.0**-24


# The compiler multiplies an arange as a formula, which overflows with 64-bit numbers. So it must
# not look inside.
_opaque = torch.library.custom_op(
    "fedssl::uniform", _uniform, mutates_args=(), schema="(Tensor state, int draws) -> Tensor"
)
_opaque.register_fake(
    lambda state, draws: state.new_empty((*state.shape, draws), dtype=torch.float32)
)


def normal(state: Tensor, draws: int) -> Tensor:
    """Draw standard normal numbers for each entry of ``state`` (Box and Muller 1958)."""
    pairs = uniform(state, draws + draws % 2)
    radius = torch.sqrt(-2.0 * torch.log1p(-pairs[..., 0::2]))
    angle = 2.0 * math.pi * pairs[..., 1::2]
    both = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)
    return both.flatten(-2)[..., :draws]


def permutation(state: int, count: int) -> NDArray[np.int64]:
    """Shuffle ``range(count)``: the argsort of one random number for each."""
    return np.argsort(mix(state, np.arange(count, dtype=np.uint64)), kind="stable")


def choose(state: int, count: int, size: int) -> NDArray[np.int64]:
    """Choose ``size`` different members of ``range(count)``, in ascending order."""
    if size >= count:
        return np.arange(count)
    ranks = mix(state, np.arange(count, dtype=np.uint64))
    return np.sort(np.argpartition(ranks, size)[:size])
