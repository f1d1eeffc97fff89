"""InstaHide (Huang et al. 2020): an image is mixed with others, and signs are flipped at random.

It is no proof of privacy: Carlini et al. (2020) recover the private images from encrypted ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.config import Data
from fedssl.data.load import convert_channels, load_dataset
from fedssl.util.errors import UserError

BOUND = 0.65  # c₁, the most that one image weighs, as in the authors' program


@dataclass(frozen=True)
class Key:
    """A key that encrypts some images. Keep it secret, and use it once.

    ``members [n, k]``: which images are mixed, the encrypted one first. Public images follow the
    client's, and the last k/2 are of these where there are any;
    ``weights [n, k]``: λ; ``signs [n, …]``: σ, one for every number of an image.
    """

    members: NDArray[np.int64]
    weights: NDArray[np.float64]
    signs: NDArray[np.int8]

    @classmethod
    def draw(
        cls,
        images: NDArray[np.int64],
        count: int,
        k: int,
        shape: Sequence[int],
        generator: np.random.Generator,
        public: int = 0,
    ) -> Key:
        """Draw a key for ``images`` among ``count``, each with k − 1 different others."""
        shown = k // 2 if public else 0
        others = distinct(len(images), count - 1, k - 1 - shown, generator)
        others += others >= images[:, None]  # skip the image itself
        partners = count + distinct(len(images), public, shown, generator)
        signs = generator.integers(0, 2, (len(images), *shape), dtype=np.int8) * 2 - 1
        members = np.concatenate((images[:, None], others, partners), axis=1)
        return cls(members, weights(len(images), k, generator), signs)


@functools.lru_cache(maxsize=1)
def load_public_images(root: str, data: Data, shape: tuple[int, int, int], least: int) -> Tensor:
    """Load the images of another data set in a folder, at the clients' ``shape``."""
    channels, height, width = shape
    own = Data(name="folder", root=root, size=max(height, width), cache=data.cache, stream="off")
    try:
        images = convert_channels(load_dataset(own), [channels]).train.images[0]
    except UserError as error:
        error.key, error.value = "algorithm.mix_root", root
        raise
    if len(images) < least:
        problem = f"holds {len(images)} images, and {least} are mixed with each image"
        raise UserError(problem, key="algorithm.mix_root", value=root, fix="Give more images.")
    return images[..., :height, :width]


def distinct(rows: int, count: int, k: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw k different numbers below ``count`` in each row, evenly (Floyd's algorithm)."""
    drawn = np.empty((rows, k), dtype=np.int64)
    for column, last in enumerate(range(count - k, count)):
        new = generator.integers(0, last + 1, rows)
        taken = (drawn[:, :column] == new[:, None]).any(1)
        drawn[:, column] = np.where(taken, last, new)
    return drawn


def weights(count: int, k: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Draw λ: absolute normal numbers over their sum, drawn again while one is above the bound.

    The paper leaves the distribution open; this is that of the authors' program.
    """
    rows = np.empty((count, k))
    above = np.ones(count, dtype=bool)
    while above.any():
        sizes = np.abs(generator.standard_normal((int(above.sum()), k)))
        rows[above] = sizes / sizes.sum(1, keepdims=True)
        above = rows.max(1) > BOUND
    return rows


def mixture(images: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    """Σ_j λ_j x_j of uint8 ``images``, whose pixels become numbers between −1 and 1."""
    members, weights = (torch.from_numpy(a).to(images.device) for a in (key.members, key.weights))
    mixed = torch.zeros_like(images[members[:, 0]], dtype=dtype)
    for member, weight in zip(members.T, weights.T.to(dtype), strict=True):
        mixed += weight.view(-1, 1, 1, 1) * (images[member].to(dtype) / 127.5 - 1)
    return mixed


def encrypt(images: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    """x̃ = σ ∘ Σ_j λ_j x_j, between −1 and 1 (around 0, where a sign hides something)."""
    return mixture(images, key, dtype) * torch.from_numpy(key.signs).to(images.device)
