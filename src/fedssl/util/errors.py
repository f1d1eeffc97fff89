"""The two ways in which a run ends early: the user can mend it, or the training failed."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

CONTINUE = "continue with --resume"  # in a hint: what goes on with a run of ``fedssl run``


class UserError(Exception):
    """A mistake that the user can mend: one line that names the key, the value and the fix.

    ``told`` says it without names of files and folders: what a site tells its server.
    """

    def __init__(self, text: str, told: str | None = None) -> None:
        super().__init__(text)
        self.told = told


class TrainingError(Exception):
    """Training cannot go on (a loss that is not finite); what was saved is kept."""


@contextlib.contextmanager
def going_on(words: str) -> Iterator[None]:
    """Hints within say ``words`` where a run does not go on with ``--resume``."""
    try:
        yield
    except UserError as error:
        error.args = (str(error).replace(CONTINUE, words),)
        raise


def go_on(folder: str | Path) -> str:
    """The command that goes on with a run or a sweep, to be pasted."""
    return f"fedssl run --resume --out {shlex.quote(str(folder))}"
