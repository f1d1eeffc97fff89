"""Load a trained encoder from a run's folder, an export or a file."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fedssl import config
from fedssl.config import Encoder
from fedssl.data.decode import decode_file, describe_failure, to_pixels
from fedssl.evaluate.features import extract
from fedssl.models.encoders import encoder as make_encoder
from fedssl.models.weights import (
    NOTE,
    SUFFIXES,
    check_readable,
    find_model,
    load_weights,
    tower_file,
)
from fedssl.util.errors import UserError, format_resume

HEADER = "fedssl"  # the entry of a safetensors header, or of config.json, that holds the note
ACCEPTED = "Give the folder of a run, or a safetensors or hf export of `fedssl export`."
AnImage = str | Path | Image.Image | Tensor
Note = dict[str, Any]  # the contents of encoder.json
NOTE_TYPES: dict[str, Any] = {  # of the entries that every note has
    "features": int,
    "channels": tuple[int, ...],
    "size": tuple[int, int],
    "encoder": Encoder,
}


class ImageEncoder(nn.Module):
    """An encoder with the preprocessing of its images.

    >>> encoder = load_encoder("runs/first")  # doctest: +SKIP
    >>> encoder.embed(["a.png", "b.jpg"]).shape  # doctest: +SKIP
    torch.Size([2, 96])

    ``encoder(images)`` takes float images ``[N, channels, height, width]`` between 0 and 1.
    """

    def __init__(self, body: nn.Module, note: Note, tower: int) -> None:
        super().__init__()
        self.body = body
        self.note = note
        self.tower = tower
        self.features: int = note["features"]
        self.channels: int = note["channels"][tower % len(note["channels"])]
        self.height, self.width = note["size"]

    def forward(self, images: Tensor) -> Tensor:
        """Return embeddings ``[N, features]``."""
        return self.body(images)

    def preprocess(self, image: AnImage) -> Tensor:
        """Return an image as training read it: float ``[channels, height, width]``, 0 to 1.

        A uint8 tensor must have that shape already. A large JPEG file is decoded at a fraction of
        its size, so its pixels may differ a little from those of a Pillow image of the same file.
        """
        return self._to_bytes(image).float() / 255

    def embed(self, images: Iterable[AnImage] | Tensor, batch: int = 256) -> Tensor:
        """Return the embeddings ``[N, features]`` of files, images or a uint8 tensor, on the CPU.

        ``batch`` images are read at once; large images go through the network in smaller parts.
        """
        if isinstance(images, (str, Path, Image.Image)) or not isinstance(images, Iterable):
            raise UserError("embed takes several images", fix="Use encoder.embed([image]).")
        if batch < 1:
            raise UserError("too small", key="batch", value=batch, fix="Use batch=1 or more.")
        parts = [self.embed_bytes(part) for part in self._batches(images, batch)]
        return torch.cat(parts) if parts else torch.zeros(0, self.features)

    def embed_bytes(self, images: Tensor) -> Tensor:
        """Return the embeddings of uint8 images ``[N, channels, height, width]``, on the CPU."""
        # Contiguous, because the memory layout decides torch's kernels and so the last bits.
        return extract(self.body, images.contiguous()).cpu()

    def crop(self, square: Tensor) -> Tensor:
        """Return this tower's part of square images: all, or one half (``data.halves``)."""
        if self.width == self.height:
            return square
        return square[..., -self.width :] if self.tower else square[..., : self.width]

    def _batches(self, images: Iterable[AnImage] | Tensor, batch: int) -> Iterator[Tensor]:
        if isinstance(images, Tensor):
            self._check_tensor(images, images.shape[1:], "N × ")
            yield from images.split(batch)
            return
        rest = map(self._to_bytes, images)
        while part := list(itertools.islice(rest, batch)):
            yield torch.stack(part)

    def _to_bytes(self, image: AnImage) -> Tensor:
        if isinstance(image, Tensor):
            self._check_tensor(image, image.shape)
            return image
        if not isinstance(image, (str, os.PathLike, Image.Image)):
            raise UserError(
                f"an image cannot be a {type(image).__name__}",
                fix="Give a file name, a Pillow image (PIL.Image.fromarray) or a uint8 tensor.",
            )
        try:
            if isinstance(image, Image.Image):
                array = to_pixels(image, self.height, self.channels)
            else:
                array = decode_file(Path(image), self.height, self.channels)
        except Exception as error:  # Pillow raises almost any exception on damaged files
            raise UserError(f"{image}: {describe_failure(error)}") from None
        return self.crop(torch.from_numpy(np.array(array, order="C"))).contiguous()

    def _check_tensor(self, images: Tensor, shape: torch.Size, batch: str = "") -> None:
        expected = (self.channels, self.height, self.width)
        if shape != expected or images.dtype != torch.uint8:
            raise UserError(
                f"the tensor is {' × '.join(map(str, images.shape))} of {images.dtype}",
                fix=f"Give {batch}{' × '.join(map(str, expected))} of torch.uint8, or files.",
            )


