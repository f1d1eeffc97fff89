from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pickle
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.config import Data
from fedssl.data import decode, folders, places
from fedssl.data import load as loading
from fedssl.data.dataset import Dataset, Split
from fedssl.data.labels import draw_labels
from fedssl.data.load import convert_channels
from fedssl.data.load import load_dataset as load
from fedssl.util.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSSL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def make(root: Path, *names: str, size: tuple[int, int] = (8, 8)) -> None:
    """Image files whose red value is their place in the call."""
    for value, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (value, 0, 100)).save(path)


def folder(root: Path, **keys: Any) -> Dataset:
    return load(Data(name="folder", root=str(root), **keys))


def reds(split: Split | None, modality: int = 0) -> list[int]:
    assert split is not None
    return split.images[modality][:, 0, 0, 0].tolist()


def labels(split: Split | None) -> list[int]:
    assert split is not None
    assert split.labels is not None
    assert split.labels.dtype == torch.int64
    return split.labels.tolist()


# Digits


def test_digits() -> None:
    from sklearn.datasets import load_digits

    dataset = load(Data(size=8))
    source = load_digits()
    assert dataset.test is not None
    assert (len(dataset.train), len(dataset.test)) == (1438, 359)
    expected = np.rint(source.images * 255 / 16).astype(np.uint8)
    assert np.array_equal(dataset.test.images[0][:, 0].numpy(), expected[4::5])
    assert np.array_equal(dataset.train.images[0][:4, 0].numpy(), expected[:4])
    assert labels(dataset.test) == source.target[4::5].tolist()
    assert dataset.classes == tuple("0123456789")


def test_digits_sizes() -> None:
    assert load(Data()).train.images[0].shape == (1438, 1, 16, 16)
    assert load(Data(), size=20).train.images[0].shape == (1438, 1, 20, 20)
    assert load(Data(size=16), size=10).train.images[0].shape == (1438, 1, 10, 10)
    assert load(Data()).train.images[0].dtype == torch.uint8
    assert load(Data()).train.images[0].max() > 240


# Fashion-MNIST


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


@pytest.mark.parametrize(("inside", "ending"), [("", ".gz"), ("", ""), ("FashionMNIST/raw", "")])
def test_fashion_from_a_root(root: Path, inside: str, ending: str) -> None:
    write_fashion(root / inside, ending)
    dataset = load(Data(name="fashion-mnist", root=str(root)))
    assert dataset.train.images[0].shape == (20, 1, 28, 28)
    assert reds(dataset.train) == list(range(20))
    assert labels(dataset.test) == list(range(10))
    assert dataset.classes[9] == "Ankle boot"
    resized = load(Data(name="fashion-mnist", root=str(root), size=10))
    assert resized.train.images[0].shape == (20, 1, 10, 10)
    assert reds(resized.train) == list(range(20))


def test_fashion_from_debian_and_then_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(places, "DEBIAN_FASHION", tmp_path / "debian")
    write_fashion(cache / "downloads/fashion-mnist/FashionMNIST/raw")
    assert len(load(Data(name="fashion-mnist")).train) == 20
    write_fashion(tmp_path / "debian", ".gz")
    write_idx(tmp_path / "debian/train-images-idx3-ubyte.gz", np.full((20, 28, 28), 7))
    assert reds(load(Data(name="fashion-mnist")).train) == [7] * 20


@pytest.mark.skipif(not places.DEBIAN_FASHION.is_dir(), reason="dataset-fashion-mnist")
def test_fashion_of_debian_is_the_real_one() -> None:
    dataset = load(Data(name="fashion-mnist"))
    assert dataset.test is not None
    assert (len(dataset.train), len(dataset.test)) == (60000, 10000)
    assert torch.bincount(torch.tensor(labels(dataset.train))).tolist() == [6000] * 10


@pytest.mark.parametrize("damage", ["cut", "bits", "kind", "shape", "empty"])
def test_fashion_that_is_damaged(root: Path, damage: str) -> None:
    write_fashion(root, ".gz")
    path = root / "train-images-idx3-ubyte.gz"
    data = path.read_bytes()
    path.write_bytes(
        {
            "cut": data[:-30],
            "bits": data[:20] + b"\xff" * 9 + data[29:],
            "kind": gzip.compress(b"something else"),
            "shape": gzip.compress(gzip.decompress(data)[:-5]),
            "empty": gzip.compress(b"\0\0\x08"),
        }[damage]
    )
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz: damaged"):
        load(Data(name="fashion-mnist", root=str(root)))


