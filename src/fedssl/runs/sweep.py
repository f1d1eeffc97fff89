"""A sweep: a recipe whose keys hold lists (``partition.alpha: [5, 1]``) is a run for each value."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedssl import config
from fedssl.config import Config, Recipe
from fedssl.runs.batch import PlannedRun, check_all, name_in_errors, run_all
from fedssl.runs.folder import SWEEP, check_alone, check_kind, lock
from fedssl.runs.reader import read_keys
from fedssl.util.errors import UserError
from fedssl.util.files import LONGEST, explain_write_errors, remove_strays, write_text
from fedssl.util.seals import seal_text
from fedssl.util.text import format_measures


def list_runs(
    tree: Recipe, named: Collection[str] = (), say: Callable[[str], None] = lambda note: None
) -> dict[str, Config]:
    """Return the configuration of each combination of values, by the name of its folder.

    ``named`` are the keys of the tree that the user gave.
    """
    runs: dict[str, Config] = {}
    for values in config.combine_values(tree):
        name = ",".join(f"{key}={_format(value)}" for key, value in values.items())
        with name_in_errors(name):
            resolution = config.Resolution(tree, values, named)
        settings = resolution.config
        for note in resolution.notes():
            say(f"{name}: {note}" if name else note)
        if runs.setdefault(name, settings) != settings:
            fix = "Use values that give different names (a / becomes a -)."
            raise UserError(f"two values give the folder {name}", fix=fix)
        if len(name.encode()) > LONGEST:
            fix = "Use shorter values, or fewer keys with lists."
            raise UserError(f"{name[:60]}… is too long a name for a run's folder", fix=fix)
    return runs


def _format(value: Any) -> str:
    """Format a value for the name of a folder."""
    parts = value if isinstance(value, list) else [value]
    return "+".join(str(part).replace("/", "-") for part in parts)


def sweep(
    tree: Recipe,
    out: Path,
    resume: bool,
    notes: Sequence[str] = (),
    named: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Run what is not finished, one after another; return the summaries by run.

    ``named`` are the keys of the tree that the user gave. ``notes`` are printed once all runs are
    checked. A run that diverges is reported and skipped.
    """
    said = list(notes)
    _check_folder(out, resume)
    with contextlib.ExitStack() as stack:
        before: Recipe = {}
        if resume:  # locked before it is read: another process may be adding to its lists
            stack.enter_context(lock(out))
            before = read_keys(out / SWEEP, is_resumed=True)
        tree = _reorder(tree, before)
        settings = list_runs(tree, named, said.append)
        lost = [name for name in list_runs(before) if name not in settings] if before else []
        if lost:
            problem = f"has the run {lost[0]}, and no list has these values"
            fix = "Keep the lists as they were. You may add values."
            raise UserError(problem, key="--out", value=out, fix=fix)
        runs = [PlannedRun(name, each, out / name) for name, each in settings.items()]
        check_all(runs)
        if not resume:  # only now: a refused sweep leaves no folder
            stack.enter_context(lock(out))
            _check_folder(out, resume)  # another may have come and gone
        with explain_write_errors("--out", out):
            remove_strays([out])
            text = yaml.safe_dump(
                _with_absolute_paths(tree, runs[0].settings), sort_keys=False, allow_unicode=True
            )
            write_text(out / SWEEP, seal_text(text))
        for note in said:
            print(f"fedssl: {note}", file=sys.stderr)
        for _ in run_all(runs):
            pass
    summaries = {run.label: run.summary() for run in runs}
    return {name: summary for name, summary in summaries.items() if summary is not None}


def _check_folder(out: Path, resume: bool) -> None:
    check_kind(out, resume, SWEEP)
    if not resume:
        check_alone(out)


def _reorder(tree: Recipe, like: Recipe) -> Recipe:
    """Return the tree with keys in another tree's order, which names the runs' folders."""
    ordered = {key: tree[key] for key in like if key in tree}
    for key, value in ordered.items():
        if isinstance(value, dict) and isinstance(like[key], dict):
            ordered[key] = _reorder(value, like[key])
    return ordered | {key: value for key, value in tree.items() if key not in ordered}


def _with_absolute_paths(tree: Recipe, one: Config) -> Recipe:
    """Return a sweep with absolute paths, as ``one`` of its runs has them.

    Paths in lists stay: folders are named after them.
    """
    values = config.flatten(config.to_tree(config.with_absolute_paths(one)))
    single = config.flatten(tree).keys() - config.find_sweep(tree).keys()
    return config.with_values(tree, {key: values[key] for key in single if key in values})


def format_table(summaries: Mapping[str, Mapping[str, Any]], width: int | None = None) -> str:
    """Format a row for each run, after an untrained network's numbers that all runs share."""
    results = {name: summary["result"] for name, summary in summaries.items()}
    measures = {measure for result in results.values() for measure in result}
    untrained = [summary["untrained"].items() for summary in summaries.values()]
    shared = {
        k: v for k, v in untrained[0] if k in measures and all((k, v) in u for u in untrained)
    }
    return format_measures(({"untrained": shared} if shared else {}) | results, width)
