"""Commands whose output nobody reads, or that no terminal can show."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import quick

SMALL = (
    "rounds=2", "cohort.size=4", "data.size=8", "objective.projector=32,32,16",
    "evaluate.protocols=knn", "evaluate.baselines=[]", "engine.threads=1",
)  # fmt: skip
PROTECT = "from fedssl.util.console import protect_streams; protect_streams()"


def shell(
    redirected: str, *words: str, **variables: str
) -> tuple[int, subprocess.CompletedProcess[str]]:
    """``fedssl words`` with what a shell does to its streams; its own status comes first."""
    line = f'{{ "$@"; echo $? >&9; }} {redirected}'
    read, write = os.pipe()
    done = subprocess.run(
        ["bash", "-c", f"exec 9>&{write}; {line}", "-", sys.executable, "-m", "fedssl", *words],
        capture_output=True, text=True, errors="replace", pass_fds=(write,),
        env={**os.environ, "PYTHONUNBUFFERED": "", **variables},
    )  # fmt: skip
    os.close(write)
    with os.fdopen(read) as file:
        return int(file.read()), done


@pytest.mark.slow
@pytest.mark.parametrize("redirected", ["2>&1 | true", ">&- 2>&-", "2>/dev/full"])
def test_a_run_needs_nobody_who_reads(redirected: str, tmp_path: Path) -> None:
    status, done = shell(redirected, "run", *SMALL, "--out", str(tmp_path / "run"))
    assert status == 0 and done.stderr == ""
    written = ("encoder.safetensors", "summary.json", "report.html")
    assert all((tmp_path / "run" / name).exists() for name in written)


# The last: what a shell's script, whose own file takes the number, is to write to.
@pytest.mark.parametrize(
    "redirected", quick(["2>/dev/full", "2>&1 | true", "2>&-", "2</dev/null"], "2>&-")
)
def test_a_mistake_is_one_whoever_reads(redirected: str) -> None:
    assert shell(redirected, "run", "bogus=1")[0] == 2


def test_a_terminal_may_go() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fedssl", "run", "bogus=1"]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        os.close(ours)
        assert process.wait() == 2


@pytest.mark.parametrize("redirected", quick(["| true", ">&-", "2>&-"], "| true"))
def test_other_commands_end_quietly(redirected: str) -> None:
    status, done = shell(redirected, "recipes")
    assert status == 0 and done.stderr == ""


def test_python_u_has_no_buffer() -> None:
    code = f"{PROTECT}; import os; print(1, end=''); os._exit(0)"
    for option, printed in (("-u", "1"), ("-B", "")):
        command = [sys.executable, option, "-c", code]
        unset = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        done = subprocess.run(command, capture_output=True, text=True, env=unset)
        assert done.stdout == printed


def test_no_file_gets_the_number_of_a_closed_stream() -> None:
    code = f"{PROTECT}; import os, sys; sys.exit(os.dup(1))"
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "-", sys.executable, "-c", code]
    assert subprocess.run(closed).returncode > 2


ASCII = {"PYTHONIOENCODING": "ascii"}
OLD_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("variables", quick([ASCII, OLD_LOCALE], OLD_LOCALE))
def test_letters_that_a_terminal_does_not_have(variables: dict[str, str]) -> None:
    status, done = shell("", "recipes", "perfcl", **variables)
    assert status == 0 and done.stderr == "" and "?" in done.stdout


def test_a_way_of_showing_letters_that_a_user_chose() -> None:
    _, done = shell("", "recipes", "perfcl", PYTHONIOENCODING="ascii:backslashreplace")
    assert "\\u03bb" in done.stdout


@pytest.mark.parametrize("unbuffered", quick(["", "1"], ""))
def test_a_full_disk_under_stdout_costs_no_report(unbuffered: str, tmp_path: Path) -> None:
    words = ("run", *SMALL, "--out", str(tmp_path / "run"))
    status, done = shell("> /dev/full", *words, PYTHONUNBUFFERED=unbuffered)
    said = "fedssl: stdout: No space left on device. Make room, then continue with --resume.\n"
    assert status == 2 and done.stderr.endswith(said)
    assert (tmp_path / "run" / "report.html").exists()


def test_a_full_disk_is_said_without_options_that_there_are_not() -> None:
    status, done = shell("> /dev/full", "recipes")  # more than a buffer holds
    said = "fedssl: stdout: No space left on device. Make room, then try again.\n"
    assert (status, done.stderr) == (2, said)
