"""Run the rows that a file names, one after another in one process, for as long as there is time.

    python results/measure.py results/plan-cifar10.txt --out DIR [--until SECONDS] [key=value ...]

A line of the file is what ``fedssl reproduce`` takes, a recipe and its keys; those of the command
hold for all lines. A row that is finished in DIR, or has diverged, is passed over, so the same
command goes on; none is started after SECONDS. A row that breaks off by an error is told and passed
over. Then ``results/add.py DIR/…/table.jsonl``.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import traceback
from pathlib import Path

from fedssl.runs import batch, loop, reproduce
from fedssl.util.errors import UserError


def planned(lines: list[str], words: list[str], out: Path) -> list[reproduce.Job]:
    """The rows of all lines; no two may have one folder."""
    jobs: dict[Path, reproduce.Job] = {}
    for number, line in enumerate(lines, 1):
        try:
            pattern, *own = shlex.split(line, comments=True) or [""]
            found = reproduce.plan(pattern, [*words, *own], "1", out) if pattern else []
        except (ValueError, UserError) as error:
            raise UserError(f"line {number}: {error}") from None
        for job in found:
            if jobs.setdefault(job.folder, job) is not job:
                raise UserError(
                    f"line {number}: {job.label} is in a line before, and would share its folder; "
                    "put it into a file of its own, and run that with another --out"
                )
    return list(jobs.values())


def measure(lines: list[str], words: list[str], out: Path, until: float) -> list[reproduce.Job]:
    """The rows that have not come to their end then; all are checked before the first is run."""
    jobs, started = planned(lines, words, out), time.monotonic()
    batch.check_all(jobs)
    for job in jobs:
        seconds = time.monotonic() - started
        if seconds > until:
            break
        if job.failed:
            print(f"{job.label}: diverged before", file=sys.stderr)
            continue
        print(f"{seconds:7.1f} s {job.label}", file=sys.stderr, flush=True)
        try:
            reproduce.work([job])
        except (loop.Interrupted, UserError):
            raise  # a mistake, or a full disk, is the others' too
        except Exception:  # whatever it is: the others need not wait for it
            traceback.print_exc()
    return [job for job in jobs if job.summary() is None and not job.failed]


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 if all rows are finished."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--until", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("words", nargs="*", metavar="key=value")
    o = parser.parse_intermixed_args(arguments)
    try:
        lines = o.file.read_text(encoding="utf-8").splitlines()
        left = measure(lines, o.words, o.out, o.until)
    except (UserError, OSError) as error:
        print(f"measure.py: {error}", file=sys.stderr)
        return 2
    except (loop.Interrupted, KeyboardInterrupt):
        print("measure.py: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    for job in left:
        print(f"not finished: {job.label}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
