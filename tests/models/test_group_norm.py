"""Group norm with ReLU, and the end of a residual block: the Triton kernels beside torch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from helpers import in_tritons_interpreter, on_gpu
from torch import Tensor, nn

from fedssl.config import Encoder
from fedssl.models.encoders import Block, encoder
from fedssl.models.kernels import group_norm as kernels
from fedssl.models.norms import GroupNorm, Norm

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")
Kind = Literal["plain", "relu", "sum", "pair"]
KINDS: list[Kind] = ["plain", "relu", "sum", "pair"]
SHAPES = [
    ((2, 64, 4, 4), 32),
    ((1, 32, 5, 5), 16),
    ((2, 128, 3, 3), 2),
    ((2, 256, 2, 2), 1),
    ((3, 64), 8),
    ((1, 8), 4),
]


def limit(patch: pytest.MonkeyPatch, tile: int | None) -> None:
    """Let a tile hold fewer numbers, so that images are read in parts or in several steps."""
    if tile is not None:
        small = kernels.Forms([(tile, 32)], (tile, 32), 16)
        patch.setattr(kernels, "FORMS", dict.fromkeys(kernels.FORMS, small))


def drawn_inputs(shape: tuple[int, ...], kind: Kind, seed: int = 0) -> list[Tensor]:
    """An image batch, a weight and a bias, and for a sum those of the shortcut."""
    generator = torch.Generator().manual_seed(seed)
    x, z = (torch.randn(shape, generator=generator) for _ in range(2))
    weights = [torch.randn(shape[1], generator=generator) for _ in range(4)]
    after = {"sum": [z - 1], "pair": [z - 1, *weights[2:]]}
    return [2 * x + 1, *weights[:2], *after.get(kind, [])]


def fused(inputs: list[Tensor], groups: int, kind: Kind) -> Tensor:
    if kind in ("plain", "relu"):
        return kernels.group_norm(inputs[0], *inputs[1:], groups, 1e-5, kind == "relu")
    x, weight, bias, z, *of_z = inputs
    return kernels.residual(x, weight, bias, z, *(of_z or (None, None)), groups, 1e-5)


def separate(inputs: list[Tensor], groups: int, kind: Kind) -> Tensor:
    y = F.group_norm(inputs[0], groups, *inputs[1:3])
    if kind == "sum":
        y = y + inputs[3]
    if kind == "pair":
        y = y + F.group_norm(inputs[3], groups, *inputs[4:])
    return y if kind == "plain" else y.relu()


def compare(
    shape: tuple[int, ...], groups: int, kind: Kind, dtype: torch.dtype, device: str
) -> None:
    """Values and all gradients beside torch's in float64, from the same rounded input."""
    inputs = [t.to(device) for t in drawn_inputs(shape, kind, groups)]
    inputs = [(t.to(dtype) if t.dim() > 1 else t).requires_grad_() for t in inputs]
    full = [t.detach().double().requires_grad_() for t in inputs]
    found, expected = fused(inputs, groups, kind), separate(full, groups, kind)
    assert found.dtype == dtype and found.shape == shape
    # Where ReLU's input is 0 but for rounding, its gradient is either.
    gradient = (expected.detach().cos() * (expected.abs() > 1e-4)).to(dtype)
    exact = torch.autograd.grad(expected, full, gradient.double())
    ours = torch.autograd.grad(found, inputs, gradient)
    for a, b in zip((found, *ours), (expected, *exact), strict=True):
        close = 2e-2 if a.dtype == torch.bfloat16 else 1e-5 if a.dim() > 1 else 1e-4
        torch.testing.assert_close(a.double(), b, rtol=close, atol=close)


def far_from_zero(device: str) -> None:
    """A large square of the mean does not swallow the variance."""
    x = 1000 + 2 * torch.randn((2, 64, 4, 4), generator=torch.Generator().manual_seed(0))
    ones, zeros = torch.ones(64), torch.zeros(64)
    found = kernels.group_norm(*(t.to(device) for t in (x, ones, zeros)), 32, 1e-5, False)
    torch.testing.assert_close(found.cpu(), F.group_norm(x.double(), 32).float(), rtol=0, atol=1e-3)


