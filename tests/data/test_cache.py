"""The cache of decoded images: used again, rebuilt when damaged, safe on a full disk."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import flip_bit, refused
from image_folders import decode_train as load
from image_folders import save
from PIL import Image

from fedssl.data import cache as caches
from fedssl.data import decode


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded from here on."""
    names: list[str] = []
    real = decode.decode_file

    def watch(path: Path, *rest: int, **keys: bool) -> decode.Pixels:
        names.append(path.name)
        return real(path, *rest, **keys)

    monkeypatch.setattr(decode, "decode_file", watch)
    return names


def test_second_load_decodes_nothing_and_maps_memory(folder: Path, decoded: list[str]) -> None:
    first = load(folder)[0]
    assert len(decoded) == 5
    second = load(folder)[0]
    assert len(decoded) == 5
    assert np.array_equal(first, second)
    assert first[:, 2, 7, 7].tolist() == [0, 1, 2, 3, 4]
    assert isinstance(first, np.memmap) and isinstance(second, np.memmap)
    assert second.flags.writeable
    second[:] = 9  # copy on write: the file keeps its values
    assert load(folder)[0].max() == 4


def test_an_array_larger_than_memory_is_mapped_to_be_read(tmp_path: Path) -> None:
    def build(folder: Path) -> dict[str, str]:
        with (folder / "large.npy").open("wb") as file:  # a sparse file
            header = {"descr": "|u1", "fortran_order": False, "shape": (1 << 42,)}
            np.lib.format.write_array_header_1_0(file, header)
            try:
                file.truncate(file.tell() + (1 << 42))
            except OSError:
                pytest.skip("this disk has no file of 4 TB")
        return {}

    found = caches.load_or_build(tmp_path, "x", build)
    assert found.arrays["large"].shape == (1 << 42,) and not found.arrays["large"][-1]
    assert found.folder == tmp_path / "x"


def test_any_change_of_the_files_or_the_size_decodes_again(
    folder: Path, decoded: list[str]
) -> None:
    load(folder)
    for change in (
        lambda: os.utime(folder / "0.png", (1, 1)),
        lambda: (folder / "1.png").rename(folder / "9.png"),
        lambda: save(folder / "2.png", Image.new("RGB", (8, 8), (200, 0, 0))),
        lambda: (folder / "3.png").unlink(),
    ):
        change()
        decoded.clear()
        last = load(folder)[0]
        assert decoded
    assert last[:, 0, 0, 0].tolist() == [0, 200, 4, 1]
    decoded.clear()
    assert load(folder, 4)[0].shape[-1] == 4
    assert decoded


def test_equal_looking_files_of_another_root_are_not_taken_for_these(tmp_path: Path) -> None:
    for name, value in (("one", 10), ("two", 20)):
        path = save(tmp_path / name / "x.bmp", Image.new("RGB", (8, 8), (value, 0, 0)))
        os.utime(path, (1, 1))
        assert load(tmp_path / name)[0][0, 0, 0, 0] == value


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "cut": lambda entry, array: array.write_bytes(array.read_bytes()[:-1]),
    "no meta": lambda entry, array: (entry / "meta.json").unlink(),
    "garbage": lambda entry, array: (entry / "meta.json").write_text('{"arrays": '),
    "header": lambda entry, array: array.write_bytes(bytes(array.stat().st_size)),
    "no array": lambda entry, array: array.unlink(),
    "file": lambda entry, array: (entry.rename(entry.parent / "away"), entry.write_text("a file")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_rebuilt(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    load(folder)
    (entry,) = cache.iterdir()
    DAMAGE[damage](entry, entry / "train-0.npy")
    found = load(folder)[0]
    assert found[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert (entry / "meta.json").is_file()
    assert "warning" not in capsys.readouterr().err
    assert not [p for p in cache.iterdir() if p.name.startswith(".") and p.is_dir()]


def test_flipped_bits_are_named_and_decoded_again(
    folder: Path, cache: Path, decoded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    first = np.array(load(folder)[0])
    (entry,) = cache.iterdir()
    chance = random.Random(0)
    for name in ("train-0.npy", "meta.json"):
        path = entry / name
        whole = path.read_bytes()
        for place in chance.sample(range(8 * len(whole)), 60):
            path.write_bytes(flip_bit(whole, place))
            decoded.clear()
            assert np.array_equal(load(folder)[0], first)
            said = capsys.readouterr().err
            # A flipped bit may also leave no array, or no JSON, and then there is none to name.
            assert decoded and ("is damaged" in said or name == "meta.json" or place < 8 * 128)
            assert path.read_bytes() == whole
    path = entry / "train-0.npy"
    path.write_bytes(flip_bit(path.read_bytes(), 8 * 200))
    load(folder)
    assert f"{path} is damaged" in capsys.readouterr().err


def test_arrays_are_read_once_to_check_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder)
    load(folder)  # the folder is in another place than where it was written
    summed: list[int] = []
    real = caches.zlib.crc32
    monkeypatch.setattr(caches.zlib, "crc32", lambda data: summed.append(len(data)) or real(data))
    load(folder)
    assert not summed


def test_folders_that_killed_processes_left_are_removed(folder: Path, cache: Path) -> None:
    load(folder)
    (entry,) = cache.iterdir()
    for name in (f".{entry.name}.123-0123abcd", f".{entry.name}.123-0123abcd.old"):
        (cache / name).mkdir()
        (cache / name / "train-0.npy").touch()
    (cache / ".mine").mkdir()
    with caches.replace_folder(cache / "other", cache) as new:
        load(folder)
        assert new.exists()  # it is at work
    assert {path.name for path in cache.iterdir()} == {entry.name, "other", ".mine"}


@pytest.mark.parametrize(("owner", "name"), [(decode, "_decode_into"), (Path, "rename")])
def test_another_process_may_finish_first(
    owner: Any, name: str, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this one decodes, or just before it puts its folder in place."""
    real = getattr(owner, name)

    def late(first: Path, *rest: object) -> Any:
        if first.name.startswith("."):  # the new folder
            monkeypatch.setattr(owner, name, real)
            assert len(load(folder)[0]) == 5
        return real(first, *rest)

    monkeypatch.setattr(owner, name, late)
    assert len(load(folder)[0]) == 5
    assert len(list(cache.iterdir())) == 1


def test_errors_of_the_disk_name_the_cache_and_leave_nothing_behind(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused("data.cache", cache, "No space left"):
        load(folder)
    assert not list(cache.iterdir())
    cache.rmdir()
    cache.write_text("in the way")
    with refused("data.cache", cache):
        load(folder)


def test_an_error_about_an_image_names_the_image(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle", str(folder / "a.png"))

    monkeypatch.setattr(decode, "_decode_into", stale)
    with refused(None, says=f"{folder / 'a.png'} cannot be read (Stale file handle). Replace"):
        load(folder)
    assert not list(cache.iterdir())


def test_array_file_grows_and_reads_back(tmp_path: Path) -> None:
    blocks = [np.arange(n * 6, dtype=np.uint8).reshape(n, 2, 3) for n in (1, 11, 0, 200)]
    with caches.grow_array(tmp_path / "x.npy") as append:
        for block in blocks:
            append(block[:, :, ::-1])  # not contiguous
    assert np.array_equal(np.load(tmp_path / "x.npy"), np.concatenate(blocks)[:, :, ::-1])
