"""Load a trained encoder from a run's folder, an export or a file."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from fedssl import config
from fedssl.config import Encoder, plugins
from fedssl.config.preprocessing import HEADER, NOTE
from fedssl.data.decode import decode_file, describe_failure, to_pixels
from fedssl.data.dicom import Window
from fedssl.data.in_memory import open_array, quantize
from fedssl.data.squares import middle_squares
from fedssl.evaluate.features import extract
from fedssl.models.encoders import encoder as make_encoder
from fedssl.models.weights import (
    SUFFIXES,
    check_readable,
    find_model,
    load_weights,
    tower_file,
)
from fedssl.util.errors import UserError, format_resume

ACCEPTED = "Give the folder of a run, or a safetensors or hf export of `fedssl export`."
AnImage = str | Path | Image.Image | Tensor | NDArray[Any]
Note = dict[str, Any]  # the contents of encoder.json
NOTE_TYPES: dict[str, Any] = {  # of the entries that every note has
    "features": int,
    "channels": tuple[int, ...],
    "size": tuple[int, int],
    "encoder": Encoder,
    "stored": int | None,
    "interpolation": Literal["bilinear", "bicubic"] | None,
    "window": tuple[float, float] | None,
}


class ImageEncoder(nn.Module):
    """An encoder with the preprocessing of its images.

    >>> encoder = fedssl.load_encoder("runs/first")
    >>> encoder.embed(["a.png", "b.jpg"]).shape
    torch.Size([2, 96])

    ``encoder(images)`` takes float images ``[N, channels, height, width]`` between 0 and 1.

    Attributes:
        features: Length of an embedding.
        channels: Channels of the images: 1 or 3, or those of your own data.
        height: Height of the images in pixels, to which files are resized.
        interpolation: How files are resized: ``bilinear`` or ``bicubic``.
        stored: Pixels of the longer side to which a file is reduced before its middle square is
            resized; ``None``: the file's middle square is resized at once.
        width: Width of the images in pixels.
        tower: 0, or 1 for the second network of a run with two.
        body: The network itself.
        note: The contents of ``encoder.json``, which describe the model.
    """

    def __init__(self, body: nn.Module, note: Note, tower: int) -> None:
        super().__init__()
        self.body = body
        self.note = note
        self.tower = tower
        self.features: int = note["features"]
        self.channels: int = note["channels"][tower % len(note["channels"])]
        self.height, self.width = note["size"]
        self.stored: int | None = note.get("stored")
        self.interpolation: str = note.get("interpolation") or "bilinear"
        window = note.get("window")
        self.window: Window | None = None if window is None else (window[0], window[1])

    def forward(self, images: Tensor) -> Tensor:
        """Return embeddings ``[N, features]``."""
        size = (self.channels, self.height, self.width)
        if images.ndim != 4 or images.shape[1:] != size:
            expected = f"N × {' × '.join(map(str, size))}"
            raise _shape_error(images, f"Give floats {expected} between 0 and 1.")
        if not images.is_floating_point():
            raise _shape_error(images, "Use encoder.embed(images), or divide by 255.")
        return self.body(images)

    def preprocess(self, image: AnImage) -> Tensor:
        """Return an image as training read it: float ``[channels, height, width]``, 0 to 1.

        A large JPEG file is decoded at a fraction of its size, so its pixels may differ a little
        from those of a Pillow image of the same file.
        """
        return self._to_bytes(image).float() / 255

    def embed(self, images: AnImage | Iterable[AnImage], batch: int = 256) -> Tensor:
        """Return the embedding ``[features]`` of an image, or those ``[N, features]`` of several.

        An image is a file, a Pillow image, an array ``[height, width, channels]`` or a tensor
        ``[channels, height, width]``. Tensors must have the encoder's size; others are resized.
        Numbers are uint8, or floats between 0 and 1. Several images are a list, a tensor or an
        array with one dimension more. ``batch`` images are read at once. The result is on the CPU.

        >>> encoder = fedssl.load_encoder("runs/first")
        >>> encoder.embed("a.png").shape
        torch.Size([96])
        """
        if batch < 1:
            raise UserError("too small", key="batch", value=batch, fix="Use batch=1 or more.")
        if _is_one(images):
            return self.embed_bytes(self._to_bytes(images)[None])[0]
        if not isinstance(images, Iterable):
            raise _kind_error(images)
        parts = [self.embed_bytes(part) for part in self._batches(images, batch)]
        return torch.cat(parts) if parts else torch.zeros(0, self.features)

    def embed_bytes(self, images: Tensor) -> Tensor:
        """Return the embeddings of uint8 images ``[N, channels, height, width]``, on the CPU."""
        # Contiguous, because the memory layout decides torch's kernels and so the last bits.
        return extract(self.body, images.contiguous()).cpu()

    def _crop(self, square: Tensor) -> Tensor:
        """Return this tower's part of square images: all, or one half (``data.halves``)."""
        if self.width == self.height:
            return square
        return square[..., -self.width :] if self.tower else square[..., : self.width]

    def _batches(self, images: Iterable[Any], batch: int) -> Iterator[Tensor]:
        if isinstance(images, Tensor):
            yield from self._check_tensor(images, images.shape[1:], "N × ").split(batch)
            return
        rest = map(self._to_bytes, images)
        while part := list(itertools.islice(rest, batch)):
            yield torch.stack(part)

    def _to_bytes(self, image: Any) -> Tensor:
        if isinstance(image, Tensor):
            return self._check_tensor(image, image.shape)
        if not isinstance(image, (str, os.PathLike, Image.Image, np.ndarray)):
            raise _kind_error(image)
        try:
            if not isinstance(image, Image.Image):
                image = open_array(image) if isinstance(image, np.ndarray) else Path(image)
            return self.decode(image)
        except Exception as error:  # Pillow raises almost any exception on damaged files
            name = "the image" if isinstance(image, Image.Image | np.ndarray) else image
            raise UserError(f"{name}: {describe_failure(error)}") from None

    def decode(self, image: Path | Image.Image) -> Tensor:
        """Return uint8 pixels ``[channels, height, width]`` as training stored and evaluated them.

        Raises any error of Pillow's.
        """
        size, whole, how = self.stored or self.height, self.stored is not None, self.interpolation
        if isinstance(image, Image.Image):
            array = to_pixels(image, size, self.channels, whole, how, self.window)
        else:
            array = decode_file(image, size, self.channels, whole, how, self.window)
        pixels = torch.from_numpy(np.array(array, order="C"))
        square = middle_squares(pixels[None], self.height, how)[0] if whole else pixels
        return self._crop(square).contiguous()

    def _check_tensor(self, images: Tensor, shape: torch.Size, batch: str = "") -> Tensor:
        expected = (self.channels, self.height, self.width)
        if shape != expected:
            size = f"{batch}{' × '.join(map(str, expected))} (channels, height, width)"
            raise _shape_error(images, f"Give {size}, or files, which are resized.")
        try:
            return quantize(images)
        except ValueError as error:
            fix = "Give uint8, or floats between 0 and 1, without normalization."
            raise UserError(f"the tensor has {error}", fix=fix) from None


