"""Compare bfloat16 with compiled steps and float32 without: the same rounds of the same recipes.

    python results/precision.py --out DIR [--recipes RECIPE ...] [key=value ...]

Each recipe runs three times side by side: ``fp32`` is float32 (without TF32) and nothing compiled,
``bf16`` is bfloat16 and compiled, and ``seed`` is that with another seed (and the same split), to
compare with. Keys hold for all runs; rounds=4 algorithm.local_epochs=1 take about two minutes on an
H200. Prints a line for results/measured.jsonl: the largest differences from ``fp32`` over all
rounds, of the loss and of kNN on the test images.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RECIPES = ["fedema/table3/fedbyol/cifar10-noniid", "fedema/table3/fedema-auto/cifar10-noniid"]
KEYS = [
    "evaluate.every=1",
    "evaluate.monitor=[knn]",
    "evaluate.protocols=[knn]",
    "partition.seed=0",
]
RUNS = {
    "fp32": ["precision=fp32", "engine.compile=off", "seed=0"],
    "bf16": ["precision=bf16", "engine.compile=on", "seed=0"],
    "seed": ["precision=bf16", "engine.compile=on", "seed=1"],
}


def start(recipe: str, name: str, words: list[str], out: Path) -> subprocess.Popen[bytes]:
    """Start a run; its output goes to a file beside its folder."""
    folder = out / recipe.replace("/", "-") / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = {"NVIDIA_TF32_OVERRIDE": "0"} if name == "fp32" else {}
    command = [sys.executable, "-m", "fedssl", "run", recipe, *KEYS, *RUNS[name], *words]
    with folder.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--out", str(folder)], env={**os.environ, **own}, stdout=log, stderr=log
        )


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def compare(folder: Path) -> dict[str, Any]:
    """Largest differences from float32, and each run's numbers."""
    runs = {name: rounds_of(folder / name) for name in RUNS}
    values = {
        measure: {name: [round(line[key], 4) for line in lines] for name, lines in runs.items()}
        for measure, key in {"loss": "loss", "knn": "knn_top1"}.items()
    }
    largest = {
        f"{measure}_{name}": round(
            max(abs(a - b) for a, b in zip(each["fp32"], each[name], strict=True)), 4
        )
        for measure, each in values.items()
        for name in ("bf16", "seed")
    }
    seconds = {name: [round(line["seconds"], 2) for line in lines] for name, lines in runs.items()}
    return {"largest": largest, **values, "seconds_of_each_round": seconds}


def main() -> int:
    """Run all, and print a line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("words", nargs="*", metavar="key=value")
    o = parser.parse_intermixed_args()
    running = [start(recipe, name, o.words, o.out) for recipe in o.recipes for name in RUNS]
    codes = [process.wait() for process in running]
    if any(codes):
        print(f"precision.py: a run failed. See the logs in {o.out}.", file=sys.stderr)
        return 1
    numbers = {recipe: compare(o.out / recipe.replace("/", "-")) for recipe in o.recipes}
    line = {
        "what": "bfloat16 with compiled steps against float32 (no TF32) with plain ones: largest "
        "differences over all rounds, and those between two seeds",
        "command": " ".join(["python results/precision.py", *o.words]),
        "numbers": numbers,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps(line, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
