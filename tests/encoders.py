"""Small runs and random encoders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedssl import config
from fedssl.config import Encoder
from fedssl.encoder.load import ImageEncoder
from fedssl.models.encoders import encoder as make_encoder
from fedssl.models.network import initialize
from fedssl.runs import checkpoint, loop
from fedssl.runs.build import Experiment, build_experiment
from fedssl.util.files import write_json

SMALL = (
    "rounds=2",
    "cohort.size=6",
    "data.size=8",
    "objective.projector=32,32,16",
    "evaluate.protocols=knn",
    "evaluate.baselines=[]",
    "engine.threads=1",
)


def trained(out: Path, *words: str) -> Path:
    loop.run(config.resolve(config.read_recipe(None), [*SMALL, *words]), out)
    return out


def reopened(folder: Path) -> Experiment:
    session = build_experiment(config.build(config.read_yaml(folder / "config.yaml")))
    session.engine.open(folder)
    assert checkpoint.read(folder, session)
    return session


def made(name: str, norm: str, channels: int, size: int) -> ImageEncoder:
    """An encoder at random, with running statistics that matter."""
    settings = Encoder(name, norm=norm, groups=8)  # type: ignore[arg-type]
    body = make_encoder(settings, channels, size)
    initialize(body, 0)
    generator = torch.Generator().manual_seed(0)
    for key, value in body.state_dict().items():
        if key.endswith("running_mean"):
            value.uniform_(-0.2, 0.2, generator=generator)
        elif key.endswith("running_var"):
            value.uniform_(0.5, 2, generator=generator)
    note = {
        "model": "global",
        "encoder": config.to_tree(settings),
        "features": body.features,
        "channels": [channels],
        "size": [size, size],
    }
    return ImageEncoder(body.eval(), note, 0).eval()


def saved(encoder: ImageEncoder, folder: Path) -> Path:
    """Write the files that a run leaves of its encoder."""
    folder.mkdir(exist_ok=True)
    save_file(encoder.body.state_dict(), folder / "encoder.safetensors")
    write_json(folder / "encoder.json", encoder.note)
    return folder


def needs(format: str) -> None:
    """Skip where the extra is not installed."""
    for package in ("onnx", "onnxruntime", "onnxscript") if format == "onnx" else ():
        pytest.importorskip(package)
