"""Normalization layers: batch norm, or group norm on standardized weights."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedssl.models.kernels import batch_norm, group_norm
from fedssl.util.errors import UserError

STATISTICS_MOMENTUM = 0.1  # share of a batch in batch norm's running statistics
NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)  # the layers of algorithm.norm_policy


def standardize(weight: Tensor) -> Tensor:
    """Give each output's weights zero mean and unit variance (Qiao et al. 2019, Eq. 5)."""
    rows = weight.flatten(1)
    return F.layer_norm(rows, rows.shape[1:], eps=1e-10).view_as(weight)


class StandardizedConv2d(nn.Conv2d):
    """A convolution with standardized filters."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve with the standardized filters."""
        return self._conv_forward(x, standardize(self.weight), self.bias)


class StandardizedLinear(nn.Linear):
    """A linear layer with standardized rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the standardized rows."""
        return F.linear(x, standardize(self.weight), self.bias)


class BatchNorm(_BatchNorm):
    """Batch norm of a batch that stacks several views, each with its own statistics.

    With ``views`` one pass gives the numbers of a pass for each view, running statistics included.
    With ``relu`` it also applies the ReLU after it. With ``is_frozen`` it stays at its running
    statistics, in training as in evaluation.
    """

    views = 1
    is_frozen = False

    def __init__(self, channels: int, relu: bool = False) -> None:
        super().__init__(channels, momentum=STATISTICS_MOMENTUM)
        self.num_batches_tracked = None  # nothing reads it, and a resumed run would restart it
        self.relu = relu

    def train(self, mode: bool = True) -> Self:
        """Set the mode, unless the statistics are frozen."""
        return super().train(mode and not self.is_frozen)

    def _check_input_dim(self, input: Tensor) -> None:
        return  # feature maps and vectors alike

    def forward(self, input: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Normalize, and apply ReLU if asked; at the end of a block add the shortcut before ReLU.

        ``views`` matters only in training.
        """
        relu = self.relu or shortcut is not None
        # Kernels only in compiled steps: to start them from Python is slow.
        if self.training and torch.compiler.is_compiling() and batch_norm.applies(input):
            parameters = self.weight, self.bias, self.eps, self.views
            y, mean, variance = batch_norm.batch_norm(input, shortcut, *parameters, relu)
            self._follow(mean, variance, input)
            return y
        y = self._apart(input) if self.training and self.views > 1 else super().forward(input)
        y = y if shortcut is None else y + shortcut
        return F.relu(y, inplace=True) if relu else y

    def _apart(self, input: Tensor) -> Tensor:
        """Normalize each view by its own statistics."""
        x = input.unflatten(0, (self.views, -1)).to(torch.promote_types(input.dtype, torch.float32))
        over = [1, *range(3, x.dim())]
        variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
        shape = (1, 1, -1, *[1] * (x.dim() - 3))
        y = (x - mean) * torch.rsqrt(variance + self.eps)
        y = y * self.weight.view(shape) + self.bias.view(shape)
        self._follow(mean.flatten(1), variance.flatten(1), input)
        return y.flatten(0, 1).to(input.dtype)

    @torch.no_grad()
    def _follow(self, means: Tensor, variances: Tensor, input: Tensor) -> None:
        """Update the running statistics view by view."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.momentum is not None
        samples = input.numel() // (self.views * input.shape[1])
        for mean, variance in zip(means, variances, strict=True):
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (samples / (samples - 1)), self.momentum)


