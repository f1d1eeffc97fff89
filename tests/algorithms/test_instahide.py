"""InstaHide: weights, signs, who is mixed with whom, and that no key comes twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedssl.algorithms.instahide import BOUND, Key, distinct, encrypt, mixture, weights
from fedssl.util.secrets import system_generator

SHAPE = (3, 8, 8)


def pictures(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=generator)


def drawn(own: list[int], count: int, k: int, seed: int | None = 0) -> Key:
    generator = system_generator() if seed is None else np.random.default_rng(seed)
    return Key.draw(np.array(own), count, k, SHAPE, generator)


@pytest.mark.parametrize("k", [2, 4, 6])
def test_weights_sum_to_one_and_are_bounded(k: int) -> None:
    rows = weights(4000, k, np.random.default_rng(0))
    assert rows.shape == (4000, k)
    np.testing.assert_allclose(rows.sum(1), 1, atol=1e-12)
    assert rows.min() >= 0 and rows.max() <= BOUND == 0.65
    np.testing.assert_allclose(rows.mean(0), 1 / k, atol=0.02)  # no image is favoured
    assert rows.max() > 0.6  # and all that the bound allows is used


def test_weights_are_those_of_the_authors_program() -> None:
    """Weight by weight: |normal| over their sum. Even weights would vary twice as much."""
    generator, rows = np.random.default_rng(1), []
    while len(rows) < 8000:
        sizes = [abs(generator.standard_normal()) for _ in range(4)]
        row = [size / sum(sizes) for size in sizes]
        rows += [row] if max(row) <= 0.65 else []
    found = weights(8000, 4, np.random.default_rng(0))
    for share in (0.1, 0.5, 0.9):
        expected = np.quantile(np.sort(rows, axis=1), share, axis=0)
        np.testing.assert_allclose(np.quantile(np.sort(found), share, axis=0), expected, atol=0.01)


def test_an_image_is_mixed_with_different_others_of_which_any_may_be() -> None:
    own = [0, 3, 5] * 400
    members = drawn(own, 6, 4).members
    assert members[:, 0].tolist() == own
    assert all(len(set(row)) == 4 for row in members.tolist())
    assert members.min() == 0 and members.max() == 5
    for image in (0, 3, 5):
        partners = np.bincount(members[members[:, 0] == image][:, 1:].ravel(), minlength=6)
        assert partners[image] == 0
        np.testing.assert_allclose(np.delete(partners, image), 400 * 3 / 5, rtol=0.25)


def test_all_sets_of_partners_are_as_likely() -> None:
    rows = distinct(30_000, 6, 3, np.random.default_rng(0))
    sets, counts = np.unique(np.sort(rows, axis=1), axis=0, return_counts=True)
    assert len(sets) == 20 and all(len({*row}) == 3 for row in sets.tolist())
    np.testing.assert_allclose(counts, 30_000 / 20, rtol=0.1)


def test_as_many_images_as_are_mixed() -> None:
    assert {tuple(sorted(row)) for row in drawn([0, 1], 2, 2).members.tolist()} == {(0, 1)}


def test_signs_are_fair_and_independent_of_each_other() -> None:
    signs = drawn([0] * 500, 4, 2).signs.reshape(500, -1).astype(float)
    assert set(np.unique(signs)) == {-1, 1}
    spread = 1 / np.sqrt(500)
    assert np.abs(signs.mean(0)).max() < 5 * spread  # every place
    assert abs(signs.mean()) < 5 / np.sqrt(signs.size)
    together = signs.T @ signs / 500
    assert np.abs(together - np.eye(len(together))).max() < 6 * spread


def test_the_mixture_is_the_weighted_sum_and_signs_change_no_size() -> None:
    images, key = pictures(6), drawn([1, 4], 6, 3)
    centred = images.double().numpy() / 127.5 - 1
    expected = np.stack(
        [
            sum(w * centred[m] for w, m in zip(ws, ms, strict=True))
            for ws, ms in zip(key.weights, key.members, strict=True)
        ]
    )
    mixed, hidden = (f(images, key, torch.float64) for f in (mixture, encrypt))
    np.testing.assert_allclose(mixed.numpy(), expected, atol=1e-14)
    assert torch.equal(hidden.abs(), mixed.abs())
    flipped = (torch.sign(hidden) != torch.sign(mixed)).double().mean()
    assert 0.4 < float(flipped) < 0.6
    assert float(hidden.abs().max()) <= 1 and float(hidden.min()) < 0 < float(hidden.max())


def test_two_epochs_never_use_the_same_key() -> None:
    keys = [drawn(list(range(20)), 20, 4, seed=None) for _ in range(3)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not np.isclose(keys[a].weights, keys[b].weights).any(1).all()
        assert not (keys[a].signs == keys[b].signs).reshape(20, -1).all(1).any()
        assert not (keys[a].members == keys[b].members).all()
