"""Encoders: images in [0, 1] to feature vectors, of any image size (the last map is averaged)."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.config import Encoder
from fedssl.models import fused
from fedssl.models.norms import Norm
from fedssl.models.vit import ViT, check_patch


class Tiny(nn.Module):
    """Three convolutions, about 75,000 parameters: for demonstrations and tests on a CPU."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        widths = (channels, 32, 64, 96)
        self.features = widths[-1]
        self.layers = nn.Sequential()
        for i, (inputs, outputs) in enumerate(pairwise(widths)):
            self.layers.append(norm.conv(inputs, outputs, 3, stride=1 if i == 2 else 2))
            self.layers.append(norm.after_conv(outputs, relu=True))
            self.layers.append(norm.activation())

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[B, 96]``."""
        return self.layers(fused.layout(x)).mean(dim=(2, 3))


class Block(nn.Module):
    """A body and a shortcut (He et al. 2016, Figure 5)."""

    expansion: ClassVar[int]

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Body plus shortcut."""
        return F.relu(self.body(x) + self.shortcut(x))


class Basic(Block):
    """Two 3 × 3 convolutions (Figure 5 left)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        body = nn.Sequential(
            norm.conv(inputs, width, 3, stride),
            norm.after_conv(width, relu=True),
            norm.activation(),
            norm.conv(width, width, 3),
            norm.after_conv(width),
        )
        super().__init__(body, shortcut(inputs, width, stride, norm))


class Bottleneck(Block):
    """1 × 1, 3 × 3, 1 × 1 convolutions (Figure 5 right)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        outputs = width * self.expansion
        body = nn.Sequential(
            norm.conv(inputs, width, 1),
            norm.after_conv(width, relu=True),
            norm.activation(),
            norm.conv(width, width, 3, stride),
            norm.after_conv(width, relu=True),
            norm.activation(),
            norm.conv(width, outputs, 1),
            norm.after_conv(outputs),
        )
        super().__init__(body, shortcut(inputs, outputs, stride, norm))


def shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    """The identity, or a 1 × 1 projection where the shape changes."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(norm.conv(inputs, outputs, 1, stride), norm.after_conv(outputs))


class ResNet(nn.Module):
    """A residual network with the 3 × 3 stem for small images or the 7 × 7 stem for large ones."""

    def __init__(
        self,
        block: type[Basic] | type[Bottleneck],
        depths: tuple[int, ...],
        channels: int,
        norm: Norm,
        stem: Literal["small", "large"],
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            norm.conv(channels, 64, 3) if stem == "small" else norm.conv(channels, 64, 7, 2),
            norm.after_conv(64, relu=True),
            norm.activation(),
        )
        if stem == "large":
            self.stem.append(nn.MaxPool2d(3, 2, 1))
        self.stages = nn.Sequential()
        inputs = 64
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                self.stages.append(block(inputs, width, stride, norm))
                inputs = width * block.expansion
        self.features = inputs

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[B, 512]`` or ``[B, 2048]``."""
        return self.stages(self.stem(fused.layout(x))).mean(dim=(2, 3))


RESNETS: dict[str, tuple[type[Basic] | type[Bottleneck], tuple[int, ...]]] = {
    "resnet14": (Bottleneck, (1, 1, 1, 1)),  # the DCCO paper's, see section 4.2
    "resnet18": (Basic, (2, 2, 2, 2)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
}
LARGE_IMAGE = 96  # pixels a side from which a residual network has the large stem


def encoder(settings: Encoder, channels: int, size: int) -> Tiny | ResNet | ViT:
    """The encoder that the configuration names, for images of ``size`` pixels a side."""
    norm = Norm(settings.norm, settings.groups)
    if settings.name == "tiny":
        return Tiny(channels, norm)
    if settings.name == "vit-tiny":
        check_patch(settings.patch, size, size)
        return ViT(channels, settings.patch)
    stem: Literal["small", "large"] = "large" if size >= LARGE_IMAGE else "small"
    return ResNet(*RESNETS[settings.name], channels, norm, stem)
