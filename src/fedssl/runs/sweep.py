"""A sweep: a recipe whose keys hold lists (``partition.alpha: [5, 1]``) is a run for each value."""

from __future__ import annotations

import contextlib
import re
import sys
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedssl import config
from fedssl.config import Config, plugins
from fedssl.data.dataset import Dataset
from fedssl.data.heterogeneity import alter_training_images
from fedssl.data.load import load_dataset
from fedssl.data.places import name_images
from fedssl.engines.flower.environment import require_flower
from fedssl.runs import checkpoint, loggers, run
from fedssl.runs.build import assemble
from fedssl.runs.record import Run
from fedssl.runs.split import split_clients
from fedssl.util.errors import TrainingError, UserError
from fedssl.util.files import LONGEST, write_text, writing
from fedssl.util.text import format_measures

FILE = "sweep.yaml"
Place = tuple[config.Data, int]  # what data is loaded by, and the seed


def runs(tree: config.Tree) -> dict[str, Config]:
    """The settings of each run, by what is its own: every combination of the lists' values."""
    found: dict[str, Config] = {}
    for own in config.combine_values(tree):
        label = _label(own)
        if label in found:
            raise UserError(f"{label}: stands in a list twice; leave one out")
        try:
            settings = config.build(config.with_values(tree, own))
        except UserError as error:
            raise _of_run(label, error) from None
        for other, before in found.items():
            if before == settings:
                raise UserError(f"{label}: the same run as {other}; leave one out")
        found[label] = settings
    return found


def _of_run(label: str, error: UserError) -> UserError:
    """A line about one run; the key that it begins with is not said twice."""
    key = re.escape(str(error).partition("=")[0])
    others = re.sub(rf"(^|[, ]){key}=.*?(?=,[a-z_.]+=|$)", "", label).lstrip(",")
    return UserError(": ".join(filter(None, (others, str(error)))))


