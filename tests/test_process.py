"""What a training process sets for itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fedssl.process import wait_briefly

TENSORS = """
import resource, sys
from fedssl.process import keep_memory
if sys.argv[1] == "keep":
    keep_memory()
def step():
    return [bytearray(24 << 20) for _ in range(3)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, "torch" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_memory_that_was_used_is_not_cleared_again() -> None:
    """Pages that the kernel has to give: of three buffers of 24 MiB, four times."""
    faults = {}
    for how in ("keep", "as it is"):
        words = [sys.executable, "-c", TENSORS, how]
        found = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
        faults[how], imported = int(found[0]), found[1]
        assert imported == "False"  # importing is cheap
    assert faults["keep"] < 100 < 10_000 < faults["as it is"]


def test_threads_wait_briefly_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    wait_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
