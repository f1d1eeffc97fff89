"""``fedssl evaluate``: judge a run's encoder again, under other protocols or on other data."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedssl import config
from fedssl.data.dataset import Dataset
from fedssl.data.load import convert_channels, load_dataset
from fedssl.data.places import name_images
from fedssl.evaluate import parse, protocols
from fedssl.runs import checkpoint
from fedssl.runs.build import build_evaluation
from fedssl.runs.finish import list_clients
from fedssl.runs.folder import check_clients
from fedssl.runs.reader import RunReader, section
from fedssl.runs.result import split_models
from fedssl.runs.validate import is_deployed, list_evaluation_warnings
from fedssl.util.errors import UserError
from fedssl.util.text import shorten_list

FILE = "evaluations.jsonl"
# Keys about rounds, which are over, and about other runs.
OF_TRAINING = config.keys_affecting(config.Config, "monitoring")
SAME_IMAGES = {"data.size", "data.cache", "data.corrupt"}  # keys that leave them the run's own
OF_OWN_DATA = {
    "per-client": "judges the run's own clients",
    "collaborative": "fine-tunes at the run's own clients",
    "heldout": "judges on what the run kept out of its own training",
}


def evaluate(run: Path, words: Sequence[str]) -> dict[str, dict[str, float]]:
    """The rows of a run's result and of an untrained network; also appended to the run's folder."""
    known = run / "config.yaml"
    if not known.is_file():
        if (run / "sweep.yaml").exists():
            raise UserError(f"{run}: holds a sweep; name one of its runs")
        raise UserError(
            f"{run}: holds no run (no config.yaml in it); an encoder alone is judged by `fedssl "
            "run` with encoder.init=PATH rounds=0"
        )
    for word in words:
        if not word.startswith(("evaluate.", "data.", "device=")):
            raise UserError(f"{word}: only evaluate.*, data.* and device can change here")
        if word.startswith("data.holdout"):
            raise UserError(f"{word}: what was held out of training is decided when it starts")
        if word.partition("=")[0] in OF_TRAINING:
            raise UserError(f"{word}: is about training, and nothing is trained here; leave it out")
    tree = config.read_yaml(known)
    settings = config.resolve(tree, words)
    # What watched the rounds says nothing here, and need not suit the protocols or the data.
    settings = replace(settings, evaluate=replace(settings.evaluate, monitor=None, targets=()))
    given = {word.partition("=")[0] for word in words if word.startswith("data.")} - SAME_IMAGES
    sites = is_deployed(settings)
    if sites and not given:  # it was trained on images that are elsewhere: the server's are others
        given = {"data.root"}
    dataset, classes = None, None
    if given == {"data.root"}:
        # Whole: of labels to draw, others may have too few.
        dataset = _load(replace(settings.data, labels=None), settings.seed, given)
        if checkpoint.has_same_images(run, dataset):  # which were moved
            given, dataset = set(), dataset if settings.data.labels is None else None
    if given:
        own, levels = section(tree, "data").get("name"), settings.data.levels
        settings = _on_other_data(settings, given, own)
        if dataset is None or settings.data.levels != levels:
            dataset = _load(settings.data, settings.seed, given)
        if settings.data.name == own:
            _say_levels(run, levels, settings.data, dataset.classes)
        dataset = _fitting(run, settings.data, dataset)
        settings, classes = _of_other_classes(settings, dataset, checkpoint.read_classes(run))
    experiment = build_evaluation(settings, dataset, classes)
    experiment.of_sites = sites
    if not given and checkpoint.has_other_images(run, experiment.dataset):
        where, fix = name_images(settings.data), "evaluate on other images with data.root"
        check_clients(run, list_clients(experiment), experiment.dataset, where, fix)
    if not given and checkpoint.has_other_images(run, experiment.dataset, "test"):
        said = "the test images are not those that the run had; its summary.json has those'"
        print(f"fedssl: evaluate: {said} numbers", file=sys.stderr)
    experiment.engine.open(run)
    if not checkpoint.read(run, experiment):
        raise UserError(f"{run}: has no checkpoint yet; let it run, or resume it")
    done, rounds = experiment.server.round, settings.rounds
    if done < rounds:
        print(f"fedssl: evaluate: round {done} of {rounds}: it has not ended", file=sys.stderr)
    for note in list_evaluation_warnings(experiment):
        print(f"fedssl: evaluate: {note}", file=sys.stderr)
    rows = {
        "untrained": experiment.evaluator.evaluate_untrained(experiment.untrained()),
        "result": experiment.evaluator.evaluate_result(experiment.models),
    }
    _append(run, {"rounds": experiment.server.round, "changed": list(words), "rows": rows})
    shown = split_models("result", rows["result"], experiment.models.result)
    return {"untrained": rows["untrained"], **shown}


def _append(run: Path, found: dict[str, Any]) -> None:
    line = {"date": time.strftime("%Y-%m-%dT%H:%M:%S"), **found}
    try:
        with (run / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:  # the numbers are still worth seeing
        print(f"fedssl: {run / FILE}: not written ({error.strerror})", file=sys.stderr)


def _fitting(run: Path, data: config.Data, dataset: Dataset) -> Dataset:
    """Other images as the run's encoder takes them, grey or in colour; enough to say anything."""
    where, train = "=".join(name_images(data)), dataset.train
    if len(train) < 2:
        raise UserError(f"{where}: holds {len(train)} training image; judging needs at least two")
    # None: the run has not ended, and its checkpoint will say that something differs.
    wanted, now = (
        RunReader(run).read_json("encoder.json", {}).get("channels"),
        train.images[0].shape[1],
    )
    if wanted and wanted[0] != now:
        kind = "grey" if wanted[0] == 1 else "in colour"
        print(
            f"fedssl: evaluate: {where}: images are made {kind}, as the run's are", file=sys.stderr
        )
    return convert_channels(dataset, wanted) if wanted else dataset


