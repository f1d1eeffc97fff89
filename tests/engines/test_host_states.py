"""Client states between rounds, on the CPU."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from helpers import engine_of, groups_of, made_split, siamese, step

from fedssl.engines import host_states as states_module
from fedssl.engines.host_states import HostStates
from fedssl.util.trees import flatten


def states() -> HostStates:
    made = HostStates(torch.device("cpu"))
    made[3] = {"a": torch.ones(2), "deep": {"b": torch.zeros(3)}}
    made[1] = {"a": torch.full((2,), 5.0)}
    return made


def test_a_missing_state_is_an_empty_dictionary() -> None:
    made = states()
    made[7] = {}
    made.prefetch(7)
    assert made[7] == made.on_host(7) == made.numbers(7) == {} and sorted(made) == [1, 3]


def test_states_are_read_back_and_changing_the_dictionary_stores_nothing() -> None:
    made = states()
    read: Any = made[3]
    read["a"], read["deep"]["b"], read["c"] = torch.zeros(1), torch.ones(1), torch.ones(1)
    again: Any = made[3]
    assert set(again) == {"a", "deep"} and torch.equal(again["a"], torch.ones(2))
    assert torch.equal(again["deep"]["b"], torch.zeros(3))
    assert torch.equal(made.on_host(3)["deep/b"], torch.zeros(3))


def test_what_was_written_is_known_until_the_checkpoint() -> None:
    made = states()
    assert made.changed == {1, 3} and made.versions == {}
    made.changed.clear()
    made[1] = {"a": torch.zeros(2)}
    made[3] = {}  # a client with nothing to keep
    assert made.changed == {1}
    made.restore(9, {"x/y": torch.ones(1)}, version=4)
    assert made.versions == {9: 4} and made.changed == {1}
    assert torch.equal(made[9]["x"]["y"], torch.ones(1))  # type: ignore[index, arg-type]


@pytest.mark.parametrize(
    ("algorithm", "objective"), [("fedema", "byol"), ("ditto", "moco"), ("standalone", "byol")]
)
def test_no_client_changes_the_state_of_another(algorithm: str, objective: str) -> None:
    """A client that is not asked keeps every bit, although all work in the same tensors."""
    config = siamese(objective, f"algorithm.name={algorithm}", "server.momentum=0.9")
    engine, server = engine_of(config, made_split(), groups_of(6, 9, 5))
    step(engine, server, 0)
    step(engine, server, 1)
    before = {name: leaf.clone() for name, leaf in flatten(engine.states[1]).items()}
    step(engine, server, 2, 0, 2)
    after = flatten(engine.states[1])
    assert before and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    held = [leaf.data_ptr() for k in range(3) for leaf in flatten(engine.states[k]).values()]
    assert len(set(held)) == len(held), "two leaves share memory, which files refuse"


class Files(dict[int, Any]):
    """Files of states, in memory; each may be read once it was written."""

    def write(self, client: int, flat: dict[str, torch.Tensor]) -> Any:
        self[client] = {name: tensor.clone() for name, tensor in flat.items()}
        return 7, "seal"

    def read(self, client: int, version: Any) -> dict[str, torch.Tensor]:
        assert version == (7, "seal")
        return dict(self[client])


def test_states_above_the_limit_are_in_files_and_come_back() -> None:
    made = HostStates(torch.device("cpu"), most=100)
    files = made.files = Files()
    for client in range(5):  # 44 bytes each
        made[client] = {"a": torch.full((10,), float(client)), "n": torch.tensor(client).int()}
    assert sorted(files) == [0, 1, 2] and made.changed == {3, 4} and sorted(made) == [*range(5)]
    for client in range(5):
        assert made.numbers(client)["n"] == client  # without its file
        assert len(made._host) <= 2
    files.clear()
    read: Any = made[3]  # still here, and used last from now on
    assert read["a"].tolist() == [3.0] * 10
    files[0] = {"a": torch.zeros(10), "n": torch.tensor(0)}
    made[0] = made[0]  # from its file, and changed
    assert sorted(made._host) == [0, 3] and sorted(files) == [0, 4]
    assert made.changed == {0, 3} and made._held == made._bytes[0] + made._bytes[3]
    assert sum(made._bytes.values()) == made._held


def test_a_state_that_did_not_change_is_not_written_again() -> None:
    made = HostStates(torch.device("cpu"), most=100)
    files = made.files = Files()
    for client in range(4):
        files[client] = {"a": torch.full((20,), float(client))}
        made.restore(client, files[client], (7, "seal"))
    before = dict(files)
    for client in range(4):
        assert torch.equal(made.on_host(client)["a"], files[client]["a"])
    assert dict(files) == before and not made.changed


class Queue:
    """A stream that has always finished: stands for CUDA's where there is none."""

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> Queue:
        return self

    def synchronize(self) -> None: ...


@pytest.mark.parametrize("objective", ["byol", "moco"])
def test_what_is_written_does_not_stay_on_the_device(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client has its copy on the host and nothing else, however many clients there are."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Queue())
    monkeypatch.setattr(states_module, "_pinned_like", lambda tensor, old: torch.empty_like(tensor))

    def alive(clients: int) -> tuple[int, int]:
        """Tensors as large as a network after two rounds, and how many of them the host has."""
        config = siamese(objective, "algorithm.name=fedema", "algorithm.local_epochs=1")
        engine, server = engine_of(config, made_split(4 * clients), groups_of(*[4] * clients))
        engine.states._stream = Queue()  # type: ignore[assignment]
        for round in range(2):
            step(engine, server, round)
        assert engine.trainer.target is not None
        large = engine.trainer.target.parameter_count
        host = sum(
            t.numel() >= large for k in engine.states for t in engine.states.on_host(k).values()
        )
        gc.collect()
        tensors = (o for o in gc.get_objects() if type(o) is torch.Tensor)
        return sum(t.numel() >= large for t in tensors), host

    few, of_few = alive(4)
    many, of_many = alive(12)
    assert of_many == 3 * of_few == 24  # a network and a target for each
    assert many - few == of_many - of_few
