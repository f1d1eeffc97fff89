"""Gaussian noise on whole numbers, sampled exactly, from the operating system's random bits.

Noise that is computed in floating point has gaps: some sums can give a number that others cannot
(Mironov 2012, "On significance of the least significant bits"). Here no number is rounded before
it is released. The sum is a vector of whole numbers, and the noise is a normal variable rounded
down. Rounding down the sum plus the normal variable gives the same result, so that the release has
all the privacy of the Gaussian mechanism, by post-processing.

The normal variable is exact (Karney 2016, "Sampling exactly from the normal distribution"): its
random bits are an interval that holds the true uniform variables, and where the interval leaves a
decision open, more bits are drawn.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RandomBytes = Callable[[int], bytes]

LARGEST_SIGMA = 1 << 48  # ten times as much is below 2⁵³, where float64 loses no whole number
MARGIN = 2.0**-40  # far above the error of the acceptance probability in float64
BLOCK = 1 << 16  # proposals at a time: they stay in the processor's cache
WORD = 16  # bytes of random bits for a proposal
MORE = 32  # bytes of further random bits where a decision is open
DIGITS = 160


def sample_gaussian(
    count: int, sigma: int, random: RandomBytes = os.urandom, margin: float = MARGIN
) -> NDArray[np.int64]:
    """Draw ``count`` normal variables with standard deviation ``sigma``, rounded down.

    A larger ``margin`` decides more proposals by the slow way; the law is the same.
    """
    if not 1 <= sigma <= LARGEST_SIGMA:
        raise ValueError(f"a standard deviation of {sigma}")
    noise, done = np.empty(count, dtype=np.int64), 0
    while done < count:
        wanted = min(BLOCK, 3 * (count - done) + 16)  # more than a third is accepted
        drawn = _propose(wanted, sigma, random, margin)[: count - done]
        noise[done : done + len(drawn)] = drawn
        done += len(drawn)
    return noise


def _propose(count: int, sigma: int, random: RandomBytes, margin: float) -> NDArray[np.int64]:
    """Return those of ``count`` proposals σ · (k + x), with a random sign, that are accepted.

    k ≥ 0 has a probability ∝ exp(−k²/2), x is uniform below 1, and a proposal is accepted with
    probability exp(−x (2k + x) / 2). Of its 16 random bytes, the first eight are σ · x: a whole
    number, which may be too large, and bits behind the point. The others are a sign, and the first
    bits of two uniform variables: one decides on k, the other on the acceptance.
    """
    words = np.frombuffer(random(WORD * count), dtype="<u8").reshape(2, count)
    free = 64 - max(1, (sigma - 1).bit_length())  # bits behind the point
    words = words[:, words[0] >> np.uint64(free) < sigma]
    high = (words[1] >> np.uint64(32)).astype(np.int64)
    for_k, is_negative = high & 0x7FFFFFFF, high >> 31 == 1
    uniform = (words[1] & np.uint64(0xFFFFFFFF)) * 2.0**-32
    k = np.searchsorted(_thresholds(), for_k, side="right")
    x = words[0] * (2.0**-free / sigma)
    probability = np.exp(-0.5 * x * (2 * k + x))
    accepted = uniform + 2.0**-32 <= probability - margin
    is_open = ~accepted & (uniform < probability + margin) | np.isin(for_k, _thresholds())
    for i in np.flatnonzero(is_open):
        bits = int(words[0][i]), int(for_k[i]), int(words[1][i]) & 0xFFFFFFFF
        accepted[i], k[i] = _decide(bits, free, sigma, random)
    size = k * sigma + (words[0] >> np.uint64(free)).astype(np.int64)
    return np.where(is_negative, ~size, size)[accepted]  # ~n = −n − 1: −size − x, rounded down


def _decide(
    bits: tuple[int, int, int], free: int, sigma: int, random: RandomBytes
) -> tuple[bool, int]:
    """Return whether a proposal is accepted, and its k, from its bits and many more.

    They leave open what has a probability below 2⁻²⁴⁰, which is not looked at.
    """
    with localcontext(prec=DIGITS):
        known = 1 << free, 1 << 31, 1 << 32  # of the first word, the bits behind the point
        more = (Decimal(int.from_bytes(random(MORE))) / (1 << 8 * MORE) for _ in bits)
        place, for_k, uniform = (
            (bit + rest) / scale for bit, rest, scale in zip(bits, more, known, strict=True)
        )
        k = sum(limit <= for_k for limit in _distribution())
        x = place / sigma
        return uniform < (-x * (2 * k + x) / 2).exp(), k


@lru_cache
def _distribution() -> tuple[Decimal, ...]:
    """Return the probabilities that k is at most 0, 1, 2, …, until only 10⁻²⁰⁰ is left."""
    with localcontext(prec=DIGITS):
        weights = [(Decimal(-k * k) / 2).exp() for k in range(31)]
        return tuple(itertools.accumulate(weight / sum(weights) for weight in weights))


@lru_cache
def _thresholds() -> NDArray[np.int64]:
    """Return the probabilities in units of 2⁻³¹, rounded down."""
    with localcontext(prec=DIGITS):
        return np.array(sorted({int(limit * (1 << 31)) for limit in _distribution() if limit < 1}))
