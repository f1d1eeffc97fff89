"""Settings of a training process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fedssl import cli, config, train
from fedssl.runs import build
from fedssl.util.errors import UserError
from fedssl.util.tuning import ALLOCATING, WAITING

TENSORS = """
import resource, sys
from fedssl.util.tuning import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
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
    faults: dict[tuple[str, str], int] = {}
    for how, name in (("keep", ""), ("as it is", ""), ("keep", "MALLOC_TRIM_THRESHOLD_")):
        words = [sys.executable, "-c", TENSORS, how]
        environment = {k: v for k, v in os.environ.items() if k not in ALLOCATING}
        environment |= {name: "131072"} if name else {}
        found = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
        count, imported = found.stdout.split()
        faults[how, name] = int(count)
        assert imported == "False"  # importing is cheap
    kept, plain, users = faults.values()
    assert kept < 100 < 10_000 < min(plain, users)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("PASSIVE", "1000")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
        ({"GOMP_SPINCOUNT": "5"}, (None, "5")),
    ],
)
@pytest.mark.parametrize("way", ["command line", "API"])
def test_threads_wait_briefly_unless_the_user_says_otherwise(
    given: dict[str, str],
    expected: tuple[str | None, str | None],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in WAITING:
        monkeypatch.setenv(name, "")  # put back what was there, at the end
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    if way == "command line":
        assert cli.main(["recipes", "default"]) == 0
    else:
        with pytest.raises(UserError):
            train(resume=True)
    assert tuple(os.environ.get(name) for name in WAITING) == expected


def test_a_session_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(build, "keep_freed_memory", lambda: calls.append(True))
    build.build_experiment(config.resolve(config.read_recipe(None), ["rounds=1"]))
    assert calls
