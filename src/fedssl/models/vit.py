"""Vision transformers (Dosovitskiy et al. 2020): the encoder of the Dec-SSL paper's MAE (C.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.models.inputs import Input
from fedssl.util.errors import UserError

WIDTH, LAYERS, HEADS = 192, 12, 3  # ViT-Tiny
EPSILON = 1e-6  # of its layer norms


def check_patch(patch: int, height: int, width: int) -> None:
    """Check that images have at least two whole patches per side."""
    if height % patch or width % patch or min(height, width) < 2 * patch:
        raise UserError(
            f"images of {height} by {width} pixels have no two or more whole patches per side",
            key="encoder.patch",
            value=patch,
            fix="Use another patch or image size (data.size, evaluate.size).",
        )


def patches(images: Tensor, patch: int) -> Tensor:
    """Cut images into the pixels of their patches, row by row: ``[B, N, C · patch²]``."""
    check_patch(patch, *images.shape[2:])
    cut = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # B, C, rows, p, columns, p
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def positions(rows: int, columns: int, like: Tensor) -> Tensor:
    """Return sines and cosines of each patch's column and row, ``[N, WIDTH]`` (He et al., A.1).

    They are neither learned nor stored, so that any image size works.
    """

    def steps(count: int) -> Tensor:
        return torch.arange(count, dtype=like.dtype, device=like.device)

    places = torch.cartesian_prod(steps(rows), steps(columns))
    scales = 10000 ** (steps(WIDTH // 4) / (WIDTH // 4))
    angles = [places[:, axis, None] / scales for axis in (1, 0)]
    return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1)


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens ``[B, N, WIDTH]``."""
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention, then an MLP of four times the width, both on normalized tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH, EPSILON)
        self.attention = Attention()
        self.before_mlp = nn.LayerNorm(WIDTH, EPSILON)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens ``[B, N, WIDTH]``."""
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class ViT(nn.Module):
    """ViT-Tiny without a class token: its features are the mean of its tokens.

    MAE's loss would reach a class token only through the other tokens, and He et al. (2021, A.1)
    found the mean as good.
    """

    features = WIDTH

    def __init__(self, input: Input, patch: int) -> None:
        super().__init__()
        self.input = input
        self.patch = patch
        self.embed = nn.Linear(input.channels * patch**2, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """Return features ``[B, 192]``."""
        places = positions(x.shape[2] // self.patch, x.shape[3] // self.patch, x)
        return self.tokens(patches(self.input(x), self.patch), places).mean(1)

    def tokens(self, patches: Tensor, places: Tensor) -> Tensor:
        """Return the tokens of some or all patches, given their positions."""
        return self.norm(self.layers(self.embed(patches) + places))
