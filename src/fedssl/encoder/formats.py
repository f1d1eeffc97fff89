"""Write an encoder in a format of other programs, and check it against torch."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from fedssl import __version__
from fedssl.config import plugins
from fedssl.config.preprocessing import HEADER
from fedssl.data.decode import DRAFT
from fedssl.data.load import load_dataset
from fedssl.data.places import use_local_copy
from fedssl.data.squares import MiddleSquares
from fedssl.encoder.load import ImageEncoder, load_encoder, run_folder
from fedssl.models.encoders import ResNet, Timm
from fedssl.models.inputs import Input
from fedssl.models.layouts import torchvision_names
from fedssl.models.norms import BatchNorm, StandardizedConv2d, standardize
from fedssl.models.wrapped import OwnEncoder
from fedssl.runs.reader import RunReader
from fedssl.util import files
from fedssl.util.errors import TrainingError, UserError
from fedssl.util.status import stage
from fedssl.util.text import format_bytes

ENDINGS = {
    "safetensors": ".safetensors",
    "timm": ".safetensors",
    "torchscript": ".pt",
    "onnx": ".onnx",
}
LIMIT = 1e-4  # the largest difference to torch, relative to features above 1
IMAGES = 32  # for the check
Infer = Callable[[Tensor], Tensor]
Writer = Callable[[ImageEncoder, Path], Infer]


def write_checked(run: Path, encoder: ImageEncoder, path: Path, write: Writer) -> Iterator[str]:
    """Write one file if its embeddings equal the encoder's; yield lines for the console."""
    with stage(f"writing {path}"), files.replace_output(path, "--out") as new:
        infer = write(encoder, new)
        images, origin = load_check_images(run, encoder)
        difference, line = measure_difference(encoder, infer, images)
        if not difference <= LIMIT:  # NaN is not
            raise TrainingError(f"{path}: not written ({line} on {origin}). Use another --format.")
    yield f"{path}: {format_bytes(path.stat().st_size)}"
    yield f"{line} on {origin}"


def measure_difference(encoder: ImageEncoder, infer: Infer, images: Tensor) -> tuple[float, str]:
    """Return the largest difference of embeddings to torch, and a line about it.

    The difference is relative to the largest feature, where that is above 1.
    """
    expected = encoder.embed(images)
    with torch.no_grad(), _quiet():
        embeddings = infer(images.float() / 255)
    difference = float((expected - embeddings).abs().max())
    largest = float(expected.abs().max())
    line = f"largest difference to torch {difference:.2g}"
    if largest > 1:
        line += f" (features up to {largest:.3g})"
    return difference / max(1.0, largest), line


