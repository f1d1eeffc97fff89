"""Free memory of this machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")  # of a container


def free_memory() -> int:
    """Return how many bytes this process may still use, page cache included."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        free = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limit = int((GROUP / "memory.max").read_text())
        free = min(free, limit - int((GROUP / "memory.current").read_text()))
    return free
