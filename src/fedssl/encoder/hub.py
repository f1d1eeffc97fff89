"""A folder in the layout of the Hugging Face hub: weights, what they are, and a model card."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedssl import __version__, config, privacy
from fedssl.config import TIMM, Config, Tree
from fedssl.encoder.export import about, checked, plain, save_weights
from fedssl.encoder.load import HEADER, ImageEncoder
from fedssl.models.encoders import Timm
from fedssl.models.weights import SUFFIXES
from fedssl.privacy.exchanges import build_algorithm, list_exchanges
from fedssl.runs.record import Run
from fedssl.runs.result import format_result
from fedssl.util import outputs
from fedssl.util.errors import UserError

RECIPE = "recipe.yaml"


def write(run: Path, encoders: Sequence[ImageEncoder], out: Path | None) -> Iterator[str]:
    """Write the folder of a finished run; lines that say what, and what was checked."""
    source = Run(run)
    texts = {
        "config.json": _json(description(encoders[0])),
        "preprocessor_config.json": _json(processor(encoders[0])),
        RECIPE: yaml.safe_dump(recipe(source.settings), sort_keys=False, allow_unicode=True),
        "README.md": model_card(source, encoders[0]),
    }
    folder = out or run / "export" / "hf"
    _check_free(folder)
    outputs.folder(folder, "--out")
    for encoder, suffix in zip(encoders, SUFFIXES, strict=False):
        header = {"format": "pt", HEADER: json.dumps(about(encoder))}
        path = folder / f"model{suffix}.safetensors"
        yield from checked(run, encoder, path, functools.partial(save_weights, header=header))
    for name, text in texts.items():
        outputs.write_text(folder / name, text, "--out")
    yield f"{folder}: read README.md, and add what it leaves open, before you publish it"


def _check_free(folder: Path) -> None:
    """Only a folder that is new, empty or an earlier export of ours is written into."""
    known = folder / "config.json"
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not known.is_file() or f'"{HEADER}"'.encode() not in known.read_bytes():
        raise UserError(f"--out {folder}: exists and is not empty; name a new folder")


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def description(encoder: ImageEncoder) -> dict[str, Any]:
    """``config.json``: what timm's loader reads of its own backbones, and what ours does."""
    own = {HEADER: about(encoder)}
    if not isinstance(encoder.body, Timm):
        return {
            "model_type": "fedssl",
            "num_features": encoder.features,
            "num_channels": encoder.channels,
            "image_size": [encoder.height, encoder.width],
            **own,
        }
    from timm.models import split_model_name_tag

    shown = about(encoder)["preprocess"]
    return {
        "architecture": split_model_name_tag(encoder.body.name)[0],
        "num_classes": 0,
        "num_features": encoder.features,
        "pretrained_cfg": {
            "num_classes": 0,
            "input_size": [encoder.channels, encoder.height, encoder.width],
            "fixed_input_size": encoder.body.size is not None,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": shown["mean"],
            "std": shown["std"],
        },
        **own,
    }


def processor(encoder: ImageEncoder) -> dict[str, Any]:
    """``preprocessor_config.json``, by the hub's usual names."""
    shown = about(encoder)["preprocess"]
    return {
        "do_convert_rgb": encoder.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": encoder.height},
        "resample": 2,  # bilinear
        "do_center_crop": True,
        "crop_size": {"height": encoder.height, "width": encoder.height},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": False,
        "image_mean": shown["mean"],
        "image_std": shown["std"],
    }


def recipe(settings: Config) -> Tree:
    """The run's configuration without places on its machine: a recipe for whoever has the data."""
    named = config.rename_protocols(settings.evaluate, plain)
    tree = config.to_tree(dataclasses.replace(settings, evaluate=named))
    for path in config.path_keys(settings):
        section, _, key = path.partition(".")
        tree[section][key] = None
    for section in ("algorithm", "objective", "partition"):
        tree[section]["name"] = plain(tree[section]["name"])
    return tree


# The model card ------------------------------------------------------------------------------


def model_card(run: Run, encoder: ImageEncoder) -> str:
    """What was trained on what, how, what was exchanged, how good it is, and what it is not."""
    settings = run.settings
    objective, algorithm = plain(settings.objective.name), plain(settings.algorithm.name)
    front = {
        "library_name": "timm" if isinstance(encoder.body, Timm) else "fedssl",
        "pipeline_tag": "image-feature-extraction",
        "tags": [
            *("image-feature-extraction", "self-supervised-learning", "federated-learning"),
            *("fedssl", algorithm, objective),
        ],
    }
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# An image encoder, trained by `{objective}` under `{algorithm}`

