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

CGROUPS = Path("/sys/fs/cgroup")
FULL = (
    *("allocate memory", "not enough memory", "out of memory", "bad_alloc", "start new thread"),
    "failed to map segment",  # of a library
)
LEAST_ADDRESSES = 1_500_000_000  # bytes that threads and libraries reserve beside PyTorch
FIX = "Use smaller networks, images or batches, or free memory."


def find_free_memory() -> int | None:
    """Return the bytes that this process can still allocate, as far as the system tells."""
    return min(_list_limits(), default=None)


def _list_limits() -> Iterator[int]:
    with_swap = _read_numbers(Path("/proc/meminfo"))
    if "MemAvailable" in with_swap:
        yield 1024 * (with_swap["MemAvailable"] + with_swap.get("SwapFree", 0))
    elif "SC_PHYS_PAGES" in os.sysconf_names:  # macOS: all that there is
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield from _list_cgroup_limits()
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        used = _read_numbers(Path("/proc/self/status")).get("VmSize", 0)
        yield max(0, limit - 1024 * used)


def _list_cgroup_limits() -> Iterator[int]:
    """Yield what is free below the limits of containers and batch systems, swap left out."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUPS / "memory" if controllers else CGROUPS
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit_name, used_name = names if controllers else ("memory.max", "memory.current")
        place = root / path.lstrip("/")
        for folder in (place, *place.parents):
            if not folder.is_relative_to(root):
                break
            limit, used = (_read_number(folder / name) for name in (limit_name, used_name))
            if limit is not None and used is not None:
                # The kernel gives back what it keeps of files.
                cached = _read_numbers(folder / "memory.stat").get("inactive_file", 0)
                yield max(0, limit - used + cached)


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # there is none, or it is "max"
        return None


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
