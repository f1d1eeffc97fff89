"""Show finished and running runs as one HTML page that needs no network."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fedssl.runs.reader import find_runs
from fedssl.util import files
from fedssl.util.errors import UserError
from fedssl.util.status import stage


def write_page(runs: Sequence[str | Path], out: Path | None = None) -> Path:
    """Write the page of these runs; without ``out`` into the run's folder, or above all of them."""
    from fedssl.report.page import build_page

    target = _choose_file(runs) if out is None else out
    files.check_suffix(target, "--out", ".html", ".htm")
    found = find_runs(runs)
    files.make_output_folder(target.parent, "--out")
    with (
        stage("writing the report"),
        files.replace_output(target, "--out", private=True) as new,  # it shows images
    ):
        new.write_text(build_page(found), encoding="utf-8")
    return target


def _choose_file(runs: Sequence[str | Path]) -> Path:
    """Return a file that replaces the page of none of several runs."""
    folders = [Path(run) for run in runs]
    if len(folders) == 1:
        return folders[0] / "report.html"
    if any(folder.is_absolute() for folder in folders):
        folders = [folder.absolute() for folder in folders]
    above = Path(os.path.commonpath(folders))
    return (above.parent if above in folders else above) / "report.html"


def write_page_or_warn(run: Path) -> Path | None:
    """Write the page of a run that has ended; only warn if that fails."""
    try:
        return write_page([run])
    except Exception as error:  # the run itself succeeded
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        print(f"fedssl: no report.html: {' '.join(text.split())}", file=sys.stderr)
        return None
