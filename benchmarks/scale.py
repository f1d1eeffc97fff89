"""Measure a run with a million clients, and one with 600 clients that each keep a network.

    python benchmarks/scale.py [clients] [states] [key=value ...]

``clients``: a million clients of one gray image of 8 × 8 pixels, DCCO, `tiny`, three rounds.
``states``: 600 clients of two such images, Ditto, ResNet-14, two rounds with all clients.
Printed are the seconds until the first round is in `metrics.jsonl` and until the end, report
included, the seconds of processor time in each, and the most resident memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.config import Data

COUNTS = {"clients": 1_000_000, "states": 1200}  # of images
PIXELS = 8
BASE = ("encoder.norm=group", "evaluate.baselines=[]", "device=cpu", "engine.threads=1")
WORDS = {
    "clients": ("partition.samples=1", "encoder.name=tiny", "rounds=3"),
    "states": (
        *("algorithm.name=ditto", "algorithm.local_steps=1", "algorithm.local_epochs=null"),
        *("algorithm.batch=2", "encoder.name=resnet14", "partition.name=iid"),
        *("partition.clients=600", "rounds=2", "evaluate.protocols=knn"),
    ),
}


def make_images(data: Data) -> dict[str, Any]:
    """Return images of noise; the run calls this."""
    random = np.random.default_rng(0)

    def draw(count: int) -> tuple[Any, Any]:
        pixels = random.integers(0, 256, (count, PIXELS, PIXELS), dtype=np.uint8)
        return pixels, random.integers(0, 10, count)

    return {"clients": draw(int(os.environ["IMAGES"])), "test": draw(1000)}


def read_usage(pid: int) -> tuple[float, float]:
    """Return the seconds of processor time and the largest resident memory of a process, in GB."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    peak = next((line.split()[1] for line in lines if line.startswith("VmHWM")), "0")
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK"), int(peak) * 1024 / 1e9


def measure(name: str, words: list[str]) -> None:
    """Run one case and print its numbers."""
    with tempfile.TemporaryDirectory(prefix="scale-") as place:
        out = Path(place) / "run"
        command = [sys.executable, "-m", "fedssl", "run", f"data.name={__file__}:make_images"]
        command += [*BASE, *WORDS[name], *words, "--out", str(out)]
        environment = {**os.environ, "IMAGES": str(COUNTS[name]), "FEDSSL_STATE": place}
        started, used, peak = time.perf_counter(), 0.0, 0.0
        first: tuple[float, float, float] | None = None
        with subprocess.Popen(command, env=environment) as process:
            while process.poll() is None:
                used, now = read_usage(process.pid)
                peak, metrics = max(peak, now), out / "metrics.jsonl"
                if first is None and metrics.exists() and metrics.stat().st_size:
                    first = time.perf_counter() - started, used, peak
                time.sleep(0.05)
        if process.returncode or first is None:
            raise SystemExit(f"{name}: exit code {process.returncode}")
        seconds = time.perf_counter() - started
    for label, row in {"first round": first, "end": (seconds, used, peak)}.items():
        print("{}: {} {:.0f} s, processor {:.0f} s, memory {:.2f} GB".format(name, label, *row))


def main() -> None:
    """Measure the named cases, or both."""
    words = [word for word in sys.argv[1:] if "=" in word]
    for name in [word for word in sys.argv[1:] if "=" not in word] or COUNTS:
        measure(name, words)


if __name__ == "__main__":
    main()
