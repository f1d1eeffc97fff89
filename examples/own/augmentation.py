"""An augmentation of one's own: random brightness, and a gray square that hides a part."""

from collections.abc import Callable

import torch
from torch import Tensor


def dim_and_hide(images: Tensor, draw: Callable[[int], Tensor]) -> Tensor:
    """Return one view of each image ``[N, C, H, W]``; ``draw(3)`` has three numbers for each."""
    brightness, top, left = draw(3)[:, :, None, None, None].unbind(1)
    height, width = images.shape[2:]
    rows = torch.arange(height, device=images.device)[:, None] - (top * height).floor()
    columns = torch.arange(width, device=images.device) - (left * width).floor()
    is_hidden = (rows >= 0) & (rows < height // 3) & (columns >= 0) & (columns < width // 3)
    return torch.where(is_hidden, 0.5, images * (0.6 + 0.4 * brightness))
