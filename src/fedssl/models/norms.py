"""Normalization is one choice for a network: batch norm, or group norm on standardized weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedssl.errors import UserError
from fedssl.models import fused

STATISTICS_MOMENTUM = 0.1  # share of a batch in batch norm's running statistics
NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)  # what algorithm.norm_policy is about


def standardize(weight: Tensor) -> Tensor:
    """Zero mean and unit variance over each output's inputs (Qiao et al. 2019, Eq. 5)."""
    rows = weight.flatten(1)
    return F.layer_norm(rows, rows.shape[1:], eps=1e-10).view_as(weight)


class StandardizedConv2d(nn.Conv2d):
    """A convolution whose filters are standardized at every use."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve with the standardized filters."""
        return self._conv_forward(x, standardize(self.weight), self.bias)


class StandardizedLinear(nn.Linear):
    """A linear layer whose rows are standardized at every use."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the standardized rows."""
        return F.linear(x, standardize(self.weight), self.bias)


class BatchNorm(_BatchNorm):
    """Batch norm of a batch in which several views follow one another: each by its own statistics.

    With ``views`` the numbers are those of one pass a view (running statistics too), in one pass.
    """

    views = 1

    def _check_input_dim(self, input: Tensor) -> None:
        return  # feature maps and vectors alike

    def forward(self, input: Tensor) -> Tensor:
        """Normalize; ``views`` matters in training only."""
        if self.views == 1 or not self.training:
            return super().forward(input)
        assert self.running_mean is not None and self.running_var is not None
        assert self.momentum is not None
        x = input.unflatten(0, (self.views, -1)).to(torch.promote_types(input.dtype, torch.float32))
        over = [1, *range(3, x.dim())]
        variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
        shape = (1, 1, -1, *[1] * (x.dim() - 3))
        y = (x - mean) * torch.rsqrt(variance + self.eps)
        y = y * self.weight.view(shape) + self.bias.view(shape)
        samples = x.numel() // (self.views * x.shape[2])
        with torch.no_grad():
            for m, v in zip(mean.flatten(1), variance.flatten(1), strict=True):
                self.running_mean.lerp_(m, self.momentum)
                self.running_var.lerp_(v * (samples / (samples - 1)), self.momentum)
        return y.flatten(0, 1).to(input.dtype)


class BatchNormAct(BatchNorm):
    """A batch norm that holds what comes after it, as timm has them."""

    def __init__(self, channels: int, drop: nn.Module, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop = drop
        self.act = act

    def forward(self, input: Tensor) -> Tensor:
        """Normalize, then the rest."""
        return self.act(self.drop(super().forward(input)))


class GroupNorm(nn.GroupNorm):
    """Group norm, and with ``relu`` the ReLU after it: in one kernel where there is one."""

    def __init__(self, groups: int, channels: int, relu: bool) -> None:
        super().__init__(groups, channels)
        self.relu = relu

    def forward(self, input: Tensor) -> Tensor:
        """Normalize, and cut off below 0."""
        if fused.applies(input, self.num_groups):
            return fused.group_norm(
                input, self.weight, self.bias, self.num_groups, self.eps, self.relu
            )
        y = super().forward(input)
        return F.relu(y, inplace=True) if self.relu else y


@dataclass(frozen=True)
class Norm:
    """Makes the layers of a network in its batch-norm or group-norm form.

    >>> Norm("group", groups=32).after_conv(64)
    GroupNorm(32, 64, eps=1e-05, affine=True)

    With ``relu`` a ReLU follows, which is ``activation()``: group norm has it within.
    """

    kind: Literal["batch", "group"]
    groups: int = 32

    def conv(self, inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
        """A convolution without bias: the norm after it has one."""
        layer = nn.Conv2d if self.kind == "batch" else StandardizedConv2d
        return layer(inputs, outputs, size, stride, padding=size // 2, bias=False)

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        """A linear layer without bias: the norm after it has one."""
        layer = nn.Linear if self.kind == "batch" else StandardizedLinear
        return layer(inputs, outputs, bias=False)

    def activation(self) -> nn.Module:
        """What comes after a norm with ``relu``: a layer in any case, so that names stay."""
        return nn.ReLU(inplace=True) if self.kind == "batch" else nn.Identity()

    def after_conv(self, channels: int, relu: bool = False) -> nn.Module:
        """The norm of a feature map."""
        return _batch(channels) if self.kind == "batch" else self._group(channels, relu)

    def after_linear(self, channels: int, relu: bool = False) -> nn.Module:
        """The norm of a vector."""
        if self.kind == "batch":
            return _batch(channels)
        if channels < 2 * self.groups:
            raise UserError(
                f"encoder.groups={self.groups}: groups of a vector of {channels} would hold one "
                f"number each, and a normalized single number is always 0; take at most "
                f"{channels // 2} groups or wider layers (objective.projector)"
            )
        return self._group(channels, relu)

    def _group(self, channels: int, relu: bool) -> nn.Module:
        if channels % self.groups:
            raise UserError(
                f"encoder.groups={self.groups}: a layer of {channels} channels cannot be divided "
                f"into {self.groups} groups; take fewer groups or wider layers"
            )
        return GroupNorm(self.groups, channels, relu)


def _batch(channels: int) -> BatchNorm:
    """Without the counter of batches: nothing reads it, and a resumed run would count anew."""
    norm = BatchNorm(channels, momentum=STATISTICS_MOMENTUM)
    norm.num_batches_tracked = None
    return norm


def adopt(module: nn.Module) -> None:
    """Put ours in the place of a timm network's batch norms; names and numbers stay."""
    ours: dict[nn.Module, BatchNorm] = {}
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # also where one is in two places
            if isinstance(child, _BatchNorm):
                ours.setdefault(child, _like(child))
                setattr(parent, name, ours[child])


def _like(theirs: _BatchNorm) -> BatchNorm:
    from timm.layers.norm_act import BatchNormAct2d

    plain = type(theirs) in (nn.BatchNorm1d, nn.BatchNorm2d)
    known = (plain or type(theirs) is BatchNormAct2d) and theirs.affine
    if not known or not theirs.track_running_stats or theirs.momentum is None:
        raise UserError(
            f"encoder.name: it has batch norm of a kind that is not known here "
            f"({type(theirs).__name__}); use another encoder"
        )
    norm = BatchNorm(theirs.num_features)
    if isinstance(theirs, BatchNormAct2d):
        norm = BatchNormAct(theirs.num_features, theirs.drop, theirs.act)
    norm.eps, norm.momentum, norm.num_batches_tracked = theirs.eps, theirs.momentum, None
    norm.weight, norm.bias = theirs.weight, theirs.bias
    return norm
