"""Normalization is one choice for a network: batch norm, or group norm on standardized weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedssl.errors import UserError

STATISTICS_MOMENTUM = 0.1  # share of a batch in batch norm's running statistics
NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)  # what algorithm.norm_policy is about


def standardize(weight: Tensor) -> Tensor:
    """Zero mean and unit variance over each output's inputs (Qiao et al. 2019, Eq. 5)."""
    rows = weight.flatten(1)
    variance, mean = torch.var_mean(rows, dim=1, correction=0, keepdim=True)
    return ((rows - mean) * torch.rsqrt(variance + 1e-10)).view_as(weight)


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


@dataclass(frozen=True)
class Norm:
    """Makes the layers of a network in its batch-norm or group-norm form.

    >>> Norm("group", groups=32).after_conv(64)
    GroupNorm(32, 64, eps=1e-05, affine=True)
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

    def after_conv(self, channels: int) -> nn.Module:
        """The norm of a feature map."""
        if self.kind == "batch":
            return _uncounted(nn.BatchNorm2d(channels, momentum=STATISTICS_MOMENTUM))
        return self._group(channels)

    def after_linear(self, channels: int) -> nn.Module:
        """The norm of a vector."""
        if self.kind == "batch":
            return _uncounted(nn.BatchNorm1d(channels, momentum=STATISTICS_MOMENTUM))
        if channels < 2 * self.groups:
            raise UserError(
                f"encoder.groups={self.groups}: groups of a vector of {channels} would hold one "
                f"number each, and a normalized single number is always 0; take at most "
                f"{channels // 2} groups or wider layers (objective.projector)"
            )
        return self._group(channels)

    def _group(self, channels: int) -> nn.Module:
        if channels % self.groups:
            raise UserError(
                f"encoder.groups={self.groups}: a layer of {channels} channels cannot be divided "
                f"into {self.groups} groups; take fewer groups or wider layers"
            )
        return nn.GroupNorm(self.groups, channels)


def _uncounted(norm: nn.BatchNorm1d | nn.BatchNorm2d) -> nn.Module:
    """Without the counter of batches: nothing reads it, and a resumed run would count anew."""
    norm.num_batches_tracked = None
    return norm
