"""Images streamed from a file beside resident images and, on a GPU, beside a bare loop.

    python benchmarks/streaming.py [--device cpu] [--encoders tiny resnet18] [--view 32]
        [--images 512] [--batch 64] [--repeats 5]

FedAvg of SimCLR: 5 clients, one local epoch, views from stored images of 256 pixels. The bare loop
calls the compiled step on all images as one data set. All kinds run in turn; times are the fastest
of the repeats. ``resident/bare`` and ``streamed/resident`` are ratios of images per second.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import engine_of, even, made, rounds_of, seconds, write_images
from gpu import CLIENTS, bare_loop

from fedssl import config as configuration
from fedssl.data.dataset import Split

STORED = 256


def settings(o: argparse.Namespace, encoder: str, stream: str) -> configuration.Config:
    """SimCLR by FedAvg."""
    tree: dict[str, Any] = {
        "device": o.device,
        "precision": "bf16" if o.device == "cuda" else "fp32",
        "rounds": 1_000_000,
        "schedule": "constant",
        "data": {"stream": stream},
        "augment": {"name": "simclr", "size": o.view},
        "encoder": {"name": encoder, "norm": "batch"},
        "objective": {"name": "simclr", "projector": [2048, 128]},
        "algorithm": {"name": "fedavg", "local_epochs": 1, "batch": o.batch},
        "client": {"lr": 0.03, "momentum": 0.9, "weight_decay": 1e-4},
        "server": {"optimizer": "sgd", "lr": 1.0},
    }
    return configuration.build(tree)


def compare(o: argparse.Namespace, encoder: str, folder: Path) -> str:
    """Return one line of images per second."""
    split, groups = made(o.images, 3, STORED), even(CLIENTS, o.images // CLIENTS)
    streamed = Split((write_images(folder / "images.npy", split.images[0][:]),))
    on_gpu, works = o.device == "cuda", {}
    for name, each, stream in (("resident", split, "off"), ("streamed", streamed, "on")):
        engine, server = engine_of(settings(o, encoder, stream), each, groups, compiled=on_gpu)
        works[name] = rounds_of(engine, server)
        if on_gpu and name == "resident":
            works["bare"] = bare_loop(engine.trainer, o.images, 1)
    for work in [*works.values()] * 2:  # compiles
        seconds(work, o.device)
    times = [{n: seconds(work, o.device) for n, work in works.items()} for _ in range(o.repeats)]
    speeds = {name: o.images / min(each[name] for each in times) for name in works}
    line = ", ".join(f"{name} {speed:,.0f} images/s" for name, speed in speeds.items())
    for a, b in (("resident", "bare"), ("streamed", "resident")):
        if b in speeds:
            line += f", {a}/{b} {speeds[a] / speeds[b]:.3f}"
    return f"{encoder} at {o.view} pixels: {line}"


def main() -> None:
    """One line for each encoder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--encoders", nargs="+", default=["tiny", "resnet18"])
    parser.add_argument("--view", type=int, default=32)
    parser.add_argument("--images", type=int, default=640, help="of all clients")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    o = parser.parse_args()
    torch.backends.cudnn.benchmark = True  # as a run has it
    with tempfile.TemporaryDirectory() as folder:
        for encoder in o.encoders:
            print(compare(o, encoder, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
