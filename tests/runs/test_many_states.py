"""States that do not fit into memory: the same run, and the same run after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rounds import run_of
from safetensors.torch import load_file

from fedssl.engines import host_states
from fedssl.runs import checkpoint, loop

FEW = 1 << 18  # bytes: the state of one client


def files_of(out: Path) -> dict[str, bytes]:
    """The clients' files in a checkpoint, without their numbers."""
    folder = out / checkpoint.CLIENTS
    return {path.name.partition("-")[0]: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("seconds", [0, 1000])
def test_a_run_is_the_same_if_its_states_are_in_files(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a checkpoint at the end alone, when states were in files before it."""
    settings = run_of("ditto", f"checkpoint.seconds={seconds}", "rounds=3")
    summary = loop.run(settings, tmp_path / "memory")
    monkeypatch.setattr(host_states.HostStates.__init__, "__defaults__", (FEW,))
    read: list[int] = []
    real = checkpoint.ClientFiles.read

    def note(self: Any, client: int, version: Any) -> Any:
        read.append(client)
        return real(self, client, version)

    monkeypatch.setattr(checkpoint.ClientFiles, "read", note)
    other = loop.run(settings, tmp_path / "files")
    assert set(read) == {0, 1, 2, 3}
    assert summary["per_client"] == other["per_client"]
    one, two = (tmp_path / name for name in ("memory", "files"))
    for path in (
        Path("encoder.safetensors"),
        *(p.relative_to(one) for p in one.glob("personal/*")),
    ):
        assert (one / path).read_bytes() == (two / path).read_bytes()
    states = [load_file(folder / checkpoint.FILE) for folder in (one, two)]
    assert all((states[0][name] == states[1][name]).all() for name in states[0])
    mine, theirs = files_of(one), files_of(two)
    assert mine == theirs and len(list((two / checkpoint.CLIENTS).iterdir())) == 4


@pytest.mark.parametrize("dies_after", [1, 5, 6])
def test_a_run_that_dies_among_such_files_goes_on_from_its_checkpoint(
    dies_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file of the last checkpoint is written again before the next one."""
    settings = run_of("ditto", "rounds=3")
    expected = loop.run(settings, tmp_path / "whole")
    monkeypatch.setattr(host_states.HostStates.__init__, "__defaults__", (FEW,))
    real, written = checkpoint.ClientFiles.write, list[int]()

    def dies(self: Any, client: int, flat: Any) -> Any:
        if len(written) == dies_after:
            raise KeyboardInterrupt
        written.append(client)
        return real(self, client, flat)

    monkeypatch.setattr(checkpoint.ClientFiles, "write", dies)
    with pytest.raises(KeyboardInterrupt):
        loop.run(settings, tmp_path / "run")
    monkeypatch.setattr(checkpoint.ClientFiles, "write", real)
    assert loop.run(settings, tmp_path / "run", resume=True)["result"] == expected["result"]
    one, two = (tmp_path / name for name in ("whole", "run"))
    assert files_of(one) == files_of(two)
    for name in ("state", "../encoder"):
        each = [load_file(folder / f"checkpoint/{name}.safetensors") for folder in (one, two)]
        assert all((each[0][key] == each[1][key]).all() for key in each[0])
