from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.data import cache as caches
from fedssl.data import decode, image_files
from fedssl.util.errors import UserError


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards: shows any flip, turn or shift."""
    x = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    y = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    return Image.fromarray(np.stack((x, y, np.full_like(x, 90)), -1).astype(np.uint8))


def save(path: Path, image: Image.Image | None = None, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or gradient(8, 8)).save(path, **options)
    return path


def rows(root: Path, below: str = "") -> list[image_files.Row]:
    return [(file,) for file in image_files.find_images(root, below)[0]]


def load(root: Path, cache: Path, size: int | None = 8) -> decode.Decoded:
    return decode.decode_splits(root, {"train": rows(root)}, size, cache, "test", {})


# Finding


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


# Decoding


def test_decode_keeps_pixels_of_the_right_size(tmp_path: Path) -> None:
    image = gradient(8, 8)
    pixels = decode.decode_file(save(tmp_path / "x.png", image), 8)
    assert np.array_equal(pixels, np.asarray(image).transpose(2, 0, 1))


@pytest.mark.parametrize(("width", "height"), [(90, 30), (30, 90), (37, 64), (30, 30)])
def test_decode_resizes_the_shorter_side_and_crops_the_centre(
    tmp_path: Path, width: int, height: int
) -> None:
    image = gradient(width, height)
    scale = 10 / min(width, height)
    long = image.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR)
    left, top = (long.width - 10) // 2, (long.height - 10) // 2
    wanted = long.crop((left, top, left + 10, top + 10))
    pixels = decode.decode_file(save(tmp_path / "x.png", image), 10)
    difference = pixels.transpose(1, 2, 0).astype(int) - np.asarray(wanted)
    # Half a pixel of rounding; a crop from the wrong place would be off by dozens.
    assert np.abs(difference).max() <= 0.5 * 256 / 10


def test_decode_survives_extreme_shapes(tmp_path: Path) -> None:
    assert decode.decode_file(save(tmp_path / "x.png", gradient(4000, 1)), 32).shape == (3, 32, 32)


def test_decode_reduces_large_jpegs_without_losing_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "x.jpg", gradient(640, 480), quality=95)
    drafted = decode.decode_file(path, 32).astype(int)
    seen: list[tuple[int, int]] = []
    square = decode._to_square
    monkeypatch.setattr(decode, "_to_square", lambda i, s: seen.append(i.size) or square(i, s))
    decode.decode_file(path, 32)
    assert seen == [(160, 120)]  # a quarter; an eighth would be below twice the target
    monkeypatch.setattr(Image.Image, "draft", lambda *a: None)
    with Image.open(path) as image:
        whole = np.asarray(square(image, 32)).transpose(2, 0, 1)
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


def test_decode_takes_the_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    path = save(tmp_path / "x.gif", frames[0], save_all=True, append_images=frames[1:])
    assert decode.decode_file(path, 8)[:, 0, 0].tolist() == [255, 0, 0]


def test_decode_turns_images_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera lay on its side: turn by 90° clockwise
    path = save(tmp_path / "x.png", gradient(8, 8), exif=exif)
    plain = decode.decode_file(save(tmp_path / "y.png", gradient(8, 8)), 8)
    assert np.array_equal(decode.decode_file(path, 8), np.rot90(plain, -1, (1, 2)))


def test_decode_ignores_broken_exif(tmp_path: Path) -> None:
    path = save(tmp_path / "x.png", gradient(8, 8), exif=b"Exif\0\0nonsense")
    assert decode.decode_file(path, 8).shape == (3, 8, 8)


# Unreadable files


def spoil(path: Path) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


def test_unreadable_files_are_left_out_with_their_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    for i in range(40):
        save(root / f"{i:02}.png", Image.new("RGB", (8, 8), (i, 0, 0)))
    (root / "07.png").write_text("not an image")
    spoil(save(root / "21.jpg", gradient(64, 64)))
    spoil(save(root / "22.png", gradient(64, 64)))
    (root / "33.png").write_bytes(b"")
    (root / "39.png").unlink()
    (root / "39.png").symlink_to("nowhere.png")
    save(root / "bomb.png", Image.new("RGB", (200, 200)))
    save(root / "float.tif", Image.new("F", (8, 8)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 15_000)
    found = load(root, tmp_path / "cache")
    reasons = found.unreadable
    assert sorted(reasons) == [
        *("07.png", "21.jpg", "22.png", "33.png", "39.png", "bomb.png", "float.tif")
    ]
    assert reasons["07.png"] == "not an image that Pillow knows"
    assert "truncated" in reasons["21.jpg"].lower()
    assert reasons["39.png"] == "No such file or directory"
    assert "decompression bomb" in reasons["bomb.png"]
    assert "range is unknown" in reasons["float.tif"]
    kept = [i for i in range(40) if i not in (7, 22, 33, 39)]
    assert found.images["train"][0][:, 0, 0, 0].tolist() == kept
    (meta,) = (tmp_path / "cache").glob("*/meta.json")
    assert json.loads(meta.read_text())["unreadable"] == reasons


def test_a_mended_file_is_noticed_even_if_its_time_is_the_same(tmp_path: Path) -> None:
    root, good = tmp_path / "root", io.BytesIO()
    gradient(8, 8).save(good, "PNG")
    save(root / "a.png")
    path = root / "b.png"
    path.write_bytes(b"x" * len(good.getvalue()))
    before = path.stat()
    assert list(load(root, tmp_path / "cache").unreadable) == ["b.png"]
    path.write_bytes(good.getvalue())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = load(root, tmp_path / "cache")
    assert not found.unreadable
    assert len(found.images["train"][0]) == 2


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("no")
    with pytest.raises(UserError, match=r"no image for train can be read: x\.png \(not an image"):
        load(tmp_path, tmp_path / "cache", None)


def test_of_a_part_of_which_nothing_can_be_read_its_own_files_are_named(tmp_path: Path) -> None:
    root = tmp_path / "root"
    save(root / "train/a.png")
    for name in ("train/b.png", "test/x.png"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("no")
    parts = {split: rows(root, split) for split in ("train", "test")}
    said = r"no image for test can be read: test/x\.png \([^,]*\); mend or replace some, or remove"
    with pytest.raises(UserError, match=said):
        decode.decode_splits(root, parts, 8, tmp_path / "cache", "test", {})
    save(root / "test/y.png")
    parts["test"] = rows(root, "test")
    found = decode.decode_splits(root, parts, 8, tmp_path / "cache", "test", {})
    assert list(found.unreadable) == ["train/b.png", "test/x.png"]


# Sizes


def test_own_size_is_taken_if_all_agree(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for i in range(3):
        save(root / f"{i}.png", gradient(12, 12))
    (root / "bad.png").write_text("no header, no say")
    assert load(root, tmp_path / "cache", None).images["train"][0].shape == (3, 3, 12, 12)


def test_own_size_is_not_that_of_the_majority(tmp_path: Path) -> None:
    for i, side in enumerate((12, 12, 12, 9)):
        save(tmp_path / f"{i}.png", gradient(side, side))
    with pytest.raises(UserError, match=r"\(12 × 12, 9 × 9\)"):
        load(tmp_path, tmp_path / "cache", None)


def test_own_size_that_differs_or_is_not_square_is_named(tmp_path: Path) -> None:
    for i in range(3):
        save(tmp_path / f"{i}.png", gradient(12, 10))
    with pytest.raises(UserError, match=r"data\.size.*\(12 × 10\).*data\.size=10"):
        load(tmp_path, tmp_path / "cache", None)
    for i in range(4):
        save(tmp_path / f"more{i}.png", gradient(10 + i, 10 + i))
    with pytest.raises(UserError, match=r"12 × 10, .* and 2 more sizes"):
        load(tmp_path, tmp_path / "cache", None)


# The cache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(5):
        save(tmp_path / f"root/{i}.png", Image.new("RGB", (8, 8), (i, i, i)))
    return tmp_path / "root"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded from here on."""
    names: list[str] = []
    real = decode.decode_file

    def watch(path: Path, size: int) -> decode.Pixels:
        names.append(path.name)
        return real(path, size)

    monkeypatch.setattr(decode, "decode_file", watch)
    return names


