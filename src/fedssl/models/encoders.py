"""Encoders: images in [0, 1] to feature vectors, of any image size (the last map is averaged)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedssl.config import TIMM, Encoder
from fedssl.models.kernels import group_norm
from fedssl.models.norms import BatchNorm, Norm, adopt, residual
from fedssl.models.vit import ViT, check_patch
from fedssl.util.errors import UserError


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
        return self.layers(group_norm.layout(x)).mean(dim=(2, 3))


class Block(nn.Module):
    """A body and a shortcut (He et al. 2016, Figure 5)."""

    expansion: ClassVar[int]

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Body plus shortcut, cut off below 0."""
        return residual(self.body, self.shortcut, x)


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
        return self.stages(self.stem(group_norm.layout(x))).mean(dim=(2, 3))


class Timm(nn.Module):
    """A backbone of timm's, without its classifier; its state has timm's own names.

    Transformers are made for one image size; others take any.
    """

    def __init__(self, name: str, channels: int, size: int) -> None:
        super().__init__()
        self.name = name
        # What no rule of ours initializes (tokens, positions) is the same for every seed.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.body, self.arguments = _backbone(name, channels, size)
        adopt(self.body)
        self.size: int | None = self.arguments.get("img_size")
        frozen = [key for key, p in self.body.named_parameters() if not p.requires_grad]
        if frozen:
            raise UserError(
                f"encoder.name={TIMM}{name}: its {frozen[0]} is not learned, and all weights of an "
                "encoder are here; use another"
            )
        self.features = self._features(channels, size)

    def _features(self, channels: int, size: int) -> int:
        """Their number, by trying: timm's models say it under different names."""
        try:
            with torch.no_grad():
                shape = self.body.eval()(torch.zeros(1, channels, size, size)).shape
        except Exception as error:  # a map that has become empty
            raise _unfit(self.name, size, error) from None
        finally:
            self.body.train()
        if len(shape) != 2:
            raise UserError(
                f"encoder.name={TIMM}{self.name}: gives features of shape {tuple(shape[1:])}, not "
                "one vector an image; use another encoder"
            )
        return int(shape[1])

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[B, features]``."""
        if self.size is not None and x.shape[2:] != (self.size, self.size):
            raise UserError(
                f"encoder.name={TIMM}{self.name}: was made for images of {self.size} by "
                f"{self.size} pixels, and these have {x.shape[2]} by {x.shape[3]}; use one size "
                "(data.size, evaluate.size)"
            )
        return self.body(group_norm.layout(x))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As timm has it, with batch norm's counters, which nothing reads."""
        state = self.body.state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name, module in self.body.named_modules():
            if isinstance(module, BatchNorm):
                state[f"{prefix}{name}.num_batches_tracked"] = torch.tensor(0)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """From timm's names; ours count no batches, whatever is said of counters."""
        found = self.body.load_state_dict(state_dict, False, assign)
        wrong = [key for keys in found for key in keys if not key.endswith("num_batches_tracked")]
        if strict and wrong:
            raise RuntimeError(f"{self.name}: missing or unexpected weights {', '.join(wrong)}")
        return found


def _backbone(name: str, channels: int, size: int) -> tuple[nn.Module, dict[str, Any]]:
    """A timm model, and what it was made with."""
    try:
        import timm
    except ImportError:
        raise UserError(
            f"encoder.name={TIMM}{name}: needs timm; install it with: pip install 'fedssl[timm]'"
        ) from None
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        hint = f" (did you mean {' or '.join(TIMM + n for n in close)}?)" if close else ""
        raise UserError(f"encoder.name={TIMM}{name}: timm has no such model{hint}")
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
    return UserError(
        f"encoder.name={TIMM}{name}: cannot see images of {size} by {size} pixels ({reason}); use "
        "another encoder or data.size"
    )


RESNETS: dict[str, tuple[type[Basic] | type[Bottleneck], tuple[int, ...]]] = {
    "resnet14": (Bottleneck, (1, 1, 1, 1)),  # the DCCO paper's, see section 4.2
    "resnet18": (Basic, (2, 2, 2, 2)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
}
LARGE_IMAGE = 96  # pixels a side from which a residual network has the large stem


def encoder(settings: Encoder, channels: int, size: int) -> Tiny | ResNet | ViT | Timm:
    """The encoder that the configuration names, for images of ``size`` pixels a side."""
    norm = Norm(settings.norm, settings.groups)
    if settings.name == "tiny":
        return Tiny(channels, norm)
    if settings.name == "vit-tiny":
        check_patch(settings.patch, size, size)
        return ViT(channels, settings.patch)
    if settings.name.startswith(TIMM):
        body = Timm(settings.name.removeprefix(TIMM), channels, size)
        if settings.norm == "group" and any(isinstance(m, BatchNorm) for m in body.modules()):
            raise UserError(
                f"encoder.norm=group: encoder.name={settings.name} has batch norm by nature; set "
                "encoder.norm=batch"
            )
        return body
    stem: Literal["small", "large"] = "large" if size >= LARGE_IMAGE else "small"
    return ResNet(*RESNETS[settings.name], channels, norm, stem)
