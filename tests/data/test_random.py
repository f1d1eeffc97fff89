"""The counter-based random numbers: the same bits everywhere, and random enough."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedssl.data import random

WORDS = st.integers(0, 2**64 - 1)
DRAWS = 1 << 17


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def unsigned(x: torch.Tensor) -> list[int]:
    return [v % 2**64 for v in x.flatten().tolist()]


def chi_square(cells: np.ndarray, count: int) -> float:
    """Distance from uniform in standard deviations."""
    seen = np.bincount(cells, minlength=count)
    expected = len(cells) / count
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float((statistic - (count - 1)) / math.sqrt(2 * (count - 1)))


@settings(max_examples=50)
@given(WORDS, st.integers(-(2**63), 2**64 - 1))
def test_mix_gives_the_same_bits_in_python_numpy_and_torch(state: int, part: int) -> None:
    expected = random.mix(state, part)
    state_tensor, part_tensor = torch.tensor([signed(state)]), torch.tensor([signed(part % 2**64)])
    assert 0 <= expected < 2**64
    words, before = np.array([part % 2**64], np.uint64), np.array([state], np.uint64)
    for array in (words, words.view(np.int64)):
        assert random.mix(state, array).tolist() == random.mix(before, array).tolist() == [expected]
    assert words.tolist() == [part % 2**64] and before.tolist() == [state], "left as they were"
    assert unsigned(random.mix(state, part_tensor)) == [expected]
    assert unsigned(random.mix(state_tensor, part)) == [expected]
    assert unsigned(random.mix(state_tensor, part_tensor)) == [expected]


def test_the_function_never_changes() -> None:
    """A change of any of these numbers changes every run: give it a new name instead."""
    assert random.mix(0, 0) == 0xE220A8397B1DCDAF  # SplitMix64's first number from seed 0
    assert random.mix(1, 2) == 0xF893A2EEFB32555E
    assert random.key(0, "augment", 3, 4) == 0x6F317E630D9385F8
    state = random.mix(7, torch.arange(2))
    numbers = (random.uniform(state, 3) * 2**24).long()
    assert numbers.tolist() == [[12104898, 7240928, 13990019], [9967285, 4802778, 13902819]]
    torch.testing.assert_close(
        random.normal(state[:1], 3), torch.tensor([[-1.4535407, 0.6662976, 1.5580895]])
    )
    assert random.permutation(7, 8).tolist() == [6, 3, 5, 0, 7, 2, 4, 1]
    assert random.choose(7, 20, 5).tolist() == [3, 6, 8, 12, 17]


def test_key_depends_on_every_part_and_on_their_order() -> None:
    keys = [
        random.key(0, "augment", 1, 2),
        random.key(1, "augment", 1, 2),
        random.key(0, "cohort", 1, 2),
        random.key(0, "augment", 2, 1),
        random.key(0, "augment", 1),
        random.key(0, "augment", 1, 2, 0),
        random.key(0, "augment", 1, 3),
        random.key(-1, "augment", 1, 2),
    ]
    assert len(set(keys)) == len(keys)


def test_any_number_of_draws_for_any_shape_of_states() -> None:
    state = random.mix(1, torch.arange(12)).view(3, 4)
    for draw in (random.uniform, random.normal):
        u = draw(state, 5)
        assert u.shape == (3, 4, 5) and u.dtype == torch.float32
        assert torch.equal(draw(state, 3), u[..., :3])
        assert torch.equal(draw(state[1, 2], 5), u[1, 2])


@pytest.mark.parametrize("shape", [(1, DRAWS), (DRAWS, 1), (DRAWS // 32, 32)])
def test_uniform_is_uniform(shape: tuple[int, int]) -> None:
    """Even for states that are not mixed yet but simply count."""
    u = random.uniform(torch.arange(shape[0]), shape[1]).flatten().double().numpy()
    assert u.min() >= 0 and u.max() < 1 and np.array_equal(u * 2**24, np.rint(u * 2**24))
    assert abs(chi_square((u * 256).astype(int), 256)) < 4.5
    low = (u * 2**24).astype(int) % 256  # the lowest bits too
    assert abs(chi_square(low, 256)) < 4.5


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_neighbouring_counters_and_states_are_independent(seed: int) -> None:
    u = random.uniform(random.mix(seed, torch.arange(DRAWS // 32)), 32)
    cell = (u * 16).long()
    for first, second in ((cell[:, :-1], cell[:, 1:]), (cell[:-1], cell[1:])):
        pairs = (16 * first + second).flatten().numpy()
        assert abs(chi_square(pairs, 256)) < 4.5
    # Neighbouring seeds, the same counters.
    other = (random.uniform(random.mix(seed + 1, torch.arange(DRAWS // 32)), 32) * 16).long()
    assert abs(chi_square((16 * cell + other).flatten().numpy(), 256)) < 4.5


def test_normal_has_the_moments_of_a_normal() -> None:
    z = random.normal(random.mix(4, torch.arange(DRAWS // 64)), 64).double()
    n = z.numel()
    assert bool(torch.isfinite(z).all())
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(z.pow(power).mean().item() - expected) < 5 * math.sqrt(variance / n)
    # The two numbers of a pair share a radius and an angle, and still do not depend on each other.
    for power in (1, 2):
        a, b = z[:, 0::2].flatten().pow(power), z[:, 1::2].flatten().pow(power)
        assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 5 / math.sqrt(n / 2)
    assert abs((z.abs() > 1.959964).double().mean().item() - 0.05) < 0.005


def test_permutation_is_a_permutation() -> None:
    for count in (0, 1, 2, 1000):
        assert sorted(random.permutation(9, count).tolist()) == list(range(count))
    assert random.permutation(9, 1000).tolist() != random.permutation(10, 1000).tolist()
    orders = [tuple(random.permutation(random.mix(0, k), 3).tolist()) for k in range(6000)]
    index = {order: k for k, order in enumerate(sorted(set(orders)))}
    assert len(index) == 6
    assert abs(chi_square(np.array([index[order] for order in orders]), 6)) < 4.5


def test_choose_gives_distinct_sorted_members() -> None:
    for count, size in ((10, 0), (10, 3), (1000, 999), (5, 5), (5, 9)):
        chosen = random.choose(2, count, size).tolist()
        assert len(chosen) == min(count, size)
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= set(range(count))
    members = np.concatenate([random.choose(random.mix(1, k), 10, 3) for k in range(4000)])
    assert abs(chi_square(members, 10)) < 4.5
    assert random.choose(2, 10, 3).tolist() != random.choose(3, 10, 3).tolist()
