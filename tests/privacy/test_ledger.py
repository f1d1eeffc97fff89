"""The file that counts what all runs on the same images released."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter
from pathlib import Path

import pytest

from fedssl.privacy.accountant import Release
from fedssl.privacy.ledger import Entry, Ledger, add_releases
from fedssl.util.errors import UserError

ONE, OTHER = Release(2.8284271247461903, 359, 32), Release(0.1, 5, 5)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "state" / "privacy" / "a.json")


def test_what_is_written_is_read(ledger: Ledger) -> None:
    assert ledger.read() == {} and not ledger.path.exists()
    with ledger.change() as entries:
        entries["first"] = Entry(Counter({ONE: 3, OTHER: 1}), "runs/é")
    with ledger.change() as entries:
        entries["second"] = Entry(Counter({ONE: 4}))
    assert ledger.read()["first"] == Entry(Counter({OTHER: 1, ONE: 3}), "runs/é")
    assert add_releases(ledger.read()) == Counter({ONE: 7, OTHER: 1})
    assert add_releases(ledger.read(), without="first") == Counter({ONE: 4})


def test_without_a_change_or_after_an_error_nothing_is_written(ledger: Ledger) -> None:
    with ledger.change() as entries:
        entries["first"] = Entry(Counter({ONE: 3}))
    before = ledger.path.stat().st_ino, ledger.path.read_bytes()
    with ledger.change():
        pass
    with pytest.raises(RuntimeError), ledger.change() as entries:
        entries.clear()
        raise RuntimeError
    assert before == (ledger.path.stat().st_ino, ledger.path.read_bytes())


def test_every_damage_is_one_line_that_names_the_file(ledger: Ledger) -> None:
    with ledger.change() as entries:
        entries["first"] = Entry(Counter({ONE: 3, OTHER: 12}), "runs/a")
    good = ledger.path.read_bytes()
    damaged = [good[:cut] for cut in range(len(good) - 1)]  # the last is the end of the line
    damaged += [good.replace(b"3", b"4", 1), good.replace(b"359", b"358"), b"[]", b"{}", b"\x00"]
    damaged += [good[:k] + bytes([good[k] ^ 4]) + good[k + 1 :] for k in range(len(good) - 1)]
    for content in damaged:
        ledger.path.write_bytes(content)
        with pytest.raises(UserError) as error:
            ledger.read()
        assert str(ledger.path) in error.value.problem and error.value.fix
        assert "\n" not in str(error.value) and str(ledger.path) not in str(error.value.public)
    ledger.path.write_bytes(good)
    assert ledger.read()["first"].releases == Counter({ONE: 3, OTHER: 12})


def count_up(path: Path, run: str, times: int) -> None:
    for _ in range(times):
        with Ledger(path).change() as entries:
            entries.setdefault(run, Entry()).releases[ONE] += 1
            entries.setdefault("all", Entry()).releases[ONE] += 1


def test_processes_at_the_same_time_lose_no_count(ledger: Ledger) -> None:
    context = multiprocessing.get_context("fork")
    each = [context.Process(target=count_up, args=(ledger.path, f"run-{k}", 40)) for k in range(4)]
    for process in each:
        process.start()
    for process in each:
        process.join()
    entries = ledger.read()
    assert entries["all"].releases[ONE] == 160
    assert all(entries[f"run-{k}"].releases[ONE] == 40 for k in range(4))
    assert json.loads(ledger.path.read_text())["format"] == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(ledger: Ledger) -> None:
    ledger.path.parent.parent.mkdir()
    ledger.path.parent.parent.chmod(0o500)
    with pytest.raises(UserError) as error, ledger.change():
        pass
    assert error.value.key == "FEDSSL_STATE"


def test_a_place_that_is_no_folder_is_named(ledger: Ledger) -> None:
    ledger.path.parent.parent.write_text("")
    with pytest.raises(UserError) as error, ledger.change():
        pass
    assert error.value.key == "FEDSSL_STATE"
