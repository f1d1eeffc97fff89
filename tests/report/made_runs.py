"""Runs made of others by changing their files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fedssl import config

NASTY = "<img src=x onerror=document.title='broken'>\"'&"


def again(source: Path, out: Path, summary: dict[str, Any] | None = None, **keys: Any) -> Path:
    """A copy of a run's folder with other keys, and other numbers in its summary."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("checkpoint", "tensorboard"))
    dotted = {name.replace("__", "."): value for name, value in keys.items()}
    tree = config.with_values(config.read_yaml(out / "config.yaml"), dotted)
    (out / "config.yaml").write_text(json.dumps(tree))
    if summary is not None:
        own = json.loads((out / "summary.json").read_text())
        (out / "summary.json").write_text(json.dumps(own | summary))
    return out


def made(
    out: Path,
    words: tuple[str, ...] = (),
    summary: dict[str, Any] | None = None,
    lines: tuple[dict[str, Any], ...] = (),
) -> Path:
    """A run's folder of a configuration, without any training."""
    out.mkdir(parents=True)
    base = config.read_recipe(None)
    base["evaluate"] = {"baselines": []}
    (out / "config.yaml").write_text(config.dump(config.resolve(base, words)))
    if summary is not None:
        (out / "summary.json").write_text(json.dumps(summary))
    if lines:
        (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def scored(knn: float, untrained: float = 80.0, **more: Any) -> dict[str, Any]:
    """A summary with one accuracy."""
    row = {"knn_top1": knn}
    return {**row, "result": row, "untrained": {"knn_top1": untrained}, "judged": "global", **more}
