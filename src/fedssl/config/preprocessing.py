"""Find the preprocessing of the images that given weights were trained on."""

from __future__ import annotations

import contextlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedssl.config.catalogue import TIMM
from fedssl.config.keys import Recipe

# torchvision's and most other weights for ImageNet.
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
PILLOW = {2: "bilinear", 3: "bicubic"}  # numbers of Image.Resampling, as transformers has them
NOTE = "encoder.json"  # beside the weights that fedssl wrote
HEADER = "fedssl"  # the entry of a safetensors header, or of config.json, that holds the note


def recommend_for_weights(encoder: Recipe, name: str) -> tuple[str, Recipe]:
    """Return a title and the settings that suit the weights which the keys of ``encoder`` name.

    Weights from elsewhere need the mean, the standard deviation, the size and the interpolation of
    their images. Batch norm stays at their statistics, which small clients cannot replace.
    """
    init, is_pretrained = encoder.get("init"), encoder.get("pretrained") is True
    if isinstance(init, str):
        return "encoder.init", _recommend_for_file(Path(init).expanduser(), name)
    if is_pretrained and name.startswith(TIMM):
        return "encoder.pretrained=true", _recommend_for_timm(name)
    return "", {}


def _recommend_for_file(path: Path, name: str) -> Recipe:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        if (ours := read_note(path)) is not None:
            given = ours["encoder"]
            known = {key: given[key] for key in ("mean", "std") if given.get(key)}
            how = {key: ours[key] for key in ("interpolation",) if key in ours}
            return {section: keys for section, keys in (("encoder", known), ("data", how)) if keys}
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return _read_hub_folder(path)
    if name.startswith(TIMM):
        return _recommend_for_timm(name)
    # A file of tensors alone may be fedssl's; those of other programs are mostly pickled.
    is_foreign = path.is_file() and path.suffix != ".safetensors"
    return _settings(IMAGENET) if is_foreign else {}


def _settings(statistics: Recipe, **images: Any) -> Recipe:
    """Return settings of encoder and data; ``None`` is not known, and other methods are rare."""
    if images.get("interpolation") not in ("bilinear", "bicubic"):
        images["interpolation"] = None
    known = {key: value for key, value in images.items() if value is not None}
    return {"encoder": {"norm": "frozen", **statistics}, **({"data": known} if known else {})}


@lru_cache
def _recommend_for_timm(name: str) -> Recipe:
    try:
        import timm
    except ImportError:
        return {}  # the encoder will say so
    known: Any = timm.get_pretrained_cfg(name.removeprefix(TIMM), allow_unregistered=True)
    if known is None or not known.mean:
        return {}
    statistics = {"mean": list(known.mean), "std": list(known.std)}
    return _settings(statistics, size=known.input_size[-1], interpolation=known.interpolation)


def _read_hub_folder(path: Path) -> Recipe:
    """Read a folder of transformers or timm, as the Hugging Face hub has them."""
    folder = path if path.is_dir() else path.parent
    processor = folder / "preprocessor_config.json"
    if processor.is_file():
        given = json.loads(processor.read_text(encoding="utf-8"))
        statistics = {"mean": list(given["image_mean"]), "std": list(given["image_std"])}
        size = given.get("crop_size") or given.get("size")
        side = size.get("height") or size.get("shortest_edge") if isinstance(size, dict) else size
        method = PILLOW.get(given.get("resample"))
        return _settings(statistics, size=side, interpolation=method)
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))["pretrained_cfg"]
    statistics = {"mean": list(given["mean"]), "std": list(given["std"])}
    size, method = given["input_size"][-1], given.get("interpolation")
    return _settings(statistics, size=size, interpolation=method)


def read_note(path: Path) -> dict[str, Any] | None:
    """Return the note of fedssl on an encoder in a folder or file; ``None`` if there is none."""
    if path.is_file():
        if path.suffix == ".safetensors":
            with path.open("rb") as file:  # the format's header: its length, then JSON
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            if note := header.get("__metadata__", {}).get(HEADER):
                return json.loads(note)
        folder = path.parent.parent if path.parent.name == "personal" else path.parent
        return _read_json(folder / NOTE)
    return _read_json(path / NOTE) or (_read_json(path / "config.json") or {}).get(HEADER)


def _read_json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