def test_fashion_with_images_of_something_else(root: Path) -> None:
    write_fashion(root, ".gz")
    write_idx(root / "train-images-idx3-ubyte.gz", np.zeros((3, 28, 28)))
    with pytest.raises(UserError, match="train images and labels differ in number"):
        load(Data(name="fashion-mnist", root=str(root)))


# CIFAR, STL-10, Tiny-ImageNet


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch, checked: bool = False) -> None:
    from torchvision.datasets import CIFAR10

    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for i, name in enumerate((*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")):
        pixels = np.zeros((4, 3, 32, 32), np.uint8)
        pixels[:, 0], pixels[:, 2, 1, 5] = np.arange(4)[:, None, None] + 4 * i, 77
        entry = {"data": pixels.reshape(4, -1), "labels": [i, i, 9, 9]}
        (folder / name).write_bytes(pickle.dumps(entry))
    meta = {"label_names": [f"class {k}" for k in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta))
    if not checked:  # made files do not have the real ones' checksums
        for name in ("train_list", "test_list"):
            unchecked = [[file, None] for file, _ in getattr(CIFAR10, name)]
            monkeypatch.setattr(CIFAR10, name, unchecked)
        monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": None})


def test_cifar(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(root, monkeypatch)
    dataset = load(Data(name="cifar10", root=str(root)))
    assert dataset.train.images[0].shape == (20, 3, 32, 32)
    assert reds(dataset.train) == list(range(20))
    assert reds(dataset.test) == list(range(20, 24))
    assert dataset.train.images[0][3, :, 1, 5].tolist() == [3, 0, 77]
    assert labels(dataset.train)[:6] == [0, 0, 9, 9, 1, 1]
    assert dataset.classes[3] == "class 3"


def test_cifar_is_parsed_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(root, monkeypatch)
    load(Data(name="cifar10", root=str(root)))
    monkeypatch.setattr("torchvision.datasets.CIFAR10", lambda *a, **k: pytest.fail("parsed again"))
    assert reds(load(Data(name="cifar10", root=str(root))).train) == list(range(20))


def test_cifar_with_wrong_checksums_is_not_unpickled(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(root, monkeypatch, checked=True)
    with pytest.raises(UserError, match="files of CIFAR10 there are damaged"):
        load(Data(name="cifar10", root=str(root)))


def test_stl10(root: Path) -> None:
    folder = root / "stl10_binary"
    folder.mkdir()
    for i, (split, count) in enumerate((("train", 2), ("unlabeled", 3), ("test", 2))):
        pixels = np.zeros((count, 3, 96, 96), np.uint8)
        pixels[:, 0] = np.arange(count)[:, None, None] + 10 * i
        pixels[:, 1, 5, 9] = 200  # file order is column, row
        pixels.tofile(folder / f"{split}_X.bin")
        if split != "unlabeled":
            np.array([1, 10], np.uint8).tofile(folder / f"{split}_y.bin")
    dataset = load(Data(name="stl10", root=str(root)))
    assert reds(dataset.train) == [0, 1, 10, 11, 12]
    assert labels(dataset.train) == [0, 9, -1, -1, -1]
    assert reds(dataset.test) == [20, 21]
    assert labels(dataset.test) == [0, 9]
    assert dataset.train.images[0][0, 1, 9, 5] == 200
    assert dataset.classes[9] == "truck"
    assert load(Data(name="stl10", root=str(root), size=32)).train.images[0].shape[-1] == 32
    (folder / "test_X.bin").write_bytes(b"1234")
    with pytest.raises(UserError, match=r"test_X\.bin: damaged"):
        load(Data(name="stl10", root=str(root)))


def make_tiny(root: Path) -> None:
    make(root, "train/n02/images/n02_0.JPEG", "train/n01/images/n01_0.JPEG", size=(64, 64))
    make(root, "val/images/val_0.JPEG", "val/images/val_1.JPEG", size=(64, 64))
    make(root, "test/images/test_0.JPEG", size=(64, 64))
    (root / "train/n01/n01_boxes.txt").write_text("n01_0.JPEG\t0\t0\t62\t62\n")
    lines = "val_1.JPEG\tn01\t0\t0\t1\t1\nval_0.JPEG\tn02\t0\t0\t1\t1\n"
    (root / "val/val_annotations.txt").write_text(lines)


@pytest.mark.parametrize("inside", ["", "tiny-imagenet-200"])
def test_tiny_imagenet(root: Path, inside: str) -> None:
    make_tiny(root / inside)
    dataset = load(Data(name="tiny-imagenet", root=str(root)))
    assert dataset.classes == ("n01", "n02")
    assert dataset.train.images[0].shape == (2, 3, 64, 64)
    assert labels(dataset.train) == [0, 1]
    assert labels(dataset.test) == [1, 0]


def test_tiny_imagenet_with_an_image_that_nothing_describes(root: Path) -> None:
    make_tiny(root)
    make(root, "val/images/val_2.JPEG", size=(64, 64))
    with pytest.raises(UserError, match=r"val/images/val_2\.JPEG: not in val/val_annotations"):
        load(Data(name="tiny-imagenet", root=str(root)))


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
def test_absent_and_offline_says_where_it_looked(
    name: str, offline: list[float | None], cache: Path
) -> None:
    with pytest.raises(UserError) as caught:
        load(Data(name=name))  # type: ignore[arg-type]
    line = str(caught.value)
    assert f"data.name={name}: not in " in line
    assert str(cache / "downloads" / name) in line
    assert "Name or service not known" in line
    assert "set data.root to a folder that holds " in line
    assert "\n" not in line
    assert offline[0] is not None  # a silent network would not hold it up for minutes
    assert socket.getdefaulttimeout() is None
    assert not list((cache / "downloads").iterdir())


def test_download_is_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    from torchvision.datasets import utils

    calls = []

    def fetch(url: str, folder: Path, **keys: Any) -> None:
        calls.append(url)
        make_tiny(folder / "tiny-imagenet-200")

    monkeypatch.setattr(utils, "download_and_extract_archive", fetch)
    for _ in range(2):
        assert len(load(Data(name="tiny-imagenet")).train) == 2
    assert calls == ["http://cs231n.stanford.edu/tiny-imagenet-200.zip"]
    assert [p.name for p in (cache / "downloads").iterdir()] == ["tiny-imagenet"]


def test_download_of_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import utils

    monkeypatch.setattr(utils, "download_and_extract_archive", lambda *a, **k: None)
    with pytest.raises(UserError, match=r"download failed \(the archive holds something else\)"):
        load(Data(name="cifar100"))


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10", "cifar100", "stl10", "tiny-imagenet"])
def test_a_root_without_the_files_is_not_replaced_by_a_download(
    name: str, root: Path, offline: list[float | None]
) -> None:
    with pytest.raises(UserError, match=rf"data\.root={root}: no {name} there; expected "):
        load(Data(name=name, root=str(root)))  # type: ignore[arg-type]
    assert not offline


# Folder: layouts


def test_folder_with_classes(root: Path) -> None:
    make(root, "train/dog/a.png", "train/cat/b.png", "train/cat/deep/c.JPG", "train/dog/d.bmp")
    make(root, "test/dog/a.png", "test/cat/b.png")
    make(root, "other/x.png", "train/.hidden/x.png", size=(30, 20))
    dataset = folder(root)
    assert dataset.name == "folder"
    assert dataset.classes == ("cat", "dog")
    assert dataset.train.images[0].shape == (4, 3, 8, 8)
    assert dataset.train.images[0].dtype == torch.uint8
    assert [reds(dataset.train)[i] for i in (0, 2, 3)] == [1, 0, 3]
    assert labels(dataset.train) == [0, 0, 1, 1]
    assert (reds(dataset.test), labels(dataset.test)) == ([1, 0], [0, 1])
    assert dataset.train.clients is None
    assert dataset.train.cases is None
    assert dataset.clients == ()


def test_folder_without_test(root: Path) -> None:
    make(root, "train/dog/a.png", "train/cat/b.png")
    assert folder(root).test is None


def test_folder_classes_in_train_only_are_fine(root: Path) -> None:
    make(root, "train/dog/a.png", "train/cat/b.png", "test/dog/a.png")
    assert labels(folder(root).test) == [1]


@pytest.mark.parametrize(
    "names",
    [
        ("a.png", "b/c.png", "b/d/e.png"),  # no train/
        ("train/a.png", "train/b/c.png", "train/d.png"),  # images directly in it
    ],
)
def test_folder_of_plain_images(root: Path, names: tuple[str, ...]) -> None:
    make(root, *names)
    dataset = folder(root)
    assert len(dataset.train) == 3
    assert dataset.train.labels is None
    assert dataset.classes == ()


def test_folder_levels_empty_means_unlabeled(root: Path) -> None:
    make(root, "train/dog/a.png", "train/cat/b.png")
    assert folder(root, levels=()).train.labels is None


def test_folder_levels_without_train(root: Path) -> None:
    make(root, "dog/a.png", "cat/b.png")
    assert labels(folder(root, levels=("class",)).train) == [0, 1]
    (root / "eel").mkdir()
    with pytest.raises(UserError, match="the class folder eel holds no image"):
        folder(root, levels=("class",))


def test_folder_clients_and_classes(root: Path) -> None:
    make(root, "train/zoe/dog/a.png", "train/bob/cat/b.png", "train/zoe/cat/c.png")
    make(root, "test/amy/cat/a.png", "test/bob/dog/b.png")
    dataset = folder(root, levels=("client", "class"))
    assert dataset.classes == ("cat", "dog")
    assert dataset.clients == ("bob", "zoe", "amy")  # those with training samples come first
    assert dataset.test is not None
    assert dataset.train.clients is not None
    assert dataset.test.clients is not None
    assert reds(dataset.train) == [1, 2, 0]
    assert dataset.train.clients.tolist() == [0, 1, 1]
    assert labels(dataset.train) == [0, 0, 1]
    assert dataset.test.clients.tolist() == [2, 0]


def test_folder_clients_only(root: Path) -> None:
    make(root, "bob/x/a.png", "amy/b.png")
    dataset = folder(root, levels=("client",))
    assert dataset.clients == ("amy", "bob")
    assert dataset.train.labels is None


@pytest.mark.parametrize("first", ["class", "client"])
def test_folder_cases_of_different_folders_are_different(root: Path, first: Any) -> None:
    make(root, "train/a/p1/0.png", "train/a/p1/1.png", "train/a/p2/0.png", "train/b/p1/0.png")
    make(root, "test/b/p1/0.png")
    dataset = folder(root, levels=(first, "case"))
    assert dataset.test is not None
    assert dataset.train.cases is not None
    assert dataset.test.cases is not None
    assert dataset.train.cases.tolist() == [0, 0, 1, 2]
    assert dataset.test.cases.tolist() == [0]


# Folder: mistakes


def test_folder_class_in_test_only(root: Path) -> None:
    make(root, "train/dog/a.png", "test/dog/a.png", "test/emu/b.png")
    with pytest.raises(UserError, match=r"test/ has classes that train/ lacks: emu"):
        folder(root)


@pytest.mark.parametrize("split", ["train", "test"])
def test_folder_empty_class(root: Path, split: str) -> None:
    make(root, "train/dog/a.png", "test/dog/a.png")
    (root / split / "emu").mkdir()
    (root / split / "emu/notes.txt").write_text("nothing here")
    with pytest.raises(UserError, match=rf"class folder {split}/emu holds no image"):
        folder(root)


def test_folder_image_above_its_level(root: Path) -> None:
    make(root, "train/dog/a.png", "train/b.png")
    with pytest.raises(UserError, match=r"data\.levels=class: train/b\.png lies in no class"):
        folder(root, levels=("class",))
    with pytest.raises(UserError, match=r"data\.levels=client,class: train/b\.png lies in no"):
        folder(root, levels=("client", "class"))


@pytest.mark.parametrize("levels", [("client", "class"), ("class", "client")])
def test_folder_whose_name_is_no_text(root: Path, levels: tuple[str, ...]) -> None:
    make(root, os.fsdecode(b"train/caf\xe9/a/1.png"))
    with pytest.raises(UserError, match=r"the name of the folder caf\\xe9 is not UTF-8; rename it"):
        folder(root, levels=levels)
    assert len(folder(root, levels=()).train) == 1, "it names nothing"


def test_images_that_do_not_fit_into_memory() -> None:
    with pytest.raises(UserError, match=r"data.size=1000000: images of that size do not fit"):
        load(Data(size=1_000_000))  # 7 petabytes
    with pytest.raises(UserError, match=r"evaluate.size=1000000: images of that size"):
        load(Data(), size=1_000_000)


def test_other_errors_are_not_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: Data) -> Dataset:
        raise RuntimeError("a bug")

    monkeypatch.setitem(loading.LOADERS, "digits", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        load(Data())


def test_folder_without_data(root: Path) -> None:
    with pytest.raises(UserError, match=rf"data\.root={root}: no images for train"):
        folder(root)
    (root / "train").mkdir()
    with pytest.raises(UserError, match="no images for train"):
        folder(root)
    make(root, "train/dog/a.png")
    (root / "test").mkdir()
    with pytest.raises(UserError, match="no images for test"):
        folder(root)


def test_folder_with_test_but_no_train(root: Path) -> None:
    make(root, "test/dog/a.png")
    with pytest.raises(UserError, match="test/ but no train/"):
        folder(root)


def test_roots(root: Path) -> None:
    with pytest.raises(UserError, match=r"data\.root=.*/missing: no such folder"):
        folder(root / "missing")
    (root / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.root=.*/file: a file, not a folder"):
        folder(root / "file")
    for name in ("folder", "paired"):
        with pytest.raises(UserError, match=rf"data\.name={name}: needs data\.root"):
            load(Data(name=name))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"data\.root=.*: digits .* take no data\.root"):
        load(Data(root=str(root)))


def test_levels_that_make_no_sense(root: Path) -> None:
    with pytest.raises(UserError, match=r"data\.levels=class: digits has no folder levels"):
        load(Data(levels=("class",)))
    with pytest.raises(UserError, match=r"data\.levels=class,class: name each level once"):
        folder(root, levels=("class", "class"))


# Folder: sizes, unreadable files, cache


def test_folder_sizes(root: Path) -> None:
    make(root, "train/a/0.png", "train/a/1.png", size=(20, 30))
    with pytest.raises(UserError, match=r"data\.size.*20 × 30"):
        folder(root)
    assert folder(root, size=12).train.images[0].shape == (2, 3, 12, 12)
    again = load(Data(name="folder", root=str(root), size=12), size=6)
    assert again.train.images[0].shape == (2, 3, 6, 6)


def test_folder_with_unreadable_files(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(root, *(f"train/{kind}/{i}.png" for i in range(4) for kind in ("cat", "dog")))
    make(root, "test/cat/0.png", "test/cat/1.png")
    for name in ("train/cat/1.png", "train/dog/0.png", "train/dog/2.png", "test/cat/0.png"):
        (root / name).write_text("broken")
    for _ in range(2):  # afresh, and from the cache
        with pytest.raises(UserError) as caught:
            folder(root)
        line = str(caught.value)
        assert line.startswith(f"data.corrupt=fail: 4 of 10 images below {root} cannot be read: ")
        assert "train/cat/1.png (not an image that Pillow knows)" in line
        assert line.endswith(" and 1 more; data.corrupt=skip leaves such files out")
    capsys.readouterr()
    for _ in range(2):
        folders._warn_once.cache_clear()  # as of a new process
        dataset = folder(root, corrupt="skip")
        assert reds(dataset.train) == [0, 4, 6, 3, 7]
        assert labels(dataset.train) == [0, 0, 0, 1, 1]
        assert reds(dataset.test) == [1]
        (warning,) = capsys.readouterr().err.splitlines()
        assert warning.startswith(f"warning: left out 4 of 10 images below {root}: train/cat/1")
    (meta,) = (root.parent / "cache").glob("*/meta.json")
    assert len(json.loads(meta.read_text())["unreadable"]) == 4
    # A process says it once, also where they are loaded by another name or at another size.
    load(Data(name="folder", root=str(root / "../root"), corrupt="skip"), size=5)
    assert "warning" not in capsys.readouterr().err


def test_folders_of_which_nothing_can_be_read_are_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sites = [f"{site}/{case}" for site in ("east", "north", "west") for case in ("1", "2")]
    make(root, *(f"train/{case}/{i}.png" for case in sites for i in range(2)))
    make(root, *(f"test/{case}/0.png" for case in sites))
    for name in ("train/east/1/0.png", "train/west/2/0.png", "train/west/2/1.png"):
        (root / name).write_text("broken")
    for file in (root / "train/north").rglob("*.png"):
        file.write_text("broken")
    dataset = folder(root, corrupt="skip", levels=("client", "case"))
    assert dataset.clients == ("east", "west", "north")  # it still has test images
    (warning,) = capsys.readouterr().err.splitlines()[-1:]
    assert warning.startswith(f"warning: left out 7 of 18 images below {root}: ")
    assert warning.endswith(" and 4 more; no image is left in train/north, train/west/2")
    for site in ("train/east/1/0.png", "train/west/2/0.png", "train/north/1/0.png"):
        make(root, site)
    make(root, "train/north/2/0.png")
    folder(root, corrupt="skip", levels=("client", "case"))
    assert "no image is left" not in capsys.readouterr().err


def test_folder_class_without_readable_image(root: Path) -> None:
    make(root, "train/cat/0.png", "train/dog/0.png")
    (root / "train/dog/0.png").write_text("broken")
    with pytest.raises(UserError, match="no training image of the class dog can be read"):
        folder(root, corrupt="skip")


def test_arrays_are_known_by_what_they_hold(root: Path, cache: Path) -> None:
    def known(ending: str = "", **keys: Any) -> Any:
        write_fashion(root / (ending or "plain"), ending)
        return load(Data("fashion-mnist", str(root / (ending or "plain")), **keys)).files

    before = known()
    assert before.keys() == {"train", "test"} and before["train"] != before["test"]
    assert known(".gz") == known(size=10) == known(labels=10) == before  # wherever, however stored
    pixels = np.arange(20)[:, None, None] * np.ones((1, 28, 28))
    pixels[19, 27, 27] += 1
    for part, values in (("images-idx3", pixels), ("labels-idx1", np.arange(20) % 5)):
        write_fashion(root)
        write_idx(root / f"train-{part}-ubyte", values)
        after = load(Data("fashion-mnist", str(root))).files
        assert after["train"] != before["train"] and after["test"] == before["test"]
    for meta in cache.glob("*/meta.json"):  # as older versions left it
        old = json.loads(meta.read_text())
        del old["contents"]
        meta.write_text(json.dumps(old))
    assert load(Data("fashion-mnist", str(root))).files == after


def test_images_are_known_by_the_files_that_are_used(root: Path) -> None:
    make(root, "train/cat/0.png", "train/dog/0.png", "test/cat/0.png")
    known = folder(root).files
    assert known.keys() == {"train", "test"} and not load(Data()).files
    os.utime(root / "train/cat/0.png", (1, 1))
    make(root, "test/dog/1.png")
    (root / "train/dog/1.png").write_text("broken")
    after = folder(root, corrupt="skip").files
    assert after["train"] == known["train"] and after["test"] != known["test"]
    moved = root.rename(root.with_name("moved"))
    assert folder(moved, corrupt="skip", labels=2).files == after
    (moved / "train/dog/0.png").rename(moved / "train/dog/2.png")
    assert folder(moved, corrupt="skip").files["train"] != known["train"]


def test_folder_second_load_decodes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(root, "train/cat/0.png", "train/dog/0.png")
    first = folder(root)
    monkeypatch.setattr(decode, "decode_file", None)
    second = folder(root)
    assert torch.equal(first.train.images[0], second.train.images[0])
    assert labels(second.train) == [0, 1]
    labels_only = folder(root, levels=())  # what folders mean is not part of the cache
    assert len(labels_only.train) == 2


def test_cache_place(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(root, "a.png")
    folder(root, cache=str(tmp_path / "given"))
    assert list((tmp_path / "given").glob("folder-*/train-0.npy"))
    assert not (tmp_path / "cache").exists()
    monkeypatch.delenv("FEDSSL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder(root)
    assert list((tmp_path / "home/.cache/fedssl").glob("folder-*/train-0.npy"))


# Paired modalities


def paired(root: Path, **keys: Any) -> Dataset:
    return load(Data(name="paired", root=str(root), **keys))


def test_paired(root: Path) -> None:
    make(root / "optical", "train/cat/0.png", "train/dog/1.png", "test/dog/2.png")
    make(root / "radar", "x.txt.png", "train/cat/0.jpg", "train/dog/1.bmp", "test/dog/2.png")
    (root / "notes.txt").write_text("files beside the two folders do not matter")
    dataset = paired(root)
    assert len(dataset.train.images) == 2
    assert (reds(dataset.train), labels(dataset.train)) == ([0, 1], [0, 1])
    assert reds(dataset.train, 1)[1] == 2
    assert (reds(dataset.test), reds(dataset.test, 1)) == ([2], [3])
    assert dataset.classes == ("cat", "dog")


def test_paired_below_train_and_test(root: Path) -> None:
    for number, split in enumerate(("train", "test")):
        make(root, *(f"{split}/{side}/{label}/{number}.png" for side in "ab" for label in "xy"))
    make(root, "val/c/0.png")
    dataset = paired(root)
    assert (labels(dataset.train), labels(dataset.test)) == ([0, 1], [0, 1])
    assert (reds(dataset.train), reds(dataset.train, 1)) == ([0, 1], [2, 3])
    assert paired(root, levels=("client",)).clients == ("x", "y")
    (root / "test/b").rename(root / "test/c")
    with pytest.raises(UserError, match=r"are called a, b in train/ and a, c in test/; rename"):
        paired(root)
    make(root, "test/b/x/1.png")
    with pytest.raises(UserError, match=r"exactly two folders.*found 3 in test/: a, b, c"):
        paired(root)


def test_paired_without_train(root: Path) -> None:
    make(root, "a/x/0.png", "a/x/1.png", "b/x/0.png", "b/x/1.png")
    dataset = paired(root)
    assert (reds(dataset.train), reds(dataset.train, 1)) == ([0, 1], [2, 3])
    assert dataset.train.labels is None


def test_paired_files_without_partner(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(root, "a/train/x/0.png", "a/train/x/1.png", "b/train/x/1.png", "b/train/x/2.png")
    with pytest.raises(UserError) as caught:
        paired(root)
    assert "2 files" in str(caught.value)
    assert "a/train/x/0.png (no partner in b)" in str(caught.value)
    assert "b/train/x/2.png (no partner in a)" in str(caught.value)
    dataset = paired(root, corrupt="skip")
    assert (reds(dataset.train), reds(dataset.train, 1)) == ([1], [2])
    assert "warning: left out 2 of 4 images" in capsys.readouterr().err
    (meta,) = (root.parent / "cache").glob("*/meta.json")
    assert sorted(json.loads(meta.read_text())["unpaired"]) == [
        *("a/train/x/0.png", "b/train/x/2.png")
    ]


def test_paired_split_on_one_side_only(root: Path) -> None:
    make(root, "a/train/x/0.png", "a/test/x/1.png", "b/train/x/0.png")
    with pytest.raises(UserError, match=r"a/test/x/1\.png \(no partner in b\)"):
        paired(root)


def test_paired_corrupt_partner_drops_the_pair(root: Path) -> None:
    make(root, *(f"{side}/{i}.png" for i in range(3) for side in "ab"))
    (root / "b/1.png").write_text("broken")
    with pytest.raises(UserError, match=r"1 of 6 images .* b/1\.png"):
        paired(root)
    dataset = paired(root, corrupt="skip")
    assert (reds(dataset.train), reds(dataset.train, 1)) == ([0, 4], [1, 5])


def test_paired_mistakes(root: Path) -> None:
    make(root, "a/0.png", "b/0.png", "c/0.png")
    with pytest.raises(UserError, match=r"exactly two folders.*found 3: a, b, c"):
        paired(root)
    for path in (root / "c/0.png", root / "c"):
        path.unlink() if path.is_file() else path.rmdir()
    make(root, "a/0.jpg")
    with pytest.raises(UserError, match=r"a/0\.jpg and a/0\.png differ only in their ending"):
        paired(root)
    with pytest.raises(UserError, match=r"data\.halves=true: data\.name=paired has two"):
        paired(root, halves=True)


def test_paired_in_a_folder_called_train_beside_test(root: Path) -> None:
    """As older runs have it; of one modality's folder it would be a mistake."""
    make(root, "train/a/0.png", "train/b/0.png", "test/a/1.png", "test/b/1.png")
    assert len(paired(root / "train").train) == 1 and paired(root / "train").test is None


# Halves and labels


@pytest.mark.parametrize("size", [8, 9])
def test_halves(size: int) -> None:
    whole, halved = load(Data(size=size)), load(Data(size=size, halves=True))
    assert halved.test is not None
    left, right = halved.train.images
    assert left.shape == right.shape == (1438, 1, size, 4)
    assert left.is_contiguous()
    assert right.is_contiguous()
    assert torch.equal(left, whole.train.images[0][..., :4])
    assert torch.equal(right, whole.train.images[0][..., size - 4 :])
    assert halved.test.images[1].shape == (359, 1, size, 4)
    assert labels(halved.train) == labels(whole.train)


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
        (found,), (back,) = getattr(grey, split).images, getattr(again, split).images
        assert np.array_equal(found, read) and found.dtype == back.dtype == torch.uint8
        assert torch.equal(back, found.repeat(1, 3, 1, 1)) and back.is_contiguous()
    assert convert_channels(colour, [3]) == colour
    with pytest.raises(UserError, match="images of 3 channels cannot become images of 4"):
        convert_channels(colour, [4])
    towers = dataclasses.replace(colour, train=Split(colour.train.images * 2), test=None)
    assert [x.shape[1] for x in convert_channels(towers, [3, 1]).train.images] == [3, 1]


def test_halves_of_nothing() -> None:
    with pytest.raises(UserError, match=r"data\.halves=true"):
        load(Data(size=1, halves=True))


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
    assert drawn[5].max() > 100  # not simply the first ones


def test_draw_labels_gives_every_sample_its_chance() -> None:
    numbers = torch.zeros(10, dtype=torch.int64)
    chosen = torch.cat([draw_labels(numbers, 1, 1, seed) for seed in range(500)])
    assert torch.bincount(chosen, minlength=10).min() > 25


def test_draw_labels_mistakes() -> None:
    numbers = torch.tensor([0, 0, 0, 1, -1, -1])
    with pytest.raises(UserError, match=r"evaluate\.labels=3: must be a multiple of the 2"):
        draw_labels(numbers, 3, 2, 0, key="evaluate.labels")
    with pytest.raises(UserError, match=r"data\.labels=4: needs 2 .* number 1 has 1; at most 2"):
        draw_labels(numbers, 4, 2, 0)
    with pytest.raises(UserError, match=r"data\.labels=0"):
        draw_labels(numbers, 0, 2, 0)


def test_labels_keeps_that_many_training_samples() -> None:
    whole, few = load(Data(size=8)), load(Data(size=8, labels=20), seed=5)
    assert whole.train.labels is not None
    index = draw_labels(whole.train.labels, 20, 10, seed=5)
    assert torch.equal(few.train.images[0], whole.train.images[0][index])
    assert labels(few.train) == whole.train.labels[index].tolist()
    assert few.test is not None
    assert len(few.test) == 359
    other = load(Data(size=8, labels=20), seed=6)
    assert not torch.equal(few.train.images[0], other.train.images[0])


def test_labels_keeps_clients_and_cases_in_step(root: Path) -> None:
    make(
        root,
        *(f"{who}/{kind}/{case}/0.png" for who in "abc" for kind in "xy" for case in "pqrs"),
    )
    data = Data(name="folder", root=str(root), levels=("client", "class", "case"), labels=2)
    whole = folder(root, levels=data.levels)
    assert whole.train.clients is not None
    who = dict(zip(reds(whole.train), whole.train.clients.tolist(), strict=True))
    for seed in range(8):
        few = load(data, seed)
        assert few.train.clients is not None
        assert few.train.cases is not None
        assert few.train.cases.tolist() == [0, 1]
        for red, client in zip(reds(few.train), few.train.clients.tolist(), strict=True):
            assert few.clients[client] == whole.clients[who[red]]
        assert sorted(few.clients) == ["a", "b", "c"]
        used = sorted(set(few.train.clients.tolist()))
        assert used == list(range(len(used)))  # the clients that have samples come first


def test_labels_without_classes(root: Path) -> None:
    make(root, "a.png")
    with pytest.raises(UserError, match=r"data\.labels=1: folder has no classes"):
        folder(root, labels=1)


def test_labels_and_halves_together() -> None:
    dataset = load(Data(size=8, labels=10, halves=True))
    assert [x.shape for x in dataset.train.images] == [(10, 1, 8, 4)] * 2
