"""Parameters that train: by name, in the flat vector, and merged for others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from helpers import refused
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedssl.config import Encoder
from fedssl.models.flat_weights import FlatWeights, differentiate
from fedssl.models.inputs import Input
from fedssl.models.network import Heads, Network, Tower, build, mlp
from fedssl.models.norms import BatchNorm
from fedssl.models.trainable import merge_factors, number_blocks

TIMM = ("mobilenetv3_small_050", "vit_tiny_patch16_224", "resnet10t")


def make(name: str = "resnet18", **keys: Any) -> Network:
    settings = Encoder(name, **{"norm": "frozen", "groups": 8, **keys})
    heads = lambda encoder, norm: Heads(mlp(encoder.features, (32, 16), norm))  # noqa: E731
    return build(settings, (3,), 32, heads, 0)


def tower(network: Network) -> Tower:
    first = network.towers[0]
    assert isinstance(first, Tower)
    return first


def trained(network: Network) -> set[str]:
    """The names of the encoder's tensors in the flat vector."""
    prefix = "towers.0.encoder."
    names = {span.name for span in FlatWeights(network).spans}
    head = tower(network).head.state_dict()
    assert {n for n in names if not n.startswith(prefix)} == {f"towers.0.head.{n}" for n in head}
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def test_all_and_none() -> None:
    network = make(norm="batch")
    state = {n for n in tower(network).encoder.state_dict() if "num_batches" not in n}
    flat = FlatWeights(network)
    assert state < {s.name.removeprefix("towers.0.encoder.") for s in flat.spans}
    assert not flat.constants() and flat.digest_constants() == ""
    frozen = make(train="none")
    assert not trained(frozen)
    constants = FlatWeights(frozen).constants()
    assert {n.removeprefix("towers.0.encoder.") for n in constants} == state


def test_frozen_batch_norm_is_that_of_evaluation_and_its_weights_train() -> None:
    network = make()
    assert not network.has_batch_norm and not any("running" in name for name in trained(network))
    assert "stem.1.weight" in trained(network)
    encoder, x = tower(network).encoder.double(), torch.rand(4, 3, 32, 32, dtype=torch.float64)
    for name, value in encoder.state_dict().items():
        if "running" in name:
            value.uniform_(0.5, 1.5)
    before = copy.deepcopy(encoder.state_dict())
    network.train()
    found = encoder(x)
    assert torch.equal(found, encoder.eval()(x))
    assert all(torch.equal(v, before[n]) for n, v in encoder.state_dict().items())
    torch.testing.assert_close(found, torch.cat([encoder(one[None]) for one in x]))
    moving = make(norm="batch")
    assert moving.has_batch_norm and "stem.1.running_mean" in trained(moving)


@pytest.mark.parametrize("name", TIMM[::2])
def test_norms_are_all_norms_and_only_those(name: str) -> None:
    network = make(f"timm/{name}", train="norms", norm="batch")
    body = tower(network).encoder.body
    norms = {p: m for p, m in body.named_modules() if isinstance(m, BatchNorm)}  # type: ignore[union-attr]
    kinds = ("weight", "bias", "running_mean", "running_var")
    assert trained(network) == {f"body.{p}.{kind}" for p in norms for kind in kinds}
    assert network.has_batch_norm


def test_norms_of_a_transformer() -> None:
    names = trained(make("timm/vit_tiny_patch16_224", train="norms"))
    assert len(names) == 2 * 25 and all("norm" in name for name in names)


@pytest.mark.parametrize("name", TIMM)
def test_last_blocks_are_timms(name: str) -> None:
    network = make(f"timm/{name}", train="last:2")
    model = timm.create_model(name, num_classes=0)
    layers = timm.models.group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    last = max(layers.values()) - 1
    assert trained(network) == {f"body.{n}" for n, layer in layers.items() if layer >= last}


@pytest.mark.parametrize(
    ("name", "train", "expected"),
    [
        ("resnet18", "last:1", {"stages.7"}),
        ("resnet18", "last:9", {"stem.0", "stem.1", *(f"stages.{i}" for i in range(8))}),
        ("tiny", "last:1", {"layers.6", "layers.7"}),
        ("vit-tiny", "last:2", {"layers.10", "layers.11", "norm.weight", "norm.bias"}),
    ],
)
def test_last_blocks_of_ours(name: str, train: str, expected: set[str]) -> None:
    found = trained(make(name, train=train))
    assert {".".join(n.split(".")[:2]) for n in found} == expected


