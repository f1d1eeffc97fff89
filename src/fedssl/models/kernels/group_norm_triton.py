"""The Triton kernels of ``group_norm``: ``[image, pixel, channel]`` in memory.

A tile is ``[pixel, group, channel of the group]``. Where it holds all pixels of an image it stays
in registers; otherwise tiles are read twice, once for sums.
"""

# mypy: ignore-errors

# ruff: noqa: D103 - `group_norm` says what they compute

import triton
import triton.language as tl


@triton.jit
def _place(CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's image, channels and groups; programs of one image are adjacent."""
    PARTS: tl.constexpr = CHANNELS // BLOCK
    GROUPS: tl.constexpr = BLOCK // WIDTH
    image = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    groups = (image * PARTS + part) * GROUPS + tl.arange(0, GROUPS)
    return image, part * BLOCK + tl.arange(0, BLOCK), groups


@triton.jit
def _tile(first, cols, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    """Return the offsets of some pixels of some channels, and a mask of existing pixels."""
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
    """Sum over the channels of a group, then over pixels."""
    return tl.sum(tl.sum(t, 2), 0)


@triton.jit
def _whole(t, real, eps, PIXELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Return mean and scale of each group, from a tile of all pixels."""
    COUNT: tl.constexpr = PIXELS * WIDTH
    m = _per_group(t.to(tl.float32)) / COUNT
    e = t.to(tl.float32) - m[None, :, None]
    if ROWS > PIXELS:
        e = tl.where(real[:, :, None], e, 0.0)
    v = _per_group(e * e) / COUNT
    return m, 1.0 / tl.sqrt(v + eps)


@triton.jit
def _walked(
    x, cols, eps,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return mean and scale of each group, from tile after tile."""
    COUNT: tl.constexpr = PIXELS * WIDTH
    m = tl.zeros((BLOCK // WIDTH,), tl.float32)
    v = tl.zeros((BLOCK // WIDTH,), tl.float32)
    for first in range(0, PIXELS, ROWS):
        at, real = _tile(first, cols, PIXELS, CHANNELS, ROWS)
        e = _load(x, at, real, WIDTH).to(tl.float32)
        m += _per_group(e) / COUNT
        v += _per_group(e * e) / COUNT
    v = tl.maximum(v - m * m, 0.0)
    return m, 1.0 / tl.sqrt(v + eps)


@triton.jit
def relu(t):
    return tl.maximum(t, 0.0, propagate_nan=tl.PropagateNan.ALL)  # as torch's does


@triton.jit
def _normalize(t, m, a, b, RELU: tl.constexpr):
    out = (t.to(tl.float32) - m) * a + b
    if RELU:
        out = relu(out)
    return out


@triton.jit
def forward(
    x, weight, bias, y, mean, scale, eps,
    RELU: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    image, cols, groups = _place(CHANNELS, WIDTH, BLOCK)
    x += image * PIXELS * CHANNELS
    y += image * PIXELS * CHANNELS
    if ROWS >= PIXELS:
        at, real = _tile(0, cols, PIXELS, CHANNELS, ROWS)
        t = _load(x, at, real, WIDTH)
        m, r = _whole(t, real, eps, PIXELS, WIDTH, ROWS)
    else:
        m, r = _walked(x, cols, eps, PIXELS, CHANNELS, WIDTH, BLOCK, ROWS)
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
    """Return the input minus its mean, and the gradient where ReLU was open."""
    e = _load(x, at, real, WIDTH).to(tl.float32) - m
    d = _load(gradient, at, real, WIDTH).to(tl.float32)
    if RELU:
        d = tl.where(e * a + b > 0, d, 0.0)
    return e, d


@triton.jit
def _shares(sum_d, sum_dh, w, r, COUNT: tl.constexpr):
    """Return the gradients through a group's mean, and through its scale per unit of distance."""
    s1 = tl.sum(sum_d * w, 2)[:, :, None] * r / COUNT
    s2 = tl.sum(sum_dh * w, 2)[:, :, None] * r * r / COUNT
    return s1, s2


@triton.jit
def backward(
    gradient, x, weight, bias, mean, scale, dx, dweight, dbias,
    RELU: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
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
    s1, s2 = _shares(sum_d, sum_dh, w, r, PIXELS * WIDTH)
    if ROWS >= PIXELS:
        _store(dx, at, real, d * a - s1 - e * s2)
    else:
        for first in range(0, PIXELS, ROWS):
            at, real = _tile(first, cols, PIXELS, CHANNELS, ROWS)
            e, d = _centred(x, gradient, at, real, m, a, b, RELU, WIDTH)
            _store(dx, at, real, d * a - s1 - e * s2)


@triton.jit
def _sum(t, m, a, b, u, mz, az, PAIR: tl.constexpr):
    """Add a normalized tile and another one, normalized in a pair; ``b`` has both biases."""
    other = u.to(tl.float32)
    if PAIR:
        other = (other - mz) * az
    return _normalize(t, m, a, b, False) + other


@triton.jit
def residual_forward(
    x, weight, bias, z, weight_z, bias_z, y, mean, scale, mean_z, scale_z, eps,
    PAIR: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    image, cols, groups = _place(CHANNELS, WIDTH, BLOCK)
    x += image * PIXELS * CHANNELS
    z += image * PIXELS * CHANNELS
    y += image * PIXELS * CHANNELS
    if ROWS >= PIXELS:
        at, real = _tile(0, cols, PIXELS, CHANNELS, ROWS)
        t, u = _load(x, at, real, WIDTH), _load(z, at, real, WIDTH)
        m, r = _whole(t, real, eps, PIXELS, WIDTH, ROWS)
        if PAIR:
            mz, rz = _whole(u, real, eps, PIXELS, WIDTH, ROWS)
    else:
        m, r = _walked(x, cols, eps, PIXELS, CHANNELS, WIDTH, BLOCK, ROWS)
        if PAIR:
            mz, rz = _walked(z, cols, eps, PIXELS, CHANNELS, WIDTH, BLOCK, ROWS)
    tl.store(mean + groups, m)
    tl.store(scale + groups, r)
    m = m[None, :, None]
    a, b = r[None, :, None] * _parameter(weight, cols, WIDTH), _parameter(bias, cols, WIDTH)
    if PAIR:
        tl.store(mean_z + groups, mz)
        tl.store(scale_z + groups, rz)
        mz = mz[None, :, None]
        az = rz[None, :, None] * _parameter(weight_z, cols, WIDTH)
        b += _parameter(bias_z, cols, WIDTH)
    else:
        mz, az = m, a  # not used
    if ROWS >= PIXELS:
        _store(y, at, real, relu(_sum(t, m, a, b, u, mz, az, PAIR)))
    else:
        for first in range(0, PIXELS, ROWS):
            at, real = _tile(first, cols, PIXELS, CHANNELS, ROWS)
            t, u = _load(x, at, real, WIDTH), _load(z, at, real, WIDTH)
            _store(y, at, real, relu(_sum(t, m, a, b, u, mz, az, PAIR)))


@triton.jit
def _passed(gradient, x, z, at, real, m, a, b, mz, az, PAIR: tl.constexpr, WIDTH: tl.constexpr):
    """Return both inputs minus their means, and the gradient where ReLU was open."""
    t, u = _load(x, at, real, WIDTH), _load(z, at, real, WIDTH)
    y = u.to(tl.float32)  # the output itself is in z's place, but not in a pair
    if PAIR:
        y = _sum(t, m, a, b, u, mz, az, PAIR)
    d = tl.where(y > 0, _load(gradient, at, real, WIDTH).to(tl.float32), 0.0)
    return t.to(tl.float32) - m, u.to(tl.float32) - mz, d


@triton.jit
def _pass(dx, dz, at, real, e, f, d, a, s1, s2, az, z1, z2, PAIR: tl.constexpr):
    """Write the gradients of both inputs."""
    _store(dx, at, real, d * a - s1 - e * s2)
    if PAIR:
        d = d * az - z1 - f * z2
    _store(dz, at, real, d)


@triton.jit
def residual_backward(
    gradient, x, weight, bias, z, weight_z, bias_z, mean, scale, mean_z, scale_z, dx, dz, dweight,
    dweight_z, dbias,
    PAIR: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    image, cols, groups = _place(CHANNELS, WIDTH, BLOCK)
    gradient += image * PIXELS * CHANNELS
    x += image * PIXELS * CHANNELS
    z += image * PIXELS * CHANNELS
    dx += image * PIXELS * CHANNELS
    dz += image * PIXELS * CHANNELS
    m, r = tl.load(mean + groups)[None, :, None], tl.load(scale + groups)[None, :, None]
    w, b = _parameter(weight, cols, WIDTH), _parameter(bias, cols, WIDTH)
    if PAIR:
        mz, rz = tl.load(mean_z + groups)[None, :, None], tl.load(scale_z + groups)[None, :, None]
        wz = _parameter(weight_z, cols, WIDTH)
        b += _parameter(bias_z, cols, WIDTH)
    else:
        mz, rz, wz = m, r, w  # not used
    a, az = r * w, rz * wz
    sum_d = tl.zeros((1, BLOCK // WIDTH, WIDTH), tl.float32)
    sum_dh = tl.zeros((1, BLOCK // WIDTH, WIDTH), tl.float32)
    sum_dz = tl.zeros((1, BLOCK // WIDTH, WIDTH), tl.float32)
    if ROWS >= PIXELS:
        at, real = _tile(0, cols, PIXELS, CHANNELS, ROWS)
        e, f, d = _passed(gradient, x, z, at, real, m, a, b, mz, az, PAIR, WIDTH)
        sum_d += tl.sum(d, 0)[None, :, :]
        sum_dh += tl.sum(d * e, 0)[None, :, :] * r
        if PAIR:
            sum_dz += tl.sum(d * f, 0)[None, :, :] * rz
    else:
        for first in range(0, PIXELS, ROWS):
            at, real = _tile(first, cols, PIXELS, CHANNELS, ROWS)
            e, f, d = _passed(gradient, x, z, at, real, m, a, b, mz, az, PAIR, WIDTH)
            sum_d += tl.sum(d, 0)[None, :, :]
            sum_dh += tl.sum(d * e, 0)[None, :, :] * r
            if PAIR:
                sum_dz += tl.sum(d * f, 0)[None, :, :] * rz
    tl.store(dweight + image * CHANNELS + cols, tl.reshape(sum_dh, (BLOCK,)))
    tl.store(dbias + image * CHANNELS + cols, tl.reshape(sum_d, (BLOCK,)))
    s1, s2 = _shares(sum_d, sum_dh, w, r, PIXELS * WIDTH)
    if PAIR:
        tl.store(dweight_z + image * CHANNELS + cols, tl.reshape(sum_dz, (BLOCK,)))
    z1, z2 = _shares(sum_d, sum_dz, wz, rz, PIXELS * WIDTH)
    if ROWS >= PIXELS:
        _pass(dx, dz, at, real, e, f, d, a, s1, s2, az, z1, z2, PAIR)
    else:
        for first in range(0, PIXELS, ROWS):
            at, real = _tile(first, cols, PIXELS, CHANNELS, ROWS)
            e, f, d = _passed(gradient, x, z, at, real, m, a, b, mz, az, PAIR, WIDTH)
            _pass(dx, dz, at, real, e, f, d, a, s1, s2, az, z1, z2, PAIR)
