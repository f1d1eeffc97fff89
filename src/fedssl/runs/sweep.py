"""A sweep: a recipe whose keys hold lists (``partition.alpha: [5, 1]``) is a run for each value."""

from __future__ import annotations

import contextlib
import sys
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedssl import config
from fedssl.config import Config, Recipe, plugins
from fedssl.data.dataset import Dataset
from fedssl.data.heterogeneity import alter_training_images
from fedssl.data.load import load_dataset
from fedssl.data.places import name_images
from fedssl.runs import loop
from fedssl.runs.build import assemble
from fedssl.runs.folder import (
    SWEEP,
    check_alone,
    check_folder,
    check_images,
    check_moved,
    find_move,
    has_file,
    is_started,
    lock,
    update_places,
)
from fedssl.runs.reader import RunReader
from fedssl.runs.split import split_clients
from fedssl.runs.validate import check_environment
from fedssl.util.errors import TrainingError, UserError, format_resume
from fedssl.util.files import LONGEST, explain_write_errors, write_text
from fedssl.util.text import format_measures

Place = tuple[config.Data, int]  # the data and the seed, by which a data set is loaded


def list_runs(tree: Recipe) -> dict[str, Config]:
    """Return the configuration of each combination of values, by the name of its folder."""
    runs: dict[str, Config] = {}
    for values in config.combine_values(tree):
        name = _name_run(values)
        if name in runs:
            key, value = next(iter(values.items()))
            problem = f"a list has a value twice, so two runs are {name}"
            raise UserError(problem, key=key, value=value, fix="Leave one out.")
        try:
            settings = config.build(config.with_values(tree, values))
        except UserError as error:
            raise name_error(error, name) from None
        for other, before in runs.items():
            if before == settings:
                raise UserError(f"{name} is the same run as {other}", fix="Leave one out.")
        runs[name] = settings
    return runs


