"""Group norm and ReLU in one pass over memory, forward and backward: Triton kernels for a GPU.

They want bfloat16 in channels-last order, as convolutions on a GPU do. A program has one image and
some whole groups of channels. Where these are few numbers it reads them once, into registers;
otherwise it walks over the pixels twice, first for the sums, and finds most of them in the cache.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

CHANNELS = 16  # of one program, at least: 32 bytes in a row, what memory gives at a time
# Numbers in a program's registers at most, and for one thread: the first form that an image fits
# in, or the walking one. What was fastest on an H200 (benchmarks/NOTES.md).
Way = Literal["forward", "backward"]
WHOLE: dict[Way, list[tuple[int, int]]] = {
    "forward": [(8192, 32), (32768, 64)],
    "backward": [(8192, 64)],
}
WALK = (8192, 32)
WALKED: dict[Way, int] = {"forward": 64, "backward": 32}  # channels of a walking program, at most


def layout(images: Tensor) -> Tensor:
    """Images in the order that the kernels want, where these will be used."""
    if images.is_cuda and torch.is_autocast_enabled("cuda"):
        return images.contiguous(memory_format=torch.channels_last)
    return images


def applies(x: Tensor, groups: int) -> bool:
    """Whether the kernels can take this input; everything else goes to torch."""
    width = x.shape[1] // groups
    return x.is_cuda and x.dtype == torch.bfloat16 and width & (width - 1) == 0 and _divides(x)


def _divides(x: Tensor) -> bool:
    channels = x.shape[1]
    return channels % CHANNELS == 0 if channels > CHANNELS else channels & (channels - 1) == 0


def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool
) -> Tensor:
    """``F.group_norm``, and with ``relu`` its ReLU; statistics and parameters are float32."""
    y: Tensor = _forward(_ordered(x), weight, bias, groups, eps, relu)[0]
    return y


def _ordered(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.contiguous()


@torch.library.custom_op("fedssl::group_norm", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x)
    mean = x.new_empty(len(x), groups, dtype=torch.float32)
    scale = torch.empty_like(mean)
    from fedssl.models import kernels  # Triton comes with torch's builds for a GPU only

    grid, meta = _sizes(x, groups, "forward")
    kernels.forward[grid](x, weight, bias, y, mean, scale, eps, RELU=relu, **meta)
    return y, mean, scale


@torch.library.custom_op("fedssl::group_norm_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    scale: Tensor,
    groups: int,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x)
    dweight = x.new_empty(len(x), x.shape[1], dtype=torch.float32)
    dbias = torch.empty_like(dweight)
    from fedssl.models import kernels

    grid, meta = _sizes(x, groups, "backward")
    tensors = (gradient, x, weight, bias, mean, scale, dx, dweight, dbias)
    kernels.backward[grid](*tensors, RELU=relu, **meta)
    return dx, dweight, dbias


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(x.shape[0], groups, dtype=torch.float32)
    return torch.empty_like(x), mean, torch.empty_like(mean)


@_backward.register_fake
def _(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    scale: Tensor,
    groups: int,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    each = x.new_empty(x.shape[0], x.shape[1], dtype=torch.float32)
    return torch.empty_like(x), each, torch.empty_like(each)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, groups, _, relu = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])
    ctx.settings = groups, relu


def _gradients(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dx, dweight, dbias = _backward(_ordered(gradient), *ctx.saved_tensors, *ctx.settings)
    return dx, dweight.sum(0), dbias.sum(0), None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def _sizes(x: Tensor, groups: int, way: Way) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and what a kernel is compiled for."""
    channels = x.shape[1]
    pixels, width = x.numel() // (len(x) * channels), channels // groups
    rows, block = 1 << (pixels - 1).bit_length(), max(width, min(channels, CHANNELS))
    whole = next((form for form in WHOLE[way] if rows * block <= form[0]), None)
    tile, each = whole or WALK
    most = tile // rows if whole else WALKED[way]
    while 2 * block <= most and channels % (2 * block) == 0:
        block *= 2
    rows = min(rows, max(1, tile // block))
    meta = {"PIXELS": pixels, "CHANNELS": channels, "WIDTH": width, "BLOCK": block, "ROWS": rows}
    meta["num_warps"] = max(1, min(16, rows * block // (32 * each)))
    return (len(x) * channels // block,), meta
