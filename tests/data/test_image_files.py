"""Image files below a folder."""

from __future__ import annotations

import os
from pathlib import Path

from helpers import refused
from image_folders import save

from fedssl.data import image_files


def test_find_takes_images_of_any_format_at_any_depth(tmp_path: Path) -> None:
    for name in ("b/deep/er/x.PNG", "a/y.jpg", "z.webp", "a/w.tiff"):
        save(tmp_path / name)
    (tmp_path / "a/notes.txt").write_text("no image")
    (tmp_path / "a/report.pdf").write_text("Pillow writes PDF but does not read it")
    (tmp_path / "a/jpg").write_text("no ending")
    (tmp_path / "folder.jpg").mkdir()
    save(tmp_path / ".hidden/x.png")
    save(tmp_path / "a/.y.png")
    files, folders = image_files.find_images(tmp_path)
    assert [file.path for file in files] == ["a/w.tiff", "a/y.jpg", "b/deep/er/x.PNG", "z.webp"]
    assert folders == ["a", "b", "b/deep", "b/deep/er", "folder.jpg"]
    assert [file.path for file in image_files.find_images(tmp_path, "b/deep")[0]] == [
        "b/deep/er/x.PNG"
    ]


def test_find_follows_links_but_not_in_circles(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere/x.png")
    (tmp_path / "root/real").mkdir(parents=True)
    (tmp_path / "root/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root/one.png").symlink_to(tmp_path / "elsewhere/x.png")
    (tmp_path / "root/real/loop").symlink_to(tmp_path / "root")
    (tmp_path / "root/lost.png").symlink_to(tmp_path / "nothing.png")
    os.mkfifo(tmp_path / "root/pipe.png")
    found = [file.path for file in image_files.find_images(tmp_path / "root")[0]]
    assert found == ["linked/x.png", "lost.png", "one.png"]


def test_links_that_multiply_images_are_refused(tmp_path: Path) -> None:
    """A chain of 16 folders with two links each would be 65,535 images."""
    for number in range(16):
        save(tmp_path / f"pool/{number}/x.png")
        for name in ("a", "b") if number else ():
            (tmp_path / f"pool/{number - 1}/{name}").symlink_to(tmp_path / f"pool/{number}")
    root = tmp_path / "root"
    root.mkdir()
    (root / "first").symlink_to(tmp_path / "pool/0")
    for place in (root, tmp_path):
        with refused("data.root", place, "links multiply images"):
            image_files.find_images(place)
    for number in range(15):
        (tmp_path / f"pool/{number}/b").unlink()
    assert len(image_files.find_images(root)[0]) == 16


def test_clients_share_folders_by_links(tmp_path: Path) -> None:
    """Each client has the images, also those of a folder to which the shared one has a link."""
    save(tmp_path / "pool/x.png")
    save(tmp_path / "other/y.png")
    (tmp_path / "pool/other").symlink_to(tmp_path / "other")
    for client in range(20):
        (tmp_path / f"root/{client}").mkdir(parents=True)
        (tmp_path / f"root/{client}/shared").symlink_to(tmp_path / "pool")
    assert len(image_files.find_images(tmp_path / "root")[0]) == 40


def test_folders_deeper_than_pythons_stack_are_read(tmp_path: Path) -> None:
    places = [tmp_path]
    for _ in range(1200):
        places.append(places[-1] / "d")
        places[-1].mkdir()
    save(places[-1] / "x.png")
    (file,) = image_files.find_images(tmp_path)[0]
    assert file.path == "d/" * 1200 + "x.png"
    (places[-1] / "x.png").unlink()
    for place in reversed(places[1:]):  # deeper than pytest can remove
        place.rmdir()
