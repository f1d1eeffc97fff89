"""What a client keeps counts only if the round that it came out of counts."""

from __future__ import annotations

from pathlib import Path

import torch

from fedssl.engines.store import History, Store

FIRST = History(("a",), (0,), 0)


def kept(store: Store, round: int, history: History) -> int | None:
    state = store.load(7, round, history)
    return int(state["it"]) if state else None  # type: ignore[arg-type]


def put(store: Store, round: int, history: History, value: int) -> None:
    store.save(7, {"it": torch.tensor(value)}, round, history)


def test_the_newest_state_counts_within_a_round_too(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert kept(store, 0, FIRST) is None
    put(store, 0, FIRST, 10)
    assert kept(store, 0, FIRST) == 10  # the second exchange of the round
    put(store, 0, FIRST, 11)
    put(store, 3, FIRST, 13)
    assert kept(store, 3, FIRST) == 13
    assert kept(store, 9, FIRST) == 13


def test_rounds_that_a_server_lost_are_undone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for round in range(6):
        put(store, round, FIRST, round)
    again = History(("a", "b"), (0, 4), 4)  # the checkpoint held 4 rounds: 0 to 3
    assert kept(store, 4, again) == 3
    put(store, 4, again, 40)
    assert kept(store, 5, again) == 40  # not the 5 of the first attempt


def test_a_client_that_sat_out_a_whole_attempt_forgets_what_does_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for round in range(7):
        put(store, round, FIRST, round)
    # A second attempt did rounds 5 to 7 without this client; a third goes on from 8.
    third = History(("a", "b", "c"), (0, 5, 8), 8)
    assert kept(store, 8, third) == 4


def test_states_before_the_last_committed_one_go(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for round in range(5):
        put(store, round, History(("a",), (0,), min(round, 3)), round)
    left = sorted(int(path.stem.split("-")[0]) for path in (tmp_path / "7").iterdir())
    assert left == [2, 3, 4]  # 3 rounds are committed: the state after round 2 must stay


def test_nothing_is_written_for_a_client_without_a_state(tmp_path: Path) -> None:
    Store(tmp_path).save(7, {}, 0, FIRST)
    assert not list(tmp_path.iterdir())