class BatchNormAct(BatchNorm):
    """A batch norm with dropout and activation, like timm's."""

    def __init__(self, channels: int, drop: nn.Module, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop = drop
        self.act = act

    def forward(self, input: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Normalize, drop and activate."""
        return self.act(self.drop(super().forward(input, shortcut)))


class GroupNorm(nn.GroupNorm):
    """Group norm, and with ``relu`` the ReLU after it, in one kernel where there is one."""

    def __init__(self, groups: int, channels: int, relu: bool) -> None:
        super().__init__(groups, channels)
        self.relu = relu

    def forward(self, input: Tensor) -> Tensor:
        """Normalize, and apply ReLU if asked."""
        if group_norm.applies(input, self.num_groups):
            return group_norm.group_norm(
                input, self.weight, self.bias, self.num_groups, self.eps, self.relu
            )
        y = super().forward(input)
        return F.relu(y, inplace=True) if self.relu else y


def residual(body: nn.Sequential, shortcut: nn.Module, x: Tensor) -> Tensor:
    """Compute ``relu(body(x) + shortcut(x))``, from the norms on in one kernel if possible.

    Both end in a norm of the same kind, unless the shortcut is the identity.
    """
    y, norm = _before_norm(body, x)
    if isinstance(norm, BatchNorm):
        return norm(y, shortcut(x))
    z, norm_z = _before_norm(shortcut, x) if isinstance(shortcut, nn.Sequential) else (x, None)
    groups = norm.num_groups
    if group_norm.applies(y, groups) and group_norm.applies(z, groups):
        w, b = (None, None) if norm_z is None else (norm_z.weight, norm_z.bias)
        return group_norm.residual(y, norm.weight, norm.bias, z, w, b, groups, norm.eps)
    return F.relu(norm(y) + (z if norm_z is None else norm_z(z)))


def _before_norm(layers: nn.Sequential, x: Tensor) -> tuple[Tensor, Any]:
    """Return the input of the final norm, and the norm."""
    *most, norm = layers
    for layer in most:
        x = layer(x)
    return x, norm


@dataclass(frozen=True)
class Norm:
    """Builds a network's layers, each with the batch norm or group norm after it.

    >>> Norm("group", groups=32).conv(3, 64, size=3)[1]
    GroupNorm(32, 64, eps=1e-05, affine=True)

    Weights are standardized below group norm. Layers have no bias, since the norm has one. A norm
    includes the ReLU after it; an identity in ReLU's place keeps the names in state dicts.
    """

    kind: Literal["batch", "group"]
    groups: int = 32

    def conv(
        self, inputs: int, outputs: int, size: int, stride: int = 1, relu: bool = True
    ) -> list[nn.Module]:
        """Build a convolution, its norm and ReLU."""
        kind = nn.Conv2d if self.kind == "batch" else StandardizedConv2d
        layer = kind(inputs, outputs, size, stride, padding=size // 2, bias=False)
        return [layer, *self._after(outputs, relu)]

    def linear(self, inputs: int, outputs: int) -> list[nn.Module]:
        """Build a linear layer, its norm and ReLU."""
        kind = nn.Linear if self.kind == "batch" else StandardizedLinear
        # A group of one number would become 0.
        return [kind(inputs, outputs, bias=False), *self._after(outputs, relu=True, smallest=2)]

    def _after(self, channels: int, relu: bool, smallest: int = 1) -> list[nn.Module]:
        fits = channels % self.groups == 0 and channels >= smallest * self.groups
        if self.kind == "group" and not fits:
            groups = f"{self.groups} groups of at least {smallest}"
            raise UserError(
                f"{channels} channels do not divide into {groups}",
                key="encoder.groups",
                value=self.groups,
                fix=f"Use a divisor of {channels}, at most {channels // smallest}.",
            )
        batch = self.kind == "batch"
        norm = BatchNorm(channels, relu) if batch else GroupNorm(self.groups, channels, relu)
        return [norm, nn.Identity()] if relu else [norm]


def freeze_batch_norms(module: nn.Module) -> None:
    """Keep a network's batch norms at their running statistics."""
    for each in module.modules():
        if isinstance(each, BatchNorm):
            each.is_frozen = True
            each.eval()


def mixes_samples(module: nn.Module) -> bool:
    """Return whether a layer normalizes by the statistics of a batch."""
    norms = (each for each in module.modules() if isinstance(each, _BatchNorm))
    return not all(isinstance(each, BatchNorm) and each.is_frozen for each in norms)


def replace_batch_norms(module: nn.Module) -> None:
    """Replace a network's batch norms by :class:`BatchNorm`, with the same names and numbers."""
    ours: dict[nn.Module, BatchNorm] = {}
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # also where one is in two places
            if isinstance(child, _BatchNorm) and not isinstance(child, BatchNorm):
                ours.setdefault(child, _like(child))
                setattr(parent, name, ours[child])


def _like(theirs: _BatchNorm) -> BatchNorm:
    timm = sys.modules.get("timm.layers.norm_act")  # where it is missing, no network has its norm
    has_act = timm is not None and type(theirs) is timm.BatchNormAct2d
    known = (has_act or type(theirs) in (nn.BatchNorm1d, nn.BatchNorm2d)) and theirs.affine
    if not known or not theirs.track_running_stats or theirs.momentum is None:
        raise UserError(
            f"the encoder has an unsupported batch norm ({type(theirs).__name__})",
            key="encoder.name",
            fix="Use another encoder.",
        )
    norm = BatchNorm(theirs.num_features)
    if has_act:
        norm = BatchNormAct(theirs.num_features, *map(theirs.get_submodule, ("drop", "act")))
    norm.eps, norm.momentum = theirs.eps, theirs.momentum
    norm.weight, norm.bias = theirs.weight, theirs.bias
    return norm
