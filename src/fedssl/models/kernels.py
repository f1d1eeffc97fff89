"""The Triton kernels of :mod:`fedssl.models.fused`: ``[image, pixel, channel]`` in memory.

A tile is ``[pixel, group, channel of the group]``. Where it holds all pixels of an image it stays
in registers; otherwise tiles are read twice, once for sums.
"""

# mypy: ignore-errors

# ruff: noqa: D103 - what they compute is said in `fused`

import triton
import triton.language as tl


@triton.jit
def _place(CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program's image, channels and groups: programs of one image follow each other."""
    PARTS: tl.constexpr = CHANNELS // BLOCK
    GROUPS: tl.constexpr = BLOCK // WIDTH
    image = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    groups = (image * PARTS + part) * GROUPS + tl.arange(0, GROUPS)
    return image, part * BLOCK + tl.arange(0, BLOCK), groups


@triton.jit
def _tile(first, cols, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    """Places of some pixels of some channels, and which of them exist."""
    rows = first + tl.arange(0, ROWS)
    return rows[:, None] * CHANNELS + cols[None, :], (rows < PIXELS)[:, None]


@triton.jit
def _load(x, at, real, WIDTH: tl.constexpr):
    t = tl.load(x + at, mask=real, other=0.0)
    return tl.reshape(t, (t.shape[0], t.shape[1] // WIDTH, WIDTH))


@triton.jit
def _parameter(x, cols, WIDTH: tl.constexpr):
    return tl.reshape(tl.load(x + cols), (1, cols.shape[0] // WIDTH, WIDTH))


@triton.jit
def _store(x, at, real, t):
    t = tl.reshape(t.to(x.dtype.element_ty), (t.shape[0], t.shape[1] * t.shape[2]))
    tl.store(x + at, t, mask=real)


@triton.jit
def _per_group(t):
    """Sums over the channels of a group, then over pixels."""
    return tl.sum(tl.sum(t, 2), 0)


@triton.jit
def _normalize(t, m, a, b, RELU: tl.constexpr):
    out = (t.to(tl.float32) - m) * a + b
    if RELU:
        out = tl.maximum(out, 0.0)
    return out


@triton.jit
def forward(
    x,
    weight,
    bias,
    y,
    mean,
    scale,
    eps,
    RELU: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    image, cols, groups = _place(CHANNELS, WIDTH, BLOCK)
    x += image * PIXELS * CHANNELS
    y += image * PIXELS * CHANNELS
    COUNT: tl.constexpr = PIXELS * WIDTH
    if ROWS >= PIXELS:
        at, real = _tile(0, cols, PIXELS, CHANNELS, ROWS)
        t = _load(x, at, real, WIDTH)
        m = _per_group(t.to(tl.float32)) / COUNT
        e = t.to(tl.float32) - m[None, :, None]
        if ROWS > PIXELS:
            e = tl.where(real[:, :, None], e, 0.0)
        v = _per_group(e * e) / COUNT
    else:
        m = tl.zeros((BLOCK // WIDTH,), tl.float32)
        v = tl.zeros((BLOCK // WIDTH,), tl.float32)
        for first in range(0, PIXELS, ROWS):
            at, real = _tile(first, cols, PIXELS, CHANNELS, ROWS)
            e = _load(x, at, real, WIDTH).to(tl.float32)
            m += _per_group(e) / COUNT
            v += _per_group(e * e) / COUNT
        v = tl.maximum(v - m * m, 0.0)
    r = 1.0 / tl.sqrt(v + eps)
    tl.store(mean + groups, m)
    tl.store(scale + groups, r)
    m = m[None, :, None]
    a, b = r[None, :, None] * _parameter(weight, cols, WIDTH), _parameter(bias, cols, WIDTH)
    if ROWS >= PIXELS:
        _store(y, at, real, _normalize(t, m, a, b, RELU))
    else:
        for first in range(0, PIXELS, ROWS):
            at, real = _tile(first, cols, PIXELS, CHANNELS, ROWS)
            _store(y, at, real, _normalize(_load(x, at, real, WIDTH), m, a, b, RELU))


@triton.jit
def _centred(x, gradient, at, real, m, a, b, RELU: tl.constexpr, WIDTH: tl.constexpr):
    """The input less its mean, and the gradient where ReLU let it through."""
    e = _load(x, at, real, WIDTH).to(tl.float32) - m
    d = _load(gradient, at, real, WIDTH).to(tl.float32)
    if RELU:
        d = tl.where(e * a + b > 0, d, 0.0)
    return e, d


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
    RELU: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    image, cols, groups = _place(CHANNELS, WIDTH, BLOCK)
    gradient += image * PIXELS * CHANNELS
    x += image * PIXELS * CHANNELS
    dx += image * PIXELS * CHANNELS
    m = tl.load(mean + groups)[None, :, None]
    r = tl.load(scale + groups)[None, :, None]
    w, b = _parameter(weight, cols, WIDTH), _parameter(bias, cols, WIDTH)
    a = r * w
    if ROWS >= PIXELS:
        at, real = _tile(0, cols, PIXELS, CHANNELS, ROWS)
        e, d = _centred(x, gradient, at, real, m, a, b, RELU, WIDTH)
        sum_d = tl.sum(d, 0)[None, :, :]
        sum_dh = tl.sum(d * e, 0)[None, :, :] * r
    else:
        sum_d = tl.zeros((1, BLOCK // WIDTH, WIDTH), tl.float32)
        sum_dh = tl.zeros((1, BLOCK // WIDTH, WIDTH), tl.float32)
        for first in range(0, PIXELS, ROWS):
            at, real = _tile(first, cols, PIXELS, CHANNELS, ROWS)
            e, d = _centred(x, gradient, at, real, m, a, b, RELU, WIDTH)
            sum_d += tl.sum(d, 0)[None, :, :]
            sum_dh += tl.sum(d * e, 0)[None, :, :] * r
    tl.store(dweight + image * CHANNELS + cols, tl.reshape(sum_dh, (BLOCK,)))
    tl.store(dbias + image * CHANNELS + cols, tl.reshape(sum_d, (BLOCK,)))
    s1 = tl.sum(sum_d * w, 2)[:, :, None] * r / (PIXELS * WIDTH)
    s2 = tl.sum(sum_dh * w, 2)[:, :, None] * r * r / (PIXELS * WIDTH)
    if ROWS >= PIXELS:
        _store(dx, at, real, d * a - s1 - e * s2)
    else:
        for first in range(0, PIXELS, ROWS):
            at, real = _tile(first, cols, PIXELS, CHANNELS, ROWS)
            e, d = _centred(x, gradient, at, real, m, a, b, RELU, WIDTH)
            _store(dx, at, real, d * a - s1 - e * s2)
