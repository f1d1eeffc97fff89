"""Export a run's encoder to other programs, or to a folder for the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from fedssl.config.preprocessing import NOTE
from fedssl.encoder import hub
from fedssl.encoder.formats import ENDINGS, WRITERS, describe, find_timm_model, write_checked
from fedssl.encoder.load import load_encoder, parse_note, read_note, run_folder
from fedssl.models.weights import SUFFIXES, find_model
from fedssl.util import files
from fedssl.util.errors import UserError


def export(run: Path, format: str, out: Path | None) -> Iterator[str]:
    """Write a run's encoder in a format; yield lines for the console."""
    if format not in (*WRITERS, "hf"):
        fix = f"Use one of {', '.join((*WRITERS, 'hf'))}."
        raise UserError("unknown", key="format", value=format, fix=fix)
    if format == "onnx":
        _check_onnx()
    run = find_model(run)
    if format == "hf" and run.is_file():
        fix = f"Give the run's folder, or use --format {', '.join(ENDINGS)} for one model."
        raise UserError("its model card is about a whole run", key="--format", value="hf", fix=fix)
    towers = parse_note(read_note(run), run).towers if run.is_dir() else 1
    encoders = [load_encoder(run, tower) for tower in range(towers)]
    if format == "hf":
        yield from hub.write(run, encoders, out)
        return
    first = _choose_file(run, format, out)
    for encoder, suffix in zip(encoders, SUFFIXES, strict=False):
        path = first.with_name(f"{first.stem}{suffix}{first.suffix}")
        if format == "timm":
            name, arguments, _ = find_timm_model(encoder.body)
            given = "".join(f", {key}={value!r}" for key, value in arguments.items())
            yield f'timm.create_model("{name}"{given}).load_state_dict(load_file("{path}"))'
        yield from write_checked(run, encoder, path, WRITERS[format])
        beside = path.with_name(f"{path.name}.json")
        if path.name == "encoder.safetensors":
            beside = path.with_name(NOTE)  # load_encoder then takes the folder
        files.write_output(beside, json.dumps(describe(encoder), indent=2) + "\n", "--out")
        yield f"{beside}: description and preprocessing"


def _check_onnx() -> None:
    needed = ("onnx", "onnxruntime", "onnxscript")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        fix = "Install it with: pip install 'fedssl[export]'"
        raise UserError(f"needs {missing[0]}", key="--format", value="onnx", fix=fix)


def _choose_file(run: Path, format: str, out: Path | None) -> Path:
    """Return the first tower's file, which no other model of the run shares."""
    ending, name = ENDINGS[format], run.stem if run.is_file() else "encoder"
    if format == "timm" and name == "encoder":
        name = "model"  # a folder with encoder.safetensors is fedssl's
    target = (run if run.is_dir() else run.parent) / "export" / format if out is None else out
    if target.suffix != ending and target.suffix in ENDINGS.values():
        fix = f"Use a name that ends in {ending}."
        raise UserError(
            f"the ending of another format than {format}", key="--out", value=out, fix=fix
        )
    path = target if target.suffix == ending else target / f"{name}{ending}"
    if (run_folder(path) / "config.yaml").exists():
        raise UserError("inside a run's folder", key="--out", value=out, fix="Use another folder.")
    files.make_output_folder(path.parent, "--out")
    return path
