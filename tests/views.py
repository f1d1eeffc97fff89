"""Made images and numbers for the tests of augmentation, and torchvision's colour operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from fedssl.data import random

SHAPES = [(3, 32, 32), (3, 20, 33), (1, 27, 18)]
DTYPES = {torch.float32: 2e-6, torch.float64: 1e-9}


def made(*shape: int) -> Tensor:
    """Images with flat grey, black and white ones among the noise, as bytes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    x[0], x[1], x[2] = 0, 255, 127
    x[3, :, : shape[2] // 2] = 77
    return x


def numbers(count: int, low: float, high: float, salt: int = 0) -> Tensor:
    return low + (high - low) * random.uniform(torch.tensor(salt), count).double()


def one_by_one(x: Tensor, operation: Callable[..., Tensor], *parameters: Tensor) -> Tensor:
    columns = [p.tolist() for p in parameters]
    return torch.stack([operation(*row) for row in zip(x, *columns, strict=True)])


# In the order of their numbers in ``operations.jitter``, with the range of factors.
COLOUR: dict[str, tuple[Callable[..., Tensor], float, float]] = {
    "brightness": (tv.adjust_brightness, 0, 2),
    "contrast": (tv.adjust_contrast, 0, 2),
    "saturation": (tv.adjust_saturation, 0, 2),
    "hue": (tv.adjust_hue, -0.5, 0.5),
}
