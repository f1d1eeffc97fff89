"""Write a folder in the layout of the Hugging Face hub: weights, descriptions and a model card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedssl import __version__, config
from fedssl.config import Config, Recipe
from fedssl.config.preprocessing import HEADER
from fedssl.encoder.formats import (
    describe,
    describe_preprocessing,
    drop_folder,
    write_checked,
    write_safetensors,
)
from fedssl.encoder.load import ImageEncoder
from fedssl.federation.algorithm import build_algorithm
from fedssl.models.encoders import Timm
from fedssl.models.weights import SUFFIXES
from fedssl.privacy.exchanges import list_exchanges
from fedssl.privacy.leakage import describe_leaks
from fedssl.runs.reader import RunReader
from fedssl.runs.result import format_result
from fedssl.util import files
from fedssl.util.errors import UserError
from fedssl.util.templates import load_templates

RECIPE = "recipe.yaml"
TEMPLATES = Path(__file__).with_name("templates")


def write(run: Path, encoders: Sequence[ImageEncoder], out: Path | None) -> Iterator[str]:
    """Write the folder of a finished run; yield lines for the console."""
    source, model = RunReader(run), describe_model(encoders[0])
    texts = {
        "config.json": json.dumps(model, indent=2, ensure_ascii=False) + "\n",
        RECIPE: yaml.safe_dump(strip_recipe(source.settings), sort_keys=False, allow_unicode=True),
        "README.md": write_model_card(source, encoders[0]),
    }
    folder = out or run / "export" / "hf"
    _check_free(folder)
    files.make_output_folder(folder, "--out")
    for encoder, suffix in zip(encoders, SUFFIXES, strict=False):
        path = folder / f"model{suffix}.safetensors"
        yield from write_checked(run, encoder, path, write_safetensors)
    for name, text in texts.items():
        files.write_output(folder / name, text, "--out")
    yield f"{folder}: read README.md and complete it before you publish it"


def _check_free(folder: Path) -> None:
    """Check that the folder is new, empty or an earlier export."""
    earlier = folder / "config.json"
    is_ours = earlier.is_file() and f'"{HEADER}"'.encode() in earlier.read_bytes()
    if folder.is_dir() and any(folder.iterdir()) and not is_ours:
        raise UserError("not empty", key="--out", value=folder, fix="Use a new folder.")


def describe_model(encoder: ImageEncoder) -> dict[str, Any]:
    """Return ``config.json``, which timm reads for its backbones and fedssl for all."""
    note = {HEADER: describe(encoder)}
    if not isinstance(encoder.body, Timm):
        return {
            "model_type": "fedssl",
            "num_features": encoder.features,
            "num_channels": encoder.channels,
            "image_size": [encoder.height, encoder.width],
            **note,
        }
    from timm.models import split_model_name_tag

    channels = encoder.body.input.channels
    mean, std = encoder.body.input.statistics or ([0.0] * channels, [1.0] * channels)
    size = {} if encoder.body.size is None else {"img_size": encoder.body.size}
    return {
        **({"model_args": size} if size else {}),
        "architecture": split_model_name_tag(encoder.body.name)[0],
        "num_classes": 0,
        "num_features": encoder.features,
        "pretrained_cfg": {
            "num_classes": 0,
            "input_size": [channels, encoder.height, encoder.width],
            "fixed_input_size": encoder.body.size is not None,
            "interpolation": encoder.interpolation,
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": mean,
            "std": std,
        },
        **note,
    }


def strip_recipe(settings: Config) -> Recipe:
    """Return the configuration without paths of this machine: a recipe for others."""
    tree = config.to_tree(config.rename_plugins(settings, drop_folder))
    for path in config.path_keys(settings):
        section, _, key = path.partition(".")
        tree[section][key] = None
    return tree


def write_model_card(run: RunReader, encoder: ImageEncoder) -> str:
    """Describe data, training, messages, results and limits; no folder or client is named."""
    settings, summary = run.settings, run.summary
    objective, algorithm = (drop_folder(s.name) for s in (settings.objective, settings.algorithm))
    built, samples = build_algorithm(settings), [client["samples"] for client in run.clients]
    is_timm = isinstance(encoder.body, Timm)
    tags = ("image-feature-extraction", "self-supervised-learning", "federated-learning")
    front = {
        "library_name": "timm" if is_timm else "fedssl",
        "pipeline_tag": "image-feature-extraction",
        "tags": [*tags, "fedssl", algorithm, objective],
    }
    root = "" if settings.data.root is None else " data.root=DIR"
    template = load_templates(TEMPLATES).get_template("model_card.md")
    return template.render(
        front=yaml.safe_dump(front, sort_keys=False).strip(),
        config=settings,
        encoder=encoder,
        objective=objective,
        algorithm=algorithm,
        built=built,
        parameters=sum(p.numel() for p in encoder.body.parameters()),
        version=__version__,
        is_timm=is_timm,
        steps=describe_preprocessing(encoder)["steps"],
        samples=samples,
        partition=drop_folder(settings.partition.name),
        recipe=RECIPE,
        messages="" if built.pools_data else list_exchanges(settings),
        leaks=None if built.pools_data else describe_leaks(settings, built, samples),
        summary=summary,
        results=format_result(summary, settings) if "untrained" in summary else None,
        command=f"fedssl run {RECIPE}{root}",
    )
