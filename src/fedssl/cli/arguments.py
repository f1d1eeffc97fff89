"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias


class Parser(argparse.ArgumentParser):
    """A parser that reports an error, and for which command, in one line."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self.set_defaults(parser=self)  # a command's parser replaces the one above it

    def error(self, message: str) -> NoReturn:
        """Exit with one line, without the usage."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def path(text: str) -> Path:
    """Convert an argument to a path; an unset shell variable is not the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name; give one, or . for the current folder")
    return Path(text)


def load_torch() -> None:
    """Import torch and say so: on a slow disk this takes many seconds."""
    if "torch" in sys.modules:
        return
    from fedssl.util.memory import check_addresses
    from fedssl.util.status import stage_without_threads

    with stage_without_threads("loading PyTorch"):
        check_addresses()
        import torch  # noqa: F401


RECIPE = "a recipe's name or file (default: the digits demonstration), and keys to change"


def add_words(
    parser: argparse.ArgumentParser,
    metavar: str = "RECIPE key=value",
    help: str = RECIPE,
    complete: str = "words",
) -> None:
    """Add the positional arguments for keys, by default after a recipe."""
    words = parser.add_argument("words", nargs="*", default=[], metavar=metavar, help=help)
    complete_with(words, complete)


def complete_with(argument: argparse.Action, how: str) -> None:
    """Complete an argument with a function of ``fedssl.cli.completion``."""

    def completer(prefix: str, **known: Any) -> list[str]:
        from fedssl.cli import completion

        return list(getattr(completion, how)(prefix, **known))

    argument.completer = completer  # type: ignore[attr-defined]


def suggest_words(arguments: Sequence[str], unknown: Sequence[str]) -> str:
    """Return the words that a user may mean who writes a key as an option, as in --rounds 50."""
    from fedssl.config import find_keys

    option = next((word for word in unknown if word.startswith("--")), "--")
    name, _, value = option[2:].partition("=")
    place = list(arguments).index(option) + 1 if option in arguments else len(arguments)
    value = value or next(iter(arguments[place : place + 1]), "")
    section, _, key = name.replace("-", "_").rpartition(".")
    keys = [found for found in find_keys(key) if not section or found == f"{section}.{key}"]
    return f". Write {' or '.join(f'{key}={value}' for key in keys)}" if keys and value else ""


def split_words(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Split the words of a command into the recipe's name, if there is one, and its keys."""
    return (words[0], words[1:]) if words and "=" not in words[0] else (None, words)
