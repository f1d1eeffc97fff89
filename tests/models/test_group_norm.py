"""One pass where there were several: batch norm of stacked views, group norm and ReLU in Triton."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import in_tritons_interpreter
from torch import Tensor, nn

from fedssl.models.encoders import Basic, Block
from fedssl.models.kernels import group_norm as kernels
from fedssl.models.network import Network, Tower, mlp
from fedssl.models.norms import BatchNorm, GroupNorm, Norm

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")


def batch_norm(channels: int) -> BatchNorm:
    layer = BatchNorm(channels)
    generator = torch.Generator().manual_seed(3)
    for parameter in (layer.weight, layer.bias):
        nn.init.normal_(parameter, generator=generator)
    return layer.double()


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3, 3)])
@pytest.mark.parametrize("views", [2, 3])
def test_stacked_views_have_statistics_of_their_own(shape: tuple[int, ...], views: int) -> None:
    generator = torch.Generator().manual_seed(0)
    plain, stacked = batch_norm(4), batch_norm(4)
    inputs = [
        (k + torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
        for k in range(views)
    ]
    expected = torch.cat([plain(x) for x in inputs])
    stacked.views = views
    found = stacked(torch.cat(inputs))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(stacked, name), getattr(plain, name), rtol=1e-12, atol=0)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((expected * weights).sum(), [*inputs, plain.weight, plain.bias]),
        torch.autograd.grad((found * weights).sum(), [*inputs, stacked.weight, stacked.bias]),
        strict=True,
    ):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11)
    stacked.eval()
    torch.testing.assert_close(stacked(inputs[0]), plain.eval()(inputs[0]), rtol=1e-12, atol=1e-12)


def network(joint: bool = False, towers: int = 1) -> Network:
    norm = Norm("batch")
    bodies = [
        Tower(nn.Conv2d(1, 2, 3, padding=1), nn.Sequential(nn.Flatten(), mlp(18, (8, 4), norm)))
    ]
    made = Network(bodies * towers, [mlp(4, (8, 4), norm)] * towers, joint)
    return made.double()


def test_a_stacked_network_makes_one_pass_and_is_plain_again_after() -> None:
    views = tuple(torch.randn(6, 1, 3, 3, dtype=torch.float64) for _ in range(2))
    net = network()
    expected = net.predict(net(views))
    batches: list[int] = []
    net.towers[0].register_forward_hook(lambda m, inputs, out: batches.append(len(inputs[0])))
    with net.stacked(2):
        found = net.predict(net(views))
    assert batches == [12]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    net(views)
    assert batches == [12, 6, 6]


@pytest.mark.parametrize("made", [network(joint=True), network(towers=2)], ids=["joint", "towers"])
def test_what_is_one_batch_or_two_towers_is_not_stacked(made: Network) -> None:
    views = tuple(torch.randn(6, 1, 3, 3, dtype=torch.float64) for _ in range(2))
    expected = made(views)
    with made.stacked(2):
        found = made(views)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_group_norm_has_its_relu_within() -> None:
    x = torch.randn(3, 8, 2, 2)
    for relu in (True, False):
        layer = GroupNorm(4, 8, relu)
        plain = F.group_norm(x, 4)
        torch.testing.assert_close(layer(x), plain.relu() if relu else plain)


SHAPES = [
    ((2, 64, 4, 4), 32),
    ((1, 32, 5, 5), 16),
    ((2, 128, 3, 3), 2),
    ((2, 256, 2, 2), 1),
    ((3, 64), 8),
    ((1, 8), 4),
]
# The images above are read whole, in parts, in several steps.
TILES: list[int | None] = [None, 256, 64]


def limit(patch: pytest.MonkeyPatch, tile: int | None) -> None:
    """Fewer numbers in a tile than there are."""
    if tile is not None:
        small = kernels.Forms([(tile, 32)], (tile, 32), 16)
        patch.setattr(kernels, "FORMS", dict.fromkeys(kernels.FORMS, small))


def compare(
    shape: tuple[int, ...], groups: int, relu: bool, dtype: torch.dtype, device: str
) -> None:
    """The kernels beside torch's own, which get the same rounded input."""
    generator = torch.Generator().manual_seed(groups)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    x = (2 * drawn(*shape) + 1).to(dtype).requires_grad_()
    weight, bias = (drawn(shape[1]).requires_grad_() for _ in range(2))
    plain = F.group_norm(x.float(), groups, weight, bias)
    plain = plain.relu() if relu else plain
    found = kernels.group_norm(x, weight, bias, groups, 1e-5, relu)
    assert found.dtype == dtype and found.shape == x.shape
    gradient = drawn(*shape).to(dtype)
    exact = torch.autograd.grad(plain, (x, weight, bias), gradient.float())
    ours = torch.autograd.grad(found, (x, weight, bias), gradient)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b, close in zip(
        (found, *ours), (plain, *exact), (rounding, rounding, 1e-4, 1e-4), strict=True
    ):
        torch.testing.assert_close(a.float(), b.float(), rtol=close, atol=close)


