"""``fedssl embed`` and ``fedssl search``: any images, good and bad, through a run's encoder."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from encoders import made, saved
from helpers import refused
from PIL import Image

from fedssl import load_encoder
from fedssl.cli import main
from fedssl.config import Data
from fedssl.data import decode
from fedssl.data.load import load_dataset
from fedssl.encoder import embed
from fedssl.encoder.search import search
from fedssl.util.files import write_text

SIZE = 16
FORMATS = ["out.parquet", "out.csv", "out.npz"]
NAMES = ["a.png", "b.jpg", "deep/c.png", "deep/er/d.bmp", "e.webp", "f.PNG", "grey.png"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return saved(made("tiny", "group", 3, SIZE), tmp_path_factory.mktemp("run"))


def noise(seed, width=40, height=30):
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.fixture
def photos(tmp_path):
    """Seven images at several depths, and two files that are none."""
    root = tmp_path / "photos"
    for i, name in enumerate(NAMES):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        noise(i).convert("L" if name == "grey.png" else "RGB").save(root / name)
    (root / "notes.txt").write_text("no image by its name")
    (root / "broken.png").write_text("no image")
    cut = (root / "b.jpg").read_bytes()
    (root / "cut.jpg").write_bytes(cut[: len(cut) // 2])
    return root


def embedded(run, images, to):
    """The paths and the embeddings that ``embed`` writes."""
    if to.suffix == ".parquet":
        pytest.importorskip("pyarrow")
    count = embed.embed(run, str(images), to, 256, "cpu")
    paths, rows = read(to)
    assert len(paths) == len(rows) == count
    return paths, rows


def read(to):
    if to.suffix == ".parquet":
        pq = pytest.importorskip("pyarrow.parquet")
        table = pq.read_table(to)
        assert table.schema.names == ["path", "embedding"]
        assert str(table.schema.field("embedding").type).startswith("fixed_size_list")
        return table["path"].to_pylist(), np.array(table["embedding"].to_pylist(), np.float32)
    if to.suffix == ".csv":
        head, *rows = csv.reader(to.open(encoding="utf-8", newline=""))
        assert head == ["path", *(f"e{i}" for i in range(96))]
        return [r[0] for r in rows], np.array([list(map(float, r[1:])) for r in rows], np.float32)
    arrays = np.load(to)
    return arrays["path"].tolist(), arrays["embedding"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_becomes_a_table_and_bad_files_are_named(name, run, photos, tmp_path, capsys):
    to = tmp_path / name
    if to.suffix == ".parquet":
        pytest.importorskip("pyarrow")
    to.touch(mode=0o644)
    words = ["embed", str(run), str(photos), "--to", str(to), "--batch", "3", "--device", "cpu"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.out == f"7 images: {to}\n"
    assert f"fedssl: {photos / 'broken.png'}: skipped (not an image that Pillow knows)" in said.err
    assert re.search(rf"fedssl: {photos / 'cut.jpg'}: skipped \(.*truncated", said.err)
    assert said.err.endswith("fedssl: 2 of 9 files skipped\n")
    paths, rows = read(to)
    assert paths == [str(photos / name) for name in NAMES]
    expected = load_encoder(run).embed(paths)
    torch.testing.assert_close(torch.from_numpy(rows), expected, rtol=1e-5, atol=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == [to.name, "photos"]
    assert to.stat().st_mode & 0o777 == 0o600  # only the owner reads embeddings
    paths, rows = embedded(run, photos, to)  # in one batch, to the bit
    assert np.array_equal(rows, load_encoder(run).embed(paths).numpy())


def test_a_pattern_and_a_single_file(run, photos, tmp_path, capsys):
    noise(9).save(photos / "[x]*.png")  # a name that is also a pattern
    odd = (photos / "a.png").rename(photos / "name-without-end")
    for images, names in (
        ("**/*.png", ["[x]*.png", "c.png", "grey.png"]),
        ("deep/*/*", ["d.bmp"]),
        ("[x]*.png", ["[x]*.png"]),
        (odd.name, [odd.name]),
    ):
        paths, _ = embedded(run, photos / images, tmp_path / "out.npz")
        assert [Path(path).name for path in paths] == names
    to = tmp_path / "one.csv"
    assert main(["embed", str(run), str(odd), "--to", str(to)]) == 0
    assert capsys.readouterr().out == f"1 image: {to}\n"


def test_without_images_there_is_no_file(run, tmp_path):
    (tmp_path / "1.png").write_text("no image")
    for images in (tmp_path, tmp_path / "*.gif", tmp_path / "nowhere", ""):
        with refused("IMAGES"):
            embed.embed(run, str(images), tmp_path / "out.npz", 8, "cpu")
        assert [p.name for p in tmp_path.iterdir()] == ["1.png"]


def test_a_bad_output_is_refused_before_any_work(run, photos, tmp_path, monkeypatch):
    for name in ("load_encoder", "find_files"):
        monkeypatch.setattr(embed, name, lambda *_: pytest.fail("work"))
    (tmp_path / "folder.csv").mkdir()
    for to in (photos / "a.png/out.csv", tmp_path / "new/out.csv", tmp_path / "folder.csv",
               Path("out.txt")):  # fmt: skip
        with refused("--to", to):
            embed.embed(run, str(photos), to, 8, "cpu")
    for html in (photos / "a.png/x.html", photos, photos / "a.png"):
        with refused("--html", html):
            search(run, photos / "a.png", str(photos), 1, html, 8, "cpu")
    monkeypatch.setattr("os.access", lambda *_: False)
    (tmp_path / "old.csv").write_text("old")
    with refused("--to", says="Permission denied"):
        embed.embed(run, str(photos), tmp_path / "old.csv", 8, "cpu")
    assert (tmp_path / "old.csv").read_text() == "old"


def test_a_missing_extra_is_named(run, photos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with refused("--to", says="pip install 'fedssl[frames]'"):
        embed.embed(run, str(photos), tmp_path / "out.parquet", 256, "cpu")


@pytest.mark.parametrize("name", FORMATS)
def test_a_stop_in_the_middle_leaves_the_old_file(name, run, photos, tmp_path, monkeypatch):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    to = tmp_path / name
    to.write_text("old")
    real, calls = embed.ImageEncoder.embed_bytes, []

    def stopped(self, images):
        calls.append(len(images))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, images)

    monkeypatch.setattr(embed.ImageEncoder, "embed_bytes", stopped)
    assert main(["embed", str(run), str(photos), "--to", str(to), "--batch", "2"]) == 130
    assert to.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, "photos"]


def test_a_full_disk_is_said(run, photos, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(embed.FORMATS, ".csv", full)
    with refused("--to", says="No space left"):
        embed.embed(run, str(photos), tmp_path / "out.csv", 256, "cpu")
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("options", [("--batch", "0"), ("--device", "tpu9")])
def test_a_bad_option_is_one_line(options, run, photos, capsys):
    to = photos / "out.csv"
    assert main(["embed", str(run), str(photos), "--to", str(to), *options]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not to.exists()


# Odd images ----------------------------------------------------------------------------------


def halves(left, right):
    image = Image.new("RGB", (40, 20), left)
    image.paste(right, (20, 0, 40, 20))
    return image


RED_BLUE = halves((250, 0, 0), (0, 0, 250))


def with_alpha(image):
    image.putalpha(Image.new("L", image.size, 7))
    return image


def palette():
    image = RED_BLUE.quantize(4)
    image.info["transparency"] = bytes([0, 255, 128, 3])
    return image


GREY = RED_BLUE.convert("L")
FRAMES = {"save_all": True, "append_images": [halves((0, 250, 0), (0, 250, 0))]}
TURNED = Image.Exif()
TURNED[0x0112] = 6  # turn a quarter to the right
ODD = {
    "grey-alpha.png": (lambda: with_alpha(GREY.copy()), {}, GREY),
    "alpha.png": (lambda: with_alpha(RED_BLUE.copy()), {}, RED_BLUE),
    "palette.png": (palette, {}, RED_BLUE),
    "cmyk.jpg": (lambda: RED_BLUE.convert("CMYK"), {"quality": 100}, RED_BLUE),
    "animated.webp": (lambda: RED_BLUE, {**FRAMES, "lossless": True}, RED_BLUE),
    "animated.png": (lambda: RED_BLUE, FRAMES, RED_BLUE),
    "turned.png": (lambda: RED_BLUE, {"exif": TURNED}, RED_BLUE.transpose(Image.ROTATE_270)),
}


def test_odd_images_are_read_as_in_training_and_as_people_see_them(run, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    for name, (image, options, _) in ODD.items():
        image().save(root / name, **options)
    paths, rows = embedded(run, root, tmp_path / "out.npz")
    assert len(paths) == len(ODD)
    data = Data("folder", str(root), SIZE, cache=str(tmp_path / "cache"))
    trained = load_dataset(data).train.images[0]
    assert np.array_equal(rows, load_encoder(run).embed(trained).numpy())
    for path, pixels in zip(paths, trained, strict=True):
        seen = decode.to_pixels(ODD[Path(path).name][2], SIZE).astype(int)
        assert np.abs(pixels.numpy() - seen).max() <= 4, path


def test_an_image_of_too_many_pixels_is_skipped_by_name(run, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5000)
    huge = photos / "huge.png"
    noise(0, 200, 100).save(huge)
    assert len(embedded(run, photos, tmp_path / "out.npz")[0]) == 7
    assert f"{huge}: skipped (more than 10,000 pixels" in capsys.readouterr().err
    html = tmp_path / "s.html"
    assert main(["search", str(run), str(huge), str(photos), "--html", str(html)]) == 2
    assert f"{huge}: more than 10,000 pixels" in capsys.readouterr().err


def test_a_huge_jpeg_is_read_at_a_fraction_of_its_size(tmp_path, monkeypatch):
    image = noise(0, 10, 10).resize((640, 640))
    image.save(tmp_path / "a.jpg")
    image.save(tmp_path / "b.jpg", progressive=True)
    image.save(tmp_path / "c.png")
    expected = decode.decode_file(tmp_path / "a.jpg", SIZE)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100_000)
    sizes = []
    real = decode.to_pixels

    def watched(image, *rest):
        sizes.append(image.size)
        return real(image, *rest)

    monkeypatch.setattr(decode, "to_pixels", watched)
    found = list(
        decode.decode_files(sorted(tmp_path.iterdir()), lambda p: decode.decode_file(p, SIZE))
    )
    assert np.array_equal(found[0], expected) and sizes == [(80, 80)]
    assert all("more than 200,000 pixels" in str(reason) for reason in found[1:])


@pytest.mark.parametrize("name", FORMATS)
def test_names_that_are_no_text_are_written_all_the_same(name, run, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    noise(0).save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(root / "caf\udce9.png")
    assert embedded(run, root, tmp_path / name)[0] == [str(root / "caf\\xe9.png")]


# Search --------------------------------------------------------------------------------------


def test_the_nearest_images_as_a_list_and_as_a_page(run, photos, tmp_path, capsys):
    query = photos / "<b>query&.png"
    noise(0).save(query)  # the same pixels as a.png
    (photos / "again.png").symlink_to(query)
    page = tmp_path / "page.html"
    words = ["--top", "4", "--html", str(page), "--batch", "2", "--device", "cpu"]
    assert main(["search", str(run), str(query), str(photos), *words]) == 0
    *lines, blank, last = capsys.readouterr().out.splitlines()
    assert blank == "" and last == str(page)
    found = [(line.split()[1], float(line.split()[0])) for line in lines]
    assert found[0] == (str(photos / "a.png"), 1.0)

    whole = load_encoder(run)
    rows = F.normalize(whole.embed([photos / name for name in NAMES]))
    near = (rows @ F.normalize(whole.embed([query]))[0]).topk(4)
    assert [path for path, _ in found] == [str(photos / NAMES[i]) for i in near.indices]
    assert [value for _, value in found] == pytest.approx(near.values.tolist(), abs=6e-4)

    text = page.read_text()
    assert "<b>query" not in text and "&lt;b&gt;query&amp;.png" in text
    assert text.count("data:image/jpeg;base64,") == 5 and text.count("<li>") == 4
    sources = re.findall(r'(?:src|href|url)\s*[=(]\s*"?([^">)]{5})', text)
    assert set(sources) == {"data:"} and "http" not in text
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert page.stat().st_mode & 0o777 == 0o600  # it shows images


def test_more_neighbours_than_images_and_none_at_all(run, tmp_path):
    for i in range(2):
        noise(i).save(tmp_path / f"{i}.png")
    query = tmp_path / "0.png"
    assert len(search(run, query, str(tmp_path), 10, None, 256, "cpu")) == 1
    for images, top, key in ((query, 10, "IMAGES"), (tmp_path, 0, "--top")):
        with refused(key):
            search(run, query, str(images), top, tmp_path / "s.html", 256, "cpu")
    assert not (tmp_path / "s.html").exists()


def test_who_reads_the_old_file_keeps_it_whole(tmp_path):
    """The new one takes its name; nothing is written into it."""
    path, held = tmp_path / "out.csv", tmp_path / "held"
    path.write_text("old")
    held.hardlink_to(path)
    write_text(path, "new")
    assert path.read_text() == "new" and held.read_text() == "old"