def nan_stays(device: str) -> None:
    """A diverged network shows, as with torch's ReLU."""
    x, z = torch.ones(1, 8, 2, 2, device=device), torch.ones(1, 8, 2, 2, device=device)
    z[0, 3, 1, 1] = torch.nan
    ones = torch.ones(8, device=device)
    found = kernels.residual(x, ones, ones, z, None, None, 4, 1e-5)
    assert torch.equal(found.isnan(), z.isnan())
    alone = kernels.group_norm(z, ones, ones, 4, 1e-5, True)
    assert torch.equal(alone.isnan(), F.group_norm(z, 4).isnan())


def registered(device: str) -> None:
    """Shapes, strides and gradients that the compiler is told are those of the operators."""
    for kind in KINDS[1:]:
        inputs = [kernels.ordered(t.to(device)) for t in drawn_inputs((2, 16, 3, 3), kind)]
        missing = [None] * (6 - len(inputs))
        given = [*(t.requires_grad_() for t in inputs), *missing]
        torch.library.opcheck(kernels._forward, (*given, 4, 1e-5, True))
        given = [*(t.detach() for t in inputs), *missing]
        y, mean, scale = kernels._forward(*given, 4, 1e-5, True)
        if kind == "sum":
            given[3] = y
        torch.library.opcheck(kernels._backward, (y.cos(), *given, mean, scale, 4, True))


def interpreted() -> None:
    far_from_zero("cpu")
    nan_stays("cpu")
    registered("cpu")
    for (shape, groups), kind in itertools.product(SHAPES, KINDS):
        compare(shape, groups, kind, torch.float32, "cpu")
        compare(shape, groups, kind, torch.bfloat16, "cpu")
        with pytest.MonkeyPatch.context() as patch:
            limit(patch, 64)
            compare(shape, groups, kind, torch.float32, "cpu")


@pytest.mark.slow
def test_the_kernels_in_tritons_interpreter() -> None:
    in_tritons_interpreter(
        "import test_group_norm; test_group_norm.interpreted()", Path(__file__).parent
    )


