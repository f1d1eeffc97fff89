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
from fedssl.util import memory
from fedssl.util.memory import explain_full_memory, find_free_memory, is_out_of_memory

GB = 10**9


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_limit_on_addresses_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (unlimited, unlimited))
    before = find_free_memory()
    assert before is not None and before > GB / 10
    used = 1024 * memory._read_numbers(Path("/proc/self/status"))["VmSize"]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (used + GB // 100, unlimited))
    assert find_free_memory() == pytest.approx(GB // 100, abs=GB // 200)


def test_a_container_has_the_memory_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least that a group and those above it leave, without the kernel's copies of files."""
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    real = Path.read_text

    def read(path: Path, *rest: object, **named: object) -> str:
        groups = "4:memory:/a/b\n0::/x/y\n"
        return groups if str(path) == "/proc/self/cgroup" else real(path, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read)
    assert find_free_memory() > 5000
    for place, limit, used in ((".", "7000", "1000"), ("x", "5000", "1000"), ("x/y", "max", "900")):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "memory.max").write_text(f"{limit}\n")
        (tmp_path / place / "memory.current").write_text(f"{used}\n")
        (tmp_path / place / "memory.stat").write_text("anon 7\ninactive_file 100\n")
    assert find_free_memory() == 4100


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
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="macOS ignores this limit")
@pytest.mark.parametrize("kilobytes", [300_000, 1_500_000, 3_000_000])
def test_a_limit_that_is_too_low_for_torch_is_one_line(kilobytes: int, tmp_path: Path) -> None:
    command = f"ulimit -v {kilobytes}; {sys.executable} -m fedssl run rounds=1 --out {tmp_path}/a"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "a").exists()
    assert done.stderr.splitlines()[-1].startswith(f"fedssl: ulimit -v={kilobytes}: ")
    assert "Traceback" not in done.stderr