def compare_residual(
    shape: tuple[int, ...], groups: int, pair: bool, dtype: torch.dtype, device: str
) -> None:
    """The end of a residual block beside torch's own in float64."""
    generator = torch.Generator().manual_seed(groups)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    x, z = (2 * drawn(*shape) + 1).to(dtype), (drawn(*shape) - 1).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x  # and z is not
    weight, bias, weight_z, bias_z = (drawn(shape[1]) for _ in range(4))
    inputs = [
        t.requires_grad_() for t in (x, weight, bias, z, weight_z, bias_z)[: 6 if pair else 4]
    ]
    found = kernels.residual(*inputs, *(() if pair else (None, None)), groups, 1e-5)
    assert found.dtype == dtype and found.shape == x.shape
    full = [t.detach().double().requires_grad_() for t in inputs]
    norms = [
        F.group_norm(full[i], groups, *full[i + 1 : i + 3]) for i in range(0, len(full) - 1, 3)
    ]
    both = norms[0] + (norms[1] if pair else full[3])
    # Where ReLU's input is 0 but for rounding, its gradient is either.
    gradient = (drawn(*shape) * (both.abs() > 1e-4)).to(dtype)
    exact = torch.autograd.grad(both.relu(), full, gradient.double())
    ours = torch.autograd.grad(found, inputs, gradient)
    for a, b in zip((found, *ours), (both.relu(), *exact), strict=True):
        close = 2e-2 if a.dtype == torch.bfloat16 else 1e-5 if a.dim() > 1 else 1e-4
        torch.testing.assert_close(a.double(), b, rtol=close, atol=close)


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
    grid, sizes = kernels._sizes(torch.empty(shape), 32, kind, way)
    assert tuple(sizes[name] for name in ("BLOCK", "ROWS", "num_warps")) == expected
    assert grid == (2 * shape[1] // expected[0],)


def far_from_zero(device: str) -> None:
    """Where the square of the mean is large, the variance is not lost beside it."""
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


def registered(shape: tuple[int, ...], pair: bool) -> None:
    """What is said of the operators for tracing (shapes, strides, gradients) is what they do."""
    x, z = (torch.randn(shape).contiguous(memory_format=torch.channels_last) for _ in range(2))
    weights = [torch.randn(shape[1]) for _ in range(4)]
    inputs = [t.requires_grad_() for t in (x, *weights[:2], z, *(weights[2:] if pair else ()))]
    nothing = () if pair else (None, None)
    torch.library.opcheck(kernels._residual, (*inputs, *nothing, 4, 1e-5))
    plain = [t.detach() for t in inputs]
    _, mean, scale = kernels._residual(*plain, *nothing, 4, 1e-5)
    given = (torch.ones_like(plain[0]), *plain, *nothing, mean, scale, 4)
    torch.library.opcheck(kernels._residual_backward, given)


@pytest.mark.slow
def test_the_kernels_in_tritons_interpreter() -> None:
    code = (
        "import itertools, torch, test_group_norm as t\n"
        "t.far_from_zero('cpu')\n"
        "t.nan_stays('cpu')\n"
        "t.registered((2, 16, 3, 3), True)\n"
        "t.registered((2, 16, 3, 3), False)\n"
        "kinds = (None, 64), t.SHAPES, (True, False), (torch.float32, torch.bfloat16)\n"
        "for tile, (shape, groups), form, dtype in itertools.product(*kinds):\n"
        "    t.limit(t.pytest.MonkeyPatch(), tile)\n"
        "    if tile is None or dtype == torch.float32:\n"
        "        t.compare(shape, groups, form, dtype, 'cpu')\n"
        "        t.compare_residual(shape, groups, form, dtype, 'cpu')\n"
    )
    in_tritons_interpreter(code, Path(__file__).parent)


@CUDA
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("shape", "groups"), [*SHAPES, ((64, 256, 32, 32), 32)])
@pytest.mark.parametrize("form", [True, False])
@pytest.mark.parametrize("comparison", [compare, compare_residual])
def test_the_kernels_on_a_gpu(
    comparison: Callable[..., None],
    shape: tuple[int, ...],
    groups: int,
    form: bool,
    tile: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, tile)
    comparison(shape, groups, form, torch.bfloat16, "cuda")


@CUDA
@pytest.mark.parametrize("check", [far_from_zero, nan_stays])
def test_more_of_the_kernels_on_a_gpu(check: Callable[[str], None]) -> None:
    check("cuda")


