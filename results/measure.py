"""Run the rows that a file names, one after another in one process, for as long as there is time.

    python results/measure.py results/plan-cifar10.txt --out DIR [--until SECONDS] [key=value ...]

A line of the file is what ``fedssl reproduce`` takes, a recipe and its keys; those of the command
hold for all lines. A row that is finished in DIR is passed over, so the same command goes on; none
is started after SECONDS. Then ``results/add.py DIR/…/table.jsonl``.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from fedssl import reproduce
from fedssl.errors import UserError


def planned(lines: list[str], words: list[str], out: Path) -> list[reproduce.Job]:
    """The rows of all lines, checked."""
    read = [shlex.split(line, comments=True) for line in lines]
    given = [(pattern, [*words, *own]) for pattern, *own in filter(None, read)]
    return [job for pattern, own in given for job in reproduce.plan(pattern, own, "1", out)]


def measure(lines: list[str], words: list[str], out: Path, until: float) -> int:
    """How many rows are finished then."""
    jobs, started = planned(lines, words, out), time.monotonic()
    for job in jobs:
        seconds = time.monotonic() - started
        if seconds > until:
            break
        print(f"{seconds:7.1f} s {job.label}", file=sys.stderr, flush=True)
        reproduce.work([job])
    return sum(job.summary() is not None for job in jobs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--until", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("words", nargs="*", metavar="key=value")
    o = parser.parse_intermixed_args()
    lines = o.file.read_text(encoding="utf-8").splitlines()
    try:
        print(f"{measure(lines, o.words, o.out, o.until)} rows are finished")
    except UserError as error:
        print(f"measure.py: {error}", file=sys.stderr)
        sys.exit(2)
