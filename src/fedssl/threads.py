"""How torch's threads wait for one another: set before torch is imported."""

from __future__ import annotations

import os


def wait_briefly() -> None:
    """Threads look for work for some microseconds, then sleep; what the user has set stays.

    Going to sleep at once costs small networks a third of their speed on a quiet machine, and
    waiting for long makes them forty times as slow on a busy one (benchmarks/NOTES.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # libgomp's own number for more threads than processors; it goes before the policy.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
