"""The cache of decoded images: used again, rebuilt when damaged, safe on a full disk."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from helpers import refused
from image_folders import decode_rows as load
from image_folders import save
from PIL import Image

from fedssl.data import cache as caches
from fedssl.data import decode


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
        refused("data.cache", tmp_path, "No space left"),
        caches.replace_folder(tmp_path / "entry", tmp_path),
        caches.grow_array(Path("/dev/full")) as append,
    ):
        append(np.zeros((4, 3, 64, 64), np.uint8))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    cache = folder.parent / "cache"
    with refused("data.cache", cache, "No space left"):
        load(folder, cache)
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written_is_named(folder: Path) -> None:
    cache = folder.parent / "file"
    cache.write_text("in the way")
    with refused("data.cache", cache):
        load(folder, cache)


def test_array_file_grows_and_reads_back(tmp_path: Path) -> None:
    blocks = [np.arange(n * 6, dtype=np.uint8).reshape(n, 2, 3) for n in (1, 11, 0, 200)]
    with caches.grow_array(tmp_path / "x.npy") as append:
        for block in blocks:
            append(block[:, :, ::-1])  # not contiguous
    assert np.array_equal(np.load(tmp_path / "x.npy"), np.concatenate(blocks)[:, :, ::-1])
