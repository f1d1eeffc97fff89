"""What a process that trains sets for itself: how its threads wait, and what memory it keeps."""

from __future__ import annotations

import ctypes
import os
import sys

# Of glibc's malloc.h, and the most that it takes for the second.
_TRIM, _MAP, _LARGEST = -1, -3, 32 << 20


def wait_briefly() -> None:
    """Threads look for work for some microseconds, then sleep; what the user has set stays.

    To be called before torch is imported. Going to sleep at once costs small networks a third of
    their speed on a quiet machine, and waiting for long makes them forty times as slow on a busy
    one (benchmarks/NOTES.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # libgomp's own number for more threads than processors; it goes before the policy.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def keep_memory() -> None:
    """What tensors of up to 32 MiB leave free stays with the process, up to 1 GiB.

    Otherwise the kernel takes it back and clears it for the next tensor, again and again: on a CPU
    a sixth to a third of a training step (benchmarks/NOTES.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # glibc
        mallopt(_MAP, _LARGEST)
        mallopt(_TRIM, 1 << 30)