def sweep(
    tree: Recipe, out: Path, resume: bool, notes: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Run what is not finished, one after another; return the summaries by run.

    ``notes`` are printed once all runs are checked. A run that diverges is reported and skipped.
    """
    _check_folder(tree, out, resume)
    with contextlib.ExitStack() as stack:
        before: Recipe | None = None
        if resume:  # locked before it is read: another process may be adding to its lists
            stack.enter_context(lock(out, kind="sweep"))
            before = _read(out)
            _check_lists(tree, before, out)
            tree = _reorder(tree, before)
        settings = list_runs(tree)
        waiting = {name: run for name, run in settings.items() if _summary(out / name) is None}
        for name, run in settings.items():
            check_folder(run, out / name, is_started(out / name))
        if before is not None:
            _check_evaluation(settings, list_runs(before), settings.keys() - waiting, out)
        begun = {out / name: run for name, run in settings.items() if is_started(out / name)}
        check_same_images(begun, check_runs(waiting))
        if not resume:  # only now: a refused sweep leaves no folder
            stack.enter_context(lock(out, kind="sweep"))
            _check_folder(tree, out, resume)  # another may have come and gone
        update_all_places(begun)
        _write(_placed(tree, next(iter(settings.values()))), out)
        for note in notes:
            print(f"fedssl: {note}", file=sys.stderr)
        _run_all(settings, waiting, out)
    summaries = {name: _summary(out / name) for name in settings}
    return {name: summary for name, summary in summaries.items() if summary is not None}


def _run_all(settings: Mapping[str, Config], waiting: Collection[str], out: Path) -> None:
    for number, (name, run) in enumerate(settings.items(), 1):
        title = f"[{number}/{len(settings)}] {name}"
        print(title if name in waiting else f"{title}: finished before", file=sys.stderr)
        if name in waiting:
            try:
                loop.run(run, out / name, is_started(out / name))
            except TrainingError as error:
                print(f"{title}: {error}", file=sys.stderr)


def _check_folder(tree: Recipe, out: Path, resume: bool) -> None:
    """Check that a folder is free for a sweep, or holds one to resume."""
    key, values = next(iter(config.find_sweep(tree).items()), ("", []))
    if has_file(out, SWEEP):
        if not resume:
            fix = f"Choose another folder, or continue it: {format_resume(out)}"
            raise UserError("holds a sweep", key="--out", value=out, fix=fix)
    elif is_started(out):
        problem = f"is a sweep, and {out} holds one run"
        raise UserError(problem, key=key, value=values, fix="Choose another folder.")
    elif resume:
        problem, fix = f"{out} holds no run or sweep", "Start it without --resume."
        raise UserError(problem, key="--resume", fix=fix)
    else:
        check_alone(out)


def _read(out: Path) -> Recipe:
    """Return the sweep that a folder holds."""
    tree = config.read_yaml(out / SWEEP)
    if not config.find_sweep(tree):
        fix = "Write back the list that it had, such as seed: [0, 1]."
        raise UserError(f"{out / SWEEP} has no key with a list of values", fix=fix)
    return tree


def _check_lists(tree: Recipe, before: Recipe, out: Path) -> None:
    """Check that lists keep their values: runs are found by them."""
    lists, former = config.find_sweep(tree), config.find_sweep(before)
    for key, values in former.items():
        kept = {_text(value) for value in lists.get(key, [])}
        if any(_text(value) not in kept for value in values):
            raise UserError(
                f"was {values} in {out}",
                key=key,
                value=config.flatten(tree).get(key),
                fix="Leave it as it was, or add values.",
            )
    for key in (key for key in lists if key not in former):
        fix = "Leave it as it was, or start a new sweep in another folder."
        raise UserError(f"is no list in {out}", key=key, value=lists[key], fix=fix)


def _reorder(tree: Recipe, like: Recipe) -> Recipe:
    """Return the tree with keys in another tree's order, which names the runs' folders."""
    ordered = {key: tree[key] for key in like if key in tree}
    for key, value in ordered.items():
        if isinstance(value, dict) and isinstance(like[key], dict):
            ordered[key] = _reorder(value, like[key])
    return ordered | {key: value for key, value in tree.items() if key not in ordered}


def _check_evaluation(
    settings: Mapping[str, Config],
    before: Mapping[str, Config],
    finished: Collection[str],
    out: Path,
) -> None:
    """Check that runs of one table are evaluated alike: finished ones are not evaluated again."""
    for name in (name for name in before if name in finished):
        old, new = (config.to_tree(each[name].evaluate) for each in (before, settings))
        for key in (key for key in new if new[key] != old[key]):
            raise UserError(
                f"was {old[key]} in {out}, and {name} is finished",
                key=f"evaluate.{key}",
                value=new[key],
                fix="Leave it as it was, and use fedssl evaluate for other protocols.",
            )


def _placed(tree: Recipe, one: Config) -> Recipe:
    """Return a sweep with absolute paths, as ``one`` of its runs has them.

    Paths in lists stay: folders are named after them.
    """
    values, lists = (
        config.flatten(config.to_tree(config.with_absolute_paths(one))),
        config.find_sweep(tree),
    )
    texts = {
        key: values[key]
        for key, given in config.flatten(tree).items()
        if isinstance(given, str | list) and key in values and key not in lists
    }
    return config.with_values(tree, texts)


def _write(tree: Recipe, out: Path) -> None:
    with explain_write_errors("--out", out):
        write_text(out / SWEEP, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def update_all_places(begun: Mapping[Path, Config]) -> None:
    """Write where the images of runs and their baselines are now, also of finished ones."""
    for folder, run in begun.items():
        for each in (folder, *(folder / "baselines").glob("*")):
            if is_started(each):
                with explain_write_errors("--out", each):
                    update_places(run, each)


def check_same_images(begun: Mapping[Path, Config], loaded: Mapping[Place, Dataset]) -> None:
    """Check that runs of one table have the same images, also finished ones."""
    datasets = {data: dataset for (data, _), dataset in loaded.items()}
    for folder, run in begun.items():
        if run.data not in datasets and find_move(run, folder):
            datasets[run.data] = load_dataset(run.data, run.seed)
        if run.data in datasets:
            fix = "Put them back as they were, or start anew in another folder."
            check_images(folder, datasets[run.data], name_images(run.data), fix)
            check_moved(run, folder, datasets[run.data])


def check_runs(waiting: Mapping[str, Config]) -> dict[Place, Dataset]:
    """Check all runs before the first one starts; return the data sets that were loaded."""
    loaded: dict[Place, Dataset] = {}
    for name, run in waiting.items():
        place = (run.data, run.seed)
        baselines = sorted(set(run.evaluate.baselines) - {run.algorithm.name})
        try:
            check_environment(run)
            with plugins.translate_errors():
                if place not in loaded:
                    loaded[place] = load_dataset(*place)
                dataset = alter_training_images(run.partition, loaded[place], run.seed)
                clients = split_clients(run, dataset)
                for each in (run, *(config.with_algorithm(run, other) for other in baselines)):
                    assemble(each, dataset, clients, weights=_needs_weights(each))
        except UserError as error:
            raise name_error(error, name) from None
    return loaded


def _needs_weights(settings: Config) -> bool:
    """Return whether a check needs the network's numbers: a plug-in may, and files are read.

    In a large network they take a second each.
    """
    is_shipped = (
        settings.objective.name in config.VARIANTS["objective"]
        and settings.algorithm.name in config.VARIANTS["algorithm"]
        and not settings.encoder.name.startswith(config.TIMM)
    )
    return not is_shipped or settings.encoder.init is not None


def format_table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Format a row for each run, after an untrained network's numbers that all runs share."""
    results = {name: summary["result"] for name, summary in summaries.items()}
    measures = {measure for result in results.values() for measure in result}
    untrained = [summary["untrained"].items() for summary in summaries.values()]
    shared = {
        k: v for k, v in untrained[0] if k in measures and all((k, v) in u for u in untrained)
    }
    return format_measures(({"untrained": shared} if shared else {}) | results)


def _summary(folder: Path) -> dict[str, Any] | None:
    return (RunReader(folder).summary or None) if is_started(folder) else None


def name_error(error: UserError, name: str, kind: str = "run") -> UserError:
    """Return an error that also names the run, unless there is only one."""
    problem = f"{error.problem} ({kind} {name})" if name else error.problem
    if error.key is None:
        return UserError(problem, fix=error.fix)
    return UserError(problem, key=error.key, value=error.value, fix=error.fix)


def _name_run(values: Mapping[str, Any]) -> str:
    """Return the name of a run's folder, made of its values."""
    parts = {key: f"{key}={_text(value)}" for key, value in values.items()}
    for key, part in parts.items():
        if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in part):
            problem = "a run's folder is named after it, and has a control character"
            raise UserError(problem, key=key, value=repr(values[key]), fix="Leave it out.")
    name = ",".join(parts.values())
    if len(name.encode()) > LONGEST:
        key = max(parts, key=lambda key: len(parts[key]))
        raise UserError(
            f"a run's folder is named after it, with {len(name.encode())} bytes in all where "
            f"{LONGEST} fit",
            key=key,
            value=f"{_text(values[key])[:60]}…",
            fix="Use shorter values, or fewer keys with lists.",
        )
    return name


def _text(value: Any) -> str:
    """Return a value as it stands in the name of a folder."""
    parts = value if isinstance(value, list) else [value]
    return "+".join(str(part).replace("/", "-") for part in parts)