@CUDA
@pytest.mark.parametrize("tile", [None, 256, 64])
@pytest.mark.parametrize(("shape", "groups"), [*SHAPES, ((64, 256, 32, 32), 32)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_on_a_gpu(
    kind: Kind,
    shape: tuple[int, ...],
    groups: int,
    tile: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, tile)
    compare(shape, groups, kind, torch.bfloat16, "cuda")


@CUDA
@pytest.mark.parametrize("check", [far_from_zero, nan_stays, registered])
def test_more_of_the_kernels_on_a_gpu(check: Callable[[str], None]) -> None:
    check("cuda")


@pytest.mark.parametrize(
    ("shape", "way", "expected", "kind"),
    [
        # The smaller tile, the larger one, and none at all: 64 (or 32) channels of some pixels.
        ((2, 64, 4, 4), "forward", (64, 16, 1), "norm"),
        ((2, 512, 16, 16), "forward", (32, 256, 8), "norm"),
        ((2, 64, 32, 32), "forward", (32, 1024, 16), "norm"),
        ((2, 64, 64, 64), "forward", (64, 128, 8), "norm"),
        ((2, 512, 16, 16), "backward", (32, 256, 4), "norm"),
        ((2, 64, 32, 32), "backward", (32, 256, 8), "norm"),
        ((2, 96, 64, 64), "forward", (32, 256, 8), "norm"),
        ((2, 2048, 4, 4), "forward", (128, 16, 2), "residual"),
        ((2, 512, 16, 16), "forward", (32, 256, 8), "residual"),
        ((2, 256, 32, 32), "forward", (16, 1024, 16), "residual"),
        ((2, 256, 64, 64), "forward", (64, 64, 4), "residual"),
        ((2, 1024, 8, 8), "backward", (32, 64, 2), "residual"),
        ((2, 512, 16, 16), "backward", (16, 256, 4), "residual"),
        ((2, 256, 32, 32), "backward", (16, 1024, 16), "residual"),
    ],
)
def test_a_tile_is_whole_where_it_can_be(
    shape: tuple[int, ...], way: kernels.Way, expected: tuple[int, ...], kind: kernels.Kind
) -> None:
    grid, sizes = kernels._sizes(torch.empty(shape, device="meta"), 32, kind, way)
    assert tuple(sizes[name] for name in ("BLOCK", "ROWS", "num_warps")) == expected
    assert grid == (2 * shape[1] // expected[0],)


@CUDA
@pytest.mark.parametrize("name", ["resnet14", "resnet18"])
def test_a_network_of_fused_layers(name: str) -> None:
    """In bfloat16, with the kernels and without: as far apart as bfloat16 is."""
    net = encoder(Encoder(name), 3, 32).cuda()
    x = torch.rand(8, 3, 32, 32, device="cuda")

    def features_and_gradients() -> tuple[Tensor, Tensor]:
        features = net(x).float()
        gradients = torch.autograd.grad(features.square().mean(), list(net.parameters()))
        return features.detach(), torch.cat([g.flatten() for g in gradients])

    exact = features_and_gradients()
    errors = []
    for applies in (kernels.applies, lambda *_: False):
        with pytest.MonkeyPatch.context() as patch, torch.autocast("cuda", torch.bfloat16):
            patch.setattr(kernels, "applies", applies)
            found = features_and_gradients()
        errors.append([float((f - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)])
    ours, torchs = errors
    assert ours[0] < 2 * torchs[0] < 0.1
    assert ours[1] < 1.5 * torchs[1] < 0.6  # many ReLUs open or close by rounding


def test_group_norm_has_its_relu_within() -> None:
    x = torch.randn(3, 8, 2, 2)
    for relu in (True, False):
        plain = F.group_norm(x, 4)
        torch.testing.assert_close(GroupNorm(4, 8, relu)(x), plain.relu() if relu else plain)


IMAGES = torch.randn(
    (2, 8, 4, 4), generator=torch.Generator().manual_seed(2), dtype=torch.float64
).requires_grad_()


def is_input(t: Tensor, groups: int) -> bool:
    """The identity gives the block's input, known by its first number."""
    return bool(t[0, 0, 0, 0] == IMAGES[0, 0, 0, 0])


@pytest.mark.parametrize("identity", [True, False])
@pytest.mark.parametrize(
    ("applies", "is_one_kernel"),
    [
        (lambda t, groups: groups == 4, True),
        (lambda t, groups: False, False),
        (is_input, False),
        (lambda t, groups: t.shape[1] == 8 and not is_input(t, groups), False),
    ],
    ids=["all", "none", "shortcut", "body"],
)
def test_the_end_of_a_block_is_one_kernel_where_it_applies(
    identity: bool,
    applies: Callable[[Tensor, int], bool],
    is_one_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With torch's own in the place of the kernels, values and gradients are the same."""
    made = Block(8, 8 if identity else 16, 1 if identity else 2, Norm("group", 4)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        nn.init.normal_(parameter, generator=generator)
    for norm in (m for m in made.modules() if isinstance(m, nn.GroupNorm)):
        norm.eps = 1e-3  # it reaches the kernel

    def values(out: Tensor) -> list[Tensor]:
        weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()
        return [out, *torch.autograd.grad((out * weights).sum(), [IMAGES, *made.parameters()])]

    expected = values(F.relu(made.body(IMAGES) + made.shortcut(IMAGES)))
    asked: list[str] = []

    def group_norm(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float, relu: bool) -> Tensor:
        asked.append("norm")
        y = F.group_norm(x, groups, w, b, eps)
        return y.relu() if relu else y

    def residual(x: Tensor, w: Tensor, b: Tensor, z: Tensor, *rest: Any) -> Tensor:
        asked.append("residual")
        *of_z, groups, eps = rest
        other = z if of_z[0] is None else F.group_norm(z, groups, *of_z, eps)
        return F.relu(F.group_norm(x, groups, w, b, eps) + other)

    monkeypatch.setattr(kernels, "applies", applies)
    monkeypatch.setattr(kernels, "group_norm", group_norm)
    monkeypatch.setattr(kernels, "residual", residual)
    found = values(made(IMAGES))
    assert asked == ["norm", "residual"] if is_one_kernel else "residual" not in asked
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 96, 2, 2), 32), ((2, 192, 2, 2), 2), ((2, 24, 2, 2), 6)]
)
def test_odd_widths_are_left_to_torch(shape: tuple[int, ...], groups: int) -> None:
    assert not kernels.applies(on_gpu(*shape), groups)
    assert kernels.applies(on_gpu(2, 64, 2, 2), 32)
    assert not kernels.applies(on_gpu(2, 64, 2, 2, dtype=torch.float32), 32)
