"""What a client keeps counts only if the round that it came out of counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from fedssl.engines.remote.codec import MalformedError
from fedssl.engines.remote.disk_states import DiskStates, History
from fedssl.engines.remote.site import describe_fault
from fedssl.util.errors import UserError

FIRST = History(("a",), (0,), 0)


def names(store: DiskStates) -> list[str]:
    return sorted(path.stem for path in (store.folder / "7").iterdir())


def kept(store: DiskStates, round: int, history: History) -> int | None:
    state = store.load(7, round, history)
    return int(state["it"]) if state else None


def put(store: DiskStates, round: int, history: History, value: int) -> None:
    store.save(7, {"it": torch.tensor(value)}, round, history)


def test_the_newest_state_counts_within_a_round_too(tmp_path: Path) -> None:
    store = DiskStates(tmp_path)
    assert kept(store, 0, FIRST) is None
    put(store, 0, FIRST, 10)
    assert kept(store, 0, FIRST) == 10  # the second exchange of the round
    put(store, 0, FIRST, 11)
    put(store, 3, FIRST, 13)
    assert kept(store, 3, FIRST) == 13
    assert kept(store, 9, FIRST) == 13


def test_rounds_that_a_server_lost_are_undone(tmp_path: Path) -> None:
    store = DiskStates(tmp_path)
    for round in range(6):
        put(store, round, FIRST, round)
    again = History(("a", "b"), (0, 4), 4)  # the checkpoint held 4 rounds: 0 to 3
    assert kept(store, 4, again) == 3
    put(store, 4, again, 40)
    assert kept(store, 5, again) == 40  # not the 5 of the first attempt


def test_a_client_that_sat_out_a_whole_attempt_forgets_what_does_not_count(tmp_path: Path) -> None:
    store = DiskStates(tmp_path)
    for round in range(7):
        put(store, round, FIRST, round)
    # A second attempt did rounds 5 to 7 without this client; a third goes on from 8.
    third = History(("a", "b", "c"), (0, 5, 8), 8)
    assert kept(store, 8, third) == 4


def test_states_before_the_last_committed_one_go(tmp_path: Path) -> None:
    store = DiskStates(tmp_path)
    for round in range(5):
        put(store, round, History(("a",), (0,), min(round, 3)), round)
    left = sorted(int(path.stem.split("-")[0]) for path in (tmp_path / "7").iterdir())
    assert left == [2, 3, 4]  # 3 rounds are committed: the state after round 2 must stay


def test_nothing_is_written_for_a_client_without_a_state(tmp_path: Path) -> None:
    DiskStates(tmp_path).save(7, {}, 0, FIRST)
    assert not list(tmp_path.iterdir())


def test_reading_changes_nothing(tmp_path: Path) -> None:
    """Whoever evaluates a run that is going on must not take its clients' states."""
    store = DiskStates(tmp_path)
    for round in range(5):
        put(store, round, FIRST, round)
    before = names(store)
    assert kept(store, 2, History(("a", "other"), (0, 2), 2)) == 1
    assert names(store) == before


def test_states_of_rounds_that_do_not_count_go_when_a_new_one_is_written(tmp_path: Path) -> None:
    store = DiskStates(tmp_path)
    for round in range(5):
        put(store, round, FIRST, round)
    put(store, 2, History(("a", "b"), (0, 2), 2), 20)
    assert names(store) == ["1-a", "2-b"]


def test_a_message_that_comes_late_is_refused_and_spoils_nothing(tmp_path: Path) -> None:
    store = DiskStates(tmp_path)
    for round in range(3):
        put(store, round, FIRST, round)
    with pytest.raises(MalformedError, match="round 2 was done already"):
        store.load(7, 1, FIRST)
    assert kept(store, 3, FIRST) == 2


def test_an_attempt_counts_from_its_first_round(tmp_path: Path) -> None:
    history = History(("a", "b"), (0, 4), 4)
    counts = [(round, name) for round in range(6) for name in "ab" if history.counts(round, name)]
    assert counts == [(0, "a"), (1, "a"), (2, "a"), (3, "a"), (4, "b"), (5, "b")]


def test_a_state_that_is_not_finite_is_not_kept(tmp_path: Path) -> None:
    store = DiskStates(tmp_path)
    put(store, 0, FIRST, 1)
    with pytest.raises(MalformedError, match="not finite"):
        store.save(7, {"it": torch.tensor(float("nan"))}, 1, FIRST)
    assert kept(store, 1, FIRST) == 1


def test_a_full_disk_is_no_reason_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(UserError, match=r"No space left on device.*Make room") as caught:
        put(DiskStates(tmp_path), 0, FIRST, 1)
    assert str(tmp_path) in describe_fault(
        caught.value, is_real=False
    )  # a simulation hides nothing
    assert str(tmp_path) not in describe_fault(caught.value)
