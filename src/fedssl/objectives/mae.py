"""Masked autoencoder (He et al. 2021): rebuild the patches that the encoder did not see."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.config import Config, ObjectiveParams, Recipe
from fedssl.data.random import mix, uniform
from fedssl.models.network import Backbone, Heads, Tower
from fedssl.models.norms import Norm
from fedssl.models.vit import EPSILON, WIDTH, Layer, ViT, patches, positions
from fedssl.objectives.base import Encodings, Networks, Objective
from fedssl.objectives.batch import EncodedBatch
from fedssl.util.errors import UserError

VISIBLE = 4  # one patch of four is visible, so 75% are masked
LAYERS = 4  # of the decoder
PURPOSE = zlib.crc32(b"mask")  # so that masks differ from the views' random numbers


class Decoder(nn.Module):
    """Computes the pixels of masked patches from the tokens of visible patches."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, WIDTH)
        self.mask = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, EPSILON)
        self.pixels = nn.Linear(WIDTH, outputs)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Decode; ``places`` has the positions of all patches, first those of ``tokens``."""
        seen, hidden = tokens.shape[1], places.shape[1] - tokens.shape[1]
        masks = self.mask.to(tokens.dtype).expand(len(tokens), hidden, -1)
        x = self.layers(torch.cat((self.embed(tokens).to(tokens.dtype), masks), 1) + places)
        return self.pixels(self.norm(x[:, seen:]))


class MAE(Objective):
    """The mean squared error of masked patches (Dec-SSL paper, appendix B.1; He et al., section 3).

    Encodings are the decoder's pixels and the image's, of masked patches only, and the mean of the
    visible patches' tokens, which FeatARC aligns. The decoder is the head, so that it is not
    exported.
    """

    @dataclass(frozen=True)
    class Params(ObjectiveParams):
        """Keys of MAE: none of its own."""

        recommended: ClassVar[Recipe] = {
            **ObjectiveParams.recommended,
            "encoder": {"name": "vit-tiny"},
        }

        def check(self, config: Config) -> None:
            """Refuse encoders without patches."""
            if config.encoder.name != "vit-tiny":
                raise UserError(
                    "mae hides patches from the encoder, which must be a vision transformer",
                    key="objective.name",
                    value=self.name,
                    fix="Use encoder.name=vit-tiny.",
                    against="encoder.name",
                )

    views = 1

    def heads(self, encoder: Backbone, norm: Norm, classes: int) -> Heads:
        """Return the decoder of patches as the encoder cuts them."""
        vit = cast(ViT, encoder)
        return Heads(Decoder(vit.features, vit.embed.in_features))

    def encode(
        self, networks: Networks, views: tuple[Tensor, ...], state: Tensor | None
    ) -> Encodings:
        """Return the visible patches' features, and masked patches ``[B, 3N/4, C · patch²]``.

        The latter are rebuilt and true.
        """
        assert state is not None
        tower = cast(Tower, networks.online.towers[0])
        encoder, (images,) = cast(ViT, tower.encoder), views
        pixels = patches(encoder.input(images), encoder.patch)
        grid = (images.shape[2] // encoder.patch, images.shape[3] // encoder.patch)
        order, seen = shuffled(state, pixels.shape[1]), pixels.shape[1] // VISIBLE
        places = positions(*grid, images)[order]
        pixels = pixels.gather(1, order[..., None].expand(-1, -1, pixels.shape[2]))
        tokens = encoder.tokens(pixels[:, :seen], places[:, :seen])
        return tokens.mean(1), tower.head(tokens, places), pixels[:, seen:]

    def loss(self, batch: EncodedBatch) -> Tensor:
        """Return the mean over all masked pixels."""
        _, rebuilt, pixels = batch.encodings
        return F.mse_loss(rebuilt, pixels)


def shuffled(state: Tensor, count: int) -> Tensor:
    """Return an order of ``count`` patches for each sample, from its random state."""
    return uniform(mix(state, PURPOSE), count).argsort(dim=1, stable=True)