def load_check_images(run: Path, encoder: ImageEncoder) -> tuple[Tensor, str]:
    """Return images for the check: the run's own if they are on this machine, or random ones."""
    with contextlib.suppress(UserError):
        config = RunReader(run if run.is_dir() else run_folder(run)).settings
        data = load_dataset(use_local_copy(config.data), config.split_seed)
        split, name = (data.train, "training") if data.test is None else (data.test, "test")
        modality = encoder.tower % len(split.images)
        images = split.images[modality]
        if images.shape[2:] != (encoder.height, encoder.width):
            sizes = None if split.sizes is None else split.sizes[modality]
            images = MiddleSquares(images, sizes, encoder.height, encoder.interpolation)
        if len(images):
            chosen = images[:: -(-len(images) // IMAGES)]
            return chosen, f"{len(chosen)} of the run's {name} images"
    generator = torch.Generator().manual_seed(0)
    shape = (IMAGES, encoder.channels, encoder.height, encoder.width)
    noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return noise, f"{IMAGES} random images (the run's data is not here)"


def describe(encoder: ImageEncoder) -> dict[str, Any]:
    """Return the note on an exported encoder, without paths of the machine that trained it."""
    note = {key: value for key, value in encoder.note.items() if key not in ("files", "personal")}
    settings = note["encoder"]
    note["encoder"] = {**settings, "name": drop_folder(settings["name"]), "init": None}
    note |= {key: drop_folder(note[key]) for key in ("algorithm", "objective") if key in note}
    return {
        **note,
        "tower": encoder.tower,
        "preprocess": describe_preprocessing(encoder),
        "fedssl": __version__,
    }


def drop_folder(name: str) -> str:
    """Return the name of an algorithm or another plug-in without the folder of its file."""
    return name.rpartition("/")[2] if plugins.is_file(name) else name


def describe_preprocessing(encoder: ImageEncoder) -> dict[str, Any]:
    """Return the steps from a file to the encoder's input."""
    side, width, channels = encoder.height, encoder.width, encoder.channels
    input = cast(Input, encoder.body.input)
    half = f"its {('left', 'right')[encoder.tower]} {width} columns"
    grey = ['grey (Pillow\'s convert("L"))'] if channels == 1 else []
    square = f"the square in the middle, resized to {side} by {side} pixels"
    method = encoder.interpolation
    if encoder.stored is None:
        least = DRAFT * side
        draft = f"both sides at least {least}: Pillow's draft(None, ({least}, {least}))"
        pillow = f"Pillow's resize with box, {method.upper()}, which is antialiased"
        fit = [f"{square} in one step ({pillow})", *grey]
    else:
        draft = f"the longer side at least {DRAFT * encoder.stored}: Pillow's draft"
        longest = f"if its longer side has more than {encoder.stored} pixels"
        fit = [f"reduced to that, {longest} (Pillow's resize, {method.upper()})", *grey]
        fit += [f"{square} (torch's interpolate of bytes, {method}, antialias=True)"]
    steps = [
        f"decoded (a JPEG file at the smallest of 1, 1/2, 1/4 and 1/8 of its size with {draft})",
        "turned upright as EXIF says",
        "RGB of 8 bits, alpha dropped (of 16 bits: (value + 128) // 257)",
        *fit,
        *([half] if width != side else []),
        "divided by 255",
        *([] if input.statistics is None else [input.describe()]),
    ]
    return {
        "steps": steps,
        "layout": "NCHW",
        "dtype": "float32",
        "channels": channels,
        "height": side,
        "width": width,
        "range": [0.0, 1.0],
        "mean": [0.0] * channels,  # the file itself normalizes
        "std": [1.0] * channels,
    }


def write_safetensors(encoder: ImageEncoder, path: Path) -> Infer:
    """Write the weights under the names of the network, with the note in the header."""
    state = {name: tensor.contiguous() for name, tensor in encoder.body.state_dict().items()}
    path.write_bytes(save(state, {"format": "pt", HEADER: json.dumps(describe(encoder))}))
    own = encoder.body.body if isinstance(encoder.body, OwnEncoder) else None
    return load_encoder(path, encoder.tower, encoder=own)


def write_timm(encoder: ImageEncoder, path: Path) -> Infer:
    """Write the weights under timm's names; the check loads them into timm's own model."""
    import timm

    body = encoder.body
    name, arguments, names = find_timm_model(body)
    state = {names.get(n, n): tensor.contiguous() for n, tensor in body.state_dict().items()}
    create: Any = timm.create_model
    model = create(name, **arguments)
    counters = {n: t for n, t in model.state_dict().items() if n.endswith("num_batches_tracked")}
    note = {"format": "pt", HEADER: json.dumps(describe(encoder))}
    path.write_bytes(save(counters | state, note))
    model.load_state_dict(load(path.read_bytes()), strict=True)
    input = cast(Input, body.input)
    return lambda images: model.eval()(input(images))


def find_timm_model(body: nn.Module) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return the name of timm's model like an encoder, its arguments, and timm's tensor names."""
    if isinstance(body, Timm):
        return body.name, body.arguments, {}
    if isinstance(body, ResNet) and body.has_large_stem and _has_batch_norm(body):
        arguments = {"num_classes": 0, "in_chans": body.input.channels}
        if body.name in ("resnet18", "resnet50"):
            return body.name, arguments, torchvision_names(body)
    raise UserError(
        "timm has no model of this architecture",
        key="--format",
        value="timm",
        fix="Use --format safetensors, torchscript or onnx. Timm's are encoder.name=timm/NAME, and "
        "resnet18 and resnet50 with batch norm and images of 96 pixels or more.",
    )


def _has_batch_norm(body: nn.Module) -> bool:
    return any(isinstance(module, BatchNorm) for module in body.modules())


def write_torchscript(encoder: ImageEncoder, path: Path) -> Infer:
    """Write a traced network."""
    with _quiet():
        traced = torch.jit.trace(_fold(encoder), _example(encoder), check_trace=False)
        torch.jit.save(traced, str(path), {f"{HEADER}.json": json.dumps(describe(encoder))})
        return torch.jit.load(str(path))


def write_onnx(encoder: ImageEncoder, path: Path) -> Infer:
    """Write an ONNX graph with any number of images per batch."""
    import onnxruntime

    with _quiet():
        program = torch.onnx.export(
            _fold(encoder),
            (_example(encoder),),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["embeddings"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
        assert program is not None
        for node in program.model.graph:
            node.metadata_props.clear()  # file names of this machine
        program.model.metadata_props[HEADER] = json.dumps(describe(encoder))
        program.save(str(path), external_data=False)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _example(encoder: ImageEncoder) -> Tensor:
    """Return two images: with one, a graph might take the batch size for a constant."""
    return torch.rand(2, encoder.channels, encoder.height, encoder.width)


def _fold(encoder: ImageEncoder) -> nn.Module:
    """Return the network with weight standardization computed once: a smaller, closer graph."""
    body = copy.deepcopy(encoder.body)
    for name, conv in list(body.named_modules()):
        if isinstance(conv, StandardizedConv2d):
            names = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
            fixed = nn.Conv2d(**{key: getattr(conv, key) for key in names}, bias=False)
            with torch.no_grad():
                fixed.weight.copy_(standardize(conv.weight))
            body.set_submodule(name, fixed)
    return body.eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's remarks on its exporters: the result is checked."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


WRITERS: dict[str, Writer] = {
    "safetensors": write_safetensors,
    "timm": write_timm,
    "torchscript": write_torchscript,
    "onnx": write_onnx,
}
