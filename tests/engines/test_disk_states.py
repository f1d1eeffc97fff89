"""A client's new state counts only if its round counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from far import far_session
from helpers import HEADS, flip_bit, refused
from rounds import epochs, go

from fedssl.engines.remote.codec import MalformedError
from fedssl.engines.remote.disk_states import DiskStates, History
from fedssl.engines.remote.engine import STATES
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


def filled(folder: Path, rounds: int) -> DiskStates:
    """A store in which each round of the first attempt left its number."""
    store = DiskStates(folder)
    for round in range(rounds):
        put(store, round, FIRST, round)
    return store


def test_the_newest_state_counts_within_a_round_too(tmp_path: Path) -> None:
    store = DiskStates(tmp_path)
    store.save(7, {}, 0, FIRST)  # a client without a state
    assert kept(store, 0, FIRST) is None and not list(tmp_path.iterdir())
    put(store, 0, FIRST, 10)
    assert kept(store, 0, FIRST) == 10  # the second exchange of the round
    put(store, 0, FIRST, 11)
    put(store, 3, FIRST, 13)
    assert kept(store, 3, FIRST) == kept(store, 9, FIRST) == 13


def test_rounds_that_a_server_lost_are_undone(tmp_path: Path) -> None:
    store, again = filled(tmp_path, 6), History(("a", "b"), (0, 4), 4)
    assert kept(store, 4, again) == 3  # the checkpoint held 4 rounds: 0 to 3
    put(store, 4, again, 40)
    assert kept(store, 5, again) == 40  # not the 5 of the first attempt


def test_a_client_that_sat_out_a_whole_attempt_forgets_what_does_not_count(tmp_path: Path) -> None:
    # A second attempt did rounds 5 to 7 without this client; a third goes on from 8.
    third = History(("a", "b", "c"), (0, 5, 8), 8)
    assert kept(filled(tmp_path, 7), 8, third) == 4


def test_states_before_the_last_committed_one_go(tmp_path: Path) -> None:
    store = DiskStates(tmp_path)
    for round in range(5):
        put(store, round, replace(FIRST, committed=min(round, 3)), round)
    assert names(store) == ["2-a", "3-a", "4-a"]  # the state after round 2 must stay


def test_only_writing_deletes_states_of_rounds_that_do_not_count(tmp_path: Path) -> None:
    """Whoever evaluates a run that is going on must not take its clients' states."""
    store, again = filled(tmp_path, 5), History(("a", "b"), (0, 2), 2)
    assert kept(store, 2, again) == 1 and len(names(store)) == 5
    put(store, 2, again, 20)
    assert names(store) == ["1-a", "2-b"]


def test_a_message_that_comes_late_is_refused_and_spoils_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path, 3)
    with pytest.raises(MalformedError, match="round 2 was done already"):
        store.load(7, 1, FIRST)
    assert kept(store, 3, FIRST) == 2


def test_an_attempt_counts_from_its_first_round_to_the_next_attempt() -> None:
    history = History(("a", "b"), (0, 4), 4)
    counts = [(round, name) for round in range(6) for name in "ab" if history.counts(round, name)]
    assert counts == [(0, "a"), (1, "a"), (2, "a"), (3, "a"), (4, "b"), (5, "b")]


def test_a_state_that_is_not_finite_is_not_kept(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    with pytest.raises(MalformedError, match="not finite"):
        store.save(7, {"it": torch.tensor(float("nan"))}, 1, FIRST)
    assert kept(store, 1, FIRST) == 0


def test_a_damaged_state_is_refused_and_its_path_stays_at_the_site(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    (path,) = (tmp_path / "7").iterdir()
    path.write_bytes(flip_bit(path.read_bytes(), 8 * path.stat().st_size - 1))
    with pytest.raises(UserError) as caught:
        kept(store, 0, FIRST)
    assert str(caught.value).startswith(f"{path} is damaged")
    assert str(tmp_path) not in describe_fault(caught.value)


def test_a_simulation_with_a_damaged_state_does_not_go_on(tmp_path: Path) -> None:
    config = epochs("algorithm.name=fedema", *HEADS["byol"], "objective.name=byol")
    session, _ = far_session(config, tmp_path)
    go(session, 1)
    notes = session.engine.notes()
    path = next((tmp_path / STATES).glob("*/*.safetensors"))
    path.write_bytes(flip_bit(path.read_bytes(), 8 * path.stat().st_size - 1))
    again, _ = far_session(config, tmp_path)
    with refused(None, says=f"{path} is damaged"):
        again.engine.resume(notes, 1)


def test_a_full_disk_is_no_reason_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save", full)
    with pytest.raises(UserError, match=r"No space left on device.*Make room") as caught:
        put(DiskStates(tmp_path), 0, FIRST, 1)
    simulated = describe_fault(caught.value, is_real=False)  # hides nothing
    assert str(tmp_path) in simulated and str(tmp_path) not in describe_fault(caught.value)
