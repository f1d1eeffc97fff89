"""Loading by any name: missing folders, the place of the cache, halves, channels, few labels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused
from image_folders import folder, labels, make, reds
from PIL import Image

from fedssl.config import Data
from fedssl.data import decode
from fedssl.data import load as loading
from fedssl.data.dataset import Split
from fedssl.data.labels import draw_labels
from fedssl.data.load import convert_channels
from fedssl.data.load import load_dataset as load

# Refusals


def test_roots(root: Path) -> None:
    (root / "file").write_text("")
    for name in ("missing", "file"):
        with refused("data.root", root / name):
            folder(root / name)
    for kind in ("folder", "paired"):
        with refused("data.name", kind, "Set data.root"):
            load(Data(name=kind))  # type: ignore[arg-type]
    with refused("data.root", root, "data.name=folder"):
        load(Data(root=str(root)))


@pytest.mark.parametrize(("key", "size"), [("data.size", None), ("evaluate.size", 300_000)])
def test_images_larger_than_memory(key: str, size: int | None) -> None:
    with refused(key, 300_000):
        load(Data(size=300_000), size=size)


def test_cache_place(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(root, "a.png")
    folder(root, cache=str(tmp_path / "given"))
    assert list((tmp_path / "given").glob("folder-*/train-0.npy"))
    assert not (tmp_path / "cache").exists()
    monkeypatch.delenv("FEDSSL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder(root)
    assert list((tmp_path / "home/.cache/fedssl").glob("folder-*/train-0.npy"))


# Halves and channels


@pytest.mark.parametrize("size", [8, 9])
def test_halves(size: int) -> None:
    whole, halved = load(Data(size=size)), load(Data(size=size, halves=True))
    assert halved.test is not None
    left, right = halved.train.images
    assert left.shape == right.shape == (1438, 1, size, 4)
    assert left.is_contiguous() and right.is_contiguous()
    assert torch.equal(left, whole.train.images[0][..., :4])
    assert torch.equal(right, whole.train.images[0][..., size - 4 :])
    assert halved.test.images[1].shape == (359, 1, size, 4)
    assert labels(halved.train) == labels(whole.train)
    few = load(Data(size=size, labels=10, halves=True))
    assert [x.shape for x in few.train.images] == [(10, 1, size, 4)] * 2
    with refused("data.halves", True):
        load(Data("paired", "nowhere", halves=True))


def test_other_channels_are_those_of_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "BLOCK", 2)
    generator = np.random.default_rng(0)
    for name in ("train/a", "train/b", "train/c", "test/a"):
        (root / name).parent.mkdir(exist_ok=True)
        noise = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / f"{name}.png")
    colour = folder(root)
    grey = convert_channels(colour, [1])
    again = convert_channels(grey, [3])
    for split in ("train", "test"):
        read = [decode.decode_file(path, 32, 1) for path in sorted((root / split).iterdir())]
        (converted,), (back,) = getattr(grey, split).images, getattr(again, split).images
        assert np.array_equal(converted, read)
        assert converted.dtype == back.dtype == torch.uint8
        assert torch.equal(back, converted.repeat(1, 3, 1, 1)) and back.is_contiguous()
    assert convert_channels(colour, [3]) == colour
    with refused(None, says="3 channels cannot be converted to 4"):
        convert_channels(colour, [4])
    towers = dataclasses.replace(colour, train=Split(colour.train.images * 2), test=None)
    assert [x.shape[1] for x in convert_channels(towers, [3, 1]).train.images] == [3, 1]


# Few labels


def test_labels_keeps_that_many_training_samples(root: Path) -> None:
    whole, few = load(Data(size=8)), load(Data(size=8, labels=20), seed=5)
    assert whole.train.labels is not None
    index = draw_labels(whole.train.labels, 20, 10, seed=5)
    assert torch.equal(few.train.images[0], whole.train.images[0][index])
    assert labels(few.train) == whole.train.labels[index].tolist()
    assert few.test is not None
    assert len(few.test) == 359
    other = load(Data(size=8, labels=20), seed=6)
    assert not torch.equal(few.train.images[0], other.train.images[0])
    make(root, "a.png")
    with refused("data.labels", 1):
        folder(root, labels=1)


def places(split: Split) -> list[tuple[int, int, int]]:
    """Image, client and case of each sample."""
    assert split.clients is not None and split.cases is not None
    return list(zip(reds(split), split.clients.tolist(), split.cases.tolist(), strict=True))


def test_labels_keeps_clients_and_cases_in_step(root: Path) -> None:
    make(
        root,
        *(f"{who}/{kind}/{case}/0.png" for who in "abc" for kind in "xy" for case in "pqrs"),
    )
    levels: Any = ("client", "class", "case")
    data = Data(name="folder", root=str(root), levels=levels, labels=2)
    whole = set(places(folder(root, levels=data.levels).train))
    for seed in range(8):
        few = places(load(data, seed).train)
        assert len(few) == 2 and set(few) < whole


def test_draw_labels_is_even_sorted_nested_and_seeded() -> None:
    numbers = torch.arange(300) % 7
    numbers[::11] = -1
    drawn = {n: draw_labels(numbers, 7 * n, 7, seed=3) for n in (1, 5, 20)}
    for count, index in drawn.items():
        assert torch.bincount(numbers[index], minlength=7).tolist() == [count] * 7
        assert index.tolist() == sorted(set(index.tolist()))
    assert set(drawn[1].tolist()) < set(drawn[5].tolist()) < set(drawn[20].tolist())
    assert torch.equal(drawn[5], draw_labels(numbers, 35, 7, seed=3))
    assert not torch.equal(drawn[5], draw_labels(numbers, 35, 7, seed=4))
    # Every sample has its chance.
    chosen = torch.cat([draw_labels(torch.zeros(10).long(), 1, 1, seed) for seed in range(500)])
    assert torch.bincount(chosen, minlength=10).min() > 25


@pytest.mark.parametrize(("count", "fix"), [(3, "Use a multiple of 2"), (4, "Use at most 2")])
def test_draw_labels_mistakes(count: int, fix: str) -> None:
    numbers = torch.tensor([0, 0, 0, 1, -1, -1])
    with refused("evaluate.labels", count, fix):
        draw_labels(numbers, count, 2, 0, key="evaluate.labels")
