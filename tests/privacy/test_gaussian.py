"""Noise on the grid: its law, bit by bit, and nothing in its bits that tells the sum."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from fedssl.privacy import gaussian
from fedssl.privacy.gaussian import sample_gaussian

DRAWS = 200_000


def bytes_of(seed: int) -> Callable[[int], bytes]:
    return np.random.default_rng(seed).bytes


def expected(values: np.ndarray, sigma: int) -> np.ndarray:
    """The probability of each whole number: of a normal variable that is rounded down to it."""
    return stats.norm.cdf(values + 1, scale=sigma) - stats.norm.cdf(values, scale=sigma)


def assert_law(drawn: np.ndarray, sigma: int) -> None:
    """By a chi-square test of single numbers, or of the groups of numbers between them."""
    edges = np.unique(np.linspace(-4 * sigma, 4 * sigma, 101).astype(int))
    counts = np.histogram(drawn, [-np.inf, *edges, np.inf])[0]
    cut = stats.norm.cdf([-np.inf, *edges, np.inf], scale=sigma)
    assert stats.chisquare(counts, np.diff(cut) * len(drawn)).pvalue > 1e-4


def assert_counts(drawn: np.ndarray, values: np.ndarray, sigma: int) -> None:
    """By a chi-square test of how often each of the values came, and all others together."""
    counts, likely = np.array([(drawn == value).sum() for value in values]), expected(values, sigma)
    found = np.append(counts, len(drawn) - counts.sum())
    wanted = len(drawn) * np.append(likely, 1 - likely.sum())
    assert stats.chisquare(found, wanted).pvalue > 1e-4


@pytest.mark.parametrize("sigma", [1, 2, 3, 5, 11, 2**22, 2**22 + 1, 23726566, 2**48 - 1])
def test_the_law_is_that_of_a_rounded_normal_variable(sigma: int) -> None:
    drawn = sample_gaussian(DRAWS, sigma, bytes_of(sigma))
    assert_law(drawn, sigma)
    if sigma < 20:  # every number, up to those that are rare
        values = np.arange(-6 * sigma, 6 * sigma + 1)
        assert_counts(drawn, values[expected(values, sigma) * DRAWS >= 10], sigma)
    z = (drawn + 0.5) / sigma
    assert abs(np.mean(z)) < 5 / math.sqrt(DRAWS)
    spread = np.var(z) - (1 + (0 if sigma > 20 else 1 / 12 / sigma**2))
    assert abs(spread) < 5 * math.sqrt(2 / DRAWS)


@pytest.mark.parametrize("bit", [0, 1, 7, 20])
def test_the_last_bits_are_fair_coins(bit: int) -> None:
    """Also beside each other, and beside the sign."""
    drawn = sample_gaussian(DRAWS, 2**30, bytes_of(bit))
    coins = (drawn >> bit) & 1
    for pairs in (coins, coins ^ (drawn < 0), coins ^ np.roll(coins, 1), coins ^ (drawn >> 22 & 1)):
        assert stats.binomtest(int(pairs.sum()), DRAWS).pvalue > 1e-4


def test_open_decisions_are_made_by_further_bits() -> None:
    """With a margin of 1 all are open: the law is the same, and so are decisions not open before.

    The fast way and the slow one read the same first bits.
    """
    slow = sample_gaussian(3000, 5, bytes_of(0), margin=1.0)
    assert_counts(slow, np.arange(-8, 8), 5)
    words = bytes_of(1)(gaussian.WORD * 2000)
    for sigma in (3, 2**22 + 1):
        results = []
        for margin in (gaussian.MARGIN, 1.0):
            sent = iter([words])
            random = lambda count, sent=sent: next(sent, None) or bytes_of(count)(count)  # noqa: E731
            results.append(gaussian._propose(2000, sigma, random, margin))
        assert np.array_equal(*results) and 400 < len(results[0]) < 1500


def test_limits_between_two_numbers_are_decided_by_further_bits() -> None:
    """The first 31 bits of a limit leave open on which side of it the variable is."""
    limit = int(gaussian._thresholds()[0])
    exact = gaussian._distribution()[0] * 2**31
    sides = []
    for rest in (b"\x00" * 32, b"\xff" * 32):
        accepted, k = gaussian._decide((0, limit, 0), 40, 100, lambda count, rest=rest: rest)
        sides.append(k)
        assert accepted  # x is nearly 0, so that it always is
    assert sides == [0, 1] and limit < exact < limit + 1
    for rest, k in ((b"\x00", 0), (b"\xff", 1)):
        words = np.array([5 << 60, limit << 32], dtype="<u8").tobytes()  # x = 5 / 16
        sent = iter([words])
        random = lambda count, sent=sent, rest=rest: next(sent, None) or count * rest  # noqa: E731
        assert gaussian._propose(1, 16, random, gaussian.MARGIN).tolist() == [16 * k + 5]


def test_tails_are_reached() -> None:
    """A variable whose bits are all ones lies far out: k is as large as 2⁻²⁸⁷ allows."""
    _, k = gaussian._decide((0, 2**31 - 1, 0), 40, 100, lambda count: b"\xff" * count)
    assert 15 <= k <= 25
    assert 0 < 1 - gaussian._distribution()[18] < 1e-70


def test_draws_come_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (sample_gaussian(50, 2**22) for _ in range(2))
    assert not np.array_equal(first, second)
    assert sample_gaussian.__defaults__ is not None
    assert sample_gaussian.__defaults__[0] is gaussian.os.urandom
    assert len(sample_gaussian(0, 3)) == 0
    for sigma in (0, 2**48 + 1):
        with pytest.raises(ValueError, match="deviation"):
            sample_gaussian(1, sigma)