def _is_one(images: Any) -> bool:
    """Return whether an argument of ``embed`` is a single image."""
    if isinstance(images, Tensor | np.ndarray):
        return images.ndim < 4
    return isinstance(images, (str, os.PathLike, Image.Image))


def _shape_error(images: Tensor, fix: str) -> UserError:
    return UserError(f"the tensor is {' × '.join(map(str, images.shape))} {images.dtype}", fix=fix)


def _kind_error(image: object) -> UserError:
    fix = "Give a file name, a Pillow image, an array, a tensor, or a list of them."
    return UserError(f"the type {type(image).__name__} is no image", fix=fix)


def load_encoder(
    path: str | Path,
    tower: int = 0,
    client: int | None = None,
    encoder: nn.Module | Callable[..., nn.Module] | None = None,
) -> ImageEncoder:
    """Load the encoder of a run, of an exported folder or of a ``.safetensors`` file.

    >>> encoder = fedssl.load_encoder("runs/first")
    >>> encoder.embed("a.png").shape
    torch.Size([96])

    Args:
        path: The run's folder, the export's folder, or the file.
        tower: 1 for the second network of a run with two (``encoder.towers=2``).
        client: Number of the client whose personal model is loaded.
        encoder: Your own module, or a function that makes one, if the run was trained with
            ``fedssl.train(encoder=module)``. A module from a file is found by its name.
    """
    if encoder is not None:
        with plugins.hold_objects({"encoder.name": encoder}):
            return _load(path, tower, client, plugins.name_object(encoder))
    return _load(path, tower, client)


def _load(path: str | Path, tower: int, client: int | None, own: str | None = None) -> ImageEncoder:
    """Load an encoder; ``own`` replaces the name of its architecture."""
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
    settings = settings if own is None else replace(settings, name=own)
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
