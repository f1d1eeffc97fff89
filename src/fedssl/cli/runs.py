"""Commands that train and evaluate: ``run``, ``reproduce`` and ``evaluate``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedssl import config
from fedssl.cli.arguments import Commands, add_words, complete_with, path, resolve_words
from fedssl.runs.folder import SWEEP, check_alone, has_file, make_folder
from fedssl.util.errors import UserError, format_resume

REPRODUCE = """examples:
  fedssl reproduce fedema/table3                          every cell of a table, one after another
  fedssl reproduce fedema/table3/fedbyol                  one row
  fedssl reproduce 'fedema/table3/*/cifar10-noniid'       one column
  fedssl reproduce 'fedema/table3/*/cifar10-noniid' --scale 0.05 data.name=digits \
      data.size=16 encoder.name=tiny objective.projector=[64,32]   a rehearsal on a CPU
  fedssl reproduce mine.yaml                              a table of your own

The same command continues after Ctrl-C. Finished runs are not repeated.
"""


def add_run(commands: Commands) -> None:
    """Add ``fedssl run``."""
    run = commands.add_parser("run", help="train and evaluate, and write a run's folder")
    add_words(run)
    run.add_argument("--out", type=path, metavar="DIR", help="the run's folder (default: runs/…)")
    run.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    run.set_defaults(command=_run)


def add_reproduce(commands: Commands) -> None:
    """Add ``fedssl reproduce``."""
    parser = commands.add_parser(
        "reproduce",
        help="run a paper's table and compare with the paper's numbers",
        epilog=REPRODUCE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pattern = parser.add_argument(
        "pattern", metavar="PATTERN", help="a recipe, a table, or a pattern"
    )
    complete_with(pattern, "recipes")
    add_words(parser, "key=value", "keys to change in all", "keys")
    parser.add_argument("--scale", default="1", metavar="S", help="share of the rounds, up to 1")
    parser.add_argument(
        "--out", type=path, metavar="DIR", help="the folder of the runs (default: runs/reproduce)"
    )
    parser.set_defaults(command=_reproduce)


def add_evaluate(commands: Commands) -> None:
    """Add ``fedssl evaluate``."""
    evaluate = commands.add_parser(
        "evaluate", help="evaluate a run again, from its last checkpoint"
    )
    evaluate.add_argument("run", type=path, metavar="RUN", help="a run's folder")
    add_words(evaluate, "key=value", "evaluate.* or data.* keys", "evaluation_keys")
    evaluate.set_defaults(command=_evaluate)


def _run(options: argparse.Namespace) -> int:
    if options.resume and options.out is None:
        folder = next((word for word in options.words if Path(word).is_dir()), None)
        fix = f"Add --out {folder or 'DIR'}."
        raise UserError("the run's folder is missing", key="--resume", fix=fix)
    swept = _find_sweep(options)
    if swept is not None:
        return _sweep(*swept, options)
    name, settings = resolve_words(options.words, options.out if options.resume else None)
    out = options.out or make_folder(name)

    from fedssl import report
    from fedssl.runs import loop
    from fedssl.runs.result import format_cost, format_result

    if not options.resume and _find_config(out) is None:
        check_alone(out)
    try:
        summary = loop.run(settings, out, options.resume)
    except (loop.Interrupted, KeyboardInterrupt):
        return _report_stop(out)
    try:
        print(format_result(summary, settings))
    finally:  # also when the table cannot be printed
        report.write_page_or_warn(out)
    print(f"\n{format_cost(summary)}\n{out}")
    return 0


def _find_sweep(options: argparse.Namespace) -> tuple[str, config.Recipe, list[str]] | None:
    """Return a sweep's recipe name, its keys, and the keys that its runs leave out.

    It is a sweep if keys hold lists, or if --out is a sweep's folder.
    """
    named = bool(options.words) and "=" not in options.words[0]
    words = options.words[1:] if named else options.words
    held = _find_config(options.out) if options.resume else None
    name = options.words[0] if named else "default"
    recipe = config.read_recipe(name) if named or held is None else config.read_yaml(held)
    tree = config.apply_words(recipe, words)
    # Words without lists, for a sweep's folder, are an error that the sweep reports.
    goes_on = held is not None and held.name == SWEEP
    if not goes_on and not config.find_sweep(tree):
        return None
    return name, tree, list(config.find_omissions(recipe, tree))


def _find_config(out: Path) -> Path | None:
    """Return the configuration file of the sweep or run in a folder, if there is one."""
    files = (SWEEP, "config.yaml")
    return next((out / file for file in files if has_file(out, file)), None)


def _report_stop(out: Path) -> int:
    """Print how to continue after Ctrl-C, if the run had begun; return the exit code."""
    hint = "" if _find_config(out) is None else f". Continue with: {format_resume(out)}"
    print(f"fedssl: stopped{hint}", file=sys.stderr)
    return 130


def _sweep(
    name: str, tree: config.Recipe, notes: Sequence[str], options: argparse.Namespace
) -> int:
    from fedssl.runs import loop, sweep

    out = options.out or make_folder(name)
    try:
        summaries = sweep.sweep(tree, out, options.resume, notes)
    except (loop.Interrupted, KeyboardInterrupt):
        return _report_stop(out)
    if summaries:
        print(sweep.format_table(summaries))
    total = len(sweep.list_runs(tree))
    print(f"\n{len(summaries)} of {total} runs\n{out}")
    return 0 if len(summaries) == total else 1


def _reproduce(options: argparse.Namespace) -> int:
    from fedssl.runs import loop, reproduce
    from fedssl.runs.paper_table import format_tables

    jobs = reproduce.plan(options.pattern, options.words, options.scale, options.out)
    try:
        failed = reproduce.work(jobs)
    except (loop.Interrupted, KeyboardInterrupt):
        finished = [job for job in jobs if job.summary() is not None]
        if finished:
            print(format_tables(finished, options.words))
        print("fedssl: stopped. The same command continues from here.", file=sys.stderr)
        return 130
    print(format_tables(jobs, options.words))
    return 1 if failed else 0


def _evaluate(options: argparse.Namespace) -> int:
    from fedssl.runs.reevaluate import evaluate
    from fedssl.util.text import format_measures

    print(format_measures(evaluate(options.run, options.words)))
    return 0
