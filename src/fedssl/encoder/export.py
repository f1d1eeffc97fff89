"""``fedssl export``: a run's encoder as a file that other programs load, checked against torch."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedssl import __version__
from fedssl.data.decode import DRAFT
from fedssl.data.load import load_dataset
from fedssl.data.places import use_local_copy
from fedssl.encoder.load import HEADER, ImageEncoder, described, home, load_encoder, read_note
from fedssl.models.norms import StandardizedConv2d, standardize
from fedssl.models.weights import NOTE, SUFFIXES, place
from fedssl.runs.record import Run
from fedssl.util import outputs
from fedssl.util.errors import TrainingError, UserError
from fedssl.util.text import format_bytes

ENDINGS = {"safetensors": ".safetensors", "torchscript": ".pt", "onnx": ".onnx"}
LIMIT = 1e-4  # the largest difference to torch, for features of about 1
IMAGES = 32  # that an export is checked with
Infer = Callable[[Tensor], Tensor]
Writer = Callable[[ImageEncoder, Path], Infer]


def export(run: Path, format: str, out: Path | None) -> Iterator[str]:
    """Write the encoder in a format; lines that say what was written, and what was checked."""
    _require(format)
    run = place(run)
    if format == "hf" and run.is_file():
        raise UserError(
            f"{run}: --format hf is for a run's folder, whose data and results the card states; "
            f"use another format for one model: {', '.join(ENDINGS)}"
        )
    note = read_note(run)
    towers = described(note, run).towers if run.is_dir() else 1  # a file is of one
    encoders = [load_encoder(run, tower) for tower in range(towers)]
    if format == "hf":
        from fedssl.encoder import hub

        yield from hub.write(run, encoders, out)
        return
    first = _place(run, format, out)
    for encoder, suffix in zip(encoders, SUFFIXES, strict=False):
        path = first.with_name(f"{first.stem}{suffix}{first.suffix}")
        yield from checked(run, encoder, path, WRITERS[format])
        beside = path.with_name(f"{path.name}.json")
        if path.name == "encoder.safetensors":
            beside = path.with_name(NOTE)  # the folder is then one that load_encoder takes
        outputs.write_text(beside, json.dumps(about(encoder), indent=2) + "\n", "--out")
        yield f"{beside}: what it is, and what it wants to see"


def checked(run: Path, encoder: ImageEncoder, path: Path, write: Writer) -> Iterator[str]:
    """Write one file, unless what it gives differs from the encoder; lines that say so."""
    with outputs.replacing(path, "--out") as new:
        infer = write(encoder, new)
        images, which = looks(run, encoder)
        furthest, line = compare(encoder, infer, images)
        if not furthest <= LIMIT:  # also of what is no number
            raise TrainingError(f"{path}: not written; its {line} on {which}; use another --format")
    yield f"{path}: {format_bytes(path.stat().st_size)}"
    yield f"{line} on {which}"


def _require(format: str) -> None:
    """What the format needs must be there before any work."""
    if format != "onnx":
        return
    needed = ("onnx", "onnxruntime", "onnxscript")
    if any(importlib.util.find_spec(name) is None for name in needed):
        raise UserError(
            "--format onnx: needs onnx, onnxruntime and onnxscript; install them with: "
            "pip install 'fedssl[export]'"
        )


def _place(run: Path, format: str, out: Path | None) -> Path:
    """The first tower's file; of a model's file it has the name, so that no two share a place."""
    ending, name = ENDINGS[format], run.stem if run.is_file() else "encoder"
    where = (run if run.is_dir() else run.parent) / "export" / format if out is None else out
    if where.suffix != ending and where.suffix in ENDINGS.values():
        raise UserError(f"--out {out}: a file of --format {format} ends in {ending}")
    path = where if where.suffix == ending else where / f"{name}{ending}"
    if (home(path) / "config.yaml").exists():
        raise UserError(f"--out {out}: is in a run's own folder; name another")
    outputs.folder(path.parent, "--out")
    return path


def about(encoder: ImageEncoder) -> dict[str, Any]:
    """What an exported file is and wants to see: for its own header, and for the file beside."""
    note = {key: value for key, value in encoder.note.items() if key not in ("files", "personal")}
    # Not the places on the machine that trained.
    note["encoder"] = {**note["encoder"], "init": None}
    note |= {key: plain(note[key]) for key in ("algorithm", "objective") if key in note}
    return {
        **note,
        "tower": encoder.tower,
        "preprocess": preprocess(encoder),
        "fedssl": __version__,
    }


def plain(name: str) -> str:
    """A name, also of a user's own class, without the folder that its file is in."""
    return name.rpartition("/")[2]


