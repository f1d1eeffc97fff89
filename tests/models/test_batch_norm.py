"""Batch norm of stacked views, and of a training step in Triton beside the written-out one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers import in_tritons_interpreter, on_gpu
from torch import Tensor, nn

from fedssl.models.encoders import Block
from fedssl.models.kernels import batch_norm as kernels
from fedssl.models.network import Network, Tower, initialize, mlp
from fedssl.models.norms import BatchNorm, Norm

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")
# Rows of a view fill their tiles, or do not; there are several chunks of them, or one.
SHAPES = [(6, 16, 4, 4), (6, 64, 3, 3), (12, 24)]
VIEWS = [1, 2, 3]
Kind = Literal["plain", "relu", "add"]
KINDS: list[Kind] = ["plain", "relu", "add"]


def limit(patch: pytest.MonkeyPatch, small: bool) -> None:
    """Several tiles in a span, and spans that differ between the kernels."""
    if small:
        # Five chunks are not a power of 2, and some of the eight that are merged do not exist.
        first, second = kernels.Walk(64, 4, 5, 1), kernels.Walk(128, 4, 9, 1)
        walks = {"statistics": first, "normalize": second, "sums": first, "gradients": second}
        patch.setattr(kernels, "WALKS", walks)
        patch.setattr(kernels, "MIN_ROWS", 2)


def drawn(shape: tuple[int, ...], count: int, dtype: torch.dtype, device: str) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield torch.randn(shape, generator=generator).to(device, dtype)


def layer(channels: int, views: int) -> BatchNorm:
    made = BatchNorm(channels)
    made.eps, made.momentum, made.views = 1e-2, 0.3, views
    generator = torch.Generator().manual_seed(3)
    for parameter in made.parameters():
        nn.init.normal_(parameter, generator=generator)
    return made.double()


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3, 3)])
@pytest.mark.parametrize("views", [2, 3])
def test_stacked_views_have_statistics_of_their_own(shape: tuple[int, ...], views: int) -> None:
    plain, stacked = layer(4, 1), layer(4, views)
    x, weights = drawn((views * shape[0], *shape[1:]), 2, torch.float64, "cpu")
    inputs = [(k + view).requires_grad_() for k, view in enumerate(x.chunk(views))]
    expected, found = torch.cat([plain(view) for view in inputs]), stacked(torch.cat(inputs))

    def values(made: BatchNorm, y: Tensor) -> list[Tensor]:
        gradients = torch.autograd.grad((y * weights).sum(), [*inputs, *made.parameters()])
        return [y, *made.buffers(), *gradients]

    for a, b in zip(values(stacked, found), values(plain, expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(stacked.eval()(inputs[0]), plain.eval()(inputs[0]))


def network(joint: bool = False, towers: int = 1) -> Network:
    norm = Norm("batch")
    body = Tower(nn.Conv2d(1, 2, 3, padding=1), nn.Sequential(nn.Flatten(), mlp(18, (8, 4), norm)))
    return Network([body] * towers, [mlp(4, (8, 4), norm)] * towers, joint).double()


@pytest.mark.parametrize(
    ("net", "batches"),
    [(network(), [12]), (network(joint=True), [12]), (network(towers=2), [6, 6])],
    ids=["stacked", "joint", "towers"],
)
def test_one_tower_sees_all_views_in_one_pass(net: Network, batches: list[int]) -> None:
    """Views are stacked only if they are not one batch already and have one tower."""
    views = tuple(drawn((6, 1, 3, 3), 2, torch.float64, "cpu"))
    expected, seen = net.predict(net(views)), list[int]()
    net.towers[0].register_forward_hook(lambda m, inputs, out: seen.append(len(inputs[0])))
    with net.stacked(2):
        found = net.predict(net(views))
    assert seen == batches
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    net(views)
    assert seen == batches + ([12] if net.joint else [6, 6])  # plain again


def as_torch(
    x: Tensor, z: Tensor | None, weight: Tensor, bias: Tensor, eps: float, views: int, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels' results, computed by torch."""
    apart = x.unflatten(0, (views, -1))
    over = [1, *range(3, apart.dim())]
    variance, mean = torch.var_mean(apart, over, correction=0, keepdim=True)
    y = ((apart - mean) / (variance + eps).sqrt()).flatten(0, 1).transpose(1, -1)
    y = (y * weight + bias).transpose(1, -1) + (0 if z is None else z)
    return y.relu() if relu else y, mean.flatten(1).detach(), variance.flatten(1).detach()