def sweep(
    tree: config.Tree, out: Path, resume: bool, notes: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Run what is not finished, one after another; the summaries of all, by what is their own.

    ``notes`` are said once all are checked. A run that diverges is said and passed over.
    """
    _check_folder(tree, out, resume)
    with contextlib.ExitStack() as stack:
        held = checkpoint.locked(out / checkpoint.LOCK, f"--out {out}", run.WAIT, "sweep")
        before = None
        if resume:  # before it is read: another may be about to add to its lists
            stack.enter_context(held)
            before = _read(out)
            _check_lists(tree, before, out)
            tree = _in_order(tree, before)
        settings = runs(tree)
        waiting = {label: own for label, own in settings.items() if _summary(out / label) is None}
        for label, own in settings.items():
            run.check_folder(own, out / label, run.started(out / label))
        if before is not None:
            _check_judged(settings, runs(before), settings.keys() - waiting, out)
        begun = {out / label: own for label, own in settings.items() if run.started(out / label)}
        check_images(begun, check(waiting))
        if not resume:  # only now: what is refused leaves no folder
            stack.enter_context(held)
            _check_folder(tree, out, resume)  # another may have come and gone
        note_places(begun)
        _write(_placed(tree, next(iter(settings.values()))), out)
        for note in notes:
            print(f"fedssl: {note}", file=sys.stderr)
        _work(settings, waiting, out)
    found = {label: _summary(out / label) for label in settings}
    return {label: summary for label, summary in found.items() if summary is not None}


def _work(settings: Mapping[str, Config], waiting: Collection[str], out: Path) -> None:
    """One run after another, but for those that are finished."""
    for number, (label, own) in enumerate(settings.items(), 1):
        done = "" if label in waiting else ": finished before"
        print(f"[{number}/{len(settings)}] {label}{done}", file=sys.stderr)
        if label in waiting:
            try:
                run.run(own, out / label, run.started(out / label))
            except TrainingError as error:
                print(f"[{number}/{len(settings)}] {label}: {error}", file=sys.stderr)


def _check_folder(tree: config.Tree, out: Path, resume: bool) -> None:
    """Refuse a folder that holds something else, or no sweep to resume."""
    started = run.holds(out, FILE)
    if started and not resume:
        raise UserError(f"--out {out}: holds a sweep; choose another folder, or use --resume")
    if started:
        return
    if run.started(out):
        key, values = next(iter(config.find_sweep(tree).items()))
        if resume:
            raise UserError(
                f"--resume: {out} holds one run, and {key}={values} is several; leave it out, or "
                "start a sweep in another folder"
            )
        raise UserError(
            f"--out {out}: holds a run, and {key}={values} is a sweep; choose another folder"
        )
    if resume:
        raise UserError(f"--resume: {out} holds no run or sweep; start it without --resume")
    run.check_alone(out)


def _read(out: Path) -> config.Tree:
    """The sweep that a folder holds."""
    tree = config.read_yaml(out / FILE)
    if not config.find_sweep(tree):
        raise UserError(
            f"{out / FILE}: no key has a list of values; write back what it had, as in seed: [0, 1]"
        )
    return tree


def _check_lists(tree: config.Tree, before: config.Tree, out: Path) -> None:
    """Refuse lists that lack what they had: runs are found by their values, and would be lost."""
    lists, former = config.find_sweep(tree), config.find_sweep(before)
    for key, values in former.items():
        kept = {_text(value) for value in lists.get(key, [])}
        if any(_text(value) not in kept for value in values):
            raise UserError(
                f"--resume: {key} was {values} in {out} and is now "
                f"{config.flatten(tree).get(key, 'not given')}; leave it as it was, or add values"
            )
    for key in (key for key in lists if key not in former):
        raise UserError(
            f"--resume: {key}={lists[key]} is a list, and the sweep in {out} has none of it; leave "
            "it as it was, or start a new sweep in another folder"
        )


def _in_order(tree: config.Tree, like: config.Tree) -> config.Tree:
    """The same with keys in another tree's order, in which its folders are named."""
    known = {key: tree[key] for key in like if key in tree}
    for key, value in known.items():
        if isinstance(value, dict) and isinstance(like[key], dict):
            known[key] = _in_order(value, like[key])
    return known | {key: value for key, value in tree.items() if key not in known}


def _check_judged(
    settings: Mapping[str, Config],
    before: Mapping[str, Config],
    finished: Collection[str],
    out: Path,
) -> None:
    """Runs of one table are judged alike, and those that are finished are not judged again."""
    for label in (label for label in before if label in finished):
        old, new = (config.to_tree(each[label].evaluate) for each in (before, settings))
        for key in (key for key in new if new[key] != old[key]):
            raise UserError(
                f"--resume: evaluate.{key} was {old[key]} in {out} and is now {new[key]}, and "
                f"{label} is finished; leave it as it was, and judge runs again by fedssl evaluate"
            )


def _placed(tree: config.Tree, one: Config) -> config.Tree:
    """A sweep with paths that mean the same from any folder, as ``one`` of its runs has them.

    In lists they stay as they are: folders are named after them.
    """
    values, lists = (
        config.flatten(config.to_tree(config.with_absolute_paths(one))),
        config.find_sweep(tree),
    )
    texts = {
        key: values[key]
        for key, given in config.flatten(tree).items()
        if isinstance(given, (str, list)) and key in values and key not in lists
    }
    return config.with_values(tree, texts)


def _write(tree: config.Tree, out: Path) -> None:
    with writing(f"--out {out}"):
        write_text(out / FILE, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def note_places(begun: Mapping[Path, Config]) -> None:
    """Write down where the images of runs and their baselines are, finished ones too."""
    for folder, own in begun.items():
        for each in (folder, *(folder / "baselines").glob("*")):
            if run.started(each):
                with writing(f"--out {each}"):
                    run.note_place(own, each)


def check_images(begun: Mapping[Path, Config], loaded: Mapping[Place, Dataset]) -> None:
    """Runs of one table have the same images, those that are finished too."""
    known = {data: dataset for (data, _), dataset in loaded.items()}
    for folder, own in begun.items():
        if own.data not in known and run.moved(own, folder):
            known[own.data] = load_dataset(own.data, own.seed)
        if own.data not in known:
            continue
        if checkpoint.of_other_images(folder, known[own.data]):
            key, value = name_images(own.data)
            raise UserError(
                f"the training images are not those of {folder}",
                key=key,
                value=value,
                fix="Put them back as they were, or start anew in another folder.",
            )
        run.check_moved(own, folder, known[own.data])


def check(waiting: Mapping[str, Config]) -> dict[Place, Dataset]:
    """Refuse, before the first run, whatever any of them would be refused for in its turn.

    What was loaded for it is given back.
    """
    loaded: dict[Place, Dataset] = {}
    for label, own in waiting.items():
        place = (own.data, own.seed)
        names = sorted(set(own.evaluate.baselines) - {own.algorithm.name})
        try:
            run.check_here(own)
            loggers.require(own)
            if own.engine.name == "flower":
                require_flower()
            with plugins.translate_errors():
                if place not in loaded:
                    loaded[place] = load_dataset(*place)
                data = alter_training_images(own.partition, loaded[place], own.seed)
                groups = split_clients(own, data)
                for settings in (own, *(config.with_algorithm(own, name) for name in names)):
                    assemble(settings, data, groups, weights=_needs_weights(settings))
        except UserError as error:
            raise _of_run(label, error) from None
    return loaded


def _needs_weights(settings: Config) -> bool:
    """Whether a network is checked in full: others' code may look at numbers, and files are read.

    All others are checked without weights, which take a second each in a large network.
    """
    ours = (
        settings.objective.name in config.VARIANTS["objective"]
        and settings.algorithm.name in config.VARIANTS["algorithm"]
        and not settings.encoder.name.startswith(config.TIMM)
    )
    return not ours or settings.encoder.init is not None


def table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each run; after an untrained network's numbers that are the same for all."""
    results = {label: summary["result"] for label, summary in summaries.items()}
    named = {measure for result in results.values() for measure in result}
    untrained = [summary["untrained"].items() for summary in summaries.values()]
    same = {k: v for k, v in untrained[0] if k in named and all((k, v) in u for u in untrained)}
    return format_measures(({"untrained": same} if same else {}) | results)


def _summary(folder: Path) -> dict[str, Any] | None:
    return (Run(folder).summary or None) if run.started(folder) else None


def _label(own: Mapping[str, Any]) -> str:
    """What is a run's own, which is also its folder's name."""
    parts = {key: f"{key}={_text(value)}" for key, value in own.items()}
    for key, part in parts.items():
        if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in part):
            raise UserError(
                f"{key}={_text(own[key])!r}: a run's folder is named after it, and cannot be; "
                "leave control characters out"
            )
    label = ",".join(parts.values())
    if len(label.encode()) > LONGEST:
        longest = max(parts.values(), key=len)
        raise UserError(
            f"{longest[:60]}…: a run's folder is named after it, with {len(label.encode())} bytes "
            f"in all where {LONGEST} fit; give shorter values, or fewer keys with lists"
        )
    return label


def _text(value: Any) -> str:
    """A value in the name of a folder."""
    parts = value if isinstance(value, list) else [value]
    return "+".join(str(part).replace("/", "-") for part in parts)
