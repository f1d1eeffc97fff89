"""The file that adds up what all runs on the same images have released."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from fedssl.privacy.accountant import Release, Releases
from fedssl.util.errors import UserError
from fedssl.util.files import explain_write_errors, hold_lock, write_json

FORMAT = 1


@dataclass
class Entry:
    """The releases of one run."""

    releases: Releases = field(default_factory=Counter)
    about: str = ""  # the run's folder or, at a site, the last round that it took part in


Entries = dict[str, Entry]  # by the number of the run


@dataclass(frozen=True)
class Ledger:
    """Releases of one data set, in a file that several runs may change."""

    path: Path

    @contextlib.contextmanager
    def change(self) -> Iterator[Entries]:
        """Yield the entries, which no other process sees until they are written."""
        lock = self.path.with_suffix(".lock")
        public = "its record of the privacy spent cannot be written"
        with explain_write_errors("FEDSSL_STATE", self.path, public), hold_lock(lock):
            entries = self.read()
            before = _to_json(entries)
            yield entries
            runs = _to_json(entries)
            if runs != before:
                content = {"format": FORMAT, "sha256": _digest(runs), "runs": runs}
                write_json(self.path, content)

    def read(self) -> Entries:
        """Read the entries; none if nothing was released."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["sha256"] != _digest(content["runs"]) or content["format"] != FORMAT:
                raise ValueError("digest")
            return {run: _from_json(row) for run, row in content["runs"].items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, AttributeError):
            problem = f"{self.path}, which counts the privacy spent on these images, is damaged"
            fix = "Restore it. If you remove it, what earlier runs spent is forgotten."
            public = "its record of the privacy spent is damaged"
            raise UserError(problem, public, fix=fix) from None


def add_releases(entries: Entries, without: str | None = None) -> Releases:
    """Add up the releases of all runs but one."""
    total: Releases = Counter()
    for run, entry in entries.items():
        if run != without:
            total += entry.releases
    return total


def _to_json(entries: Entries) -> dict[str, Any]:
    runs = {}
    for run, entry in entries.items():
        rounds = [[*astuple(release), count] for release, count in sorted(entry.releases.items())]
        runs[run] = {"about": entry.about, "releases": rounds}
    return runs


def _from_json(row: dict[str, Any]) -> Entry:
    releases: Releases = Counter()
    for noise, clients, drawn, count in row["releases"]:
        releases[Release(float(noise), int(clients), int(drawn))] += int(count)
    return Entry(releases, str(row["about"]))


def _digest(runs: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()
