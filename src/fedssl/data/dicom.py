"""DICOM files: a frame as an image of 8 bits, in the range of values that a window selects."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedssl.util.errors import UserError

ENDINGS = (".dcm", ".dicom")
Window = tuple[float, float]  # center and width


def check_package() -> None:
    """Refuse to go on without pydicom."""
    if importlib.util.find_spec("pydicom") is None:
        fix = "Run pip install 'fedssl[dicom]'."
        raise UserError("DICOM files need pydicom", "pydicom is missing", key="data.root", fix=fix)


def is_dicom(source: Path | BytesIO) -> bool:
    """Return whether a file has the ending of DICOM, or its mark."""
    if isinstance(source, Path):
        return source.suffix.lower() in ENDINGS
    return source.getvalue()[128:132] == b"DICM"


def read_size(source: Path | BytesIO) -> tuple[int, int]:
    """Return the width and height in a file's header."""
    import pydicom

    found = pydicom.dcmread(source, stop_before_pixels=True, specific_tags=["Rows", "Columns"])
    return int(found.Columns), int(found.Rows)


def count_frames(path: Path) -> int:
    """Return how many frames a file has; 1 if its header cannot be read."""
    import pydicom

    try:
        tags = ["NumberOfFrames"]
        found = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=tags)
        return int(found.get("NumberOfFrames") or 1)
    except Exception:  # decoding reports it
        return 1


def read_frame(
    source: Path | BytesIO, window: Window | None, frame: int | None, on_deep: Callable[[], object]
) -> Image.Image:
    """Read a frame; ``None`` is the one in the middle.

    Without ``window``, the first window in the file counts, or else all values of the frame.
    """
    check_package()
    import pydicom
    from pydicom.pixels.processing import apply_color_lut, apply_modality_lut
    from pydicom.pixels.utils import pixel_array

    dataset = pydicom.dcmread(source)
    if frame is None:
        frame = int(dataset.get("NumberOfFrames") or 1) // 2
    pixels = pixel_array(dataset, index=frame)
    if dataset.PhotometricInterpretation == "PALETTE COLOR":
        pixels = apply_color_lut(pixels, dataset)
    if pixels.ndim == 3:  # in colour
        is_palette = dataset.PhotometricInterpretation == "PALETTE COLOR"
        shift = (8 * pixels.dtype.itemsize if is_palette else int(dataset.BitsStored)) - 8
        return Image.fromarray((pixels >> shift).astype(np.uint8))
    values = apply_modality_lut(pixels, dataset).astype(np.float64)
    if window is None:
        if int(dataset.BitsStored) > 8:
            on_deep()
        values, window = _select_values(values, dataset)
    scaled = scale_values(values, window)
    is_inverted = dataset.PhotometricInterpretation == "MONOCHROME1"
    return Image.fromarray(255 - scaled if is_inverted else scaled)


def _select_values(values: NDArray[Any], dataset: Any) -> tuple[NDArray[Any], Window]:
    """Return values and the window that the file has for them."""
    from pydicom.pixels.processing import apply_voi_lut

    if "VOILUTSequence" in dataset:
        values = apply_voi_lut(values.astype(np.int64), dataset).astype(np.float64)
    elif dataset.get("WindowCenter") is not None and dataset.get("WindowWidth") is not None:
        center, width = (
            np.ravel(dataset[name].value)[0] for name in ("WindowCenter", "WindowWidth")
        )
        if dataset.get("VOILUTFunction", "LINEAR") == "LINEAR":  # DICOM PS3.3, C.11.2.1.2.1
            return values, (float(center) - 0.5, max(1.0, float(width) - 1))
        return values, (float(center), float(width))
    low, high = float(values.min()), float(values.max())
    return values, ((low + high) / 2, max(1.0, high - low))


def scale_values(values: NDArray[Any], window: Window) -> NDArray[np.uint8]:
    """Scale a window to 0 to 255; values outside become 0 or 255."""
    center, width = window
    shares = (values.astype(np.float64) - (center - width / 2)) / width
    return (255 * shares.clip(0, 1)).round().astype(np.uint8)
