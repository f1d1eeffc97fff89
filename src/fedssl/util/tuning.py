"""Tune the threads, the memory and the compiler of a training process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
ALLOCATING = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_TRIM, _MAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h


def shorten_thread_waits() -> None:
    """Let idle threads spin for microseconds, then sleep, unless the user has set either.

    Call it before torch is imported. Sleeping at once makes small networks up to 1.7 times slower
    on a quiet machine; spinning long makes them tens of times slower on a busy one
    (benchmarks/NOTES.md).
    """
    if not WAITING.keys() & os.environ.keys():
        os.environ.update(WAITING)  # libgomp reads the number, others the policy


def count_threads(setting: int | str) -> int:
    """Return a number of CPU threads; ``auto`` is the user's ``OMP_NUM_THREADS`` or all cores."""
    if isinstance(setting, int):
        return setting
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given):
        return int(given)
    return count_cores()


def count_cores() -> int:
    """Count the cores that this process may use."""
    can_ask = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if can_ask else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Keep memory that tensors free in the process, unless the user has set otherwise.

    Otherwise the kernel takes it back and clears it for the next tensors: on a CPU up to a third of
    a training step (benchmarks/NOTES.md). Buffers above 32 MiB still go back.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not os.environ.keys() & set(ALLOCATING):
        mallopt(_MAP, 32 << 20)  # older versions refuse more
        mallopt(_TRIM, 1 << 30)


def keep_compiled_code(folder: Path) -> None:
    """Let torch keep compiled code in this folder, unless the user has named another.

    Torch's own folder is a temporary one, which a restart empties: the next run would compile for a
    minute again. It stays where this folder cannot be made.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
