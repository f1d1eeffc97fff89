"""Files of standard data sets with a few made images, in the layouts of the originals."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from image_folders import make


def write_idx(path: Path, values: np.ndarray[Any, Any]) -> None:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    data = header + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_fashion(root: Path, ending: str = "") -> None:
    for split, count in (("train", 20), ("t10k", 10)):
        pixels = np.arange(count)[:, None, None] * np.ones((1, 28, 28))
        write_idx(root / f"{split}-images-idx3-ubyte{ending}", pixels)
        write_idx(root / f"{split}-labels-idx1-ubyte{ending}", np.arange(count) % 10)


def write_cifar(root: Path, classes: Literal[10, 100] = 10) -> None:
    files = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    folder, labels, meta, names = "cifar-10-batches-py", "labels", "batches.meta", "label_names"
    if classes == 100:
        files, folder, labels, meta = ["train", "test"], "cifar-100-python", "fine_labels", "meta"
        names = "fine_label_names"
    (root / folder).mkdir(parents=True)
    for i, name in enumerate(files):
        pixels = np.zeros((4, 3, 32, 32), np.uint8)
        pixels[:, 0], pixels[:, 2, 1, 5] = np.arange(4)[:, None, None] + 4 * i, 77
        entry = {"data": pixels.reshape(4, -1), labels: [i, i, 9, 9]}
        (root / folder / name).write_bytes(pickle.dumps(entry))
    every = {names: [f"class {k}" for k in range(classes)]}
    (root / folder / meta).write_bytes(pickle.dumps(every))


def skip_checksums(patch: pytest.MonkeyPatch, cifar: Any) -> None:
    """Let a CIFAR class of torchvision read made files."""
    for name in ("train_list", "test_list"):
        patch.setattr(cifar, name, [[file, None] for file, _ in getattr(cifar, name)])
    patch.setattr(cifar, "meta", {**cifar.meta, "md5": None})


def write_stl10(root: Path, unlabelled: int = 3) -> None:
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    sizes = (("train", 2), ("unlabeled", unlabelled), ("test", 2))
    for i, (split, count) in enumerate(sizes):
        pixels = np.zeros((count, 3, 96, 96), np.uint8)
        pixels[:, 0] = np.arange(count)[:, None, None] + 10 * i
        pixels[:, 1, 5, 9] = 200  # file order is column, row
        pixels.tofile(folder / f"{split}_X.bin")
        if split != "unlabeled":
            np.array([1, 10], np.uint8).tofile(folder / f"{split}_y.bin")


def write_tiny_imagenet(root: Path, count: int = 1) -> None:
    """Write ``count`` training images of each of two classes."""
    names = [f"train/n0{c}/images/n0{c}_{k}.JPEG" for c in (2, 1) for k in range(count)]
    make(root, *names, size=(64, 64))
    make(root, "val/images/val_0.JPEG", "val/images/val_1.JPEG", size=(64, 64))
    make(root, "test/images/test_0.JPEG", size=(64, 64))
    (root / "train/n01/n01_boxes.txt").write_text("n01_0.JPEG\t0\t0\t62\t62\n")
    lines = "val_1.JPEG\tn01\t0\t0\t1\t1\nval_0.JPEG\tn02\t0\t0\t1\t1\n"
    (root / "val/val_annotations.txt").write_text(lines)
