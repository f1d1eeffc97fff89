# PYTHON_ARGCOMPLETE_OK
"""The command line. Commands import torch when they need it, so that ``--help`` is quick.

With the extra ``completion``, ``eval "$(register-python-argcomplete fedssl)"`` completes words in
bash, zsh and fish.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Sequence

from fedssl import __version__
from fedssl.cli import deploy, encoders, recipes, reports, runs, tools
from fedssl.cli.arguments import Parser, suggest_words
from fedssl.util.console import protect_streams
from fedssl.util.errors import TrainingError, UserError, shorten
from fedssl.util.files import FULL
from fedssl.util.memory import explain_full_memory
from fedssl.util.text import escape
from fedssl.util.tuning import shorten_thread_waits

EXAMPLES = """examples:
  fedssl run                                  DCCO on scikit-learn's digits, in under a minute
  fedssl run rounds=50 seed=1 --out runs/a    the same with other keys
  fedssl run dcco/table1/dcco/noniid-4        a row of a paper's table
  fedssl run --resume --out runs/a            continue after Ctrl-C or a crash
  fedssl run sites data.root=DIR              your own images, a folder for each site
  fedssl recipes fedema/table3                a table's recipes, with the paper's numbers
  fedssl reproduce fedema/table3 --scale 0.1  all of them, with a tenth of the rounds

your own algorithm:  fedssl run algorithm.name=path/to/file.py:Name
completion:          eval "$(register-python-argcomplete fedssl)"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0, 1 (training failed), 2 (a mistake to fix)."""
    protect_streams()
    options: argparse.Namespace | None = None
    try:
        options = parse(arguments)
        shorten_thread_waits()
        with explain_full_memory():
            code = int(options.command(options))
        sys.stdout.flush()  # a full disk is an error here, where it can still be reported
        return code
    except (UserError, TrainingError) as error:
        if error.__cause__ is not None:  # an error of the user's own code
            traceback.print_exception(error.__cause__)
        print(f"fedssl: {escape(error)}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:
        if isinstance(error, PermissionError) and isinstance(error.filename, str):
            fix = "Change the permissions of the file or its folder."
        elif error.errno in FULL:
            then = "continue with --resume" if hasattr(options, "resume") else "try again"
            fix = f"Make room, then {then}."
        elif error.errno == errno.ENAMETOOLONG:
            fix = "Use a shorter name."
        else:
            raise
        where = f"{shorten(str(error.filename))}: " if error.filename else ""
        print(f"fedssl: {where}{error.strerror}. {fix}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fedssl: stopped", file=sys.stderr)
        return 130


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse like ``parse_args``, and accept key=value words after an option too."""
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:
        _complete(parser)
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "words") or any(word.startswith("-") for word in rest)):
        meant = suggest_words(sys.argv[1:] if arguments is None else arguments, rest)
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
    if rest:
        options.words = [*options.words, *rest]
    return options


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and exit, where argcomplete is installed."""
    with contextlib.suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(parser)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, in the order in which ``--help`` lists them."""
    parser = Parser(
        prog="fedssl",
        description="Train image encoders on unlabeled images that stay where they are.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fedssl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    runs.add_run(commands)
    recipes.add_recipes(commands)
    runs.add_reproduce(commands)
    runs.add_evaluate(commands)
    tools.add_partition(commands)
    reports.add_report(commands)
    reports.add_compare(commands)
    encoders.add_export(commands)
    encoders.add_embed(commands)
    encoders.add_search(commands)
    encoders.add_detect(commands)
    deploy.add_deploy(commands)
    tools.add_theory(commands)
    tools.add_doctor(commands)
    return parser
