"""Commands that train and evaluate: ``run``, ``reproduce`` and ``evaluate``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from fedssl import config
from fedssl.cli.arguments import (
    Commands,
    add_words,
    complete_with,
    load_torch,
    path,
    split_words,
)
from fedssl.runs.folder import SWEEP, check_alone, find_config, make_folder, read_recipe
from fedssl.util.errors import UserError, format_resume
from fedssl.util.text import fit_line, terminal_width

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
    run.add_argument(
        "--explain", action="store_true", help="show the keys that the words change, and stop"
    )
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
    load_torch()
    name, words = split_words(options.words)
    recipe = read_recipe(name, options.out if options.resume else None)[1]
    held = find_config(options.out) if options.resume else None
    from fedssl.runs.fit import fit_recipe

    fitted = fit_recipe(recipe, words)
    if options.explain:
        return _explain(recipe, fitted, words)
    recipe, tree = fitted, config.apply_words(fitted, words)
    # Words without lists, for a sweep's folder, are an error that the sweep reports.
    if config.find_sweep(tree) or (held is not None and held.name == SWEEP):
        notes = list(config.find_omissions(recipe, tree))
        out, named = options.out or make_folder(name or "default"), config.read_words(words)
        return _sweep(tree, out, options.resume, notes, named)
    settings = config.resolve(recipe, words)
    out = options.out or make_folder(name or "default")

    from fedssl import report
    from fedssl.runs import loop
    from fedssl.runs.outcome import judge_run
    from fedssl.runs.reader import RunReader
    from fedssl.runs.result import format_cost, format_privacy, format_result

    if not options.resume and find_config(out) is None:
        check_alone(out)
    try:
        summary = loop.run(settings, out, options.resume)
    except (loop.Interrupted, KeyboardInterrupt):
        return _report_stop(out)
    try:
        print(format_result(summary, settings, terminal_width()))
    finally:  # also when the table cannot be printed
        page = report.write_page_or_warn(out)
    print(f"\n{format_cost(summary)}")
    if privacy := format_privacy(summary):
        print(privacy)
    if outcome := judge_run(RunReader(out)):
        print(fit_line(outcome.sentence, terminal_width()))
    print(f"Run: {out}" if page is None else f"Report: {page.absolute().as_uri()}")
    return 0


def _explain(recipe: config.Recipe, fitted: config.Recipe, words: Sequence[str]) -> int:
    """Print the keys that differ from the recipe, with where each value comes from."""
    from fedssl.util.text import align_columns

    before, tree, named = (
        config.resolve(recipe),
        config.apply_words(fitted, words),
        config.read_words(words),
    )
    for values in config.combine_values(tree):  # one, or the runs of a sweep
        resolution = config.Resolution(tree, values, named)
        rows = [list(row) for row in resolution.explain(before)]
        for note in resolution.notes():
            print(f"fedssl: {note}", file=sys.stderr)
        heads = ["key", "value", "in the recipe", "from"]
        print(align_columns([heads, *rows]) if rows else "no key differs from the recipe")
    return 0


def _report_stop(out: Path) -> int:
    """Print how to continue after Ctrl-C, if the run had begun; return the exit code."""
    hint = "" if find_config(out) is None else f". Continue with: {format_resume(out)}"
    print(f"fedssl: stopped{hint}", file=sys.stderr)
    return 130


def _sweep(
    tree: config.Recipe, out: Path, resume: bool, notes: Sequence[str], named: Collection[str]
) -> int:
    from fedssl.runs import loop, sweep

    try:
        summaries = sweep.sweep(tree, out, resume, notes, named)
    except (loop.Interrupted, KeyboardInterrupt):
        return _report_stop(out)
    if summaries:
        print(sweep.format_table(summaries, terminal_width()))
    total = len(sweep.list_runs(tree, named))
    print(f"\n{len(summaries)} of {total} runs\n{out}")
    return 0 if len(summaries) == total else 1


def _reproduce(options: argparse.Namespace) -> int:
    load_torch()
    from fedssl.runs import loop, reproduce
    from fedssl.runs.paper_table import format_tables
    from fedssl.util.status import stage

    with stage("reading the recipes"):
        jobs = reproduce.plan(options.pattern, options.words, options.scale, options.out)
    try:
        failed = reproduce.work(jobs)
    except (loop.Interrupted, KeyboardInterrupt):
        finished = [job for job in jobs if job.summary() is not None]
        if finished:
            print(format_tables(finished, options.words, terminal_width()))
        print("fedssl: stopped. The same command continues from here.", file=sys.stderr)
        return 130
    print(format_tables(jobs, options.words, terminal_width()))
    return 1 if failed else 0


def _evaluate(options: argparse.Namespace) -> int:
    load_torch()
    from fedssl.runs.reevaluate import evaluate
    from fedssl.util.text import format_measures

    print(format_measures(evaluate(options.run, options.words), terminal_width()))
    return 0