@CUDA
@pytest.mark.parametrize("name", ["resnet14", "resnet18"])
def test_a_network_of_fused_layers(name: str) -> None:
    """In bfloat16, with the kernels and without: as far apart as bfloat16 is."""
    from fedssl.config import Encoder
    from fedssl.models.encoders import encoder

    net = encoder(Encoder(name), 3, 32).cuda()
    x = torch.rand(8, 3, 32, 32, device="cuda")

    def features_and_gradients() -> tuple[Tensor, Tensor]:
        features = net(x).float()
        gradients = torch.autograd.grad(features.square().mean(), list(net.parameters()))
        return features.detach(), torch.cat([g.flatten() for g in gradients])

    exact = features_and_gradients()
    found = []
    for applies in (kernels.applies, lambda *_: False):
        with pytest.MonkeyPatch.context() as patch, torch.autocast("cuda", torch.bfloat16):
            patch.setattr(kernels, "applies", applies)
            found.append(features_and_gradients())
    ours, torchs = (
        [float((f - e).norm() / e.norm()) for f, e in zip(each, exact, strict=True)]
        for each in found
    )
    assert ours[0] < 2 * torchs[0] < 0.1
    assert ours[1] < 1.5 * torchs[1] < 0.6  # many ReLUs open or close by rounding


def block(identity: bool) -> Block:
    made = Basic(8, 8 if identity else 16, 1 if identity else 2, Norm("group", 4)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        nn.init.normal_(parameter, generator=generator)
    return made


def values(made: Block, out: Tensor, x: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()
    return [out, *torch.autograd.grad((out * weights).sum(), [x, *made.parameters()])]


def images() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn((2, 8, 4, 4), generator=generator, dtype=torch.float64).requires_grad_()


def plain_kernels(patch: pytest.MonkeyPatch, applies: Callable[[Tensor, int], bool]) -> list[str]:
    """torch's own in the place of the kernels; which are asked for."""
    asked: list[str] = []

    def group_norm(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float, relu: bool) -> Tensor:
        asked.append("group_norm")
        y = F.group_norm(x, groups, w, b, eps)
        return y.relu() if relu else y

    def residual(x: Tensor, w: Tensor, b: Tensor, z: Tensor, *rest: Any) -> Tensor:
        asked.append("residual")
        *of_z, groups, eps = rest
        other = z if of_z[0] is None else F.group_norm(z, groups, *of_z, eps)
        return F.relu(F.group_norm(x, groups, w, b, eps) + other)

    patch.setattr(kernels, "applies", applies)
    patch.setattr(kernels, "group_norm", group_norm)
    patch.setattr(kernels, "residual", residual)
    return asked


@pytest.mark.parametrize("identity", [True, False])
def test_the_end_of_a_block_is_one_kernel(identity: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = block(identity), images()
    made.body[-1].eps = 1e-3  # it reaches the kernel
    if not identity:
        made.shortcut[-1].eps = 1e-3
    expected = values(made, F.relu(made.body(x) + made.shortcut(x)), x)
    asked = plain_kernels(monkeypatch, lambda t, groups: groups == 4)
    found = values(made, made(x), x)
    assert asked == ["group_norm", "residual"]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def is_input(t: Tensor) -> bool:
    """The identity gives the block's input, known by its first number."""
    return bool(t[0, 0, 0, 0] == images()[0, 0, 0, 0])


def nothing(made: Block) -> None:
    pass


@pytest.mark.parametrize(
    ("identity", "change", "applies"),
    [
        (False, lambda made: setattr(made.shortcut[-1], "num_groups", 2), lambda *_: True),
        (False, lambda made: setattr(made.shortcut[-1], "eps", 1e-3), lambda *_: True),
        (True, lambda made: setattr(made, "shortcut", nn.AdaptiveAvgPool2d(1)), lambda *_: True),
        (True, lambda made: setattr(made.body[-1], "relu", True), lambda *_: True),
        (True, nothing, lambda *_: False),
        (False, nothing, lambda *_: False),
        (True, nothing, lambda t, groups: is_input(t)),
        (True, nothing, lambda t, groups: not is_input(t)),
    ],
)
def test_what_one_kernel_cannot_take_is_left_to_several(
    identity: bool,
    change: Callable[[Block], None],
    applies: Callable[[Tensor, int], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, x = block(identity), images()
    change(made)
    expected = values(made, F.relu(made.body(x) + made.shortcut(x)), x)
    asked = plain_kernels(monkeypatch, applies)
    found = values(made, made(x), x)
    assert "residual" not in asked
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 96, 2, 2), 32), ((2, 192, 2, 2), 2), ((2, 24, 2, 2), 6)]
)
def test_odd_widths_are_left_to_torch(shape: tuple[int, ...], groups: int) -> None:
    class OnGpu(Tensor):
        is_cuda = True

    x = torch.zeros(shape, dtype=torch.bfloat16).as_subclass(OnGpu)
    assert not kernels.applies(x, groups)
    assert kernels.applies(torch.zeros(2, 64, 2, 2, dtype=torch.bfloat16).as_subclass(OnGpu), 32)
    assert not kernels.applies(torch.zeros(2, 64, 2, 2).as_subclass(OnGpu), 32)
