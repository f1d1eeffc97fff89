"""MAE (He et al. 2021): rebuild the patches of an image that the encoder did not see."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.config import Encoder, ObjectiveParams
from fedssl.data.random import mix, uniform
from fedssl.models.network import Network, Tower
from fedssl.models.norms import Norm
from fedssl.models.vit import EPSILON, WIDTH, Layer, ViT, patches, positions
from fedssl.objectives.base import Objective
from fedssl.objectives.batch import Memory
from fedssl.util.errors import UserError

VISIBLE = 4  # one patch of so many is seen, so that 75 % are masked
LAYERS = 4  # of the decoder
PURPOSE = zlib.crc32(b"mask")  # unlike the numbers of views, which draw from the same state


class Decoder(nn.Module):
    """Pixels of the patches that were not seen, from the tokens of those that were."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, WIDTH)
        self.mask = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, EPSILON)
        self.pixels = nn.Linear(WIDTH, outputs)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """``places`` of all patches, those of ``tokens`` first; the order is all the same."""
        seen, hidden = tokens.shape[1], places.shape[1] - tokens.shape[1]
        masks = self.mask.to(tokens.dtype).expand(len(tokens), hidden, -1)
        x = self.layers(torch.cat((self.embed(tokens).to(tokens.dtype), masks), 1) + places)
        return self.pixels(self.norm(x[:, seen:]))


class MAE(Objective):
    """The mean squared error of masked patches (Dec-SSL paper, appendix B.1; He et al., section 3).

    Encodings are the decoder's pixels and the image's, of the masked patches only. The decoder is
    the head: it is not kept.
    """

    inputs = 1

    @dataclass(frozen=True)
    class Params(ObjectiveParams):
        """No keys of its own."""

    def head_for(
        self, encoder: Encoder, channels: int, features: int, norm: Norm, classes: int
    ) -> nn.Module:
        """The decoder of patches as the encoder cuts them."""
        if encoder.name != "vit-tiny":
            raise UserError(
                f"encoder.name={encoder.name}: objective.name={self.params.name} hides patches "
                "from the encoder, which needs encoder.name=vit-tiny"
            )
        return Decoder(features, channels * encoder.patch**2)

    def head(self, features: int, norm: Norm, classes: int) -> nn.Module:
        """Not without an encoder."""
        raise NotImplementedError

    def project(
        self, network: Network, inputs: tuple[Tensor, ...], state: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The masked patches, rebuilt and as they are: ``[B, 3N/4, C · patch²]`` each."""
        assert state is not None
        tower = cast(Tower, network.towers[0])
        encoder, (images,) = cast(ViT, tower.encoder), inputs
        pixels = patches(images, encoder.patch)
        grid = (images.shape[2] // encoder.patch, images.shape[3] // encoder.patch)
        order, seen = shuffled(state, pixels.shape[1]), pixels.shape[1] // VISIBLE
        places = positions(*grid, images)[order]
        pixels = pixels.gather(1, order[..., None].expand(-1, -1, pixels.shape[2]))
        tokens = encoder.tokens(pixels[:, :seen], places[:, :seen])
        return tower.head(tokens, places), pixels[:, seen:]

    def loss(
        self, encodings: tuple[Tensor, ...], labels: Tensor | None, memory: Memory | None = None
    ) -> Tensor:
        """The mean over all masked pixels."""
        rebuilt, pixels = encodings
        return F.mse_loss(rebuilt, pixels)


def shuffled(state: Tensor, count: int) -> Tensor:
    """An order of ``count`` patches for each sample, from its own random numbers."""
    return uniform(mix(state, PURPOSE), count).argsort(dim=1, stable=True)
