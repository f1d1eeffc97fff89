"""MAE: what is masked, what the loss looks at, lightly's and timm's parts."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, settings
from lightly.models.modules import MaskedVisionTransformerTIMM
from lightly.models.utils import get_at_index, patchify, repeat_token, set_at_index
from rounds import epochs, losses
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from fedssl.config import Encoder
from fedssl.data.dataset import Split
from fedssl.models.network import Network, build
from fedssl.models.vit import patches
from fedssl.objectives.base import Networks
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.mae import MAE, shuffled

EPS = functools.partial(nn.LayerNorm, eps=1e-6)
MAE_ = ("objective.name=mae", "encoder.name=vit-tiny")
OURS = MAE(MAE.Params("mae"))


def encode(network: Network, view: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    return OURS.encode(Networks(network, None, {}), (view,), state)


def loss_of(rebuilt: Tensor, pixels: Tensor) -> Tensor:
    return OURS.loss(EncodedBatch((pixels, rebuilt, pixels)))  # without features


def tower_of(channels: int = 3, patch: int = 2, size: int = 8) -> tuple[Network, Any]:
    """A network in float64 whose norms and mask token are not those of the start."""
    settings = Encoder("vit-tiny", patch=patch)
    heads = lambda encoder, norm: OURS.heads(encoder, norm, 0)  # noqa: E731
    network = build(settings, (channels,), size, heads, seed=0).double()
    (tower,) = network.towers
    for norm in (m for m in network.modules() if isinstance(m, nn.LayerNorm)):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    nn.init.normal_(tower.head.mask)
    return network, tower


def images(count: int = 5, channels: int = 3, size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, channels, size, size, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(("count", "masked"), [(256, 192), (16, 12), (49, 37), (4, 3)])
def test_exactly_three_quarters_are_masked(count: int, masked: int) -> None:
    side = math.isqrt(count)
    network, _ = tower_of(1, 2, 2 * side)
    view, state = images(3, 1, 2 * side), torch.arange(3)
    _, rebuilt, pixels = encode(network, view, state)
    assert rebuilt.shape == pixels.shape == (3, masked, 4)
    order = shuffled(state, count)
    assert torch.equal(order.sort(1).values, torch.arange(count).expand(3, -1))
    for sample in range(3):
        expected = patches(view, 2)[sample, order[sample, count // 4 :]]
        assert torch.equal(pixels[sample], expected)


def test_masks_are_even_and_each_samples_own() -> None:
    state = torch.arange(4000)
    order = shuffled(state, 16)
    assert torch.equal(order[7:9], shuffled(state[7:9], 16))
    often = torch.bincount(order[:, :4].flatten(), minlength=16) / 4000
    assert (often - 0.25).abs().max() < 0.03  # four standard deviations of a share
    pairs = (order[:-1] == order[1:]).all(1)
    assert not pairs.any()


def test_masks_depend_on_round_client_and_sample() -> None:
    engine, _ = engine_of(settings(*MAE_, "algorithm.name=fedavg"), made_split(), groups_of(4, 4))

    def order(client: int, round: int) -> Tensor:
        member = engine.client(np.array([client]), round, remember=False)
        return shuffled(member._samples_of(0)[1], 16)

    assert torch.equal(order(0, 0), order(0, 0))
    assert not torch.equal(order(0, 0), order(1, 0))
    assert not torch.equal(order(0, 0), order(0, 1))


def test_the_loss_looks_at_masked_patches_only() -> None:
    """The encoder sees the rest: what the decoder makes of them is held fixed here."""
    network, _ = tower_of()
    network.requires_grad_(False)
    view, state = images(), torch.arange(5)
    _, rebuilt, pixels = encode(network, view, state)
    loss = loss_of(rebuilt, pixels)
    order = shuffled(state, 16)
    for chosen, changes in ((order[:, 0], False), (order[:, 4], True), (order[:, -1], True)):
        other = view.clone()
        for sample, patch in enumerate(chosen.tolist()):
            row, column = 2 * (patch // 4), 2 * (patch % 4)
            other[sample, :, row : row + 2, column : column + 2] += 1
        _, changed, target = encode(network, other, state)
        again = loss_of(rebuilt, target)
        assert (float((again - loss).abs()) > 1e-3) == changes
        # And the encoder sees the visible patches only.
        assert torch.equal(changed, rebuilt) == changes


def test_lightlys_encoder_and_timms_blocks_give_the_loss() -> None:
    """Encoder on kept tokens, decoder of all tokens in their places, the mean squared error."""
    network, tower = tower_of()
    view, state = images(), torch.arange(5) * 3 + 1
    ours = loss_of(*encode(network, view, state)[1:])
    order = shuffled(state, 16)
    keep, mask = order[:, :4], order[:, 4:]

    theirs = VisionTransformer(
        img_size=8, patch_size=2, num_classes=0, global_pool="avg", embed_dim=192, depth=12,
        num_heads=3, class_token=False, fc_norm=False,
    )  # fmt: skip
    encoder = MaskedVisionTransformerTIMM(theirs).double()
    names = [k for k in theirs.state_dict() if k != "pos_embed"]
    state_of = dict(zip(names, tower.encoder.state_dict().values(), strict=True))
    key = "patch_embed.proj.weight"
    state_of[key] = state_of[key].unflatten(1, (3, 2, 2))
    theirs.load_state_dict(state_of, strict=False)
    blocks = nn.Sequential(*(Block(192, 3, qkv_bias=True, norm_layer=EPS) for _ in range(4)))
    own = list(tower.head.layers.state_dict().values())
    blocks.double().load_state_dict(dict(zip(blocks.state_dict(), own, strict=True)))
    head = tower.head

    with torch.no_grad():
        tokens = head.embed(encoder.encode(view, idx_keep=keep))
        everything = repeat_token(head.mask[None, None], (5, 16))
        everything = set_at_index(everything, keep, tokens) + theirs.pos_embed
        rebuilt = get_at_index(head.pixels(head.norm(blocks(everything))), mask)
    # lightly's patches have their channels last.
    rebuilt = rebuilt.unflatten(2, (3, 2, 2)).permute(0, 1, 3, 4, 2).flatten(2)
    target = get_at_index(patchify(view, 2), mask)
    loss = nn.functional.mse_loss(rebuilt, target)
    # Its positions are rounded to float32.
    assert float(ours.detach()) == pytest.approx(float(loss), rel=1e-5)


def test_gradients_reach_all_of_encoder_and_decoder() -> None:
    network, _ = tower_of()
    loss_of(*encode(network, images(), torch.arange(5))[1:]).backward()
    for name, weight in network.named_parameters():
        assert weight.grad is not None and weight.grad.abs().max() > 0, name


@pytest.mark.usefixtures("shallow")
def test_it_learns_to_rebuild() -> None:
    """Images of one grey each: what is seen tells what is not."""
    grey = torch.arange(31, dtype=torch.uint8)[:, None, None, None] * 8
    split = Split((grey.expand(-1, 1, 8, 8).contiguous(),), labels=None)
    words = ("client.optimizer=adamw", "client.lr=0.001", "client.momentum=0", "augment.name=none")
    first, second = losses(epochs(*MAE_, *words, "algorithm.local_epochs=4"), split)
    assert second < 0.5 * first
