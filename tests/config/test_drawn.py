"""Configurations drawn at random run or are refused in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ATTACK = Path(__file__).parents[2] / "benchmarks" / "attacks" / "configurations.py"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_drawn_configurations_run_or_are_refused(count: int) -> None:
    command = [sys.executable, str(ATTACK), "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} configurations, 0 findings" in done.stdout
    for end in ("accepted", "refused", "refused before training", "trained"):
        assert any(line.split(maxsplit=1)[1:] == [end] for line in done.stdout.splitlines())
