"""TIFF files with any number of channels, such as those of satellites and microscopes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedssl.data.dicom import Window, scale_values
from fedssl.util.errors import UserError


def check_package(channels: int) -> None:
    """Refuse to go on without tifffile."""
    if importlib.util.find_spec("tifffile") is None:
        problem, fix = "needs tifffile", "Run pip install 'fedssl[tiff]'."
        raise UserError(problem, key="data.channels", value=channels, fix=fix)


def read_channels(source: Path | BytesIO, channels: int) -> NDArray[Any]:
    """Read an image ``[channels, height, width]``."""
    import tifffile

    pixels = tifffile.imread(source)
    if pixels.ndim == 3 and pixels.shape[2] == channels != pixels.shape[0]:
        pixels = pixels.transpose(2, 0, 1)
    if pixels.ndim != 3 or len(pixels) != channels:
        shape = " × ".join(map(str, pixels.shape))
        raise ValueError(f"{shape} values, not {channels} channels (data.channels)")
    return pixels


def to_bytes(
    pixels: NDArray[Any], window: Window | None, on_deep: Callable[[], object]
) -> NDArray[np.uint8]:
    """Scale values to 8 bits: by a window, or from all values of 16 bits."""
    if pixels.dtype == np.uint8:
        return pixels
    if window is not None:
        return scale_values(pixels, window)
    if pixels.dtype != np.uint16:
        raise ValueError(f"pixels of {pixels.dtype}, whose range is unknown; set data.window")
    on_deep()
    return ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)