def drawn_inputs(
    shape: tuple[int, ...], kind: Kind, dtype: torch.dtype, device: str
) -> list[Tensor | None]:
    """An input, a shortcut, a weight and a bias."""
    x, z = drawn(shape, 2, dtype, device)
    return [x, z if kind == "add" else None, *drawn(shape[1:2], 2, torch.float32, device)]


def compare(
    shape: tuple[int, ...], views: int, kind: Kind, dtype: torch.dtype, device: str
) -> None:
    """Values, statistics and all gradients, from the same rounded input."""
    x, *others = drawn_inputs(shape, kind, dtype, device)
    means = torch.arange(shape[1], device=device) % 8  # of channels
    x = (2 * x + means.view(-1, *[1] * (len(shape) - 2))).to(dtype)
    inputs = [t if t is None else t.requires_grad_() for t in (x, *others)]
    full = [t if t is None else t.detach().double().requires_grad_() for t in inputs]
    settings = 1e-2, views, kind != "plain"
    ours, exact = kernels.batch_norm(*inputs, *settings), as_torch(*full, *settings)
    assert ours[0].dtype == dtype and ours[0].shape == x.shape
    assert ours[0].requires_grad and not ours[1].requires_grad and not ours[2].requires_grad

    def gradients(y: Tensor, inputs: list[Tensor | None]) -> tuple[Tensor, ...]:
        given = [t for t in inputs if t is not None]
        return torch.autograd.grad(y, given, exact[0].detach().cos().to(dtype).to(y.dtype))

    expected = (*exact, *gradients(exact[0], full))
    rounding = 2e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip((*ours, *gradients(ours[0], inputs)), expected, strict=True):
        close = rounding if a.shape == x.shape else 2e-5
        largest = max(1.0, float(b.detach().abs().max()))  # a sum of many numbers may be near 0
        torch.testing.assert_close(a.double(), b, rtol=close, atol=close * largest)


def far_from_zero(device: str) -> None:
    """A large square of the mean does not swallow the variance."""
    (x,) = (1000 + 2 * t for t in drawn((8, 16, 4, 4), 1, torch.float32, device))
    x[0, :, 0, 0] += 20  # the row that others are compared with is itself far away
    given = None, torch.ones(16, device=device), torch.zeros(16, device=device), 1e-5, 2, False
    y, _, variance = kernels.batch_norm(x, *given)
    exact, _, expected = as_torch(x.double(), *given)
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-4)
    torch.testing.assert_close(variance.double(), expected, rtol=1e-5, atol=0)


def not_a_number(device: str) -> None:
    """A NaN stays a NaN: ReLU does not make a 0 of it."""
    for kind in KINDS:
        x, z, *parameters = drawn_inputs((8, 16), kind, torch.float32, device)
        x[0, 3] = torch.nan
        if z is not None:
            z[7, 5] = torch.nan
            z.requires_grad_()
        y, *statistics = kernels.batch_norm(x, z, *parameters, 1e-2, 2, kind != "plain")
        expected = torch.zeros(8, 16, dtype=torch.bool, device=device)
        expected[:4, 3] = True  # its view's channel
        for values in statistics:
            assert torch.equal(values.isnan(), expected[[0, 4]])
        expected[7, 5] = kind == "add"
        assert torch.equal(y.isnan(), expected)
    (dz,) = torch.autograd.grad(y.sum(), z)
    assert torch.equal(dz, torch.where(y <= 0, 0.0, 1.0))  # as of torch's ReLU


