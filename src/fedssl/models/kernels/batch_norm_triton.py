"""The Triton kernels of ``batch_norm``: ``[view, row, channel]`` in memory.

A program has some channels of a span of rows of one view, and walks over it in tiles
``[row, channel]``. It adds tiles up number by number and sums them once at the end, so that nothing
in the walk waits for other threads.
"""

# mypy: ignore-errors

# ruff: noqa: D103 - `batch_norm` says what they compute

import triton
import triton.language as tl

from fedssl.models.kernels.group_norm_triton import relu


@triton.jit
def _place(CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's view, span and channels; programs of the same rows are adjacent."""
    PARTS: tl.constexpr = CHANNELS // BLOCK
    part = tl.program_id(0) % PARTS
    return tl.program_id(1), tl.program_id(0) // PARTS, part * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _view(x, view, LENGTH: tl.constexpr, CHANNELS: tl.constexpr):
    return x + view.to(tl.int64) * LENGTH * CHANNELS


@triton.jit
def _tile(row, cols, LENGTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    """Return the start of a tile, the offsets in it, and a mask of its existing rows."""
    rows = tl.arange(0, ROWS)
    at = rows[:, None] * CHANNELS + cols[None, :]
    return row.to(tl.int64) * CHANNELS, at, (row + rows < LENGTH)[:, None]


@triton.jit
def _load(x, begin, at, real, EVEN: tl.constexpr):
    places = x + begin + at
    t = tl.load(places) if EVEN else tl.load(places, mask=real, other=0.0)
    return t.to(tl.float32)


@triton.jit
def _store(x, begin, at, real, t, EVEN: tl.constexpr):
    t = t.to(x.dtype.element_ty)
    if EVEN:
        tl.store(x + begin + at, t)
    else:
        tl.store(x + begin + at, t, mask=real)


@triton.jit
def _row(x, cols):
    return tl.load(x + cols).to(tl.float32)[None, :]


@triton.jit
def _parts(x, view, cols, CHANNELS: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """Load the sums of each chunk of a view, padded with 0."""
    chunks = tl.arange(0, PADDED)[:, None]
    at = (view * CHUNKS + chunks) * CHANNELS + cols[None, :]
    return tl.load(x + at, mask=chunks < CHUNKS, other=0.0)


@triton.jit
def statistics(
    x, means, squares,
    LENGTH: tl.constexpr, CHANNELS: tl.constexpr, SPAN: tl.constexpr, CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = LENGTH % SPAN == 0
    view, chunk, cols = _place(CHANNELS, BLOCK)
    x = _view(x, view, LENGTH, CHANNELS)
    first = chunk * SPAN
    # Differences from the first row are squared. Its distance from the mean of n numbers is at
    # most sqrt(n) standard deviations, so that a large mean does not hide the variance.
    shift = _row(x + first.to(tl.int64) * CHANNELS, cols)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    square = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in tl.range(0, SPAN // ROWS, num_stages=STAGES):
        begin, at, real = _tile(first + i * ROWS, cols, LENGTH, CHANNELS, ROWS)
        e = _load(x, begin, at, real, EVEN) - shift
        if not EVEN:
            e = tl.where(real, e, 0.0)
        total += e
        square += e * e
    sums = tl.sum(total, 0)
    off = sums / tl.minimum(LENGTH - first, SPAN)
    out = (view * CHUNKS + chunk) * CHANNELS + cols
    tl.store(means + out, tl.sum(shift, 0) + off)
    tl.store(squares + out, tl.sum(square, 0) - sums * off)


@triton.jit
def _merge(
    means, squares, view, cols,
    LENGTH: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Merge the means and variances of a view's chunks (Chan et al. 1979)."""
    counts = LENGTH - tl.arange(0, PADDED)[:, None] * CHUNK
    counts = tl.maximum(tl.minimum(counts, CHUNK), 0).to(tl.float32)
    m = _parts(means, view, cols, CHANNELS, CHUNKS, PADDED)
    q = _parts(squares, view, cols, CHANNELS, CHUNKS, PADDED)
    mean = tl.sum(counts * m, 0) / LENGTH
    e = m - mean[None, :]
    return mean, tl.sum(q + counts * e * e, 0) / LENGTH


@triton.jit
def normalize(
    x, z, weight, bias, means, squares, y, mean, variance, eps,
    RELU: tl.constexpr, ADD: tl.constexpr, LENGTH: tl.constexpr, CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = LENGTH % SPAN == 0
    view, span, cols = _place(CHANNELS, BLOCK)
    m, v = _merge(means, squares, view, cols, LENGTH, CHANNELS, CHUNK, CHUNKS, PADDED)
    if span == 0:
        tl.store(mean + view * CHANNELS + cols, m)
        tl.store(variance + view * CHANNELS + cols, v)
    a, b = _row(weight, cols) / tl.sqrt(v + eps)[None, :], _row(bias, cols)
    x, y = _view(x, view, LENGTH, CHANNELS), _view(y, view, LENGTH, CHANNELS)
    if ADD:
        z = _view(z, view, LENGTH, CHANNELS)
    last = (span + 1) * SPAN - ROWS
    for i in tl.range(0, SPAN // ROWS, num_stages=STAGES):  # the last rows are in the cache
        begin, at, real = _tile(last - i * ROWS, cols, LENGTH, CHANNELS, ROWS)
        out = (_load(x, begin, at, real, EVEN) - m[None, :]) * a + b
        if ADD:
            out += _load(z, begin, at, real, EVEN)
        if RELU:
            out = relu(out)
        _store(y, begin, at, real, out, EVEN)


@triton.jit
def _scales(weight, bias, mean, variance, eps, view, cols, CHANNELS: tl.constexpr):
    """Load a view's mean and scales, and the bias."""
    r = 1.0 / tl.sqrt(_row(variance + view * CHANNELS, cols) + eps)
    return _row(mean + view * CHANNELS, cols), r, r * _row(weight, cols), _row(bias, cols)


@triton.jit
def sums(
    gradient, x, y, weight, bias, mean, variance, dz, sums_d, sums_dh, eps,
    RELU: tl.constexpr, ADD: tl.constexpr, LENGTH: tl.constexpr, CHANNELS: tl.constexpr,
    SPAN: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = LENGTH % SPAN == 0
    view, chunk, cols = _place(CHANNELS, BLOCK)
    m, r, a, b = _scales(weight, bias, mean, variance, eps, view, cols, CHANNELS)
    x, gradient = _view(x, view, LENGTH, CHANNELS), _view(gradient, view, LENGTH, CHANNELS)
    if ADD:
        y, dz = _view(y, view, LENGTH, CHANNELS), _view(dz, view, LENGTH, CHANNELS)
    sum_d = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_de = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in tl.range(0, SPAN // ROWS, num_stages=STAGES):
        begin, at, real = _tile(chunk * SPAN + i * ROWS, cols, LENGTH, CHANNELS, ROWS)
        d = _load(gradient, begin, at, real, EVEN)
        e = _load(x, begin, at, real, EVEN) - m
        if ADD:
            d = tl.where(_load(y, begin, at, real, EVEN) <= 0, 0.0, d)
            _store(dz, begin, at, real, d, EVEN)
        elif RELU:
            d = tl.where(e * a + b <= 0, 0.0, d)
        sum_d += d
        sum_de += d * e
    out = (view * CHUNKS + chunk) * CHANNELS + cols
    tl.store(sums_d + out, tl.sum(sum_d, 0))
    tl.store(sums_dh + out, tl.sum(sum_de * r, 0))


@triton.jit
def _total(x, view, cols, CHANNELS: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    return tl.sum(_parts(x, view, cols, CHANNELS, CHUNKS, PADDED), 0)


@triton.jit
def gradients(
    gradient, x, weight, bias, mean, variance, sums_d, sums_dh, dx, dweight, dbias, eps,
    RELU: tl.constexpr, VIEWS: tl.constexpr, LENGTH: tl.constexpr, CHANNELS: tl.constexpr,
    CHUNKS: tl.constexpr, PADDED: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = LENGTH % SPAN == 0
    view, span, cols = _place(CHANNELS, BLOCK)
    m, r, a, b = _scales(weight, bias, mean, variance, eps, view, cols, CHANNELS)
    s1 = _total(sums_d, view, cols, CHANNELS, CHUNKS, PADDED)
    s2 = _total(sums_dh, view, cols, CHANNELS, CHUNKS, PADDED)
    if (view == 0) & (span == 0):
        all_d, all_dh = s1, s2
        for other in range(1, VIEWS):
            all_d += _total(sums_d, other, cols, CHANNELS, CHUNKS, PADDED)
            all_dh += _total(sums_dh, other, cols, CHANNELS, CHUNKS, PADDED)
        tl.store(dbias + cols, all_d)
        tl.store(dweight + cols, all_dh)
    s1, s2 = s1[None, :] / LENGTH, s2[None, :] * r / LENGTH
    x, gradient = _view(x, view, LENGTH, CHANNELS), _view(gradient, view, LENGTH, CHANNELS)
    dx = _view(dx, view, LENGTH, CHANNELS)
    last = (span + 1) * SPAN - ROWS
    for i in tl.range(0, SPAN // ROWS, num_stages=STAGES):
        begin, at, real = _tile(last - i * ROWS, cols, LENGTH, CHANNELS, ROWS)
        d = _load(gradient, begin, at, real, EVEN)
        e = _load(x, begin, at, real, EVEN) - m
        if RELU:
            d = tl.where(e * a + b <= 0, 0.0, d)
        _store(dx, begin, at, real, (d - s1 - e * s2) * a, EVEN)
