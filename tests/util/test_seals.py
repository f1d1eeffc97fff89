"""Files that know their own digest, and the one writer of all files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import flip_bit, refused
from safetensors import safe_open

from fedssl.util import files
from fedssl.util.seals import DamagedError, check_tensors, check_text, seal_text


def notices(path: Path, check: Any) -> bool:
    """Whether a file is found to be damaged, or to have no seal."""
    try:
        return not check(path)
    except DamagedError:
        return True


def test_every_cut_and_every_bit_of_a_text_is_noticed(tmp_path: Path) -> None:
    data = seal_text("rounds: 3\nname: größer\n").encode()
    assert check_text(data) and not check_text(b"") and not check_text(b"rounds: 3\n")
    path = tmp_path / "a.yaml"
    for end in range(len(data)):
        path.write_bytes(data[:end])
        assert notices(path, lambda path: check_text(path.read_bytes())), end
    for bit in range(8 * len(data)):
        path.write_bytes(flip_bit(data, bit))
        assert notices(path, lambda path: check_text(path.read_bytes())), bit
    path.write_bytes(data + b"more: 1\n")
    assert notices(path, lambda path: check_text(path.read_bytes()))


def test_every_cut_and_every_byte_of_tensors_is_noticed(tmp_path: Path) -> None:
    """In the header, its length, the metadata, the numbers and the seal."""
    path = tmp_path / "a.safetensors"
    quoted = '{"sha256":"' + "1" * 64 + '"}'  # what looks like a seal and is a value
    tensors = {"a": torch.arange(5.0), "sha256": torch.zeros(2, 2)}
    seal = files.save_tensors(path, tensors, {"note": quoted})
    assert len(seal) == 64 and check_tensors(path) == seal
    assert files.load_tensors(path).keys() == tensors.keys()
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"note": quoted, "sha256": seal}
    data = path.read_bytes()
    for damaged in (
        *(data[:end] for end in range(len(data))),
        *(flip_bit(data, 8 * byte + byte % 8) for byte in range(len(data))),
        data + b"\0",
    ):
        path.write_bytes(damaged)
        assert notices(path, check_tensors)
    with refused(None, says=f"{path} is damaged"):
        files.load_tensors(path)


def test_a_file_is_on_the_disk_before_it_is_in_place_and_then_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_sync(number: int) -> None:
        done.append(f"sync {Path(f'/proc/self/fd/{number}').readlink().name}")
        fsync(number)

    def record_replace(source: Path, target: Path) -> None:
        done.append(f"replace {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    files.make_folders(tmp_path / "a" / "b")
    assert done == [f"sync {tmp_path.name}", "sync a"]
    place = tmp_path / "a" / "b" / "x"
    for write in (
        lambda: files.write_text(place, "text"),
        lambda: files.save_tensors(place, {"a": torch.zeros(1)}, {}),
    ):
        done.clear()
        write()
        assert done == ["sync .x.new", "replace x", "sync b"]
    done.clear()
    files.append_line(place.with_name("y"), "one")
    files.append_line(place.with_name("y"), "two")
    assert done == ["sync y", "sync b", "sync y"]
    assert place.with_name("y").read_text() == "one\ntwo\n"


@pytest.mark.parametrize("has_links", [True, False])
def test_an_exclusive_file_replaces_none(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    files.write_text(tmp_path / "x", "first", exclusive=True)
    with pytest.raises(FileExistsError):
        files.write_text(tmp_path / "x", "second", exclusive=True)
    assert (tmp_path / "x").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_disk_that_cannot_wait_is_no_error_and_a_broken_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = errno.EINVAL

    def cannot(number: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", cannot)
    files.write_text(tmp_path / "x", "first")
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        files.write_text(tmp_path / "x", "second")
    assert (tmp_path / "x").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
