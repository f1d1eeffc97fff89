"""Tar archives of image files, such as WebDataset's shards."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Container, Iterator
from pathlib import Path


def list_members(path: Path, endings: Container[str]) -> Iterator[tuple[str, int, int, str | None]]:
    """Yield name, place and length of each image, and its label.

    Files that differ only in their ending belong together. The label is the text of a file ``.cls``
    or the entry ``label`` of a file ``.json``.
    """
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, str] = {}
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            folder, slash, name = member.name.removeprefix("./").rpartition("/")
            stem, _, ending = name.partition(".")
            if not member.isfile() or not stem:
                continue
            key = f"{folder}{slash}{stem}"
            if ending in ("cls", "json"):
                file = archive.extractfile(member)
                assert file is not None
                label = _read_label(file.read(), ending)
                if label is not None:
                    labels[key] = label
            elif f".{ending.rpartition('.')[2].lower()}" in endings:
                place = (f"{folder}{slash}{name}", member.offset_data, member.size)
                images.setdefault(key, place)  # of several images of a sample, the first
    for key, place in images.items():
        yield *place, labels.get(key)


def _read_label(content: bytes, ending: str) -> str | None:
    text = content.decode().strip()
    if ending == "cls":
        return text
    fields = json.loads(text)
    label = fields.get("label") if isinstance(fields, dict) else None
    return None if label is None else str(label)


def read_member(path: Path, place: int, size: int) -> bytes:
    """Read the bytes of a file in an archive."""
    with path.open("rb") as file:
        file.seek(place)
        return file.read(size)
