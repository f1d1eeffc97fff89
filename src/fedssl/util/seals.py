"""Seals: SHA-256 digests that files hold of themselves, so that damage is noticed.

The seal of a text is its last line. That of a safetensors file is in its header, and is the digest
of the file with zeros in that place. A seal shows damage and not forgery: whoever can write the
file can seal it.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

MOST_HEADER = 100_000_000  # bytes, by safetensors' own limit
_BLANK = "0" * 64
_ABOUT = "# --resume checks the sha256 of the lines above:"
_LINE = re.compile(rb"(.*)%b ([0-9a-f]{64})\n" % _ABOUT.encode(), re.DOTALL)
_ENTRY = re.compile(rb'"sha256":"([0-9a-f]{64})"')


class DamagedError(Exception):
    """A file is not as it was written."""


def seal_text(text: str) -> str:
    """Return a text, such as YAML, with its seal as a comment in the last line."""
    return f"{text}{_ABOUT} {hashlib.sha256(text.encode()).hexdigest()}\n"


def check_text(data: bytes) -> bool:
    """Return whether a text has a seal; raise ``DamagedError`` if it has that of another text."""
    match = _LINE.fullmatch(data)
    if match and hashlib.sha256(match[1]).hexdigest().encode() != match[2]:
        raise DamagedError
    return match is not None


def make_room(metadata: dict[str, str]) -> dict[str, str]:
    """Return the metadata of a safetensors file with room for its seal."""
    return {**metadata, "sha256": _BLANK}


def seal_tensors(data: bytes) -> tuple[str, list[bytes | memoryview]]:
    """Return the seal of a safetensors file with room for it, and the parts of the sealed file."""
    header = data[: _header_end(data)]
    digest, room, place = _read_header(header)
    rest = memoryview(data)  # without a copy of what may be gigabytes
    digest.update(rest[len(header) :])
    seal = digest.hexdigest()
    return seal, [rest[:place], seal.encode(), rest[place + len(room) :]]


def check_tensors(path: Path) -> str:
    """Return the seal of a safetensors file, or "" if it has none.

    Raise ``DamagedError`` if it has that of another file.
    """
    with path.open("rb") as file:
        length = file.read(8)
        digest, stored, _ = _read_header(length + file.read(_header_end(length) - 8))
        if stored and hashlib.file_digest(file, lambda: digest).hexdigest() != stored:
            raise DamagedError
    return stored


def _header_end(data: bytes) -> int:
    """Return the end of a safetensors header, whose length stands before it."""
    return 8 + min(int.from_bytes(data[:8], "little"), MOST_HEADER)


def _read_header(header: bytes) -> tuple[Any, str, int]:
    """Return the digest of a header with a blank seal, the seal that it has, and its place."""
    entry = _ENTRY.search(header)
    if entry is None:
        return hashlib.sha256(header), "", 0
    start, end = entry.span(1)
    return hashlib.sha256(header[:start] + _BLANK.encode() + header[end:]), entry[1].decode(), start