{_network(encoder, settings)} Written by fedssl {__version__}.

## Use

```python
import fedssl

encoder = fedssl.load_encoder("PATH")  # this folder
embeddings = encoder.embed(["a.jpg", "b.png"])  # [2, {encoder.features}]
```

{_timm(encoder)}An image is {"; ".join(about(encoder)["preprocess"]["steps"])}.

## Data

{_data(run)}

## Training

Objective `{objective}`, algorithm `{algorithm}`, {settings.rounds} rounds, seed {settings.seed}. \
The model is: {encoder.note["model"]}. All keys are in `{RECIPE}`.{_started(settings)}

## What was exchanged

{_exchanged(run)}

## Results

{_results(run)}

## Limits

{_limits(run, encoder)}
"""


def _started(settings: Config) -> str:
    return "" if settings.encoder.init is None else " It started from given weights."


def _network(encoder: ImageEncoder, settings: Config) -> str:
    parameters = sum(p.numel() for p in encoder.body.parameters())
    norm = "" if settings.encoder.name.startswith(TIMM) else f", {settings.encoder.norm} norm"
    return (
        f"`{settings.encoder.name}`{norm}, {parameters:,} parameters: images of {encoder.channels} "
        f"× {encoder.height} × {encoder.width} to vectors of {encoder.features} numbers."
    )


def _timm(encoder: ImageEncoder) -> str:
    if not isinstance(encoder.body, Timm):
        return ""
    return (
        'timm loads it as well: `timm.create_model("local-dir:PATH", pretrained=True, '
        "num_classes=0)`.\n\n"
    )


def _data(run: Run) -> str:
    """Numbers only: names of folders may be those of sites or people."""
    settings, counts = run.settings, [client["samples"] for client in run.clients]
    text = f"`{settings.data.name}`, unlabeled in training"
    if settings.objective.name == "supervised":
        text = f"`{settings.data.name}`, with labels"
    if counts:
        most = f" to {max(counts):,}" if max(counts) > min(counts) else ""
        text += f": {sum(counts):,} images of {len(counts):,} clients, {min(counts):,}{most} each"
    if settings.engine.sites is None:
        text += f", divided by `partition.name={plain(settings.partition.name)}`"
    return text + "."


def _exchanged(run: Run) -> str:
    settings = run.settings
    kind = config.variant("algorithm", settings.algorithm.name)
    if kind.pools_data:
        return "All images were in one place; nothing was exchanged."
    start = "Trained at real sites. From each site left:"
    if settings.engine.sites is None:
        start = (
            "Trained in a simulation: whoever ran it had all images. At real sites, this "
            "configuration sends from each of them:"
        )
    text = f"{start}\n\n{list_exchanges(settings)}"
    sizes = [client["samples"] for client in run.clients]
    if single := privacy.told(settings, build_algorithm(settings), sizes):
        text += f"\n\n**Single images**: {single}."
    if "epsilon" in run.summary:
        epsilon, delta = run.summary["epsilon"], run.summary["delta"]
        text += f"\n\nDifferential privacy, client level: ε = {epsilon:.3g} for δ = {delta:g}."
    else:
        text += "\n\nThere is no differential privacy: the weights may tell of single images."
    return text


def _results(run: Run) -> str:
    command = f"fedssl run {RECIPE}"
    if run.settings.data.root is not None:
        command += " data.root=DIR"
    if "untrained" not in run.summary:
        return f"Not judged: there were no images to judge with. The command was `{command}`."
    table = format_result(run.summary, run.settings)
    rest = f"fedssl {run.summary['fedssl']}, torch {run.summary['torch']}, {run.summary['device']}"
    return f"One run of `{command}` ({rest}):\n\n```\n{table}\n```"


def _limits(run: Run, encoder: ImageEncoder) -> str:
    lines = [
        f"It has seen images of `{run.settings.data.name}` only; on others, judge it before use "
        "(`fedssl evaluate`; without the run's folder, `fedssl run` with "
        "`encoder.init=PATH rounds=0`).",
        "The numbers above are of one run and one seed.",
        "It was not examined for what it treats unequally, nor for what it may reveal of its "
        "training images.",
        "No license is stated here: whoever publishes it adds one, and what the images' owners "
        "allow.",
    ]
    if "global" not in encoder.note["model"]:
        lines.insert(0, f"It is {encoder.note['model']}.")
    return "\n".join(f"- {line}" for line in lines)
