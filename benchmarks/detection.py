"""Mask R-CNN from a run's encoder and from random weights, at equal steps, on drawn shapes.

    python benchmarks/detection.py DIR [--rounds 12] [--steps 300] [--seeds 0 1 2] [--random-only]

DIR gets the data, the pretraining run and what was found. The shapes are discs, squares and
triangles of any colour on a shaded, noisy ground, 96 pixels a side. Pretraining sees 480 images
without labels, of five clients; Mask R-CNN is fine-tuned on 40 others and judged on 60 more, with
heads of 32 channels, so that two CPU cores suffice.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedssl.util.tuning import shorten_thread_waits

shorten_thread_waits()  # as the command line does, before torch

import numpy as np
import torch
from PIL import Image, ImageDraw

from fedssl import config as configuration
from fedssl.contrib import detection
from fedssl.runs import loop

SIDE, KINDS = 96, ("disc", "square", "triangle")
COUNTS = {"pretrain": 480, "train2017": 40, "val2017": 60}
WORDS = (
    *("data.name=folder", f"data.size={SIDE}", "augment.name=dec-ssl", "partition.name=iid"),
    *(
        "partition.clients=5",
        "encoder.name=resnet18",
        "encoder.norm=batch",
        "objective.name=simclr",
    ),
    *("objective.projector=[512,512]", "objective.temperature=0.5", "algorithm.name=fedavg"),
    *("algorithm.local_epochs=1", "algorithm.batch=32", "client.optimizer=adam", "client.lr=0.001"),
    *("client.weight_decay=0.000001", "server.optimizer=sgd", "server.lr=1", "schedule=cosine"),
    *("evaluate.protocols=unlabeled", "evaluate.baselines=[]"),
)


def ground(rng: np.random.Generator) -> Image.Image:
    """A shade between two colours, with noise."""
    first, last = rng.integers(0, 256, (2, 3))
    at = np.linspace(0, 1, SIDE)[:, None, None] * np.ones((1, SIDE, 1))
    pixels = first * (1 - at) + last * at + rng.normal(0, 20, (SIDE, SIDE, 3))
    turned = np.rot90(pixels, int(rng.integers(4)))
    return Image.fromarray(np.ascontiguousarray(turned).clip(0, 255).astype(np.uint8), "RGB")


def corners(kind: str, x: int, y: int, s: int) -> list[tuple[float, float]]:
    """The outline of a shape in a box of side ``s``."""
    if kind == "square":
        return [(x, y), (x + s, y), (x + s, y + s), (x, y + s)]
    if kind == "triangle":
        return [(x, y + s), (x + s / 2, y), (x + s, y + s)]
    angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    return [(x + s / 2 * (1 + np.cos(a)), y + s / 2 * (1 + np.sin(a))) for a in angles]


def picture(rng: np.random.Generator) -> tuple[Image.Image, list[dict[str, Any]]]:
    """One to three shapes, each in a quarter of its own, and their annotations."""
    image, notes = ground(rng), []
    draw = ImageDraw.Draw(image)
    for quarter in rng.permutation(4)[: rng.integers(1, 4)]:
        s, kind = int(rng.integers(24, 45)), int(rng.integers(3))
        x, y = (SIDE // 2 * int(q) + int(rng.integers(0, 48 - s)) for q in divmod(quarter, 2))
        outline = corners(KINDS[kind], x, y, s)
        draw.polygon(outline, fill=tuple(rng.integers(0, 256, 3).tolist()))
        flat = [float(v) for corner in outline for v in corner]
        note = {"category_id": 1 + kind, "bbox": [x, y, s, s], "segmentation": [flat]}
        notes.append({**note, "area": s * s, "iscrowd": 0})
    return image, notes


def make(root: Path) -> None:
    """Images without labels, and a training and a validation split in COCO's format."""
    (root / "coco" / "annotations").mkdir(parents=True)
    for number, (split, count) in enumerate(COUNTS.items()):
        rng = np.random.default_rng(number)
        folder = root / (split if split == "pretrain" else f"coco/{split}")
        folder.mkdir()
        images, notes = [], []
        for i in range(count):
            image, found = picture(rng)
            image.save(folder / f"{i}.png")
            images.append({"id": i, "file_name": f"{i}.png", "width": SIDE, "height": SIDE})
            notes += [{**note, "image_id": i} for note in found]
        notes = [{**note, "id": i} for i, note in enumerate(notes, 1)]
        kinds = [{"id": 1 + k, "name": name} for k, name in enumerate(KINDS)]
        tree = {"images": images, "annotations": notes, "categories": kinds}
        if split != "pretrain":
            file = root / "coco" / "annotations" / f"instances_{split}.json"
            file.write_text(json.dumps(tree))


def main() -> None:
    """Pretrain once, then fine-tune from it and from random weights, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--random-only", action="store_true", help="to choose steps by")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if not (options.root / "coco").exists():
        make(options.root)
    words = [*WORDS, f"data.root={options.root / 'pretrain'}", f"rounds={options.rounds}"]
    words += [f"device={options.device}", f"data.cache={options.root / 'cache'}"]
    settings, folder = configuration.resolve({}, words), options.root / "run"
    if not (folder / "summary.json").exists():
        loop.run(settings, folder, resume=(folder / "config.yaml").exists())
    for seed in options.seeds:
        for random in (True,) if options.random_only else (True, False):
            own = detection.Settings(
                steps=options.steps, batch=4, size=SIDE, seed=seed, random=random, width=32
            )
            found = detection.detect(
                folder, options.root / "coco", own, torch.device(options.device)
            )
            shown = "  ".join(f"{name} {value:.2f}" for name, value in found.items())
            print(f"seed {seed}  {'random' if random else 'pretrained':<11}{shown}", flush=True)


if __name__ == "__main__":
    main()
