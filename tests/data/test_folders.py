"""The user's own folders: layouts, mistakes, files that cannot be read, pairs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused
from image_folders import folder, labels, make, paired, reds

from fedssl.config import Data
from fedssl.data import folders
from fedssl.data.load import load_dataset

# Layouts


def test_classes(root: Path) -> None:
    make(root, "train/dog/a.png", "train/cat/b.png", "train/cat/deep/c.JPG", "train/dog/d.bmp")
    make(root, "other/x.png", "train/.hidden/x.png", size=(30, 20))
    assert folder(root).test is None
    make(root, "test/dog/a.png", "test/cat/b.png")
    dataset = folder(root)
    assert (dataset.name, dataset.classes, dataset.clients) == ("folder", ("cat", "dog"), ())
    assert dataset.train.images[0].shape == (4, 3, 8, 8)
    assert dataset.train.images[0].dtype == torch.uint8
    assert [reds(dataset.train)[i] for i in (0, 2, 3)] == [1, 0, 3]
    assert labels(dataset.train) == [0, 0, 1, 1]
    assert (reds(dataset.test), labels(dataset.test)) == ([1, 0], [0, 1])
    assert dataset.train.clients is None and dataset.train.cases is None
    (root / "test/cat/b.png").unlink()
    (root / "test/cat").rmdir()
    assert labels(folder(root).test) == [1]  # classes of train/ alone are fine


@pytest.mark.parametrize(
    ("names", "levels"),
    [
        (("a.png", "b/c.png", "b/d/e.png"), None),  # no train/
        (("train/a.png", "train/b/c.png", "train/d.png"), None),  # images directly in it
        (("train/dog/a.png", "train/dog/b.png", "train/cat/b.png"), ()),
    ],
)
def test_plain_images(root: Path, names: tuple[str, ...], levels: Any) -> None:
    make(root, *names)
    dataset = folder(root, levels=levels)
    assert len(dataset.train) == 3
    assert dataset.train.labels is None
    assert dataset.classes == ()


def test_levels_without_train(root: Path) -> None:
    make(root, "dog/a.png", "cat/b.png")
    assert labels(folder(root, levels=("class",)).train) == [0, 1]
    sites = folder(root, levels=("client",))
    assert sites.clients == ("cat", "dog") and sites.train.labels is None
    (root / "eel").mkdir()
    with refused("data.root", root, "the class folder eel"):
        folder(root, levels=("class",))


def test_clients_and_classes(root: Path) -> None:
    make(root, "train/zoe/dog/a.png", "train/bob/cat/b.png", "train/zoe/cat/c.png")
    make(root, "test/amy/cat/a.png", "test/bob/dog/b.png")
    dataset = folder(root, levels=("client", "class"))
    assert dataset.classes == ("cat", "dog")
    assert dataset.clients == ("amy", "bob", "zoe")
    assert (reds(dataset.train), labels(dataset.train)) == ([1, 2, 0], [0, 0, 1])
    assert dataset.test is not None
    assert np.array_equal(dataset.train.clients, [1, 2, 2])
    assert np.array_equal(dataset.test.clients, [0, 1])


@pytest.mark.parametrize("first", ["class", "client"])
def test_cases_of_different_folders_are_different(root: Path, first: Any) -> None:
    make(root, "train/a/p1/0.png", "train/a/p1/1.png", "train/a/p2/0.png", "train/b/p1/0.png")
    make(root, "test/b/p1/0.png")
    dataset = folder(root, levels=(first, "case"))
    assert dataset.test is not None
    assert np.array_equal(dataset.train.cases, [0, 0, 1, 2])
    assert np.array_equal(dataset.test.cases, [0])


# Mistakes


def test_folders_without_images(root: Path) -> None:
    def says(text: str, place: str = "") -> None:
        with refused("data.root", root / place, text):
            folder(root / place)

    says("no images for train")
    (root / "train").mkdir()
    says("no images for train")
    (root / "test").mkdir()
    make(root, "train/dog/a.png")
    says("no images for test")
    make(root, "test/dog/a.png", "test/emu/b.png")
    says("lacks: emu")
    says(f"data.root={root}.", "train")  # beside test/
    (root / "train/emu").mkdir()
    (root / "train/emu/notes.txt").write_text("nothing here")
    says("class folder train/emu")
    (root / "train").rename(root / "training")
    says("test/ but no train/")


@pytest.mark.parametrize("levels", [("class",), ("client", "class")])
def test_an_image_above_its_level(root: Path, levels: tuple[str, ...]) -> None:
    make(root, "train/dog/a.png", "train/b.png")
    with refused("data.levels", levels, "train/b.png lies in no"):
        folder(root, levels=levels)


def test_a_folder_whose_name_is_no_text(root: Path) -> None:
    make(root, os.fsdecode(b"train/caf\xe9/\xfc/1.png"), "train/a\x1b[2J\n/\u202e/1.png")
    dataset = folder(root, levels=("client", "class"))
    assert dataset.clients == ("a\\x1b[2J\\n", "caf\\xe9")
    assert dataset.classes == ("\\u202e", "\\xfc")


def test_sizes(root: Path) -> None:
    make(root, "train/a/0.png", "train/a/1.png", size=(20, 30))
    with refused("data.size", None, "20 × 30"):
        folder(root)
    for size in (None, 6):
        dataset = load_dataset(Data(name="folder", root=str(root), size=12), size=size)
        assert dataset.train.images[0].shape == (2, 3, size or 12, size or 12)


# Files that cannot be read


def test_unreadable_files(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(root, *(f"train/{kind}/{i}.png" for i in range(4) for kind in ("cat", "dog")))
    make(root, "test/cat/0.png", "test/cat/1.png")
    for name in ("train/cat/1.png", "train/dog/0.png", "train/dog/2.png", "test/cat/0.png"):
        (root / name).write_text("broken")
    for _ in range(2):
        with refused("data.corrupt", "fail", "train/cat/1.png (not an image that Pillow knows)"):
            folder(root)
    capsys.readouterr()
    for _ in range(2):
        folders._warn_once.cache_clear()  # as in a new process
        dataset = folder(root, corrupt="skip")
        assert reds(dataset.train) == [0, 4, 6, 3, 7]
        assert labels(dataset.train) == [0, 0, 0, 1, 1]
        assert reds(dataset.test) == [1]
        (warning,) = capsys.readouterr().err.splitlines()
        assert warning.startswith(f"warning: left out 4 of 10 images below {root}: train/cat/1")
        assert warning.endswith(" and 1 more")
    (meta,) = (root.parent / "cache").glob("*/meta.json")
    assert len(json.loads(meta.read_text())["meta"]["unreadable"]) == 4
    # A process warns once, also where they are loaded by another name or at another size.
    load_dataset(Data(name="folder", root=str(root / "../root"), corrupt="skip"), size=5)
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
    assert dataset.clients == ("east", "north", "west")  # it still has test images
    (warning,) = capsys.readouterr().err.splitlines()[-1:]
    assert warning.startswith(f"warning: left out 7 of 18 images below {root}: ")
    assert warning.endswith(" and 4 more; no image is left in train/north, train/west/2")
    for site in ("train/east/1/0.png", "train/west/2/0.png", "train/north/1/0.png"):
        make(root, site)
    make(root, "train/north/2/0.png")
    folder(root, corrupt="skip", levels=("client", "case"))
    assert "no image is left" not in capsys.readouterr().err
    for case in ("1", "2"):
        (root / f"train/north/{case}/0.png").write_text("broken")
    with refused("data.root", root, "no training image of the class north"):
        folder(root, corrupt="skip")


def test_images_are_identified_by_the_files_that_are_used(root: Path) -> None:
    make(root, "train/cat/0.png", "train/dog/0.png", "test/cat/0.png")
    before = folder(root).files
    assert before.keys() == {"train", "test"} and not load_dataset(Data()).files
    os.utime(root / "train/cat/0.png", (1, 1))
    make(root, "test/dog/1.png")
    (root / "train/dog/1.png").write_text("broken")
    after = folder(root, corrupt="skip").files
    assert after["train"] == before["train"] and after["test"] != before["test"]
    moved = root.rename(root.with_name("moved"))
    assert folder(moved, corrupt="skip", labels=2).files == after
    (moved / "train/dog/0.png").rename(moved / "train/dog/2.png")
    assert folder(moved, corrupt="skip").files["train"] != before["train"]


# Pairs


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
    # A folder called train may be trained on alone; of one modality it would be a mistake.
    assert paired(root / "train").test is None
    (root / "test/b").rename(root / "test/c")
    with refused("data.root", root, "a, b in train/ and a, c in test/"):
        paired(root)
    make(root, "test/b/x/1.png")
    with refused("data.root", root, "test/ holds 3 folders: a, b, c"):
        paired(root)


def test_paired_files_without_partner(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(root, "a/x/0.png", "a/x/1.png", "b/x/0.png", "b/x/1.png")
    dataset = paired(root)
    assert (reds(dataset.train), reds(dataset.train, 1)) == ([0, 1], [2, 3])
    assert dataset.train.labels is None
    (root / "a/x/1.png").rename(root / "a/x/2.png")
    for path in ("a/x/2.png (no partner in b)", "b/x/1.png (no partner in a)"):
        with refused("data.corrupt", "fail", path):
            paired(root)
    dataset = paired(root, corrupt="skip")
    assert (reds(dataset.train), reds(dataset.train, 1)) == ([0], [2])
    assert "warning: left out 2 of 4 images" in capsys.readouterr().err
    files = (root.parent / "cache").glob("*/meta.json")
    metas = [json.loads(path.read_text())["meta"] for path in files]
    assert {"a/x/2.png", "b/x/1.png"} in [set(meta["unpaired"]) for meta in metas]


def test_paired_corrupt_partner_drops_the_pair(root: Path) -> None:
    make(root, *(f"{side}/{i}.png" for i in range(3) for side in "ab"))
    (root / "b/1.png").write_text("broken")
    with refused("data.corrupt", "fail", "1 of 6 images"):
        paired(root)
    dataset = paired(root, corrupt="skip")
    assert (reds(dataset.train), reds(dataset.train, 1)) == ([0, 4], [1, 5])
    (root / "b/1.png").unlink()
    make(root, "a/train/0.png", "a/test/0.png", "b/train/0.png")  # a split on one side only
    with refused("data.corrupt", "fail", "a/test/0.png (no partner in b)"):
        paired(root)


def test_paired_mistakes(root: Path) -> None:
    make(root, "a/0.png", "b/0.png", "c/0.png")
    with refused("data.root", root, "the folder holds 3 folders: a, b, c"):
        paired(root)
    (root / "c/0.png").unlink()
    (root / "c").rmdir()
    make(root, "a/0.jpg")
    with refused("data.root", root, "a/0.jpg and a/0.png differ only in their ending"):
        paired(root)
