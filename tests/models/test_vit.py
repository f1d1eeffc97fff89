"""ViT-Tiny against timm's and lightly's, and in everything that a run does with an encoder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import engine_of, groups_of, made_split, refused, settings, train
from lightly.models.utils import initialize_2d_sine_cosine_positional_embedding
from rounds import assert_refused
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedssl import config as configuration
from fedssl.config import Encoder
from fedssl.models.encoders import encoder
from fedssl.models.inputs import Input
from fedssl.models.network import initialize
from fedssl.models.norms import NORMS
from fedssl.models.vit import ViT, positions
from fedssl.runs import loop
from fedssl.runs.build import build_experiment

VIT = ("encoder.name=vit-tiny", "encoder.groups=8")
SIMCLR = ("objective.name=simclr", "objective.projector=32,16", "algorithm.name=fedavg")


def timms(ours: ViT, channels: int, size: tuple[int, int], patch: int) -> VisionTransformer:
    """timm's ViT-Tiny with our weights; positions are those that its caller sets."""
    theirs = VisionTransformer(
        img_size=size, patch_size=patch, in_chans=channels, num_classes=0, global_pool="avg",
        embed_dim=192, depth=12, num_heads=3, class_token=False, fc_norm=False,
    ).double()  # fmt: skip
    names = [k for k in theirs.state_dict() if k != "pos_embed"]
    state = dict(zip(names, ours.state_dict().values(), strict=True))
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].unflatten(
        1, (channels, patch, patch)
    )
    missing = theirs.load_state_dict(state, strict=False)
    assert missing.missing_keys == ["pos_embed"] and not missing.unexpected_keys
    return theirs.eval()


@pytest.mark.parametrize(
    ("channels", "size", "patch"), [(3, (32, 32), 2), (1, (8, 16), 4)], ids=["cifar", "oblong"]
)
def test_equal_weights_give_timms_features(
    channels: int, size: tuple[int, int], patch: int
) -> None:
    ours = ViT(Input(channels), patch).double()
    initialize(ours, 0)
    for norm in (m for m in ours.modules() if isinstance(m, nn.LayerNorm)):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    theirs = timms(ours, channels, size, patch)
    x = torch.rand(3, channels, *size, dtype=torch.float64)
    with torch.no_grad():
        theirs.pos_embed.copy_(positions(size[0] // patch, size[1] // patch, x)[None])
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-10, atol=1e-10)


def test_positions_are_lightlys() -> None:
    theirs = nn.Parameter(torch.zeros(1, 256, 192), requires_grad=False)
    initialize_2d_sine_cosine_positional_embedding(theirs, num_prefix_tokens=0)
    torch.testing.assert_close(positions(16, 16, torch.zeros(())), theirs[0], rtol=0, atol=1e-5)


def test_a_large_grid_goes_on_where_a_small_one_ends() -> None:
    small, large = (positions(n, n, torch.zeros((), dtype=torch.float64)) for n in (4, 6))
    assert torch.equal(large.view(6, 6, -1)[:4, :4], small.view(4, 4, -1))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_any_image_size_and_layer_norms_only(norm: str) -> None:
    net = encoder(Encoder("vit-tiny", norm=norm, patch=4), 1, 16)  # type: ignore[arg-type]
    assert net.features == 192
    with torch.no_grad():
        for height, width in ((8, 8), (16, 24)):
            assert net(torch.rand(2, 1, height, width)).shape == (2, 192)
    assert {type(m) for m in net.modules() if isinstance(m, NORMS)} == {nn.LayerNorm}
    assert not list(net.buffers())


@pytest.mark.parametrize("shape", [(8, 9), (10, 8), (4, 8)])
def test_images_that_are_not_patches_are_refused(shape: tuple[int, int]) -> None:
    with refused("encoder.patch", 4):
        ViT(Input(1), 4)(torch.rand(1, 1, *shape))


@pytest.mark.parametrize("word", ["encoder.patch=3", "encoder.patch=8", "evaluate.size=9"])
def test_refused_before_any_training(word: str) -> None:
    assert_refused("data.size=8", *VIT, word, key="encoder.patch")


def test_two_rounds_of_simclr_and_layer_norms_that_stay_at_home() -> None:
    config = settings(*SIMCLR, *VIT, "algorithm.norm_policy=local")
    engine, server = engine_of(config, made_split(), groups_of(5, 6))
    kept = engine.trainer.kept
    norms = [m for m in engine.trainer.network.modules() if isinstance(m, NORMS)]
    assert kept is not None and len(norms) == 26  # the projector has one too
    assert len(kept) == sum(p.numel() for m in norms for p in m.parameters())
    before = server.weights.clone()
    after = train(engine, server, 2)
    assert torch.isfinite(after).all() and not torch.equal(after, before)
    own = [engine.states[k]["norm"] for k in (0, 1)]
    assert not torch.equal(own[0], own[1])  # type: ignore[arg-type]


def test_a_run_exports_an_encoder_that_another_starts_from(tmp_path: Path) -> None:
    words = [
        *("rounds=1", "cohort.size=2", "data.size=8", "data.labels=60", "evaluate.protocols=knn"),
        *("evaluate.baselines=[]", "engine.threads=1", "encoder.patch=4", *VIT),
        *("algorithm.name=fedavg", "objective.name=mae"),
    ]
    recipe = configuration.read_recipe(None)
    summary = loop.run(configuration.resolve(recipe, words), tmp_path / "run")
    assert 0 <= summary["knn_top1"] <= 100
    assert json.loads((tmp_path / "run" / "encoder.json").read_text())["features"] == 192
    stored = load_file(tmp_path / "run" / "encoder.safetensors")
    init = f"encoder.init={tmp_path / 'run'}"
    network = build_experiment(configuration.resolve(recipe, [*words, init])).trainer.network
    found = network.towers[0].encoder.state_dict()
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)
    with refused("encoder.init", says="embed.weight"):
        build_experiment(configuration.resolve(recipe, [*words, init, "encoder.patch=2"]))