def _load(data: config.Data, seed: int, given: Set[str]) -> Dataset:
    try:
        return load_dataset(data, seed)
    except UserError as error:
        if "data.levels" in given or error.key != "data.levels":
            raise
        fix = f"{error.fix} The run set this key."
        raise UserError(error.problem, key=error.key, value=error.value, fix=fix) from None


def _needs_class(settings: config.Config) -> bool:
    """Whether protocols with labels are asked for, and the run's folders told of none."""
    levels, named = settings.data.levels, settings.evaluate.protocols or ()
    return levels is not None and "class" not in levels and bool(set(named) - {"unlabeled"})


def _say_levels(
    run: Path, own: tuple[str, ...] | None, data: config.Data, classes: tuple[str, ...]
) -> None:
    """What folders were taken for whose meaning nobody said; sites are not taken for classes."""
    if data.levels == own or not classes:
        return
    where = "=".join(name_images(data))
    text = f"{where}: data.levels={','.join(own or ())}, the run's, names no class"
    names = {row["name"] for row in RunReader(run).clients if row["name"] != str(row["client"])}
    sites = sorted(set(classes) & names)
    if sites:
        raise UserError(
            f"{text}, and the folders in train/ are called as the run's clients "
            f"({shorten_list(sites, 3)}); say what they are, as in data.levels=client,class"
        )
    taken = f"the folders in train/ are taken for classes ({shorten_list(classes, 3)})"
    print(f"fedssl: evaluate: {text}; {taken}, as with data.levels=class", file=sys.stderr)


def _of_other_classes(
    settings: config.Config, dataset: Dataset, before: tuple[str, ...] | None
) -> tuple[config.Config, int | None]:
    """The protocols without the run's own classifier, where images are not of its classes.

    And how many those are, if that is known: the network is one that tells so many apart.
    """
    needs = config.variant("objective", settings.objective.name).needs_labels
    if not needs or before is None or before == dataset.classes:
        return settings, None
    named = protocols(settings.evaluate, dataset.train, dataset.test)
    if "head" in named and dataset.classes:  # without any, no protocol with labels will do
        known, given = (shorten_list(names, 5) for names in (before, dataset.classes))
        raise UserError(
            f"evaluate.protocols=head: the run's classifier knows the classes {known}, and those "
            f"of {'='.join(name_images(settings.data))} are {given}; name other protocols, such as "
            "evaluate.protocols=[knn,linear]"
        )
    judged = replace(settings.evaluate, protocols=named)
    return replace(settings, evaluate=judged), len(before)


def _on_other_data(settings: config.Config, given: Set[str], own: object) -> config.Config:
    """What the run says of its own images, the data set ``own``, need not hold for others.

    They may not be divisible in the run's way; judging an encoder needs no clients. They may have
    no labels to draw from; nothing of them was trained on.
    """
    for spec in settings.evaluate.protocols or ():
        why = OF_OWN_DATA.get(parse(spec)[0])
        if why is not None:
            raise UserError(
                f"evaluate.protocols={spec}: {why}, so on its own data; leave the data.* keys out, "
                "or name other protocols"
            )
    labels = settings.data.labels if "data.labels" in given else None
    data = replace(settings.data, holdout=0.0, labels=labels)
    if data.name != own and "data.root" not in given:
        data = replace(data, root=None)
    if "data.levels" not in given and (data.name != own or _needs_class(settings)):
        data = replace(data, levels=None)
    if getattr(settings.algorithm, "public", 0):
        without: Any = {"public": 0, "align": 0.0}
        settings = replace(settings, algorithm=replace(settings.algorithm, **without))
    whole = config.build({"partition": {"name": "iid", "clients": 1}})
    return replace(
        settings,
        data=data,
        partition=whole.partition,
        cohort=whole.cohort,
        engine=replace(settings.engine, name="local"),
        privacy=whole.privacy,
    )
