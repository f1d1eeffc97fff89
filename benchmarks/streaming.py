"""Images streamed from a file beside images in memory, and a set larger than memory.

    python benchmarks/streaming.py [--images 512] [--repeats 8] [--device cpu]

First 16 steps on 69 GB of images, a sparse file, and the memory that they take. Then rounds of
SimCLR (2 clients, batches of 64, views of 32 and 64 pixels from stored images of 256) with both
kinds of images in turn; times are the fastest of the repeats.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import engine_of, even, made, rounds_of, seconds, write_images

from fedssl import config as configuration
from fedssl.data.dataset import Split
from fedssl.data.stored import StoredImages

STORED = 256
WORK = (("tiny", 32, 1), ("resnet18", 64, 4))  # network, size of a view, 1/share of the images


def settings(encoder: str, view: int, device: str, **algorithm: int) -> configuration.Config:
    """SimCLR by FedAvg."""
    tree: dict[str, Any] = {
        "device": device,
        "rounds": 1_000_000,
        "schedule": "constant",
        "augment": {"name": "simclr", "size": view},
        "encoder": {"name": encoder, "groups": 8},
        "objective": {"name": "simclr", "projector": [128, 64]},
        "algorithm": {"name": "fedavg", "batch": 64, **algorithm},
        "client": {"lr": 0.03},
        "server": {"optimizer": "sgd", "lr": 1.0},
    }
    return configuration.build(tree)


def peak() -> int:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def compare(o: argparse.Namespace, folder: Path) -> None:
    """One line for each network."""
    split = made(o.images, 3, STORED)
    kinds = (split, Split((write_images(folder / "images.npy", split.images[0][:]),)))
    for encoder, view, part in WORK:
        images, config = o.images // part, settings(encoder, view, o.device, local_epochs=1)
        works = [rounds_of(*engine_of(config, each, even(2, images // 2))) for each in kinds]
        for work in works:
            seconds(work, o.device)
        times = [[seconds(work, o.device) for work in works] for _ in range(o.repeats)]
        resident, streamed = (min(column) for column in zip(*times, strict=True))
        print(
            f"{encoder:9} at {view:3} pixels: resident {images / resident:5.0f} images/s, "
            f"streamed {images / streamed:5.0f}, ratio {resident / streamed:.3f}",
            flush=True,
        )


def train_large(o: argparse.Namespace, folder: Path) -> None:
    """Steps on images that fit into no memory."""
    path, shape = folder / "large.npy", (350_000, 3, STORED, STORED)
    with path.open("wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + int(np.prod(shape, dtype=np.int64)))
    config, before = settings("tiny", 32, o.device, local_steps=8), peak()
    engine = engine_of(config, Split((StoredImages(path),)), even(2, shape[0] // 2))
    rounds_of(*engine)()
    size = path.stat().st_size / 1e9
    print(f"{size:.0f} GB of images: {peak()} MiB at most, {peak() - before} more than before")


def main() -> None:
    """Two lines and the memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        train_large(o, Path(folder))
        compare(o, Path(folder))


if __name__ == "__main__":
    main()
