"""The Triton kernels of :mod:`fedssl.models.fused`: ``[image, pixel, channel]`` in memory."""

# mypy: ignore-errors

# ruff: noqa: D103 - what they compute is said in `fused`

import triton
import triton.language as tl


@triton.jit
def _per_group(x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over the channels of each group."""
    return tl.sum(tl.reshape(x, (BLOCK // WIDTH, WIDTH)), 1)


@triton.jit
def _per_channel(x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Each group's number for all its channels."""
    return tl.reshape(tl.broadcast_to(x[:, None], (BLOCK // WIDTH, WIDTH)), (BLOCK,))


@triton.jit
def _tile(image, first, pixels, channels, cols, ROWS: tl.constexpr):
    """Places of some pixels of some channels, and which of them exist."""
    rows = first + tl.arange(0, ROWS)
    return (image * pixels + rows)[:, None] * channels + cols[None, :], (rows < pixels)[:, None]


@triton.jit
def forward(
    x,
    weight,
    bias,
    y,
    mean,
    scale,
    pixels,
    channels,
    eps,
    RELU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    image, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    total, square = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, pixels, ROWS):
        at, real = _tile(image, first, pixels, channels, cols, ROWS)
        t = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        total += tl.sum(t, 0)
        square += tl.sum(t * t, 0)
    count = pixels * WIDTH
    m = _per_group(total, WIDTH, BLOCK) / count
    v = tl.maximum(_per_group(square, WIDTH, BLOCK) / count - m * m, 0.0)
    r = 1.0 / tl.sqrt(v + eps)
    place = (image * channels // WIDTH) + part * (BLOCK // WIDTH) + tl.arange(0, BLOCK // WIDTH)
    tl.store(mean + place, m)
    tl.store(scale + place, r)
    a = _per_channel(r, WIDTH, BLOCK) * tl.load(weight + cols)
    b = tl.load(bias + cols) - _per_channel(m, WIDTH, BLOCK) * a
    for first in range(0, pixels, ROWS):
        at, real = _tile(image, first, pixels, channels, cols, ROWS)
        out = tl.load(x + at, mask=real, other=0.0).to(tl.float32) * a[None, :] + b[None, :]
        if RELU:
            out = tl.maximum(out, 0.0)
        tl.store(y + at, out.to(y.dtype.element_ty), mask=real)


@triton.jit
def _normalized(x, gradient, at, real, m, r, w, b, RELU: tl.constexpr):
    """x̂, and the gradient where ReLU let it through."""
    h = (tl.load(x + at, mask=real, other=0.0).to(tl.float32) - m[None, :]) * r[None, :]
    d = tl.load(gradient + at, mask=real, other=0.0).to(tl.float32)
    if RELU:
        d = tl.where(h * w[None, :] + b[None, :] > 0, d, 0.0)
    return h, d


@triton.jit
def backward(
    gradient,
    x,
    weight,
    bias,
    mean,
    scale,
    dx,
    dweight,
    dbias,
    pixels,
    channels,
    RELU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    image, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    place = (image * channels // WIDTH) + part * (BLOCK // WIDTH) + tl.arange(0, BLOCK // WIDTH)
    m = _per_channel(tl.load(mean + place), WIDTH, BLOCK)
    r = _per_channel(tl.load(scale + place), WIDTH, BLOCK)
    w, b = tl.load(weight + cols), tl.load(bias + cols)
    sum_d, sum_dh = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, pixels, ROWS):
        at, real = _tile(image, first, pixels, channels, cols, ROWS)
        h, d = _normalized(x, gradient, at, real, m, r, w, b, RELU)
        sum_d += tl.sum(d, 0)
        sum_dh += tl.sum(d * h, 0)
    tl.store(dweight + image * channels + cols, sum_dh)
    tl.store(dbias + image * channels + cols, sum_d)
    count = pixels * WIDTH
    s1 = _per_channel(_per_group(sum_d * w, WIDTH, BLOCK) / count, WIDTH, BLOCK)
    s2 = _per_channel(_per_group(sum_dh * w, WIDTH, BLOCK) / count, WIDTH, BLOCK)
    for first in range(0, pixels, ROWS):
        at, real = _tile(image, first, pixels, channels, cols, ROWS)
        h, d = _normalized(x, gradient, at, real, m, r, w, b, RELU)
        out = r[None, :] * (d * w[None, :] - s1[None, :] - h * s2[None, :])
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=real)
