"""Measure what feature fusion and neighbourhood matching add to CCL's local epoch.

    python benchmarks/fusion.py [--device cpu] [--precision fp32] [--encoder resnet18]
        [--samples 9984] [--batch 128] [--queue 4096] [--pixels 32] [--compile] [--repeats 3]

A client of five, 128 dimensions. Rows run in turn: one local epoch of that client without remote
features (CL), with the other four's as negatives (CL + FF: InstaHide and its own new bank as well),
with matching too (NM). On a CPU, times are the processor's on one thread, which a busy machine
changes least: half an hour an epoch of 32 pixels, a quarter of that at 16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import engine_of, even, made, seconds

from fedssl import config as configuration
from fedssl.engines.local import LocalEngine
from fedssl.federation.server import Server

ROWS: dict[str, dict[str, Any]] = {
    "CL": {"remote": "off", "lambda": 0},
    "CL + FF": {"lambda": 0},
    "CL + FF + NM": {},
}


def epoch(engine: LocalEngine, server: Server, rows: int) -> Callable[[], None]:
    """A round of the first client, the others' banks being full."""
    width = 128
    if engine.algorithm.asked(False, "each"):
        others = range(1, len(engine.groups))
        bank = F.normalize(torch.randn(rows, width, device=server.weights.device), dim=1)
        server.state["banks"] = {str(k): bank for k in others}

    def one() -> None:
        engine.algorithm.round(server, engine.cohort(np.array([0]), server.round))
        server.round += 1
        float(server.log["loss"])

    return one


def processor(work: Callable[[], None]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """One line a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--samples", type=int, default=9984, help="of a client; no bank is larger")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--queue", type=int, default=4096)
    parser.add_argument("--pixels", type=int, default=32)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    o = parser.parse_args()

    torch.set_num_threads(1)
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
        split = made(5 * o.samples, 3, o.pixels)
        config = configuration.build(tree)
        engine, server = engine_of(config, split, even(5, o.samples), o.compile)
        rows[name] = epoch(engine, server, min(o.queue, o.samples))
    for work in rows.values() if o.device == "cuda" else ():
        for _ in range(3):  # all shapes are compiled, caches are full
            work()
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(o.repeats):
        for name, work in rows.items():
            took = seconds(work, o.device) if o.device == "cuda" else processor(work)
            times[name].append(took)
    for name, each in times.items():
        added = statistics.median(t / c - 1 for t, c in zip(each, times["CL"], strict=True))
        print(
            f"{name:14} {1e3 * min(each):9.1f} ms an epoch   adds {100 * added:5.1f} %", flush=True
        )


if __name__ == "__main__":
    main()
