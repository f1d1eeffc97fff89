"""The command line. Torch is imported when a command needs it, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fedssl import __version__
from fedssl import config as configuration
from fedssl.errors import TrainingError, UserError

EXAMPLES = """examples:
  fedssl run                                  DCCO on scikit-learn's digits, in under a minute
  fedssl run rounds=50 seed=1 --out runs/a    the same with other keys
  fedssl run dcco/cifar100-noniid-4           a row of a paper's table
  fedssl run --resume --out runs/a            go on after Ctrl-C or a crash
  fedssl run folder data.root=DIR             your own images
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, 1 (training failed), 2 (a mistake to mend)."""
    options = _parser().parse_args(arguments)
    # Waiting threads must not spin: on a busy machine that makes small networks far slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        return int(options.command(options))
    except UserError as error:
        print(f"fedssl: {error}", file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"fedssl: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read us (head, less) has gone; Python must not complain when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        where = f"{error.filename}: " if error.filename else ""
        hint = "make room, then continue with --resume"
        print(f"fedssl: {where}{error.strerror}; {hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fedssl: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedssl",
        description="Train image encoders on unlabeled images that stay where they are.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fedssl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="train, judge, and leave a run's folder")
    _add_words(run)
    run.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/…)")
    run.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    run.set_defaults(command=_run)

    recipes = commands.add_parser("recipes", help="what ships, and which row of which paper it is")
    recipes.set_defaults(command=_recipes)

    evaluate = commands.add_parser("evaluate", help="judge a run again, from its last checkpoint")
    evaluate.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    evaluate.add_argument("words", nargs="*", metavar="key=value", help="evaluate.* or data.* keys")
    evaluate.set_defaults(command=_evaluate)

    partition = commands.add_parser("partition", help="who holds what, as a table")
    _add_words(partition)
    partition.set_defaults(command=_partition)
    return parser


def _add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RECIPE key=value",
        help="a recipe's name or file (default: the digits demonstration), and keys to change",
    )


def _resolve(words: Sequence[str]) -> tuple[str, configuration.Config]:
    """Recipe and configuration from the words of a command."""
    recipe = words[0] if words and "=" not in words[0] else None
    overrides = words[1:] if recipe else words
    return recipe or "default", configuration.resolve(configuration.read_recipe(recipe), overrides)


def _run(options: argparse.Namespace) -> int:
    if options.resume and options.out is None:
        raise UserError("--resume: say which run with --out DIR")
    known = options.out / "config.yaml" if options.resume else None
    if known is not None and known.exists() and not (options.words and "=" not in options.words[0]):
        # Without a recipe's name, words change the run's own configuration.
        name, settings = "run", configuration.resolve(configuration.read_yaml(known), options.words)
    else:
        name, settings = _resolve(options.words)
    out = options.out or _fresh_folder(name)

    from fedssl import run, tables

    try:
        summary = run.run(settings, out, options.resume)
    except run.Interrupted:
        print(f"fedssl: stopped; continue with: fedssl run --resume --out {out}", file=sys.stderr)
        return 130
    print(tables.result(summary, settings))
    print(f"\n{tables.closing(summary)}\n{out}")
    return 0


def _fresh_folder(name: str) -> Path:
    stem = Path("runs") / f"{Path(name).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    out, number = stem, 2
    while out.exists():
        out, number = stem.with_name(f"{stem.name}-{number}"), number + 1
    return out


def _recipes(options: argparse.Namespace) -> int:
    from fedssl import tables

    print(tables.recipes())
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from fedssl import tables
    from fedssl.reevaluate import evaluate

    print(tables.rows(evaluate(options.run, options.words)))
    return 0


def _partition(options: argparse.Namespace) -> int:
    _, settings = _resolve(options.words)

    from fedssl.data import datasets
    from fedssl.data.partition import Folder, partition, table

    dataset = datasets.load(settings.data, settings.seed)
    train = dataset.train
    groups = partition(settings.partition, train, len(dataset.classes), settings.seed)
    labels = None if train.labels is None else train.labels.numpy()
    by_folder = isinstance(settings.partition, Folder.Params)
    names = dataset.clients if by_folder and len(dataset.clients) >= len(groups) else ()
    print(table(groups, labels, dataset.classes, len(train), names))
    return 0
