"""Group norm and ReLU in one pass over memory, forward and backward: Triton kernels for a GPU.

So is the end of a residual block: a norm, the sum with the shortcut (and its norm), and ReLU.

Inputs are bfloat16 in channels-last order. A program has one image and some whole groups of
channels. Few numbers are read once, into registers. Otherwise the program reads the pixels twice,
first for the sums, and finds most of them in the cache.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

CHANNELS = 16  # of one program, at least: 32 bytes, the least that memory transfers
Kind = Literal["norm", "residual"]
Way = Literal["forward", "backward"]


class Forms(NamedTuple):
    """The largest tile of a program, and the numbers of one thread.

    A program uses the first form in ``whole`` that an image fits in, else ``walk``.
    """

    whole: list[tuple[int, int]]
    walk: tuple[int, int]
    channels: int


# The fastest on an H200 (benchmarks/NOTES.md); of a residual, with two norms.
FORMS: dict[tuple[Kind, Way], Forms] = {
    ("norm", "forward"): Forms([(8192, 32), (32768, 64)], (8192, 32), 64),
    ("norm", "backward"): Forms([(8192, 64)], (8192, 32), 32),
    ("residual", "forward"): Forms([(2048, 32), (8192, 32), (16384, 32)], (4096, 32), 64),
    ("residual", "backward"): Forms([(2048, 32), (4096, 32), (16384, 32)], (4096, 32), 32),
}


def layout(images: Tensor) -> Tensor:
    """Return images in the memory layout of the kernels, if these will be used."""
    if images.is_cuda and torch.is_autocast_enabled("cuda"):
        return images.contiguous(memory_format=torch.channels_last)
    return images


def applies(x: Tensor, groups: int) -> bool:
    """Return whether the kernels support this input; torch computes the rest."""
    width = x.shape[1] // groups
    return x.is_cuda and x.dtype == torch.bfloat16 and width & (width - 1) == 0 and _divides(x)


def _divides(x: Tensor) -> bool:
    channels = x.shape[1]
    return channels % CHANNELS == 0 if channels > CHANNELS else channels & (channels - 1) == 0


def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool
) -> Tensor:
    """Compute ``F.group_norm``, and ReLU if asked; statistics and parameters are float32."""
    y: Tensor = _forward(ordered(x), weight, bias, None, None, None, groups, eps, relu)[0]
    return y


def residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    z: Tensor,
    weight_z: Tensor | None,
    bias_z: Tensor | None,
    groups: int,
    eps: float,
) -> Tensor:
    """Compute ``relu(norm(x) + norm(z))``, or without a weight of z ``relu(norm(x) + z)``."""
    inputs = ordered(x), weight, bias, ordered(z), weight_z, bias_z
    y: Tensor = _forward(*inputs, groups, eps, True)[0]
    return y


def ordered(x: Tensor) -> Tensor:
    """Return the tensor with channels last in memory."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.contiguous()


@torch.library.custom_op("fedssl::group_norm", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    z: Tensor | None,
    weight_z: Tensor | None,
    bias_z: Tensor | None,
    groups: int,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from fedssl.models.kernels import group_norm_triton  # Triton comes with CUDA builds only

    y, mean, scale = _outputs(x, weight_z, groups)
    if z is None:
        grid, meta = _sizes(x, groups, "norm", "forward")
        group_norm_triton.forward[grid](x, weight, bias, y, mean, scale, eps, RELU=relu, **meta)
    else:
        grid, meta = _sizes(x, groups, "residual", "forward")
        tensors = (x, weight, bias, z, weight_z, bias_z, y, mean[0], scale[0], mean[-1], scale[-1])
        pair = weight_z is not None
        group_norm_triton.residual_forward[grid](*tensors, eps, PAIR=pair, **meta)
    return y, mean, scale


@torch.library.custom_op("fedssl::group_norm_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    z: Tensor | None,
    weight_z: Tensor | None,
    bias_z: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    groups: int,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients; after a sum without ``weight_z``, the output is in z's place."""
    from fedssl.models.kernels import group_norm_triton

    dx, dz, dweight, dbias = _gradient_outputs(x, z, weight_z)
    if z is None:
        grid, meta = _sizes(x, groups, "norm", "backward")
        tensors = (gradient, x, weight, bias, mean, scale, dx, dweight, dbias)
        group_norm_triton.backward[grid](*tensors, RELU=relu, **meta)
    else:
        grid, meta = _sizes(x, groups, "residual", "backward")
        group_norm_triton.residual_backward[grid](
            *(gradient, x, weight, bias, z, weight_z, bias_z),
            *(mean[0], scale[0], mean[-1], scale[-1]),
            *(dx, dz, dweight[0], dweight[-1], dbias),
            PAIR=weight_z is not None,
            **meta,
        )
    return dx, dz, dweight, dbias


def _outputs(x: Tensor, weight_z: Tensor | None, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate a tensor like x, and two tables for each norm (of x, then of z) and image."""
    norms = 1 if weight_z is None else 2
    table = x.new_empty(norms, x.shape[0], columns, dtype=torch.float32)
    return torch.empty_like(x), table, torch.empty_like(table)


def _gradient_outputs(
    x: Tensor, z: Tensor | None, weight_z: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the gradients of x and z, and those of weights and of biases by image."""
    dx, dweight, _ = _outputs(x, weight_z, x.shape[1])
    dz = x.new_empty(0) if z is None else torch.empty_like(z)
    return dx, dz, dweight, torch.empty_like(dweight[0])


_forward.register_fake(
    lambda x, weight, bias, z, weight_z, bias_z, groups, eps, relu: _outputs(x, weight_z, groups)
)
_backward.register_fake(
    lambda d, x, weight, bias, z, weight_z, *others: _gradient_outputs(x, z, weight_z)
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, z, weight_z, bias_z, groups, _, relu = inputs
    y, mean, scale = output
    other = y if z is not None and weight_z is None else z
    ctx.save_for_backward(x, weight, bias, other, weight_z, bias_z, mean, scale)
    ctx.settings = groups, relu


def _gradients(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dx, dz, dweight, dbias = _backward(ordered(gradient), *ctx.saved_tensors, *ctx.settings)
    weight, *weight_z = dweight.sum(1)
    bias = dbias.sum(0)  # of both norms
    of_z = (*weight_z, bias) if weight_z else (None, None)
    is_added = ctx.saved_tensors[3] is not None
    return dx, weight, bias, dz if is_added else None, *of_z, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def _sizes(x: Tensor, groups: int, kind: Kind, way: Way) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid, and the constants that a kernel is compiled for."""
    channels = x.shape[1]
    pixels, width = x.numel() // (len(x) * channels), channels // groups
    rows, block = 1 << (pixels - 1).bit_length(), max(width, min(channels, CHANNELS))
    forms = FORMS[kind, way]
    whole = next((form for form in forms.whole if rows * block <= form[0]), None)
    tile, each = whole or forms.walk
    most = tile // rows if whole else forms.channels
    while 2 * block <= most and channels % (2 * block) == 0:
        block *= 2
    rows = min(rows, max(1, tile // block))
    meta = {"PIXELS": pixels, "CHANNELS": channels, "WIDTH": width, "BLOCK": block, "ROWS": rows}
    meta["num_warps"] = max(1, min(16, rows * block // (32 * each)))
    return (len(x) * channels // block,), meta