def test_blocks_of_a_users_own_module() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(3))
            self.first = nn.Linear(3, 3)
            self.middle = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
            self.last = nn.Linear(3, 3)

    wrapped = nn.Module()
    wrapped.body, wrapped.input = Own(), Input(3)
    numbers = {name.removesuffix(".weight"): n for name, n in number_blocks(wrapped).items()}
    parts = ("token", "first", "middle.0", "middle.1", "middle.2", "last")
    assert [numbers[f"body.{part}"] for part in parts] == [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize("name", ["vit-tiny", *(f"timm/{n}" for n in TIMM)])
@pytest.mark.parametrize("factors", ["one", "both"])
def test_low_rank_updates_cover_linear_layers_and_pointwise_convolutions(
    name: str, factors: str
) -> None:
    network = make(name, train="lora:4", factors=factors, norm="frozen")
    plain = tower(make(name)).encoder
    layers = {
        n
        for n, m in plain.named_modules()
        if isinstance(m, nn.Linear) or (isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1))
        if getattr(m, "groups", 1) == 1
    }
    kinds = ("up", "down") if factors == "both" else ("up",)
    wanted = {f"{n}.parametrizations.weight.0.{kind}" for n in layers for kind in kinds}
    assert trained(network) == wanted
    x = torch.rand(2, 3, 32, 32)
    encoder = tower(network).encoder.eval()
    with torch.no_grad():
        torch.testing.assert_close(encoder(x), plain.eval()(x))  # it starts as it was
        for n, p in encoder.named_parameters():
            if n.endswith("up"):
                p.normal_(std=0.02, generator=torch.Generator().manual_seed(p.numel()))
        expected = encoder(x)
        assert not torch.allclose(expected, plain(x))
    merged = merge_factors(copy.deepcopy(encoder))
    assert merged.state_dict().keys() == plain.state_dict().keys()
    assert all(p.requires_grad for p in merged.parameters())
    plain.load_state_dict(merged.state_dict())
    with torch.no_grad():
        assert torch.equal(plain(x), expected)  # exactly: both have the same weights
        assert torch.equal(encoder(x), expected)  # and the original still has its factors


def test_a_step_along_one_factor_is_a_projected_step_of_the_whole_weight() -> None:
    torch.manual_seed(0)
    network = make("vit-tiny", train="lora:8").double()
    plain = make("vit-tiny").double()
    plain.load_state_dict({**plain.state_dict(), **_merged(network)})
    x, rate = (torch.rand(3, 3, 32, 32, dtype=torch.float64),), 0.1
    flats = [FlatWeights(each) for each in (network, plain)]
    for flat, net in zip(flats, (network, plain), strict=True):
        (gradients,) = differentiate(net(x)[0].square().sum(), flat)
        flat.take(gradients)
        flat.params.sub_(flat.gradient, alpha=rate)
    name = "towers.0.encoder.layers.3.mlp.0"
    down = network.get_submodule(name).parametrizations.weight[0].down  # type: ignore[union-attr,index]
    span = next(s for s in flats[1].spans if s.name == f"{name}.weight")
    step = -rate * span.of(flats[1].gradient) @ (down.T @ down)  # type: ignore[operator]
    before = _merged(make("vit-tiny", train="lora:8").double())[f"{name}.weight"]
    torch.testing.assert_close(_merged(network)[f"{name}.weight"], before + step)


def _merged(network: Network) -> dict[str, Tensor]:
    return merge_factors(copy.deepcopy(network)).state_dict()


@pytest.mark.parametrize("factors", ["one", "both"])
def test_the_mean_of_one_factor_is_the_mean_of_the_products(factors: str) -> None:
    """With both factors it is not, which is why one is the default."""
    network = make("vit-tiny", train="lora:2", factors=factors).double()
    flat = FlatWeights(network)
    generator = torch.Generator().manual_seed(0)
    ends, products = [], []
    for _ in range(3):
        noise = torch.rand(flat.vector.shape, generator=generator, dtype=torch.float64)
        ends.append(flat.vector + 0.1 * noise)
    for end in [*ends, torch.stack(ends).mean(0)]:
        flat.vector.copy_(end)
        products.append(_merged(network)["towers.0.encoder.layers.0.mlp.0.weight"])
    exact = torch.allclose(torch.stack(products[:3]).mean(0), products[3], rtol=0, atol=1e-12)
    assert exact == (factors == "one")


def test_the_constant_factor_is_the_same_on_every_machine() -> None:
    network = make("vit-tiny", train="lora:2")
    layer = tower(network).encoder.embed
    assert parametrize.is_parametrized(layer)  # type: ignore[arg-type]
    down = layer.parametrizations.weight[0].down  # type: ignore[union-attr,index]
    signs = (down * down.shape[1] ** 0.5).round().int().tolist()  # type: ignore[operator,union-attr,index]
    assert signs[0] == [1, -1, 1, 1, -1, 1, 1, -1, 1, -1, -1, 1]


@pytest.mark.parametrize("train", ["last:0", "last", "lora:x", "some", "norms:1"])
def test_an_unknown_choice_is_refused(train: str) -> None:
    with refused("encoder.train"):
        Encoder("resnet18", train=train)


def test_too_many_blocks_and_no_layers_for_factors() -> None:
    with refused("encoder.train", says="Use last:9 or fewer."):
        make(train="last:10")
    with refused("encoder.train", says="no linear layer"):
        make("tiny", train="lora:2")
