"""Encoders: from images in [0, 1], of any size, to feature vectors."""

from __future__ import annotations

import difflib
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fedssl.config import TIMM, Encoder, plugins
from fedssl.models.inputs import Input
from fedssl.models.norms import BatchNorm, Norm, replace_batch_norms, residual
from fedssl.models.vit import ViT, check_patch
from fedssl.models.wrapped import OwnEncoder, Wrapped
from fedssl.util.errors import UserError


class Tiny(nn.Module):
    """Three convolutions, about 75,000 parameters: for demonstrations and tests on a CPU."""

    def __init__(self, input: Input, norm: Norm) -> None:
        super().__init__()
        self.input = input
        widths = (input.channels, 32, 64, 96)
        self.features = widths[-1]
        self.layers = nn.Sequential()
        for i, (inputs, outputs) in enumerate(pairwise(widths)):
            self.layers.extend(norm.conv(inputs, outputs, 3, stride=1 if i == 2 else 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return features ``[B, 96]``."""
        return self.layers(self.input(x)).mean(dim=(2, 3))


class Block(nn.Module):
    """A body and a shortcut, which projects if the shape changes (He et al. 2016, Figure 5).

    The body has two 3 × 3 convolutions (left), or as a bottleneck 1 × 1, 3 × 3, 1 × 1 (right).
    """

    def __init__(
        self, inputs: int, width: int, stride: int, norm: Norm, bottleneck: bool = False
    ) -> None:
        super().__init__()
        self.outputs = 4 * width if bottleneck else width
        if bottleneck:
            layers = norm.conv(inputs, width, 1) + norm.conv(width, width, 3, stride)
        else:
            layers = norm.conv(inputs, width, 3, stride)
        last = norm.conv(width, self.outputs, 1 if bottleneck else 3, relu=False)
        self.body = nn.Sequential(*layers, *last)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != self.outputs or stride != 1:
            projection = norm.conv(inputs, self.outputs, 1, stride, relu=False)
            self.shortcut = nn.Sequential(*projection)

    def forward(self, x: Tensor) -> Tensor:
        """Return the ReLU of body plus shortcut."""
        return residual(self.body, self.shortcut, x)


class ResNet(nn.Module):
    """A residual network with the 3 × 3 stem for small images or the 7 × 7 stem for large ones."""

    name: str

    def __init__(
        self,
        depths: tuple[int, ...],
        bottleneck: bool,
        input: Input,
        norm: Norm,
        large_stem: bool,
    ) -> None:
        super().__init__()
        self.depths, self.has_large_stem = depths, large_stem
        self.input = input
        if large_stem:
            self.stem = nn.Sequential(*norm.conv(input.channels, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        else:
            self.stem = nn.Sequential(*norm.conv(input.channels, 64, 3))
        self.stages = nn.Sequential()
        self.features = 64
        for stage, depth in enumerate(depths):
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                block = Block(self.features, 64 * 2**stage, stride, norm, bottleneck)
                self.stages.append(block)
                self.features = block.outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return features ``[B, self.features]``."""
        return self.stages(self.stem(self.input(x))).mean(dim=(2, 3))


OTHER = "Use another encoder."


class Timm(Wrapped):
    """A timm model without its classifier, with timm's names in its state.

    Transformers are built for one image size; other models take any size.
    """

    def __init__(self, name: str, size: int, input: Input) -> None:
        super().__init__()
        self.name = name
        self.input = input
        # Tokens and positions, which ``initialize`` leaves alone, are the same for every seed.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.body, self.arguments = _backbone(name, input.channels, size)
        replace_batch_norms(self.body)
        self.size: int | None = self.arguments.get("img_size")
        self.features = self._features(input.channels, size)

    def _features(self, channels: int, size: int) -> int:
        """Count the features by encoding an image: timm's models have no common name for it."""
        try:
            shape = self.encode_zeros(channels, size).shape
        except Exception as error:  # a map that has become empty
            raise _unfit(self.name, size, error) from None
        if len(shape) != 2:
            raise _error(self.name, f"features have the shape {tuple(shape[1:])}, not one vector")
        return int(shape[1])

    def forward(self, x: Tensor) -> Tensor:
        """Return features ``[B, features]``."""
        if self.size is not None and x.shape[2:] != (self.size, self.size):
            raise _error(
                self.name,
                f"built for images of {self.size} by {self.size} pixels, and these have "
                f"{x.shape[2]} by {x.shape[3]}",
                "Use one size for data.size and evaluate.size.",
            )
        return self.body(self.input(x))


def _backbone(name: str, channels: int, size: int) -> tuple[nn.Module, dict[str, Any]]:
    """Create a timm model; return its arguments, too."""
    try:
        import timm
    except ImportError:
        raise _error(name, "needs timm", "Run pip install 'fedssl[timm]'.") from None
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        fix = f"Use {' or '.join(TIMM + n for n in close)}." if close else OTHER
        raise _error(name, "timm has no such model", fix)
    create: Any = timm.create_model
    arguments = {"num_classes": 0, "in_chans": channels}
    sized = {**arguments, "img_size": size}
    try:
        return create(name, **sized), sized
    except TypeError:  # most convolutional networks take any size, and no such argument
        return create(name, **arguments), arguments
    except Exception as error:  # patches or windows that do not fit
        raise _unfit(name, size, error) from None


def _unfit(name: str, size: int, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [""])[0] or type(error).__name__
    return _error(
        name,
        f"cannot encode images of {size} by {size} pixels ({reason})",
        "Use another encoder or data.size.",
    )


def _error(name: str, problem: str, fix: str = OTHER) -> UserError:
    return UserError(problem, key="encoder.name", value=f"{TIMM}{name}", fix=fix)


RESNETS = {  # depths, and whether blocks are bottlenecks
    "resnet14": ((2, 2, 2), False),  # 6n + 2 layers with n = 2 (He et al., section 4.2)
    "resnet18": ((2, 2, 2, 2), False),
    "resnet50": ((3, 4, 6, 3), True),
}
LARGE_IMAGE = 96  # pixels per side from which a residual network has the large stem


def encoder(
    settings: Encoder, channels: int, size: int, seed: int = 0
) -> Tiny | ResNet | ViT | Timm | OwnEncoder:
    """Build the configuration's encoder, for images of ``size`` pixels per side.

    ``seed`` is for a user's own code that makes one; ``initialize`` draws the weights of others.
    """
    input = Input.from_config(settings, channels)
    if plugins.is_own(settings.name):
        return OwnEncoder(settings.name, size, seed, input)
    norm = Norm("group" if settings.norm == "group" else "batch", settings.groups)
    if settings.name == "tiny":
        return Tiny(input, norm)
    if settings.name == "vit-tiny":
        check_patch(settings.patch, size, size)
        return ViT(input, settings.patch)
    if settings.name.startswith(TIMM):
        body = Timm(settings.name.removeprefix(TIMM), size, input)
        if settings.norm == "group" and any(isinstance(m, BatchNorm) for m in body.modules()):
            raise UserError(
                f"{settings.name} has batch norm",
                key="encoder.norm",
                value="group",
                fix="Use encoder.norm=batch or encoder.norm=frozen.",
            )
        return body
    resnet = ResNet(*RESNETS[settings.name], input, norm, large_stem=size >= LARGE_IMAGE)
    resnet.name = settings.name
    return resnet
