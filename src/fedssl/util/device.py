"""Choose a device, and copy to it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.util.errors import UserError


def to_device(numbers: NDArray[np.int64], device: torch.device | None) -> Tensor:
    """Copy numbers to the device, from pinned memory, so that the host need not wait."""
    tensor = torch.from_numpy(numbers)
    if device is None or device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def pick_device(name: str) -> torch.device:
    """Return the device of this name; ``auto`` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:100]
        raise UserError(
            f"not available here ({reason})", key="device", value=name, fix="Use device=cpu."
        ) from None
    return device


def name_device(device: torch.device) -> str:
    """Return the model of a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