def load_encoder(path: str | Path, tower: int = 0, client: int | None = None) -> ImageEncoder:
    """Load the encoder of a run, of an exported folder or of a ``.safetensors`` file.

    ``tower=1`` is the second of two (``encoder.towers=2``); ``client`` chooses a personal model.
    """
    path = find_model(Path(path).expanduser())
    note = read_note(path)
    settings = parse_note(note, path)
    if path.is_file():  # an export records its tower; a run's own file has it in its name
        recorded = note.get("tower", 1 if path.stem.endswith(SUFFIXES[1]) else tower)
        if tower not in (0, recorded):
            fix = f"Give the file of the other tower, or tower={recorded}."
            raise UserError(f"{path} is tower {recorded}", key="tower", value=tower, fix=fix)
        tower = recorded
    if not 0 <= tower < settings.towers:
        fix = f"Use a number below {settings.towers}."
        raise UserError(f"{path} has {settings.towers} towers", key="tower", value=tower, fix=fix)
    file = find_weights(path, note, tower, client)
    check_readable(file)
    note = _add_owner(note, file)
    channels = note["channels"][tower % len(note["channels"])]
    body = make_encoder(settings, channels, min(note["size"]))  # in float32, as in evaluation
    load_weights(body, file)
    return ImageEncoder(body, note, tower).eval()


def _add_owner(note: Note, file: Path) -> Note:
    """Replace the note's model with the client's where the file is a personal model."""
    name = file.stem.removesuffix(SUFFIXES[1])
    if f"personal/{name}.safetensors" not in note.get("personal", ()):
        return note
    return {**note, "model": f"personal, client {name.removeprefix('client-')}"}


def parse_note(note: Note, path: Path) -> Encoder:
    """Return the encoder's configuration, after checking the note."""
    try:
        read = {key: config.convert(kind, note.get(key), key) for key, kind in NOTE_TYPES.items()}
    except UserError as error:
        problem = f"written by another version of fedssl ({error.key}: {error.problem})"
        raise UserError(f"{path}: {problem}") from None
    return cast(Encoder, read["encoder"])


def find_weights(path: Path, note: Note, tower: int = 0, client: int | None = None) -> Path:
    """Return the file of a tower's weights, or of a client's personal model."""
    if path.is_file():
        if client is not None:
            fix = "Give the folder of its run."
            raise UserError(f"{path} is one model", key="client", value=client, fix=fix)
        return path
    if client is None:
        return tower_file(path, tower)
    name = f"personal/client-{client}.safetensors"
    files = [Path(file) for file in note.get("personal", ())]
    if Path(name) not in files:
        clients = ", ".join(file.stem.removeprefix("client-") for file in files)
        fix = f"Use one of {clients}." if clients else "Leave it out."
        problem = f"{path} has no personal model of this client"
        raise UserError(problem, key="client", value=client, fix=fix)
    return tower_file(path / name, tower)


def run_folder(file: Path) -> Path:
    """Return the folder that would be the run's if the file is a run's model."""
    return file.parent.parent if file.parent.name == "personal" else file.parent


def read_note(path: Path) -> Note:
    """Read the note on an encoder from a run, an export or a file's header."""
    if path.is_file():
        if (text := _read_header(path)) is not None:
            return _parse(text, path)
        if (run_folder(path) / NOTE).is_file():
            return _read(run_folder(path) / NOTE)
        fix = f"Keep {NOTE} beside it, or export it as safetensors with `fedssl export`."
        raise UserError(f"{path}: nothing says which encoder it is", fix=fix)
    if (path / NOTE).is_file():
        return _read(path / NOTE)
    hub = path / "config.json"
    if hub.is_file() and isinstance(note := _read(hub).get(HEADER), dict):
        return note
    if (path / "config.yaml").is_file():
        fix = f"Continue it: {format_resume(path)}"
        raise UserError(f"{path}: the run has not ended, so there is no encoder yet", fix=fix)
    raise UserError(f"{path}: no encoder there", fix=ACCEPTED)


def _read(path: Path) -> Note:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    return _parse(text, path)


def _parse(text: str, path: Path) -> Note:
    with contextlib.suppress(ValueError):
        if isinstance(note := json.loads(text), dict):
            return note
    raise UserError(f"{path}: not the note on an encoder ({text.strip()[:50]})")


def _read_header(path: Path) -> str | None:
    """Read the note in the header of an exported safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get(HEADER)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except SafetensorError:
        raise UserError(f"{path}: not a safetensors file, or damaged", fix=ACCEPTED) from None
