"""Image operations in batches: one parameter for each sample, as torchvision's functional ones.

Images are floats ``[B, C, H, W]`` between 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def _computes_all(x: Tensor) -> bool:
    """Return whether to compute for all samples and select.

    Finding the chosen ones would make a GPU wait, and a compiled step cannot do it.
    """
    return x.device.type != "cpu" or torch.compiler.is_compiling()


def apply_where(
    chosen: Tensor, x: Tensor, operation: Callable[..., Tensor], *parameters: Tensor
) -> Tensor:
    """Apply ``operation(x, *parameters)`` to the chosen samples; may overwrite ``x``."""
    if _computes_all(x):
        return torch.where(chosen.view(-1, 1, 1, 1), operation(x, *parameters), x)
    index = chosen.nonzero().squeeze(1)
    if len(index) == len(x):
        return operation(x, *parameters)
    if len(index) == 0:
        return x
    return x.index_copy_(0, index, operation(x[index], *(p[index] for p in parameters)))


def _per_sample(parameter: Tensor, x: Tensor) -> Tensor:
    """Shape one number for each sample to multiply images with it."""
    return parameter.to(x.dtype).view(-1, 1, 1, 1)


def resized_crop(
    x: Tensor,
    top: Tensor,
    left: Tensor,
    height: Tensor,
    width: Tensor,
    size: tuple[int, int],
    flip: Tensor | None = None,
    interpolation: str = "bilinear",
) -> Tensor:
    """Resize each sample's box to ``size`` (antialiased), and mirror some."""
    is_cubic = interpolation == "bicubic"
    rows = _resize_weights(top, height, size[0], x.shape[2], x.dtype, is_cubic)
    columns = _resize_weights(left, width, size[1], x.shape[3], x.dtype, is_cubic, flip)
    resized = _separable(x, rows, columns)
    return resized.clamp_(0, 1) if is_cubic else resized


def _resize_weights(
    start: Tensor,
    length: Tensor,
    out: int,
    total: int,
    dtype: torch.dtype,
    is_cubic: bool,
    flip: Tensor | None = None,
) -> Tensor:
    """Return how much of each input pixel goes into each output pixel, ``[B, out, total]``.

    A triangle around the output pixel's place, as wide as the larger of the two kinds of pixel; or
    the cubic spline of Keys (1981) with a = −1/2, which is twice as wide, as in Pillow.
    """
    start, length = start.to(dtype)[:, None], length.to(dtype)[:, None]
    target = torch.arange(out, device=start.device, dtype=dtype) + 0.5
    if flip is not None:
        target = torch.where(flip[:, None], out - target, target)
    scale = length / out
    reach = scale.clamp(min=1)
    centre = target * scale / reach
    source = torch.arange(total, device=start.device, dtype=dtype) + 0.5 - start
    outside = (source < 0) | (source > length)
    source = (source / reach).masked_fill(outside, math.inf)  # infinitely far: no weight
    distance = (source[:, None, :] - centre[:, :, None]).abs_()
    weights = _cubic(distance) if is_cubic else distance.neg_().add_(1).clamp_(min=0)
    return weights.div_(weights.sum(2, keepdim=True))


def _cubic(x: Tensor) -> Tensor:
    """Return the weights of pixels at distances ``x``; those farther than 2 have none."""
    x = x.clamp(max=2)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, far)


def _separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Apply a linear map to each image's columns, and one to its rows."""
    batch, channels, height, width = x.shape
    # All channels in one product; the same for the rows would need them copied twice.
    x = x.reshape(batch, channels * height, width) @ columns.mT
    return rows[:, None] @ x.view(batch, channels, height, -1)


