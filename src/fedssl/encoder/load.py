"""``fedssl.load_encoder``: a run's encoder with its preprocessing, for use anywhere."""

from __future__ import annotations

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
from fedssl.data.dataset import PIXELS_PER_PASS
from fedssl.data.decode import decode_file, describe_failure, to_pixels
from fedssl.evaluate.features import encode, pixels, precision
from fedssl.models.encoders import encoder as make_encoder
from fedssl.models.weights import (
    NOTE,
    SUFFIXES,
    check_readable,
    load_weights,
    place,
    tower_file,
)
from fedssl.util.errors import UserError, format_resume

HEADER = "fedssl"  # where an exported file's own header, or config.json, holds the note
ACCEPTED = "give the folder of a run, or what `fedssl export` wrote as safetensors or hf"
AnImage = str | Path | Image.Image | Tensor
Note = dict[str, Any]


class ImageEncoder(nn.Module):
    """An encoder, and how an image becomes what it sees.

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
        """Embeddings ``[N, features]``."""
        return self.body(images)

    def preprocess(self, image: AnImage) -> Tensor:
        """An image or its file as training read it: float ``[channels, height, width]``, 0 to 1.

        A uint8 tensor must have that shape already. A Pillow image is taken as it is: of a large
        JPEG it may differ by a few of 255 from its file, which is decoded at a fraction.
        """
        return pixels(self._bytes(image), "cpu", torch.float32)

    def embed(self, images: Iterable[AnImage] | Tensor, batch: int = 256) -> Tensor:
        """The embeddings ``[N, features]`` of files, images or a uint8 tensor, on the CPU.

        ``batch`` is how many go through the network at once; of large images it is fewer.
        """
        if isinstance(images, (str, Path, Image.Image)) or not isinstance(images, Iterable):
            raise UserError("embed: expected several images, as in encoder.embed([image])")
        if batch < 1:
            raise UserError(f"batch={batch}: must be at least 1")
        found = [self.embed_bytes(part) for part in self._batches(images, batch)]
        return torch.cat(found) if found else torch.zeros(0, self.features)

    def embed_bytes(self, images: Tensor) -> Tensor:
        """The embeddings of uint8 images ``[N, channels, height, width]``, on the CPU."""
        where, dtype = next(self.parameters()).device, precision(self.body)
        # The order in memory decides how torch computes, and so the last bits.
        parts = images.contiguous().split(max(1, PIXELS_PER_PASS // (self.height * self.width)))
        return encode(self.body, (pixels(part, where, dtype) for part in parts)).cpu()

    def crop(self, square: Tensor) -> Tensor:
        """What this tower sees of a square image: all of it, or its half (``data.halves``)."""
        if self.width == self.height:
            return square
        return square[..., -self.width :] if self.tower else square[..., : self.width]

    def _batches(self, images: Iterable[AnImage] | Tensor, batch: int) -> Iterator[Tensor]:
        if isinstance(images, Tensor):
            shape = (self.channels, self.height, self.width)
            if images.ndim != 4 or images.shape[1:] != shape or images.dtype != torch.uint8:
                raise UserError(_mismatch(images, ("N", *shape)))
            yield from images.split(batch)
            return
        rest = iter(images)
        while some := list(itertools.islice(rest, batch)):
            yield torch.stack([self._bytes(image) for image in some])

    def _bytes(self, image: AnImage) -> Tensor:
        if isinstance(image, Tensor):
            shape = (self.channels, self.height, self.width)
            if image.shape != shape or image.dtype != torch.uint8:
                raise UserError(_mismatch(image, shape))
            return image
        if not isinstance(image, (str, os.PathLike, Image.Image)):
            raise UserError(
                f"an image of type {type(image).__name__}: expected a file's name, a Pillow image "
                "(PIL.Image.fromarray) or a torch tensor of uint8 (torch.from_numpy)"
            )
        try:
            if isinstance(image, Image.Image):
                found = to_pixels(image, self.height, self.channels)
            else:
                found = decode_file(Path(image), self.height, self.channels)
        except Exception as error:  # Pillow's readers raise nearly anything on broken bytes
            raise UserError(f"{image}: {describe_failure(error)}") from None
        return self.crop(torch.from_numpy(np.array(found, order="C"))).contiguous()


def _mismatch(images: Tensor, shape: tuple[int | str, ...]) -> str:
    expected, given = " × ".join(map(str, shape)), " × ".join(map(str, images.shape))
    return (
        f"a tensor of images: expected {expected} of torch.uint8, got {given} of {images.dtype}; "
        "files and Pillow's images may have any size"
    )


def load_encoder(path: str | Path, tower: int = 0, client: int | None = None) -> ImageEncoder:
    """The encoder of a run, of an exported folder or of a ``.safetensors`` file.

    ``tower=1`` is the second of two (``encoder.towers=2``); ``client`` names a personal model.
    """
    path = place(Path(path).expanduser())
    note = read_note(path)
    settings = described(note, path)
    if path.is_file():  # an export says which tower it is, a run's own file by its name
        own = note.get("tower", 1 if path.stem.endswith(SUFFIXES[1]) else tower)
        if tower not in (0, own):
            raise UserError(f"tower={tower}: {path} is tower {own}; give the other file")
        tower = own
    if not 0 <= tower < settings.towers:
        raise UserError(f"tower={tower}: {path} has {settings.towers}, counted from 0")
    file = weights_file(path, note, tower, client)
    check_readable(file)
    note = _of_model(note, file)
    channels = note["channels"][tower % len(note["channels"])]
    body = make_encoder(settings, channels, min(note["size"]))
    load_weights(body, file, str(file))
    # It is of single precision, whatever the weights were, as where a run judges its encoder.
    return ImageEncoder(body, note, tower).eval()


def _of_model(note: Note, file: Path) -> Note:
    """A run's note is about its result; of a client's own model it says whose that is."""
    name = file.stem.removesuffix(SUFFIXES[1])
    if f"personal/{name}.safetensors" not in note.get("personal", ()):
        return note
    return {**note, "model": f"personal, client {name.removeprefix('client-')}"}


def described(note: Note, path: Path) -> Encoder:
    """The network that a note describes."""
    try:
        for key in ("encoder", "features", "channels", "size"):
            if key not in note:
                raise UserError(f"{NOTE} has no {key}")
        for key, lengths in (("features", (1,)), ("channels", (1, 2)), ("size", (2,))):
            given = [note[key]] if key == "features" else note[key]
            if not _counts(given) or len(given) not in lengths:
                raise UserError(f"{key}={note[key]}")
        return cast(Encoder, config.convert(Encoder, note["encoder"], "encoder"))
    except UserError as error:
        raise UserError(f"{path}: written by another version of fedssl ({error})") from None


def _counts(given: Any) -> bool:
    return isinstance(given, list) and all(type(n) is int and n > 0 for n in given)


def weights_file(path: Path, note: Note, tower: int = 0, client: int | None = None) -> Path:
    """Where a tower's weights are."""
    if path.is_file():
        if client is not None:
            raise UserError(f"client={client}: {path} is one model; give the folder of its run")
        return path
    if client is None:
        return tower_file(path, tower)
    name = f"personal/client-{client}.safetensors"
    if name not in note.get("personal", ()):
        known = ", ".join(
            own.partition("client-")[2].split(".")[0] for own in note.get("personal", ())
        )
        raise UserError(
            f"client={client}: {path} has "
            + (f"personal models of clients {known}" if known else "no personal models")
        )
    return tower_file(path / name, tower)


