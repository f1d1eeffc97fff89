"""What feature fusion and neighbourhood matching add to CCL's local epoch, as shares of it.

    python benchmarks/fusion.py [--device cpu] [--precision fp32] [--encoder resnet18]
        [--samples 9984] [--batch 128] [--queue 4096] [--pixels 32] [--compile] [--repeats 3]

Five clients, 128 dimensions. Rows run in turn: a round of one local epoch without remote features
(CL), with them as negatives (CL + FF: sharing and InstaHide included), with matching too (NM). An
hour a round on a CPU: made for a GPU.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from common import engine_of, even, made, rounds_of, seconds

from fedssl import config as configuration

ROWS: dict[str, dict[str, Any]] = {
    "CL": {"remote": "off", "lambda": 0},
    "CL + FF": {"lambda": 0},
    "CL + FF + NM": {},
}


def main() -> None:
    """One line a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--samples", type=int, default=9984, help="of a client; no bank is larger")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--queue", type=int, default=4096)
    parser.add_argument("--pixels", type=int, default=32)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    o = parser.parse_args()

    torch.set_num_threads(2)
    rows = {}
    for name, keys in ROWS.items():
        tree = {
            "augment": {"name": "fedema"},
            "encoder": {"name": o.encoder, "norm": "batch"},
            "objective": {"name": "moco", "projector": [512, 128], "queue": o.queue},
            "algorithm": {"name": "ccl", "local_epochs": 1, "batch": o.batch, **keys},
            "client": {"lr": 0.032, "momentum": 0.9, "weight_decay": 5e-4},
            "server": {"optimizer": "sgd", "lr": 1.0},
            "device": o.device,
            "precision": o.precision,
            "rounds": 1_000_000,
        }
        split = made(o.clients * o.samples, 3, o.pixels)
        config = configuration.build(tree)
        rows[name] = rounds_of(*engine_of(config, split, even(o.clients, o.samples), o.compile))
    for work in rows.values():
        for _ in range(3):  # the banks are full, and all shapes are compiled
            seconds(work, o.device)
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(o.repeats):
        for name, work in rows.items():
            times[name].append(seconds(work, o.device))
    for name, each in times.items():
        added = statistics.median(t / c - 1 for t, c in zip(each, times["CL"], strict=True))
        print(
            f"{name:14} {1e3 * min(each):9.1f} ms a round   adds {100 * added:5.1f} %", flush=True
        )


if __name__ == "__main__":
    main()
