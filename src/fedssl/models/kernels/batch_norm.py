"""Batch norm of a training step, with the ReLU or the residual sum after it: Triton for a GPU.

Two kernels each way: the first leaves sums of chunks of rows, the second merges them and goes over
the rows again. Nothing is added up in an order that may change. Inputs are bfloat16, channels-last.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedssl.models.kernels.group_norm import ordered

CHANNELS = 64  # of one program, at most: 128 bytes, a cache line
MIN_ROWS = 32  # of one program
CHUNKS = 128  # of a view, at most: each program of the second kernel reads the sums of all


class Walk(NamedTuple):
    """The division of rows among programs, and their order of reading."""

    tile: int  # numbers that a program reads at a time
    each: int  # of these, for one thread
    programs: int  # on a GPU, about: two for each multiprocessor of an H200
    stages: int  # tiles being loaded at once


Kernel = Literal["statistics", "normalize", "sums", "gradients"]
# The fastest on an H200 (benchmarks/NOTES.md).
WALKS: dict[Kernel, Walk] = {
    "statistics": Walk(8192, 32, 264, 3),
    "normalize": Walk(8192, 32, 264, 3),
    "sums": Walk(4096, 16, 264, 3),
    "gradients": Walk(8192, 32, 264, 3),
}


def applies(x: Tensor) -> bool:
    """Return whether the kernels support this input; torch computes the rest."""
    return x.is_cuda and x.dtype == torch.bfloat16 and x.dim() in (2, 4) and _block(x.shape[1]) >= 8


def batch_norm(
    x: Tensor, z: Tensor | None, weight: Tensor, bias: Tensor, eps: float, views: int, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize each view by its own statistics, add z if given, and apply ReLU if asked.

    Returns the statistics, too: mean and biased variance, ``[views, channels]``.
    """
    z = None if z is None else ordered(z)
    y, mean, variance = _forward(ordered(x), z, weight, bias, eps, views, relu)
    return y, mean, variance


@torch.library.custom_op("fedssl::batch_norm", mutates_args=())
def _forward(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    views: int,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from fedssl.models.kernels import batch_norm_triton  # Triton comes with CUDA builds only

    y, mean, variance = _outputs(x, views)
    grid, walk, chunks = _sizes(x, views, "statistics")
    means = x.new_empty(views, chunks["CHUNKS"], x.shape[1], dtype=torch.float32)
    squares = torch.empty_like(means)
    batch_norm_triton.statistics[grid](x, means, squares, CHUNKS=chunks["CHUNKS"], **walk)
    grid, walk, _ = _sizes(x, views, "normalize")
    batch_norm_triton.normalize[grid](
        *(x, z, weight, bias, means, squares, y, mean, variance, eps),
        RELU=relu,
        ADD=z is not None,
        **chunks,
        **walk,
    )
    return y, mean, variance


@torch.library.custom_op("fedssl::batch_norm_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    views: int,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients; ``y`` is given after a sum, otherwise dz is empty."""
    from fedssl.models.kernels import batch_norm_triton

    dx, dz, dweight, dbias = _gradient_outputs(x, y, weight, bias)
    grid, walk, chunks = _sizes(x, views, "sums")
    sums = x.new_empty(2, views, chunks["CHUNKS"], x.shape[1], dtype=torch.float32)
    scales = weight, bias, mean, variance
    batch_norm_triton.sums[grid](
        *(gradient, x, y, *scales, dz, *sums, eps),
        RELU=relu,
        ADD=y is not None,
        CHUNKS=chunks["CHUNKS"],
        **walk,
    )
    grid, walk, _ = _sizes(x, views, "gradients")
    # After a sum, dz is the gradient that ReLU let through.
    d, relu = (gradient, relu) if y is None else (dz, False)
    batch_norm_triton.gradients[grid](
        *(d, x, *scales, *sums, dx, dweight, dbias, eps),
        RELU=relu,
        VIEWS=views,
        CHUNKS=chunks["CHUNKS"],
        PADDED=chunks["PADDED"],
        **walk,
    )
    return dx, dz, dweight, dbias


def _outputs(x: Tensor, views: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the output, and a mean and a variance for each channel of each view."""
    mean = x.new_empty(views, x.shape[1], dtype=torch.float32)
    return torch.empty_like(x), mean, torch.empty_like(mean)


def _gradient_outputs(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the gradients of x, z, the weight and the bias."""
    dz = x.new_empty(0) if y is None else torch.empty_like(x)
    return torch.empty_like(x), dz, torch.empty_like(weight), torch.empty_like(bias)


_forward.register_fake(lambda x, z, weight, bias, eps, views, relu: _outputs(x, views))
_backward.register_fake(
    lambda d, x, y, weight, bias, *others: _gradient_outputs(x, y, weight, bias)
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, z, weight, bias, *ctx.settings = inputs
    y, mean, variance = output
    ctx.save_for_backward(x, None if z is None else y, weight, bias, mean, variance)
    ctx.mark_non_differentiable(mean, variance)


def _gradients(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dx, dz, dweight, dbias = _backward(ordered(gradient), *ctx.saved_tensors, *ctx.settings)
    added = ctx.saved_tensors[1] is not None
    return dx, dz if added else None, dweight, dbias, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def _block(channels: int) -> int:
    return min(CHANNELS, channels & -channels)  # the largest power of 2 that divides them


def _sizes(
    x: Tensor, views: int, kernel: Kernel
) -> tuple[tuple[int, int], dict[str, int], dict[str, int]]:
    """Return the grid, the sizes of spans and tiles, and the chunks to merge."""
    channels, walk = x.shape[1], WALKS[kernel]
    length, block = x.numel() // (views * channels), _block(channels)
    parts = channels // block
    spans = max(1, walk.programs // (views * parts))
    if kernel in ("statistics", "sums"):
        spans = min(spans, CHUNKS)
    rows = min(walk.tile // block, max(MIN_ROWS, _power(-(-length // spans))))
    span = -(-length // (spans * rows)) * rows
    spans = -(-length // span)
    sizes = {"LENGTH": length, "CHANNELS": channels, "SPAN": span, "ROWS": rows, "BLOCK": block}
    warps = max(1, min(16, rows * block // (32 * walk.each)))
    return (
        (parts * spans, views),
        {**sizes, "STAGES": walk.stages, "num_warps": warps},
        {"CHUNK": span, "CHUNKS": spans, "PADDED": _power(spans)},
    )


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