def fakes(device: str) -> None:
    """The shapes and types that the compiler is told are those of the outputs."""
    for shape, kind in itertools.product([(4, 8, 3, 3), (4, 8)], KINDS[1:]):
        inputs = drawn_inputs(shape, kind, torch.float32, device)
        x, z, *parameters = [t if t is None else kernels.ordered(t) for t in inputs]
        settings = 1e-5, 2, True
        y, *statistics = kernels._forward(x, z, *parameters, *settings)
        given = (y.cos(), x, None if z is None else y, *parameters, *statistics, *settings)
        torch.library.opcheck(kernels._backward, given)
        learned = [t if t is None else t.requires_grad_() for t in (x, z, *parameters)]
        torch.library.opcheck(kernels._forward, (*learned, *settings))


def one_step(compiled: bool, device: str) -> list[Tensor]:
    """Loss, gradients and statistics: an identity and a projection as shortcuts, and a head."""
    norm, calls = Norm("batch"), list[bool]()
    blocks = [Block(16, 16, 1, norm), Block(16, 24, 2, norm)]
    net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), mlp(24, (16, 8), norm))
    initialize(net, 0)
    net.to(device)
    for module in net.modules():
        if isinstance(module, BatchNorm):
            module.views = 2
    (x,) = drawn((6, 16, 4, 4), 1, torch.float32, device)
    real = kernels.batch_norm

    def counted(x: Tensor, z: Tensor | None, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(z is not None)
        return real(x, z, *given)

    backend = "inductor" if device == "cuda" else "aot_eager"
    with pytest.MonkeyPatch.context() as patch, torch.backends.cudnn.flags(allow_tf32=False):
        patch.setattr(kernels, "applies", lambda x: compiled)
        patch.setattr(kernels, "batch_norm", counted)
        run = torch.compile(net, backend=backend, fullgraph=True) if compiled else net
        loss = run(kernels.ordered(x)).square().sum()
        gradients = torch.autograd.grad(loss, list(net.parameters()))
    assert sum(calls) == 2 * compiled
    return [loss.detach(), *gradients, *net.buffers()]


def compiled_as_plain(device: str) -> None:
    """The kernels in a step that is really compiled."""
    for a, b in zip(one_step(True, device), one_step(False, device), strict=True):
        largest = max(1.0, float(b.abs().max()))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * largest)


def interpreted() -> None:
    compiled_as_plain("cpu")
    far_from_zero("cpu")
    not_a_number("cpu")
    fakes("cpu")
    for shape, views, kind in itertools.product(SHAPES, VIEWS, KINDS):
        compare(shape, views, kind, torch.float32, "cpu")
        if views == 2:
            compare(shape, views, kind, torch.bfloat16, "cpu")
        if views == 3:
            with pytest.MonkeyPatch.context() as patch:
                limit(patch, small=True)
                compare(shape, views, kind, torch.float32, "cpu")


@pytest.mark.slow
def test_the_kernels_in_tritons_interpreter() -> None:
    in_tritons_interpreter(
        "import test_batch_norm; test_batch_norm.interpreted()", Path(__file__).parent
    )


@CUDA
@pytest.mark.parametrize(
    ("shape", "small"),
    [
        *itertools.product(SHAPES, [False, True]),
        *(((96, *rest), False) for rest in [(64, 32, 32), (512, 4, 4), (4096,)]),
    ],
)
@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_on_a_gpu(
    shape: tuple[int, ...], views: int, kind: Kind, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, small)
    compare(shape, views, kind, torch.bfloat16, "cuda")


