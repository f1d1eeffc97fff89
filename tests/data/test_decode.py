"""Image files to pixels: sizes, modes, unreadable files, threads, progress."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import refused
from image_folders import decode_train as load
from image_folders import gradient, rows, save
from PIL import Image, ImageOps

from fedssl.data import decode
from fedssl.util import status

# Decoding


@pytest.mark.parametrize("how", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC])
@pytest.mark.parametrize(("width", "height"), [(90, 30), (30, 90), (37, 64), (30, 30), (10, 10)])
def test_decode_resizes_the_shorter_side_and_crops_the_centre(
    tmp_path: Path, width: int, height: int, how: Image.Resampling
) -> None:
    image = gradient(width, height)
    scale = 10 / min(width, height)
    long = image.resize((round(width * scale), round(height * scale)), how)
    left, top = (long.width - 10) // 2, (long.height - 10) // 2
    wanted = long.crop((left, top, left + 10, top + 10))
    path = save(tmp_path / "x.png", image)
    pixels = decode.decode_file(path, 10, interpolation=how.name.lower())
    difference = pixels.transpose(1, 2, 0).astype(int) - np.asarray(wanted)
    # Half a pixel of rounding; a crop from the wrong place would be off by dozens.
    assert np.abs(difference).max() <= 0.5 * 256 / 10


def test_decode_reduces_large_jpegs_without_losing_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "x.jpg", gradient(640, 480), quality=95)
    drafted = decode.decode_file(path, 32).astype(int)
    seen: list[tuple[int, int]] = []
    fit = ImageOps.fit
    monkeypatch.setattr(ImageOps, "fit", lambda i, *a: seen.append(i.size) or fit(i, *a))
    decode.decode_file(path, 32)
    assert seen == [(160, 120)]  # a quarter; an eighth would be below twice the target
    monkeypatch.setattr(decode.JpegImageFile, "draft", lambda *a: None)
    whole = decode.decode_file(path, 32)
    assert seen[1] == (640, 480)
    assert np.abs(drafted - whole).max() <= 2


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_decode_scales_16_bits_to_8(tmp_path: Path, ending: str) -> None:
    values = np.array([[0, 257], [32896, 65535]], np.uint16)
    pixels = decode.decode_file(save(tmp_path / f"x.{ending}", Image.fromarray(values)), 2)
    assert np.array_equal(pixels, np.array([[[0, 1], [128, 255]]] * 3))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_decode_converts_any_mode_to_rgb(tmp_path: Path, mode: str) -> None:
    image = Image.new("RGB", (8, 8), "white").convert(mode)
    ending = "jpg" if mode in ("CMYK", "YCbCr") else "png"
    pixels = decode.decode_file(save(tmp_path / f"x.{ending}", image), 8)
    assert pixels.shape == (3, 8, 8)
    assert pixels.min() >= 250


def test_decode_turns_images_upright_unless_exif_is_broken(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera lay on its side: turn by 90° clockwise
    path = tmp_path / "x.png"
    plain = np.asarray(gradient(8, 8)).transpose(2, 0, 1)
    for block, turns in ((b"Exif\0\0nonsense", 0), (exif, -1)):
        pixels = decode.decode_file(save(path, gradient(8, 8), exif=block), 8)
        assert np.array_equal(pixels, np.rot90(plain, turns, (1, 2)))


# Unreadable files


def test_unreadable_files_are_left_out_with_their_reasons(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(40):
        save(root / f"{i:02}.png", Image.new("RGB", (8, 8), (i, 0, 0)))
    (root / "07.png").write_text("not an image")
    for name in ("21.jpg", "22.png"):
        data = save(root / name, gradient(64, 64)).read_bytes()
        (root / name).write_bytes(data[: len(data) // 2])
    (root / "33.png").write_bytes(b"")
    (root / "39.png").unlink()
    (root / "39.png").symlink_to("nowhere.png")
    save(root / "bomb.png", Image.new("RGB", (200, 200)))
    save(root / "float.tif", Image.new("F", (8, 8)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 15_000)
    images, reasons = load(root)
    assert " ".join(sorted(reasons)) == "07.png 21.jpg 22.png 33.png 39.png bomb.png float.tif"
    assert reasons["07.png"] == "not an image that Pillow knows"
    assert "truncated" in reasons["21.jpg"].lower()
    assert reasons["39.png"] == "No such file or directory"
    assert "decompression bomb" in reasons["bomb.png"]
    assert "range is unknown" in reasons["float.tif"]
    kept = [i for i in range(40) if i not in (7, 22, 33, 39)]
    assert images[:, 0, 0, 0].tolist() == kept
    (meta,) = cache.glob("*/meta.json")
    assert json.loads(meta.read_text())["meta"]["unreadable"] == reasons


def test_a_mended_file_is_noticed_even_if_its_time_is_the_same(root: Path) -> None:
    good, path = save(root / "a.png").read_bytes(), root / "b.png"
    path.write_bytes(b"x" * len(good))
    before = path.stat()
    assert list(load(root)[1]) == ["b.png"]
    path.write_bytes(good)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    images, unreadable = load(root)
    assert len(images) == 2 and not unreadable


def test_unreadable_files_are_named_where_their_folders_are_not_utf8(root: Path) -> None:
    for name in ("a.png", "b.png"):
        save(root / name)
    (root / "caf\udce9").mkdir()
    (root / "a.png").rename(root / "caf\udce9/a.png")
    (root / "caf\udce9/c.png").write_text("no")
    for _ in range(2):  # decoded, then from the cache
        images, unreadable = load(root)
        assert len(images) == 2 and list(unreadable) == ["caf\udce9/c.png"]
    assert decode.list_failures(unreadable).startswith("caf\\xe9/c.png (")
    assert decode.list_failures({"\x1b[2J\n": "damaged"}) == "\\x1b[2J\\n (damaged)"


def test_of_a_part_of_which_nothing_can_be_read_its_own_files_are_named(
    root: Path, cache: Path
) -> None:
    save(root / "train/a.png")
    for name in ("train/b.png", "test/x.png"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("no")
    parts = {split: rows(root, split) for split in ("train", "test")}
    with refused("data.root", root, "no image for test can be read: test/x.png"):
        decode.decode_splits(root, parts, decode.Storage(8), cache, "test", {})
    save(root / "test/y.png")
    parts["test"] = rows(root, "test")
    found = decode.decode_splits(root, parts, decode.Storage(8), cache, "test", {})
    assert list(found.unreadable) == ["train/b.png", "test/x.png"]


# Sizes


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ([(12, 12)] * 3 + [(9, 9)], "(12 × 12, 9 × 9)"),
        ([(12, 10)] * 3, "(12 × 10). Set it, for example data.size=10"),
        ([(12, 10)] * 2 + [(k, k) for k in range(10, 14)], "11 × 11 and 2 more)"),
    ],
)
def test_sizes_that_differ_or_are_not_square(
    tmp_path: Path, sizes: list[tuple[int, int]], says: str
) -> None:
    for i, size in enumerate(sizes):
        save(tmp_path / f"{i}.png", gradient(*size))
    (tmp_path / "bad.png").write_text("no header, no say")
    with refused("data.size", None, says):
        load(tmp_path, None)
    for i in range(len(sizes)):
        save(tmp_path / f"{i}.png", gradient(12, 12))
    assert load(tmp_path, None)[0].shape == (len(sizes), 3, 12, 12)


@pytest.mark.parametrize(("noise", "threads"), [(False, 1), (True, 4)])
def test_small_files_are_decoded_by_one_thread_and_large_ones_by_all(
    noise: bool, threads: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = gradient(80, 80)
    if noise:  # 19 kB as PNG, the gradient has less than one
        pixels = np.random.default_rng(0).integers(0, 256, (80, 80, 3), np.uint8)
        image = Image.fromarray(pixels)
    for i in range(4):
        save(root / f"{i}.png", image)
    monkeypatch.setattr(decode, "CHUNK", 1)
    monkeypatch.setattr(decode.os, "cpu_count", lambda: 4)
    together, real, met = threading.Barrier(threads), decode.decode_file, []

    def watch(path: Path, *rest: int, **keys: bool) -> decode.Pixels:
        together.wait(timeout=30)  # breaks where fewer threads are at work
        met.append(threading.get_ident())
        return real(path, *rest, **keys)

    monkeypatch.setattr(decode, "decode_file", watch)
    assert not load(root)[1]
    assert len(set(met)) == threads


def test_decoding_shows_how_many_images_are_done(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "SILENCE", 0.0)
    monkeypatch.setattr(status, "TICK", 0.01)
    monkeypatch.setattr(decode, "CHUNK", 1)
    slow = decode.decode_file

    def decode_slowly(*arguments: Any, **keys: Any) -> Any:
        time.sleep(0.1)
        return slow(*arguments, **keys)

    monkeypatch.setattr(decode, "decode_file", decode_slowly)
    load(folder)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"decoding 5 images of {folder} (")
    assert lines[-1].startswith(f"decoding 5 images of {folder}: ") and " of 5 (" in lines[-1]
    load(folder)  # from the cache
    assert capsys.readouterr().err == ""
