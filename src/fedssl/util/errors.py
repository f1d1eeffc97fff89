"""The two ways in which a run ends early: the user can mend it, or the training failed."""

from __future__ import annotations

import contextlib
import difflib
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

CONTINUE = "continue with --resume"  # in a hint: what goes on with a run of ``fedssl run``


_UNSET = object()


class UserError(Exception):
    """A mistake that the user can fix: ``key=value: problem. Fix.`` on one line.

    ``key`` is the configuration key or the option (``--out``) at fault and ``value`` what it was
    set to. A site sends ``told`` to its server instead of the text, so that no file name leaves it.
    """

    def __init__(
        self,
        problem: str,
        told: str | None = None,
        *,
        fix: str = "",
        key: str | None = None,
        value: object = _UNSET,
    ) -> None:
        self.problem, self.fix, self.key, self.value = problem, fix, key, value
        self.told = told
        super().__init__(self._line())

    def _line(self) -> str:
        text = f"{self.problem}. {self.fix}" if self.fix else self.problem
        if self.key is None:
            return text
        if self.value is _UNSET:
            return f"{self.key}: {text}"
        sign = " " if self.key.startswith("-") else "="
        return f"{self.key}{sign}{_show(self.value)}: {text}"


def _show(value: object) -> str:
    """Format a value the way it is written on the command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_show, value))}]"
    return str(value)


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


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `` (did you mean …?)`` for the known name closest to a mistyped one."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""
