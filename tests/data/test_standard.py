"""Digits, Fashion-MNIST, CIFAR, STL-10 and Tiny-ImageNet: read, refused, downloaded."""

from __future__ import annotations

import gzip
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused
from image_folders import labels, make, reds
from standard_data_sets import (
    skip_checksums,
    write_cifar,
    write_fashion,
    write_idx,
    write_stl10,
    write_tiny_imagenet,
)

from fedssl.config import Data
from fedssl.data import places
from fedssl.data.dataset import Dataset
from fedssl.data.load import load_dataset as load


def test_digits() -> None:
    from sklearn.datasets import load_digits

    dataset, source = load(Data(size=8)), load_digits()
    assert dataset.test is not None
    assert (len(dataset.train), len(dataset.test)) == (1438, 359)
    expected = np.rint(source.images * 255 / 16).astype(np.uint8)
    assert np.array_equal(dataset.test.images[0][:, 0].numpy(), expected[4::5])
    assert np.array_equal(dataset.train.images[0][:4, 0].numpy(), expected[:4])
    assert labels(dataset.test) == source.target[4::5].tolist()
    assert dataset.classes == tuple("0123456789")
    for size, given, side in ((None, None, 16), (None, 20, 20), (16, 10, 10)):
        images = load(Data(size=size), size=given).train.images[0]
        assert images.shape == (1438, 1, side, side) and images.dtype == torch.uint8
        assert images.max() > 240


# Fashion-MNIST


def fashion(root: Path | None = None, **keys: Any) -> Dataset:
    return load(Data("fashion-mnist", root and str(root), **keys))


@pytest.mark.parametrize(("inside", "ending"), [("", ".gz"), ("", ""), ("FashionMNIST/raw", "")])
def test_fashion_from_a_root(root: Path, inside: str, ending: str) -> None:
    write_fashion(root / inside, ending)
    for size, side in ((None, 28), (10, 10)):
        dataset = fashion(root, size=size)
        assert dataset.train.images[0].shape == (20, 1, side, side)
        assert reds(dataset.train) == list(range(20))
        assert labels(dataset.test) == list(range(10))
        assert dataset.classes[9] == "Ankle boot"


def test_fashion_from_debian_and_then_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(places, "DEBIAN_FASHION", tmp_path / "debian")
    write_fashion(cache / "downloads/fashion-mnist/FashionMNIST/raw")
    assert reds(fashion().train) == list(range(20))
    write_fashion(tmp_path / "debian", ".gz")
    write_idx(tmp_path / "debian/train-images-idx3-ubyte.gz", np.full((20, 28, 28), 7))
    assert reds(fashion().train) == [7] * 20


def test_fashion_that_is_damaged(root: Path) -> None:
    write_fashion(root, ".gz")
    path = root / "train-images-idx3-ubyte.gz"
    good = path.read_bytes()
    for damaged in (
        good[:-30],
        good[:20] + b"\xff" * 9 + good[29:],
        gzip.compress(b"something else"),
        gzip.compress(gzip.decompress(good)[:-5]),
        gzip.compress(b"\0\0\x08"),
    ):
        path.write_bytes(damaged)
        with refused("data.root", root, path.name):
            fashion(root)
    write_idx(path, np.zeros((3, 28, 28)))
    with refused("data.root", root, "differ in number"):
        fashion(root)


def test_arrays_are_identified_by_their_content(root: Path) -> None:
    def digests(ending: str = "", **keys: Any) -> Any:
        write_fashion(root / (ending or "plain"), ending)
        return fashion(root / (ending or "plain"), **keys).files

    before = digests()
    assert before.keys() == {"train", "test"} and before["train"] != before["test"]
    assert digests(".gz") == digests(size=10) == digests(labels=10) == before
    pixels = np.arange(20)[:, None, None] * np.ones((1, 28, 28))
    pixels[19, 27, 27] += 1
    for part, values in (("images-idx3", pixels), ("labels-idx1", np.arange(20) % 5)):
        write_fashion(root)
        write_idx(root / f"train-{part}-ubyte", values)
        after = fashion(root).files
        assert after["train"] != before["train"] and after["test"] == before["test"]


# CIFAR, STL-10, Tiny-ImageNet