def preprocess(encoder: ImageEncoder) -> dict[str, Any]:
    """How a file becomes the encoder's input; whoever follows the steps gets its numbers."""
    side, width, channels = encoder.height, encoder.width, encoder.channels
    half = f"its {('left', 'right')[encoder.tower]} {width} columns"
    least = DRAFT * side
    steps = [
        f"decoded (a JPEG file at the smallest of 1, 1/2, 1/4 and 1/8 of its size with both sides "
        f"at least {least}: Pillow's draft(None, ({least}, {least})))",
        "turned upright as EXIF says",
        "RGB of 8 bits, alpha dropped (of 16 bits: (value + 128) // 257)",
        f"the square in the middle, resized to {side} by {side} pixels in one step (Pillow's "
        "resize with box, BILINEAR, which is antialiased)",
        *(['grey (Pillow\'s convert("L"))'] if channels == 1 else []),
        *([half] if width != side else []),
        "divided by 255",
    ]
    return {
        "steps": steps,
        "layout": "NCHW",
        "dtype": "float32",
        "channels": channels,
        "height": side,
        "width": width,
        "range": [0.0, 1.0],
        "mean": [0.0] * channels,
        "std": [1.0] * channels,
    }


# Checking ------------------------------------------------------------------------------------


def compare(encoder: ImageEncoder, infer: Infer, images: Tensor) -> tuple[float, str]:
    """The largest difference of an export's embeddings to ours, and a line that says it.

    Where features are large, it is measured in their size.
    """
    ours = encoder.embed(images)
    with torch.no_grad(), _quiet():
        theirs = infer(images.float() / 255)
    difference, largest = float((ours - theirs).abs().max()), float(ours.abs().max())
    line = f"largest difference to torch {difference:.2g}"
    if largest > 1:
        line += f" (features up to {largest:.3g})"
    return difference / max(1.0, largest), line


def looks(run: Path, encoder: ImageEncoder) -> tuple[Tensor, str]:
    """Images to check with: the run's own where they are here, else made ones; and which."""
    with contextlib.suppress(UserError):
        settings = Run(run if run.is_dir() else home(run)).settings
        data = load_dataset(use_local_copy(settings.data), settings.seed)
        split = data.train if data.test is None else data.test
        images = split.images[encoder.tower % len(split.images)]
        if len(images):
            chosen = images[:: -(-len(images) // IMAGES)]
            name = "training" if data.test is None else "test"
            return chosen, f"{len(chosen)} of the run's {name} images"
    generator = torch.Generator().manual_seed(0)
    shape = (IMAGES, encoder.channels, encoder.height, encoder.width)
    made = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return made, f"{IMAGES} made images (the run's data is not here)"


# Formats -------------------------------------------------------------------------------------


def _example(encoder: ImageEncoder) -> Tensor:
    """Two images: of one, a graph might take the number for a constant."""
    return torch.rand(2, encoder.channels, encoder.height, encoder.width)


def _folded(encoder: ImageEncoder) -> nn.Module:
    """The network with filters that are standardized once and for all: a smaller, closer graph."""
    body = copy.deepcopy(encoder.body)
    for name, conv in list(body.named_modules()):
        if isinstance(conv, StandardizedConv2d):
            names = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
            fixed = nn.Conv2d(**{key: getattr(conv, key) for key in names}, bias=False)
            with torch.no_grad():
                fixed.weight.copy_(standardize(conv.weight))
            body.set_submodule(name, fixed)
    return body.eval()


def _safetensors(encoder: ImageEncoder, path: Path) -> Infer:
    return save_weights(encoder, path, {HEADER: json.dumps(about(encoder))})


def save_weights(encoder: ImageEncoder, path: Path, header: dict[str, str]) -> Infer:
    """An encoder's weights by the names of its network (of timm's: timm's)."""
    state = {name: tensor.contiguous() for name, tensor in encoder.body.state_dict().items()}
    save_file(state, path, header)
    return load_encoder(path, encoder.tower)


def _torchscript(encoder: ImageEncoder, path: Path) -> Infer:
    with _quiet():
        traced = torch.jit.trace(_folded(encoder), _example(encoder), check_trace=False)
        torch.jit.save(traced, str(path), {f"{HEADER}.json": json.dumps(about(encoder))})
        return torch.jit.load(str(path))


def _onnx(encoder: ImageEncoder, path: Path) -> Infer:
    import onnxruntime

    with _quiet():
        program = torch.onnx.export(
            _folded(encoder),
            (_example(encoder),),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["embeddings"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
        assert program is not None
        for node in program.model.graph:
            node.metadata_props.clear()  # where in our source each came from
        program.model.metadata_props[HEADER] = json.dumps(about(encoder))
        program.save(str(path), external_data=False)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks on its own exporters; what counts is compared afterwards."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


WRITERS: dict[str, Writer] = {
    "safetensors": _safetensors,
    "torchscript": _torchscript,
    "onnx": _onnx,
}