@pytest.mark.parametrize(("noise", "threads"), [(False, 1), (True, 4)])
def test_small_files_are_decoded_by_one_thread_and_large_ones_by_all(
    noise: bool, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = gradient(80, 80)
    if noise:  # 19 kB as PNG, the gradient has less than one
        pixels = np.random.default_rng(0).integers(0, 256, (80, 80, 3), np.uint8)
        image = Image.fromarray(pixels)
    for i in range(4):
        save(tmp_path / f"root/{i}.png", image)
    monkeypatch.setattr(decode, "CHUNK", 1)
    monkeypatch.setattr(decode.os, "cpu_count", lambda: 4)
    together, real, met = threading.Barrier(threads), decode.decode_file, []

    def watch(path: Path, size: int) -> decode.Pixels:
        together.wait(timeout=30)  # breaks where fewer threads are at work
        met.append(threading.get_ident())
        return real(path, size)

    monkeypatch.setattr(decode, "decode_file", watch)
    assert not load(tmp_path / "root", tmp_path / "cache").unreadable
    assert len(set(met)) == threads


def test_second_load_decodes_nothing_and_maps_memory(folder: Path, decoded: list[str]) -> None:
    cache = folder.parent / "cache"
    first = load(folder, cache).images["train"][0]
    assert len(decoded) == 5
    second = load(folder, cache).images["train"][0]
    assert len(decoded) == 5
    assert np.array_equal(first, second)
    assert first[:, 2, 7, 7].tolist() == [0, 1, 2, 3, 4]
    assert isinstance(first, np.memmap)
    assert isinstance(second, np.memmap)
    assert second.flags.writeable
    second[:] = 9  # copy on write: the file keeps its values
    assert load(folder, cache).images["train"][0].max() == 4


def test_any_change_of_the_files_or_the_size_decodes_again(
    folder: Path, decoded: list[str]
) -> None:
    cache = folder.parent / "cache"
    load(folder, cache)
    for change in (
        lambda: os.utime(folder / "0.png", (1, 1)),
        lambda: (folder / "1.png").rename(folder / "9.png"),
        lambda: save(folder / "2.png", Image.new("RGB", (8, 8), (200, 0, 0))),
        lambda: (folder / "3.png").unlink(),
    ):
        change()
        decoded.clear()
        last = load(folder, cache).images["train"][0]
        assert decoded
    assert last[:, 0, 0, 0].tolist() == [0, 200, 4, 1]
    decoded.clear()
    assert load(folder, cache, 4).images["train"][0].shape[-1] == 4
    assert decoded


def test_equal_looking_files_of_another_root_are_not_taken_for_these(tmp_path: Path) -> None:
    for name, value in (("one", 10), ("two", 20)):
        path = save(tmp_path / name / "x.bmp", Image.new("RGB", (8, 8), (value, 0, 0)))
        os.utime(path, (1, 1))
        assert load(tmp_path / name, tmp_path / "cache").images["train"][0][0, 0, 0, 0] == value


@pytest.mark.parametrize("damage", ["cut", "meta", "garbage", "header", "gone", "file"])
def test_a_damaged_cache_is_rebuilt(
    folder: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    cache = folder.parent / "cache"
    load(folder, cache)
    (entry,) = cache.iterdir()
    array = entry / "train-0.npy"
    if damage == "cut":
        array.write_bytes(array.read_bytes()[:-1])
    elif damage == "meta":
        (entry / "meta.json").unlink()
    elif damage == "garbage":
        (entry / "meta.json").write_text('{"arrays": ')
    elif damage == "header":
        array.write_bytes(bytes(array.stat().st_size))
    elif damage == "gone":
        array.unlink()
    elif damage == "file":
        entry.rename(cache / "away")
        entry.write_text("a file in its place")
    found = load(folder, cache).images["train"][0]
    assert found[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert (entry / "meta.json").is_file()
    assert "warning" not in capsys.readouterr().err
    assert not [p for p in cache.iterdir() if p.name.startswith(".") and p.is_dir()]


def _load_in_process(folder: Path, cache: Path, start: object, results: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    found = load(folder, cache).images["train"][0]
    results.put(found[:, 0, 0, 0].tolist())  # type: ignore[attr-defined]


def test_two_processes_at_once_both_end_well(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(2), context.Queue()
    cache = folder.parent / "cache"
    workers = [
        context.Process(target=_load_in_process, args=(folder, cache, start, results))
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=60) for _ in workers] == [[0, 1, 2, 3, 4]] * 2
    for worker in workers:
        worker.join(10)
        assert worker.exitcode == 0
    assert len(list(cache.iterdir())) == 1  # nothing left over


def test_another_process_may_finish_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = folder.parent / "cache"
    build = decode._decode_into

    def slow(*arguments: object) -> caches.Meta:
        monkeypatch.setattr(decode, "_decode_into", build)
        load(folder, cache)  # the other one, while this one still works
        return build(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(decode, "_decode_into", slow)
    assert len(load(folder, cache).images["train"][0]) == 5
    assert len(list(cache.iterdir())) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_a_full_disk_names_the_cache(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=rf"data\.cache={tmp_path}: the disk is full.*data\.cache"),
        caches.ArrayFile(Path("/dev/full"), tmp_path) as file,
    ):
        file.append(np.zeros((4, 3, 64, 64), np.uint8))


def test_a_disk_that_fills_up_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    cache = folder.parent / "cache"
    with pytest.raises(UserError, match=r"data\.cache=.*the disk is full"):
        load(folder, cache)
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written_is_named(folder: Path) -> None:
    cache = folder.parent / "file"
    cache.write_text("in the way")
    with pytest.raises(UserError, match=r"data\.cache=.*/file: cannot write there"):
        load(folder, cache)


def test_progress_is_one_line_where_there_is_no_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(folder, folder.parent / "cache")
    assert capsys.readouterr().err == f"decoding 5 images of {folder} ...\n"
    load(folder, folder.parent / "cache")
    assert capsys.readouterr().err == ""


def test_progress_is_a_bar_on_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load(folder, folder.parent / "cache")
    assert "5/5" in capsys.readouterr().err


def test_array_file_grows_and_reads_back(tmp_path: Path) -> None:
    blocks = [np.arange(n * 6, dtype=np.uint8).reshape(n, 2, 3) for n in (1, 11, 0, 200)]
    with caches.ArrayFile(tmp_path / "x.npy", tmp_path) as file:
        for block in blocks:
            file.append(block[:, :, ::-1])  # not contiguous
    assert np.array_equal(np.load(tmp_path / "x.npy"), np.concatenate(blocks)[:, :, ::-1])
