"""The first layer of every encoder: from pixels in [0, 1] to what its weights expect."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from fedssl.config import Encoder
from fedssl.models.kernels import group_norm
from fedssl.util.errors import UserError


class Input(nn.Module):
    """Normalize images by a mean and a standard deviation, if there are any.

    It has no state: the configuration holds its numbers.

    Attributes:
        channels: Channels of its result. A grey image is repeated in as many as the mean has.
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(
        self,
        channels: int,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
    ) -> None:
        super().__init__()
        count = 1 if mean is None else len(mean)
        if count > 1 and channels not in (1, count):
            raise UserError(
                f"the images have {channels} channels",
                key="encoder.mean",
                value=mean,
                fix=f"Use images of {count} channels or grey ones, or other weights.",
            )
        self.channels = max(channels, count)
        # Constants take part in no average, so they are in no state either.
        for name, values in (("mean", mean), ("std", std)):
            column = None if values is None else torch.tensor(values).view(1, -1, 1, 1)
            self.register_buffer(name, column, persistent=False)

    @classmethod
    def from_config(cls, settings: Encoder, channels: int) -> Input:
        """Build the layer for images of so many channels."""
        return cls(channels, settings.mean, settings.std)

    @property
    def statistics(self) -> tuple[list[float], list[float]] | None:
        """The mean and the standard deviation of each channel; ``None`` without any."""
        if self.mean is None or self.std is None:
            return None
        columns = (each.expand(1, self.channels, 1, 1).flatten() for each in (self.mean, self.std))
        mean, std = ([round(float(x), 6) for x in column] for column in columns)
        return mean, std

    def describe(self) -> str:
        """Return what the layer does to pixels between 0 and 1, in words."""
        if self.statistics is None:
            return "no further normalization"
        mean, std = self.statistics
        return f"the encoder subtracts the mean {mean} and divides by the standard deviation {std}"

    def forward(self, images: Tensor) -> Tensor:
        """Return images ``[B, channels, height, width]`` in the layout that is fastest."""
        if self.mean is not None:
            images = images.expand(-1, self.channels, -1, -1)
            images = (images - self.mean) / cast(Tensor, self.std)
        return group_norm.layout(images)