def home(file: Path) -> Path:
    """The folder of the run that a model's file lies in, if it is a run's."""
    return file.parent.parent if file.parent.name == "personal" else file.parent


def read_note(path: Path) -> Note:
    """What an encoder is, from where a run or an export says it."""
    if path.is_file():
        inside = _header(path)
        if inside is not None:
            return inside
        if (home(path) / NOTE).is_file():
            return _read(home(path) / NOTE)
        raise UserError(
            f"{path}: nothing says what it is; keep {NOTE} beside it, or take a file that "
            "`fedssl export` wrote as safetensors"
        )
    if (path / NOTE).is_file():
        return _read(path / NOTE)
    if (path / "config.json").is_file() and HEADER in (known := _read(path / "config.json")):
        return _parsed(json.dumps(known[HEADER]), path / "config.json")
    if (path / "config.yaml").is_file():
        raise UserError(
            f"{path}: the run has not ended, so there is no encoder yet",
            fix=f"Continue it: {format_resume(path)}",
        )
    raise UserError(f"{path}: no encoder there; {ACCEPTED}")


def _read(path: Path) -> Note:
    try:
        return _parsed(path.read_text(encoding="utf-8"), path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from None


def _parsed(text: str, path: Path) -> Note:
    try:
        note = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(note, dict):
        raise UserError(f"{path}: expected keys and values of an encoder, got {text.strip()[:50]}")
    return note


def _header(path: Path) -> Note | None:
    """The note in a safetensors file itself: of an export."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(HEADER)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except SafetensorError:  # its words are about bytes
        raise UserError(f"{path}: not a safetensors file, or damaged; {ACCEPTED}") from None
    return None if text is None else _parsed(text, path)
