"""Each image operation is torchvision's, in batches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tv
from views import COLOUR, DTYPES, SHAPES, made, numbers, one_by_one

from fedssl.data import operations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("number", range(4))
def test_colour_operations_are_torchvisions(
    number: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    theirs, low, high = list(COLOUR.values())[number]
    x = made(16, *shape).to(dtype) / 255
    factor = numbers(16, low, high)
    factor[8:11] = torch.tensor([low, (low + high) / 2, high])
    # torchvision turns the hue in float32 whatever the image's type.
    tolerance = 2e-6 if theirs is tv.adjust_hue else DTYPES[dtype]
    turns = torch.full((16, 1), number)
    result = operations.jitter(x, factor[:, None].expand(-1, 4), turns)
    assert result.dtype == dtype
    torch.testing.assert_close(result, one_by_one(x, theirs, factor), rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_grayscale_and_solarize_are_torchvisions(shape: tuple[int, ...]) -> None:
    x = made(8, *shape).double() / 255
    x[4, 0, 0, :3] = torch.tensor([0.5, math.nextafter(0.5, 0), 1e-9])
    close = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(operations.grayscale(x), tv.rgb_to_grayscale(x, shape[0]), **close)
    torch.testing.assert_close(operations.solarize(x), tv.solarize(x, 0.5), **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [3, 5, 9])
@pytest.mark.parametrize("shape", SHAPES)
def test_blur_is_torchvisions(shape: tuple[int, ...], kernel: int, dtype: torch.dtype) -> None:
    x = made(8, *shape).to(dtype) / 255
    sigma = numbers(8, 0.1, 2.0)
    expected = one_by_one(x, lambda image, s: tv.gaussian_blur(image, [kernel] * 2, [s, s]), sigma)
    result = operations.gaussian_blur(x, sigma, kernel)
    torch.testing.assert_close(result, expected, rtol=0, atol=DTYPES[dtype])


def test_blur_kernel_as_wide_as_reflection_allows() -> None:
    x = made(4, 1, 5, 6).double() / 255
    sigma = numbers(4, 1.0, 2.0)
    expected = one_by_one(x, lambda image, s: tv.gaussian_blur(image, [9, 9], [s, s]), sigma)
    torch.testing.assert_close(operations.gaussian_blur(x, sigma, 9), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_is_torchvisions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = made(16, *shape).to(dtype) / 255
    degrees = numbers(16, -180, 180)
    degrees[4:9] = torch.tensor([0.0, 90.0, 180.0, -180.0, -90.0])
    expected = one_by_one(
        x, lambda image, d: tv.rotate(image, d, InterpolationMode.BILINEAR), degrees
    )
    # Where a quarter turn puts the border exactly on the edge, rounding shows a little more.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(operations.rotate(x, degrees), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((3, 32, 32), (32, 32)),
        ((3, 20, 33), (20, 33)),
        ((1, 27, 18), (27, 18)),
        ((3, 64, 48), (16, 20)),
    ],
)
@pytest.mark.parametrize("how", ["bilinear", "bicubic"])
def test_resized_crop_is_torchvisions(
    shape: tuple[int, int, int], size: tuple[int, int], how: str, dtype: torch.dtype
) -> None:
    x = made(40, *shape).to(dtype) / 255
    height = numbers(40, 1, shape[1] + 1, salt=1).long()
    width = numbers(40, 1, shape[2] + 1, salt=2).long()
    height[0], width[0] = shape[1], shape[2]  # the whole image
    height[1], width[1] = 1, 1  # one pixel
    height[2], width[2] = size  # nothing to resize
    top = (numbers(40, 0, 1, salt=3) * (shape[1] - height + 1)).long()
    left = (numbers(40, 0, 1, salt=4) * (shape[2] - width + 1)).long()
    box = (top, left, height, width)

    def crop(image: Tensor, *box: int) -> Tensor:
        mode = InterpolationMode(how)
        crop = tv.resized_crop(image, *box, size=list(size), interpolation=mode, antialias=True)
        return crop.clamp(0, 1)  # a cubic overshoots at edges

    expected = one_by_one(x, crop, *box)
    result = operations.resized_crop(x, *box, size, interpolation=how)
    # Weights of float32 positions: a rounding error of a position, times a step of brightness.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(result, expected, rtol=0, atol=tolerance)
    flip = torch.arange(40) % 3 == 0
    flipped = torch.where(flip.view(-1, 1, 1, 1), expected.flip(3), expected)
    result = operations.resized_crop(x, *box, size, flip, how)
    torch.testing.assert_close(result, flipped, rtol=0, atol=tolerance)


@pytest.mark.parametrize("used", [(0, 1, 2, 3), (0, 1), (2, 3), (1,)])
def test_jitter_applies_the_operations_in_each_samples_own_order(used: tuple[int, ...]) -> None:
    turns = torch.tensor(list(itertools.permutations(used)))
    batch = max(4, len(turns))
    turns = turns.repeat(batch // len(turns), 1)
    x = made(batch, 3, 12, 10).float() / 255
    bounds = [given[1:] for given in COLOUR.values()]
    factors = torch.stack([numbers(batch, *b, salt=k) for k, b in enumerate(bounds)], 1).float()
    theirs = [given[0] for given in COLOUR.values()]
    expected = x.clone()
    for i in range(batch):
        for k in turns[i].tolist():
            expected[i] = theirs[k](expected[i], factors[i, k].item())
    result = operations.jitter(x, factors, turns)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)


def test_operations_leave_their_input_alone() -> None:
    x = made(6, 3, 12, 10).float() / 255
    given, factor, one = x.clone(), numbers(6, 0.2, 0.4), torch.ones(6)
    operations.jitter(x, factor[:, None].expand(-1, 4), torch.arange(4).expand(6, 4))
    operations.adjust_hue(x, factor)
    operations.grayscale(x)
    operations.solarize(x)
    operations.gaussian_blur(x, factor, 3)
    operations.rotate(x, 100 * factor)
    operations.resized_crop(x, one, one, 5 * one, 6 * one, (12, 10))
    assert torch.equal(x, given)
