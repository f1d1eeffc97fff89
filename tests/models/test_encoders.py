from __future__ import annotations

from typing import Literal, cast

import pytest
import torch
import torchvision
from helpers import refused
from timm.layers import StdConv2d
from torch import nn

from fedssl.config import Encoder, Initializer
from fedssl.models.encoders import encoder
from fedssl.models.network import Heads, Network, Tower, build, initialize, mlp
from fedssl.models.norms import BatchNorm, GroupNorm, Norm, StandardizedConv2d, StandardizedLinear


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_batch_norm_resnets_have_torchvisions_parameters(name: str) -> None:
    """With the large stem it is the same network, so the same numbers come out."""
    ours = encoder(Encoder(name, norm="batch"), 3, 224).eval()  # type: ignore[arg-type]
    theirs = getattr(torchvision.models, name)(num_classes=1)
    theirs.fc = nn.Identity()
    assert count(ours) == count(theirs)
    named = {k: v for k, v in theirs.state_dict().items() if "num_batches" not in k}
    pairs = list(zip(ours.state_dict().items(), named.items(), strict=True))
    assert [a.shape for (_, a), _ in pairs] == [b.shape for _, (_, b) in pairs]
    theirs.load_state_dict({k: a for (_, a), (k, _) in pairs}, strict=False)
    x = torch.rand(2, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs.eval()(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "features"), [("tiny", 96), ("resnet14", 2048), ("resnet18", 512), ("resnet50", 2048)]
)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_any_image_size_and_both_norms(name: str, features: int, norm: str) -> None:
    for size in (16, 96):
        net = encoder(Encoder(name, norm=norm), 1, size).eval()  # type: ignore[arg-type]
        with torch.no_grad():
            assert net(torch.rand(2, 1, size, size)).shape == (2, features)
            assert net(torch.rand(2, 1, 2 * size, size)).shape == (2, features)
        kinds = {type(m) for m in net.modules()}
        assert (GroupNorm in kinds) == (norm == "group")
        assert (BatchNorm in kinds) == (norm == "batch")


def test_resnet14_is_one_bottleneck_a_stage_with_the_small_stem() -> None:
    net = encoder(Encoder("resnet14"), 3, 32)
    convolutions = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    names = [n for n, m in net.named_modules() if isinstance(m, nn.Conv2d)]
    assert sum("shortcut" not in n for n in names) == 13  # and the classifier makes 14
    assert convolutions[0].kernel_size == (3, 3) and convolutions[0].stride == (1, 1)
    assert all(isinstance(m, StandardizedConv2d) for m in convolutions)
    assert encoder(Encoder("resnet14"), 3, 224).stem[0].kernel_size == (7, 7)


def test_standardized_convolution_agrees_with_timms() -> None:
    ours = StandardizedConv2d(3, 8, 3, bias=False).double()
    theirs = StdConv2d(3, 8, 3, padding=0, eps=1e-10).double()
    theirs.weight = ours.weight
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))


def test_projector_of_the_paper() -> None:
    """Section 4.2: standardized weights and group norm on every layer but the last."""
    head = mlp(2048, (1024, 1024, 1024), Norm("group"))
    assert [type(m) for m in head] == [
        StandardizedLinear, GroupNorm, nn.Identity,
        StandardizedLinear, GroupNorm, nn.Identity,
        nn.Linear,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "groups"), [("conv", 5), ("conv", 128), ("linear", 64)], ids=["5", "128", "alone"]
)
def test_groups_that_do_not_fit_are_refused(kind: str, groups: int) -> None:
    """A layer's channels must divide into groups, and a group of a vector have two numbers."""
    norm = Norm("group", groups)
    said = (
        f"64 channels do not divide into {groups} groups of at least {1 if kind == 'conv' else 2}."
    )
    with refused("encoder.groups", groups, said):
        norm.conv(64, 64, 3) if kind == "conv" else norm.linear(64, 64)


def network(
    seed: int = 0, towers: int = 1, width: int = 16, norm: Literal["group", "batch"] = "group"
) -> Network:
    settings = Encoder("tiny", norm=norm, groups=8, towers=towers)  # type: ignore[arg-type]
    return build(settings, (1,), 8, lambda e, norm: Heads(mlp(e.features, (width, 16), norm)), seed)


def test_initialization_depends_on_name_and_seed_only() -> None:
    a, b, c = network(0), network(0), network(1)
    wide = network(0, width=32)
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), c.parameters(), strict=True):
        assert torch.equal(p, q)
        if p.ndim > 1:
            assert not torch.equal(p, r)
        if ".encoder." in name:
            assert torch.equal(p, dict(wide.named_parameters())[name])


def test_two_towers_start_differently_and_one_is_shared() -> None:
    two = network(0, towers=2)
    first, second = two.towers
    assert isinstance(first, Tower)
    weights = [t.encoder.layers[0].weight for t in (first, second)]
    assert not torch.equal(*weights)
    x = torch.rand(3, 1, 8, 8)
    f, g = network(0)((x, x))
    torch.testing.assert_close(f, g)  # of one pass: sums of a batch's rows may differ in order
    f, g = two((x, x))
    assert not torch.equal(f, g)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_two_views_equal_two_passes(norm: Literal["group", "batch"]) -> None:
    """Without batch norm they go through one tower as one batch."""
    net = network(norm=norm).double()
    views = tuple(torch.rand(2, 5, 1, 8, 8, dtype=torch.float64))
    for found, view in zip(net(views), views, strict=True):
        torch.testing.assert_close(found, net.towers[0](view), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "shape"), [(nn.Conv2d, (64, 1024, 3)), (nn.Linear, (600, 1000))])
def test_the_torch_initializer_draws_as_torch_does(
    kind: type[nn.Conv2d] | type[nn.Linear], shape: tuple[int, ...]
) -> None:
    """Another generator, the same distribution: FedEMA's program leaves its layers as torch's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = kind(*shape)
    theirs = [p.detach().clone() for p in layer.parameters()]
    initialize(nn.Sequential(layer), 3, "torch")
    for ours, other in zip(layer.parameters(), theirs, strict=True):
        mine = ours.detach()
        assert not torch.equal(mine, other)
        assert float(mine.std() / other.std()) == pytest.approx(1, abs=0.05)
        assert float(mine.abs().max() / other.abs().max()) == pytest.approx(1, abs=0.01)
    initialize(nn.Sequential(layer), 3)
    assert layer.bias is not None and not layer.bias.any()


@pytest.mark.parametrize(("name", "norm"), [("he", 16.0), ("torch", 6.53)])
def test_a_network_is_drawn_by_its_initializer(name: Initializer, norm: float) -> None:
    """ResNet-18's convolutions: √(2 · inputs) with He's rule, √(outputs / 3) with torch's."""
    settings = Encoder("resnet18", norm="batch", initializer=name)
    net = build(settings, (3,), 32, lambda e, _: Heads(nn.Linear(e.features, 4)), seed=0)
    conv = cast(Tower, net.towers[0]).encoder.get_submodule("stages.3.body.0")
    assert isinstance(conv, nn.Conv2d) and conv.weight.shape[:2] == (128, 128)
    assert float(conv.weight.detach().norm()) == pytest.approx(norm, rel=0.02)