def rotate(x: Tensor, degrees: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Rotate images counter-clockwise about their middle (bilinear, black outside).

    ``sizes [B, 2]`` are the heights and widths of images in the upper left corner of a frame.
    """
    height, width = x.shape[2:]
    angle = torch.deg2rad(degrees.to(x.dtype))
    cos, sin, zero = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle)
    up, down = -sin * (height / width), sin * (width / height)
    across, along = zero, zero
    if sizes is not None:  # the middle, where the frame goes from -1 to 1
        a, b = (sizes[:, k].to(x.dtype) / side - 1 for k, side in ((1, width), (0, height)))
        across, along = a - cos * a - up * b, b - down * a - cos * b
    theta = torch.stack((cos, up, across, down, cos, along), dim=1)
    grid = F.affine_grid(theta.view(-1, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="zeros", align_corners=False)


def jitter(x: Tensor, factors: Tensor, turns: Tensor) -> Tensor:
    """Jitter colours: each sample applies operations in its own order.

    Of brightness, contrast, saturation and hue, sample ``i`` applies number ``turns[i, 0]`` first;
    number ``k`` is applied with ``factors[i, k]``.
    """
    for turn in turns.unbind(1):
        factor = factors.gather(1, turn[:, None]).squeeze(1)
        contrast, saturation, hue = (turn == k for k in (1, 2, 3))
        # Three of the four mix the image with another one (black, the mean of its grey version,
        # that version), so one mixture serves all samples.
        ratio = torch.where(hue, 1.0, factor)
        grey = _luma(x)
        mean = grey.mean((1, 2, 3), keepdim=True)
        rest = 1 - ratio
        x = x * _per_sample(ratio, x)
        x += grey * _per_sample(rest * saturation, x) + mean * _per_sample(rest * contrast, x)
        x = apply_where(hue, x.clamp_(0, 1), adjust_hue, factor)
    return x


def _luma(x: Tensor) -> Tensor:
    """Return the grey version ``[B, 1, H, W]`` of colour images; other images stay as they are."""
    if x.shape[1] != 3:
        return x
    red, green, blue = x.split(1, dim=1)
    return (0.2989 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def adjust_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the colour circle by ``shift``, where 1 is a whole turn; value and chroma stay."""
    if x.shape[1] != 3:
        return x
    red, green, blue = x.split(1, dim=1)
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    # Where two channels are highest, both formulas agree. (lerp selects faster than where.)
    turn = (4 * chroma + red - green).lerp_(2 * chroma + blue - red, (value == green).to(x.dtype))
    turn = turn.lerp_(green - blue, (value == red).to(x.dtype))
    # Grey has no hue: any will do.
    turn = turn / (6 * chroma).clamp_(min=1e-12) + _per_sample(shift, x)
    # A channel is lowest opposite its own hue: red at 1/2, green at 5/6, blue at 1/6 of the circle.
    opposite = torch.arange(3, device=x.device, dtype=x.dtype).view(3, 1, 1) / 3 + 1 / 2
    turn = turn - opposite
    turn -= turn.round()
    return turn.abs_().mul_(-6).add_(2).clamp_(0, 1).mul_(-chroma).add_(value)


def grayscale(x: Tensor) -> Tensor:
    """Make images grey, with as many channels as before."""
    return _luma(x).expand_as(x).contiguous()


def gaussian_blur(x: Tensor, sigma: Tensor, kernel: int) -> Tensor:
    """Blur with a Gaussian ``kernel`` of odd size and reflected borders."""
    height, width = x.shape[2:]
    distance = torch.arange(kernel // 2 + 1, device=x.device, dtype=x.dtype)
    taps = torch.exp(-0.5 * (distance / sigma.to(x.dtype)[:, None]) ** 2)
    taps = taps / (2 * taps.sum(1, keepdim=True) - 1)  # all but the middle one stand on both sides
    rows = _blur_weights(taps, height)
    return _separable(x, rows, rows if height == width else _blur_weights(taps, width))


def _blur_weights(taps: Tensor, size: int) -> Tensor:
    """Return the weight of each pixel in each, mirror images included: ``[B, size, size]``."""
    i = torch.arange(size, device=taps.device)
    out, source = i[:, None], i[None, :]
    reach = torch.arange(taps.shape[1], device=taps.device)[:, None, None]
    last = size - 1
    count = ((out - source).abs() == reach).to(taps.dtype)
    count += (out + source == reach) & (source > 0)
    count += (2 * last - out - source == reach) & (source < last)
    return (taps @ count.flatten(1)).view(-1, size, size)


def solarize(x: Tensor) -> Tensor:
    """Invert pixels of 0.5 or brighter."""
    return 0.5 - (x - 0.5).abs_()
