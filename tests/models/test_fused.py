"""One pass where there were several: batch norm of stacked views, group norm and ReLU in Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.models import fused
from fedssl.models.network import Network, Tower, mlp
from fedssl.models.norms import BatchNorm, GroupNorm, Norm

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")


def batch_norm(channels: int) -> BatchNorm:
    layer = Norm("batch").after_conv(channels)
    assert isinstance(layer, BatchNorm)
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
    bodies = [Tower(norm.conv(1, 2, 3), nn.Sequential(nn.Flatten(), mlp(18, (8, 4), norm)))]
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
        patch.setattr(fused, "WHOLE", {way: [(tile, 32)] for way in fused.WHOLE})
        patch.setattr(fused, "WALK", (tile, 32))
        patch.setattr(fused, "WALKED", dict.fromkeys(fused.WALKED, 16))


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
    found = fused.group_norm(x, weight, bias, groups, 1e-5, relu)
    assert found.dtype == dtype and found.shape == x.shape
    gradient = drawn(*shape).to(dtype)
    exact = torch.autograd.grad(plain, (x, weight, bias), gradient.float())
    ours = torch.autograd.grad(found, (x, weight, bias), gradient)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b, close in zip(
        (found, *ours), (plain, *exact), (rounding, rounding, 1e-4, 1e-4), strict=True
    ):
        torch.testing.assert_close(a.float(), b.float(), rtol=close, atol=close)


@pytest.mark.parametrize(
    ("shape", "way", "expected"),
    [
        # The smaller tile, the larger one, and none at all: 64 (or 32) channels of some pixels.
        ((2, 64, 4, 4), "forward", (64, 16, 1)),
        ((2, 512, 16, 16), "forward", (32, 256, 8)),
        ((2, 64, 32, 32), "forward", (32, 1024, 16)),
        ((2, 64, 64, 64), "forward", (64, 128, 8)),
        ((2, 512, 16, 16), "backward", (32, 256, 4)),
        ((2, 64, 32, 32), "backward", (32, 256, 8)),
        ((2, 96, 64, 64), "forward", (32, 256, 8)),
    ],
)
def test_a_tile_is_whole_where_it_can_be(
    shape: tuple[int, ...], way: fused.Way, expected: tuple[int, ...]
) -> None:
    grid, sizes = fused._sizes(torch.empty(shape), 32, way)
    assert tuple(sizes[name] for name in ("BLOCK", "ROWS", "num_warps")) == expected
    assert grid == (2 * shape[1] // expected[0],)


def far_from_zero(device: str) -> None:
    """Where the square of the mean is large, the variance is not lost beside it."""
    x = 1000 + 2 * torch.randn((2, 64, 4, 4), generator=torch.Generator().manual_seed(0))
    ones, zeros = torch.ones(64), torch.zeros(64)
    found = fused.group_norm(*(t.to(device) for t in (x, ones, zeros)), 32, 1e-5, False)
    torch.testing.assert_close(found.cpu(), F.group_norm(x.double(), 32).float(), rtol=0, atol=1e-3)


def test_the_kernels_in_tritons_interpreter() -> None:
    """It must be asked for before Triton is imported: in a process of its own."""
    # Triton 3.4's interpreter stumbles over newer versions of numpy.
    pytest.importorskip("triton", minversion="3.5")
    code = (
        "import itertools, torch, test_fused as t\n"
        "t.far_from_zero('cpu')\n"
        "kinds = t.TILES, t.SHAPES, (True, False), (torch.float32, torch.bfloat16)\n"
        "for tile, (shape, groups), relu, dtype in itertools.product(*kinds):\n"
        "    t.limit(t.pytest.MonkeyPatch(), tile)\n"
        "    t.compare(shape, groups, relu, dtype, 'cpu')\n"
    )
    path = os.pathsep.join(str(Path(p).absolute()) for p in sys.path if p)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@CUDA
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("shape", "groups"), [*SHAPES, ((64, 256, 32, 32), 32)])
@pytest.mark.parametrize("relu", [True, False])
def test_the_kernels_on_a_gpu(
    shape: tuple[int, ...],
    groups: int,
    relu: bool,
    tile: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, tile)
    compare(shape, groups, relu, torch.bfloat16, "cuda")


@CUDA
def test_the_kernels_far_from_zero() -> None:
    far_from_zero("cuda")


@CUDA
def test_a_network_of_fused_layers() -> None:
    """ResNet-14 in bfloat16, with the kernels and without: as far apart as bfloat16 is."""
    from fedssl.config import Encoder
    from fedssl.models.encoders import encoder

    net, x = encoder(Encoder("resnet14"), 3, 32).cuda(), torch.rand(8, 3, 32, 32, device="cuda")
    exact = net(x)
    found = []
    for applies in (fused.applies, lambda *_: False):
        with pytest.MonkeyPatch.context() as patch, torch.autocast("cuda", torch.bfloat16):
            patch.setattr(fused, "applies", applies)
            found.append(net(x).float())
    errors = [float((f - exact).norm() / exact.norm()) for f in found]
    assert errors[0] < 2 * errors[1] < 0.1


@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 96, 2, 2), 32), ((2, 192, 2, 2), 2), ((2, 24, 2, 2), 6)]
)
def test_odd_widths_are_left_to_torch(shape: tuple[int, ...], groups: int) -> None:
    class OnGpu(Tensor):
        is_cuda = True

    x = torch.zeros(shape, dtype=torch.bfloat16).as_subclass(OnGpu)
    assert not fused.applies(x, groups)
    assert fused.applies(torch.zeros(2, 64, 2, 2, dtype=torch.bfloat16).as_subclass(OnGpu), 32)
    assert not fused.applies(torch.zeros(2, 64, 2, 2).as_subclass(OnGpu), 32)
