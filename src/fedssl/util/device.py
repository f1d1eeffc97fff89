"""Copies from the host to a device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(numbers: NDArray[np.int64], device: torch.device | None) -> Tensor:
    """Copy numbers to the device, from pinned memory, so that the host need not wait."""
    tensor = torch.from_numpy(numbers)
    if device is None or device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
