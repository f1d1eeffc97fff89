"""``fedssl report``: runs as one page of HTML that needs nothing else."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fedssl.runs.record import opened
from fedssl.util.errors import UserError

QUIET = 3.0  # seconds in which nothing is said


class Voice:
    """Says on stderr what is being done, once it takes longer than one wants to wait in silence."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """One line, if it is time for it."""
        if time.monotonic() - self._started > QUIET:
            print(f"report: {text}", file=sys.stderr)


def write(runs: Sequence[str | Path], out: Path | None = None) -> Path:
    """Write the page of these runs; without ``out`` into the run's folder, or above all of them."""
    from fedssl.report.page import build
    from fedssl.util.outputs import check_page, write_text

    found = opened(runs)
    target = _place(runs) / "report.html" if out is None else out
    if target.is_dir():
        raise UserError(f"--out {target}: is a folder; name a file such as {target}/report.html")
    check_page(target, "--out")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(target.parent, os.W_OK):  # found before the work, not after it
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        write_text(target, build(found, Voice()), "--out", private=True)  # it shows images
    except OSError as error:
        raise UserError(
            f"--out {target}: cannot be written ({error.strerror}); name another file with --out"
        ) from None
    return target


def _place(runs: Sequence[str | Path]) -> Path:
    """Where a page goes: each run has one of its own, which that of several must not replace."""
    if len(runs) == 1:
        return Path(runs[0])
    folders = [Path(run) for run in runs]
    if any(folder.is_absolute() for folder in folders):
        folders = [folder.absolute() for folder in folders]
    above = Path(os.path.commonpath(folders))
    return above.parent if above in folders else above


def leave(run: Path) -> None:
    """The page that a run ends with; a run does not fail for it."""
    try:
        write([run])
    except UserError as error:
        print(f"fedssl: no report.html: {error}", file=sys.stderr)
    except Exception as error:  # hours of training are not called a failure for a picture of them
        said = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"fedssl: no report.html: {said}", file=sys.stderr)
