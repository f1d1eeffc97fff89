"""Errors that end a run early: a mistake that the user can fix, or training that failed."""

from __future__ import annotations

import contextlib
import difflib
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

LONGEST_SHOWN = 300  # characters of a value in an error
_UNSET = object()


class UserError(Exception):
    """A mistake that the user can fix: ``key=value: problem. Fix.`` on one line.

    ``key`` is the configuration key or the option (``--out``) at fault, and ``value`` what it was
    set to. A site sends ``public`` to its server instead of the text, so that no file name leaves
    the site. An error that ``can_resume`` ends with how to continue the run. ``against`` is the key
    that contradicts ``key``, where a recipe's value of either may give way to the user's word.
    """

    def __init__(
        self,
        problem: str,
        public: str | None = None,
        *,
        key: str | None = None,
        value: object = _UNSET,
        fix: str = "",
        can_resume: bool = False,
        against: str | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem, self.fix, self.key, self.value = problem, fix, key, value
        self.public, self.against = public, against
        self.resume_hint = "Then continue with --resume." if can_resume else ""

    def __str__(self) -> str:
        sentence = self.problem if self.problem.endswith((".", "?")) else f"{self.problem}."
        more = " ".join(filter(None, (self.fix, self.resume_hint)))
        text = f"{sentence} {more}" if more else self.problem
        if self.key is None:
            return text
        if self.value is _UNSET:
            return f"{self.key}: {text}"
        sign = " " if self.key.startswith("-") else "="
        return f"{self.key}{sign}{format_value(self.value)}: {text}"


def format_value(value: object) -> str:
    """Format a value the way it is written on the command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, list | tuple):
        return shorten(f"[{','.join(map(format_value, value[:LONGEST_SHOWN]))}]")
    return shorten(str(value))


def shorten(text: str) -> str:
    """Cut a text that is too long for an error."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"


def refuse(config: object, *refusals: tuple[object, str, str, str]) -> None:
    """Raise the error of the first refusal that applies: (applies, key, problem, fix)."""
    for applies, key, problem, fix in refusals:
        if applies:
            section, _, name = key.partition(".")
            value = getattr(getattr(config, section), name)
            raise UserError(problem, key=key, value=value, fix=fix)


class TrainingError(Exception):
    """Training cannot go on, as with a loss that is not finite; what was saved is kept."""

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(f"{problem}. {fix}" if fix else problem)
        self.problem, self.fix = problem, fix


@contextlib.contextmanager
def resume_hint(sentence: str) -> Iterator[None]:
    """Replace ``Then continue with --resume.`` in errors, where a run continues in another way."""
    try:
        yield
    except UserError as error:
        if error.resume_hint:
            error.resume_hint = sentence
        raise


def format_resume(folder: str | Path) -> str:
    """Return the command that continues a run or a sweep."""
    return f"fedssl run --resume --out {shlex.quote(str(folder))}"


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `` (did you mean …?)`` for the known name closest to a mistyped one."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""