def test_cifar_is_checked_and_parsed_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    write_cifar(root)
    with refused("data.root", root, "files of CIFAR10"):  # wrong checksums: nothing is unpickled
        load(Data(name="cifar10", root=str(root)))
    skip_checksums(monkeypatch, CIFAR10)
    dataset = load(Data(name="cifar10", root=str(root)))
    assert dataset.train.images[0].shape == (20, 3, 32, 32)
    assert reds(dataset.train) == list(range(20))
    assert reds(dataset.test) == list(range(20, 24))
    assert dataset.train.images[0][3, :, 1, 5].tolist() == [3, 0, 77]
    assert labels(dataset.train)[:6] == [0, 0, 9, 9, 1, 1]
    assert dataset.classes[3] == "class 3"
    monkeypatch.setattr("torchvision.datasets.CIFAR10", lambda *a, **k: pytest.fail("parsed again"))
    assert reds(load(Data(name="cifar10", root=str(root))).train) == list(range(20))


def test_stl10(root: Path) -> None:
    write_stl10(root)
    dataset = load(Data(name="stl10", root=str(root)))
    assert reds(dataset.train) == [0, 1, 10, 11, 12]
    assert labels(dataset.train) == [0, 9, -1, -1, -1]
    assert (reds(dataset.test), labels(dataset.test)) == ([20, 21], [0, 9])
    assert dataset.train.images[0][0, 1, 9, 5] == 200
    assert dataset.classes[9] == "truck"
    assert load(Data(name="stl10", root=str(root), size=32)).train.images[0].shape[-1] == 32
    (root / "stl10_binary/test_X.bin").write_bytes(b"1234")
    with refused("data.root", root, "test_X.bin"):
        load(Data(name="stl10", root=str(root)))


@pytest.mark.parametrize("inside", ["", "tiny-imagenet-200"])
def test_tiny_imagenet(root: Path, inside: str) -> None:
    write_tiny_imagenet(root / inside)
    dataset = load(Data(name="tiny-imagenet", root=str(root)))
    assert dataset.classes == ("n01", "n02")
    assert dataset.train.images[0].shape == (2, 3, 64, 64)
    assert (labels(dataset.train), labels(dataset.test)) == ([0, 1], [1, 0])
    make(root / inside, "val/images/val_2.JPEG", size=(64, 64))
    with refused("data.root", root / inside, "val_2.JPEG"):
        load(Data(name="tiny-imagenet", root=str(root)))


# Downloads


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float | None]:
    """No network; the time limits under which it was tried."""
    import urllib.request

    limits: list[float | None] = []

    def unreachable(*arguments: object, **keys: object) -> None:
        limits.append(socket.getdefaulttimeout())
        raise OSError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(places, "DEBIAN_FASHION", tmp_path / "debian")
    return limits


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10", "cifar100", "stl10", "tiny-imagenet"])
def test_a_failed_download_leaves_nothing_behind(
    name: Any, root: Path, offline: list[float | None], cache: Path
) -> None:
    with refused("data.root", root, "a folder that holds"):  # not replaced by a download
        load(Data(name=name, root=str(root)))
    assert not offline
    for says in ("Name or service not known", str(cache / "downloads" / name)):
        with refused("data.name", name, says):
            load(Data(name=name))
    assert offline[0] is not None  # a silent network would not hold it up for minutes
    assert socket.getdefaulttimeout() is None
    assert not list((cache / "downloads").iterdir())


def test_a_download_that_fails_without_a_text_is_named_by_its_type(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    from torchvision.datasets import utils

    def fetch(*_: Any, **__: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(utils, "download_and_extract_archive", fetch)
    with refused("data.name", "cifar100", "the download failed (TimeoutError)"):
        load(Data(name="cifar100"))


def test_a_download_is_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    from torchvision.datasets import utils

    calls = []

    def fetch(url: str, folder: Path, **keys: Any) -> None:
        calls.append(url)
        write_tiny_imagenet(folder / "tiny-imagenet-200")

    monkeypatch.setattr(utils, "download_and_extract_archive", fetch)
    with refused("data.name", "cifar100", "the archive holds something else"):
        load(Data(name="cifar100"))
    for _ in range(2):
        assert len(load(Data(name="tiny-imagenet")).train) == 2
    assert calls[1:] == ["http://cs231n.stanford.edu/tiny-imagenet-200.zip"]
    assert [p.name for p in (cache / "downloads").iterdir()] == ["tiny-imagenet"]
