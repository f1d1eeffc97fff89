"""The attacks of benchmarks/attacks on messages, secure sums and the wire, in short.

Kills are in tests/runs/test_damage.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ATTACKS = Path(__file__).parents[2] / "benchmarks" / "attacks"


def attack(script: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, ATTACKS / script, *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_secure_sum_is_wrong_or_tells_a_difference(count: int) -> None:
    said = attack("sums.py", "--count", str(count))
    assert said.startswith(f"{count} secure sums, none wrong")
    for word in ("right sums", "opened sums", "refused", "started again"):  # it got that far
        assert word in said


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_message_does_harm(count: int) -> None:
    pytest.importorskip("flwr")
    said = attack("messages.py", "--count", str(count))
    assert "changed messages, no finding" in said
    for word in ("answered by the site", "refused by the site", "refused by the server"):
        assert word in said


@pytest.mark.slow
def test_with_tls_nothing_can_be_read_on_the_wire() -> None:
    pytest.importorskip("flwr")
    assert attack("wire.py").startswith("wire: plain: ")


def test_all_attacks_run_at_night() -> None:
    text = (ATTACKS / "nightly.sh").read_text()
    scripts = {path.name for path in ATTACKS.glob("*.py") if "def main" in path.read_text()}
    assert scripts == {line.split()[1] for line in text.splitlines() if line.startswith("attack ")}
