"""Free memory by the system's own files, and errors that say that there is none."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import refused

from fedssl.cli import main
from fedssl.util import free_memory
from fedssl.util.free_memory import explain_full_memory, find_free_memory, is_out_of_memory

GB = 10**9


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_limit_on_addresses_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (unlimited, unlimited))
    before = find_free_memory()
    assert before is not None and before > GB / 10
    used = 1024 * free_memory._read_numbers(Path("/proc/self/status"))["VmSize"]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (used + GB // 100, unlimited))
    assert find_free_memory() == pytest.approx(GB // 100, abs=GB // 200)


def test_a_container_has_the_memory_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a group and of those above it, without what the kernel keeps of files."""
    monkeypatch.setattr(free_memory, "CGROUPS", tmp_path)
    real = Path.read_text
    groups = "4:memory:/a/b\n1:cpu:/a\n0::/x/y\n"

    def read(path: Path, *rest: object, **named: object) -> str:
        return groups if str(path) == "/proc/self/cgroup" else real(path, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read)
    assert list(free_memory._list_cgroup_limits()) == []
    for place, names, limit, used in (
        ("x", ("memory.max", "memory.current"), "5000", "1000"),
        ("x/y", ("memory.max", "memory.current"), "max", "900"),
        ("memory/a/b", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "3000", "2500"),
    ):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        for name, text in zip(names, (limit, used), strict=True):
            (tmp_path / place / name).write_text(f"{text}\n")
        (tmp_path / place / "memory.stat").write_text("anon 7\ninactive_file 100\n")
    assert sorted(free_memory._list_cgroup_limits()) == [600, 4100]


def test_errors_of_full_memory_are_one_line() -> None:
    for error in (
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("can't start new thread"),
        torch.OutOfMemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ):
        assert is_out_of_memory(error)
        with refused(None, says="out of memory"), explain_full_memory():
            raise error
    for other in (RuntimeError("shapes differ"), ValueError("out of memory"), OSError(2, "no")):
        assert not is_out_of_memory(other)
        with pytest.raises(type(other)), explain_full_memory():
            raise other
    with refused(None, says="out of memory"), explain_full_memory():
        torch.empty(10**15)
    with refused(None, says="out of memory"), explain_full_memory():
        np.empty(10**15)


def test_a_command_without_memory_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise MemoryError("Unable to allocate 9.1 TiB")

    monkeypatch.setattr("fedssl.contrib.doctor.report", full)
    assert main(["doctor"]) == 2
    said = "fedssl: out of memory (Unable to allocate 9.1 TiB). Use smaller"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="macOS ignores this limit")
@pytest.mark.parametrize("kilobytes", [300_000, 1_500_000, 3_000_000])
def test_a_limit_that_is_too_low_for_torch_is_one_line(kilobytes: int, tmp_path: Path) -> None:
    command = f"ulimit -v {kilobytes}; {sys.executable} -m fedssl run rounds=1 --out {tmp_path}/a"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "a").exists()
    assert done.stderr.splitlines()[-1].startswith(f"fedssl: ulimit -v={kilobytes}: ")
    assert "Traceback" not in done.stderr
