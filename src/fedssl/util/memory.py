"""Memory: how much of it is free, and errors that say that it is full."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from fedssl.util.errors import UserError
from fedssl.util.text import format_bytes

GROUPS = Path("/sys/fs/cgroup")  # of containers and batch systems
FULL = (
    *("allocate memory", "not enough memory", "out of memory", "bad_alloc", "start new thread"),
    "failed to map segment",  # of a library
)
LEAST_ADDRESSES = 1_500_000_000  # bytes that threads and libraries reserve beside PyTorch
FIX = "Use smaller networks, images or batches, or free memory."


def find_free_memory() -> int:
    """Return the bytes that this process can still use; the kernel's copies of files are free."""
    return min(_list_limits())


def _list_limits() -> Iterator[int]:
    system, page = _read_numbers(Path("/proc/meminfo")), os.sysconf("SC_PAGE_SIZE")
    available = 1024 * (system.get("MemAvailable", 0) + system.get("SwapFree", 0))
    yield available or page * os.sysconf("SC_PHYS_PAGES")  # macOS: all that there is
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield max(0, limit - 1024 * _read_numbers(Path("/proc/self/status"))["VmSize"])
    for folder in _list_groups():
        with contextlib.suppress(OSError, ValueError):  # there is no limit, or it is "max"
            most, used = (int((folder / f"memory.{n}").read_text()) for n in ("max", "current"))
            files = _read_numbers(folder / "memory.stat").get("inactive_file", 0)
            yield max(0, most - used + files)


def _list_groups() -> Iterator[Path]:
    """Yield the folder of this process's control group, and those above it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                place = Path(line.removeprefix("0::"))
                yield from (GROUPS / each.relative_to("/") for each in (place, *place.parents))


def _read_numbers(path: Path) -> dict[str, int]:
    """Read lines such as ``MemFree: 12 kB``."""
    try:
        rows = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def check_addresses() -> None:
    """Refuse to start where libraries would end the process with a signal, not with an error.

    That takes the time of another start of PyTorch, and only where addresses are limited.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    trial = f"import numpy, torch; bytearray({LEAST_ADDRESSES})"
    if subprocess.run([sys.executable, "-c", trial], capture_output=True).returncode:
        space, spare = format_bytes(limit), format_bytes(LEAST_ADDRESSES)
        problem = f"PyTorch does not fit into {space} of address space with {spare} to spare"
        fix = "Raise the limit, or use ulimit -v unlimited."
        raise UserError(problem, key="ulimit -v", value=limit // 1024, fix=fix)


@contextlib.contextmanager
def explain_full_memory() -> Iterator[None]:
    """Turn an error that says that memory is full into one line."""
    try:
        yield
    except (MemoryError, RuntimeError, ImportError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        detail = " ".join(str(error).split())[:200]
        problem = f"out of memory ({detail})" if detail else "out of memory"
        raise UserError(problem, "out of memory", fix=FIX) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is full: of Python, numpy, torch or the system."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | ImportError) and any(each in text for each in FULL)
