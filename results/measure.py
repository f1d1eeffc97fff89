"""Run the rows that a file names, one after another in one process, for as long as there is time.

    python results/measure.py results/plan-cifar10.txt --out DIR [--until SECONDS] [key=value ...]

A line of the file is what ``fedssl reproduce`` takes, a recipe and its keys; keys of the command
hold for all lines. Rows with keys of their own are in a folder named after these. Finished rows and
rows that diverged are skipped, so the same command continues; no row is started after SECONDS. An
error ends its row only. Then call ``results/add.py`` with the files ``table.jsonl`` below DIR.
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
    """Return the rows of all lines; no two may have the same folder.

    Lines with the same words may need the same encoder.
    """
    jobs: dict[Path, reproduce.Job] = {}
    for number, line in enumerate(lines, 1):
        try:
            pattern, *own = shlex.split(line, comments=True) or [""]
            place = out / "_".join(own).replace("/", "-")
            found = reproduce.plan(pattern, [*words, *own], "1", place) if pattern else []
        except (ValueError, UserError) as error:
            raise UserError(f"line {number}: {error}") from None
        shared = {job.needs.folder for job in found if job.needs is not None}
        for job in found:
            if jobs.setdefault(job.folder, job) is not job and job.folder not in shared:
                raise UserError(f"line {number}: {job.label} is also in an earlier line")
    return list(jobs.values())


def measure(lines: list[str], words: list[str], out: Path, until: float) -> list[reproduce.Job]:
    """Run the rows after checking all of them; return those that are not finished."""
    jobs, started = planned(lines, words, out), time.monotonic()
    batch.check_all(jobs)
    for job in jobs:
        seconds = time.monotonic() - started
        if seconds > until:
            break
        if job.failed:
            print(f"{job.label}: skipped, it diverged before", file=sys.stderr)
            continue
        print(f"{seconds:7.1f} s {job.label}", file=sys.stderr, flush=True)
        try:
            reproduce.work([job])
        except (loop.Interrupted, UserError):
            raise  # a mistake or a full disk concerns the other rows too
        except Exception:  # the other rows can still run
            traceback.print_exc()
    return [job for job in jobs if job.summary() is None and not job.failed]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0 if all rows are finished."""
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
        print("measure.py: stopped. Call the same command to continue.", file=sys.stderr)
        return 130
    for job in left:
        print(f"not finished: {job.label}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