@CUDA
@pytest.mark.parametrize("check", [far_from_zero, not_a_number, fakes, compiled_as_plain])
def test_more_of_the_kernels_on_a_gpu(check: Callable[[str], None]) -> None:
    check("cuda")


@CUDA
def test_the_kernels_say_the_same_twice() -> None:
    x, z, weight, bias = drawn_inputs((64, 64, 32, 32), "add", torch.bfloat16, "cuda")
    learned = [weight.requires_grad_(), bias.requires_grad_()]
    once, again = (
        (y, *torch.autograd.grad(y, learned, x))
        for y in (kernels.batch_norm(x, z, *learned, 1e-2, 2, True)[0] for _ in range(2))
    )
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize(
    ("shape", "views", "kernel", "spans", "expected"),
    [
        # The layers of ResNet-18 and a head: two programs for each multiprocessor, even spans.
        ((256, 64, 32, 32), 2, "statistics", 128, (64, 128, 1024, 8)),
        ((256, 128, 16, 16), 2, "statistics", 64, (64, 128, 512, 8)),
        ((256, 256, 8, 8), 2, "normalize", 32, (64, 128, 256, 8)),
        ((256, 512, 4, 4), 2, "gradients", 16, (64, 128, 128, 8)),
        ((256, 512, 4, 4), 2, "sums", 16, (64, 64, 128, 8)),
        ((256, 4096), 2, "statistics", 2, (64, 64, 64, 4)),
        # Few rows are not divided further than LEAST; the last span may be short.
        ((12, 24, 3, 3), 2, "statistics", 2, (8, 32, 32, 1)),
        # Only what leaves sums is held to CHUNKS.
        ((256, 64, 32, 32), 1, "sums", 128, (64, 64, 2048, 8)),
        ((256, 64, 32, 32), 1, "gradients", 256, (64, 128, 1024, 8)),
    ],
)
def test_programs_share_the_rows(
    shape: tuple[int, ...],
    views: int,
    kernel: kernels.Kernel,
    spans: int,
    expected: tuple[int, ...],
) -> None:
    grid, sizes, chunks = kernels._sizes(torch.empty(shape, device="meta"), views, kernel)
    assert tuple(sizes[name] for name in ("BLOCK", "ROWS", "SPAN", "num_warps")) == expected
    assert grid == (spans * shape[1] // expected[0], views)
    assert chunks == {"CHUNK": expected[2], "CHUNKS": spans, "PADDED": spans}


def test_the_kernels_take_half_precision_on_a_gpu_alone() -> None:
    assert kernels.applies(on_gpu(2, 24, 3, 3)) and kernels.applies(on_gpu(2, 8))
    assert not kernels.applies(on_gpu(2, 12)) and not kernels.applies(on_gpu(2, 8, 3))
    assert not kernels.applies(on_gpu(2, 8, dtype=torch.float32))
    assert not kernels.applies(torch.zeros(2, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("end", [False, True], ids=["norm", "end"])
@pytest.mark.parametrize("views", [1, 2])
def test_a_compiled_step_has_the_kernels_and_the_same_numbers(
    views: int, end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_once = [*drawn((6, 16, 3, 3), 1 + end, torch.float64, "cpu")]

    def results(made: BatchNorm) -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in drawn_once]
        y = made(*inputs)
        gradients = torch.autograd.grad(y.square().sum(), [*inputs, *made.parameters()])
        return [y.detach(), *gradients, *made.buffers()]

    plain, fast = (layer(16, views) for _ in range(2))
    plain.relu = fast.relu = not end
    asked: list[Any] = []

    def kernel(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        asked.append(given)
        return as_torch(*given)

    monkeypatch.setattr(kernels, "batch_norm", kernel)
    monkeypatch.setattr(kernels, "applies", lambda x: True)
    expected = results(plain)
    assert not asked  # nothing is compiled there
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for a, b in zip(results(fast), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    results(fast.eval())
    assert len(asked) == 1  # only in training
