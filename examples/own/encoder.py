"""A network of one's own, from images to features."""

from torch import Tensor, nn


class Small(nn.Module):
    """Two convolutions and a linear layer; ``channels`` is 1 for gray images and 3 for color."""

    def __init__(self, channels: int, features: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, 3, stride=2),
            nn.GroupNorm(8, 32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, features),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return features ``[N, features]`` of images ``[N, channels, height, width]``."""
        return self.layers(images)
