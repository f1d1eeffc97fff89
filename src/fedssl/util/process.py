"""What a process that trains sets for itself: how its threads wait, and what memory it keeps."""

from __future__ import annotations

import ctypes
import os
import sys

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
ALLOCATING = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_TRIM, _MAP = -1, -3  # of glibc's malloc.h


def wait_briefly() -> None:
    """Threads look for work for some microseconds, then sleep; a user who set either has the say.

    To be called before torch is imported. To sleep at once makes small networks up to 1.7 times as
    slow on a quiet machine, to wait for long tens of times on a busy one (benchmarks/NOTES.md).
    """
    if not WAITING.keys() & os.environ.keys():
        os.environ.update(WAITING)  # libgomp goes by the number, others by the policy


def keep_memory() -> None:
    """Memory that tensors leave free stays with the process, unless the user has set otherwise.

    Else the kernel takes it back and clears it for the next tensors, again and again: on a CPU up
    to a third of a training step (benchmarks/NOTES.md). Buffers above 32 MiB still go back.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not os.environ.keys() & set(ALLOCATING):
        mallopt(_MAP, 32 << 20)  # older versions refuse more
        mallopt(_TRIM, 1 << 30)
