"""Files that hold many images: tar archives, and tables in Parquet or Arrow files."""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from fedssl.data import dicom
from fedssl.data.image_files import File, find_images, image_extensions
from fedssl.data.tables import open_table
from fedssl.data.tars import list_members, read_member
from fedssl.util.errors import UserError

PAGED = (".tif", ".tiff", ".gif", ".webp")  # formats that may have several frames
ENDINGS = frozenset((".tar", ".parquet", ".arrow"))


class Record(NamedTuple):
    """An image in a file with many, and its label."""

    file: File
    label: str | None


def find_records(root: Path, below: str) -> list[Record]:
    """List the images in all archives and tables below a folder."""
    holders, _ = find_images(root, below, endings=ENDINGS)
    # Hugging Face keeps intermediate results beside a data set.
    holders = [file for file in holders if not Path(file.path).name.startswith("cache-")]
    return [record for holder in holders for record in _list_records(root, holder)]


def _list_records(root: Path, holder: File) -> Iterator[Record]:
    path = root / holder.path
    if path.suffix.lower() != ".tar":
        table = open_table(path, holder.size, holder.mtime)
        size = holder.size // max(1, sum(table.groups))
        for row, label in enumerate(table.list_labels()):
            file = File(f"{holder.path}/{row}", size, holder.mtime, holder.path, row)
            yield Record(file, label)
        return
    try:
        for name, place, size, label in list_members(path, image_extensions()):
            file = File(f"{holder.path}/{name}", size, holder.mtime, holder.path, place)
            yield Record(file, label)
    except (tarfile.TarError, OSError, ValueError) as error:
        problem, fix = f"cannot be read ({error})", "Replace it, or move it away."
        public = "an archive cannot be read"
        problem = f"{holder.path} {problem}"
        raise UserError(problem, public, key="data.root", value=root, fix=fix) from None


def list_frames(root: Path, file: File) -> list[File]:
    """Return a file for each frame of an image file."""
    path = root / file.path
    count = 1
    if dicom.is_dicom(path):
        count = dicom.count_frames(path)
    elif path.suffix.lower() in PAGED:
        with contextlib.suppress(Exception), Image.open(path) as image:  # decoding reports it
            count = getattr(image, "n_frames", 1)
    if count == 1:
        return [file]
    names = (f"{file.path}/{frame}" for frame in range(count))
    return [File(name, file.size, file.mtime, file.path, frame) for frame, name in enumerate(names)]


def open_image(root: Path, file: File) -> tuple[Path | BytesIO, int | None]:
    """Return an image file, or its bytes, and the number of the frame if it is one of several."""
    if not file.holder:
        return root / file.path, None
    path = root / file.holder
    if path.suffix.lower() not in ENDINGS:
        return path, file.number
    assert file.number is not None
    if path.suffix.lower() == ".tar":
        return BytesIO(read_member(path, file.number, file.size)), None
    status = path.stat()
    table = open_table(path, status.st_size, status.st_mtime_ns)
    return BytesIO(table.read_image(file.number)), None
