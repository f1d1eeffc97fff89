"""``fedssl evaluate``: evaluate a run's encoder again, by other protocols or on other data."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedssl import config
from fedssl.config import Config
from fedssl.data.dataset import Dataset
from fedssl.data.load import convert_channels, load_dataset
from fedssl.data.places import name_images
from fedssl.evaluate.registry import choose_protocols, list_protocols
from fedssl.runs import checkpoint
from fedssl.runs.build import Experiment, build_experiment
from fedssl.runs.finish import list_clients
from fedssl.runs.folder import RUN, SWEEP
from fedssl.runs.reader import RunReader, read_keys, section
from fedssl.runs.result import split_models
from fedssl.runs.validate import is_deployed, list_evaluation_warnings
from fedssl.util.errors import UserError
from fedssl.util.files import append_line
from fedssl.util.status import say, stage
from fedssl.util.text import shorten_list

FILE = "evaluations.jsonl"
# Keys that leave the images the same.
SAME_IMAGES = {"data.size", "data.shape", "data.cache", "data.corrupt"}


def evaluate(run: Path, words: Sequence[str]) -> dict[str, dict[str, float]]:
    """Measure a run's result and an untrained network, by row; also append them to the folder."""
    keys = _check_words(run, words)
    with stage("reading the run"):
        experiment = _read(run, words, keys)
    done, rounds = experiment.server.round, experiment.config.rounds
    if done < rounds:
        _warn(f"round {done} of {rounds}: it has not ended")
    for warning in list_evaluation_warnings(experiment):
        _warn(warning)
    evaluator, models = experiment.evaluator, experiment.models
    models.best = experiment.guard.best
    with stage("evaluating an untrained encoder"):
        untrained = evaluator.evaluate_untrained(experiment.untrained())
    with stage("evaluating the trained encoder"):
        result = evaluator.evaluate_result(models)
    rows = {"untrained": untrained, "result": result}
    _append(run, {"rounds": done, "changed": list(words), "rows": rows})
    return {"untrained": untrained, **split_models("result", result, models.result)}


def _read(run: Path, words: Sequence[str], keys: Set[str]) -> Experiment:
    """Build the run with other keys, and read its last checkpoint."""
    settings = config.resolve(read_keys(run / RUN, is_resumed=True), words)
    # What was measured during training need not suit the protocols or the data.
    settings = replace(settings, evaluate=replace(settings.evaluate, monitor=None, targets=()))
    experiment = _build(run, settings, keys)
    experiment.engine.open(run)
    if not checkpoint.read(run, experiment):
        raise UserError(f"{run} has no checkpoint yet", fix="Let it run, or resume it.")
    return experiment


def _check_words(run: Path, words: Sequence[str]) -> set[str]:
    """Check that there is a run, and that evaluation depends on the keys; return the keys."""
    if (run / SWEEP).exists():
        raise UserError(f"{run} holds a sweep", fix="Name one of its runs.")
    if not (run / RUN).is_file():
        fix = "For an encoder alone use `fedssl run` with encoder.init=PATH rounds=0."
        raise UserError(f"{run} holds no run: it has no config.yaml", fix=fix)
    given = dict(word.partition("=")[::2] for word in words)
    for key, value in given.items():
        if not key.startswith(("evaluate.", "data.")) and key != "device":
            problem = "only evaluate.*, data.* and device can change here"
        elif key == "data.holdout" or key in config.keys_affecting(Config, "monitoring"):
            problem = "is about training, and nothing is trained here"
        else:
            continue
        raise UserError(problem, key=key, value=value, fix="Leave it out.")
    return set(given)


def _build(run: Path, settings: Config, keys: Set[str]) -> Experiment:
    """Build the run on its own images, or on those that ``keys`` name."""
    given = {key for key in keys if key.startswith("data.")} - SAME_IMAGES
    of_sites = is_deployed(settings)
    if of_sites and not given:  # it was trained on other images than the server's
        given = {"data.root"}
    dataset, classes = None, None
    if given == {"data.root"}:
        # All images: others may have too few labels to draw from.
        dataset = load_dataset(replace(settings.data, labels=None), settings.split_seed)
        if checkpoint.find_changed_images(run, dataset) == []:  # they were moved
            given, dataset = set(), dataset if settings.data.labels is None else None
    if given:
        settings, dataset = _use_other_data(run, settings, given, dataset)
        settings, classes = _leave_out_head(settings, dataset, checkpoint.read_classes(run))
    experiment = build_experiment(settings, dataset, classes, trains=False)
    experiment.of_sites = of_sites
    changed = [] if given else checkpoint.find_changed_images(run, experiment.dataset) or []
    if "train" in changed:
        clients, otherwise = list_clients(experiment), "evaluate on other images with data.root"
        checkpoint.check_images(run, settings.data, experiment.dataset, otherwise, clients)
    if changed:
        _warn("the test images are not those that the run had, whose numbers are in summary.json")
    return experiment


def _use_other_data(
    run: Path, settings: Config, given: Set[str], dataset: Dataset | None
) -> tuple[Config, Dataset]:
    """Return the configuration for other images, and the images as the encoder takes them.

    Settings about the run's own images need not hold for others: they are not partitioned, nothing
    is held out, and labels are not drawn.
    """
    for protocol in list_protocols(settings.evaluate):
        if protocol.needs != "nothing":
            problem = f"needs the run's own {protocol.needs}"
            raise protocol.error(problem, "Leave the data.* keys out, or use other protocols.")
    name = section(RunReader(run).tree, "data").get("name")
    is_same, levels = settings.data.name == name, settings.data.levels
    data = replace(settings.data, holdout=0.0)
    if "data.labels" not in given:
        data = replace(data, labels=None)
    if not is_same and "data.root" not in given:
        data = replace(data, root=None)
    needs_class = bool(set(settings.evaluate.protocols or ()) - {"unlabeled"})
    lacks_class = needs_class and levels is not None and "class" not in levels
    if "data.levels" not in given and (lacks_class or not is_same):
        data = replace(data, levels=None)
    if dataset is None or data.levels != levels:
        dataset = load_dataset(data, settings.split_seed)
    key, value = name_images(data)
    if len(dataset.train) < 2:
        problem = f"holds {len(dataset.train)} training image, and evaluation needs two"
        raise UserError(problem, key=key, value=value, fix="Use a folder with more.")
    if is_same and data.levels != levels and dataset.classes:
        _check_folder_names(run, data, dataset.classes)
    # A run that has not ended has no encoder.json; its checkpoint reports a difference.
    channels = RunReader(run).read_json("encoder.json", {}).get("channels")
    if channels and channels[0] != dataset.train.images[0].shape[1]:
        kind = "grey" if channels[0] == 1 else "in colour"
        _warn(f"{key}={value}: images are made {kind}, as the run's are")
    if getattr(settings.algorithm, "public", 0):
        without: Any = {"public": 0, "align": 0.0}
        settings = replace(settings, algorithm=replace(settings.algorithm, **without))
    seed = settings.partition.seed
    whole = config.build({"partition": {"name": "iid", "clients": 1, "seed": seed}})
    settings = replace(
        settings,
        data=data,
        partition=whole.partition,
        cohort=whole.cohort,
        engine=replace(settings.engine, name="local"),
        privacy=whole.privacy,
    )
    return settings, convert_channels(dataset, channels) if channels else dataset


def _check_folder_names(run: Path, data: config.Data, classes: tuple[str, ...]) -> None:
    """Warn that folders are taken for classes; refuse folders that are named like clients."""
    key, value = name_images(data)
    names = {row["name"] for row in RunReader(run).clients if row["name"] != str(row["client"])}
    clients = sorted(set(classes) & names)
    if clients:
        problem = f"folders in train/ are named like the run's clients ({shorten_list(clients, 3)})"
        fix = "Say what the folders are, as in data.levels=client,class."
        raise UserError(problem, key=key, value=value, fix=fix)
    taken = f"the folders in train/ are taken for classes ({shorten_list(classes, 3)})"
    _warn(f"{key}={value}: {taken}, as with data.levels=class")


def _leave_out_head(
    settings: Config, dataset: Dataset, before: tuple[str, ...] | None
) -> tuple[Config, int | None]:
    """Leave the run's own classifier out if images have other classes than ``before``.

    Also return the number of classes that it tells apart.
    """
    needs = config.variant("objective", settings.objective.name).needs_labels
    if not needs or before is None or before == dataset.classes:
        return settings, None
    specs = choose_protocols(settings.evaluate, dataset.train, dataset.test)
    if "head" in specs and dataset.classes:  # without classes, no protocol with labels will do
        known, given = (shorten_list(names, 5) for names in (before, dataset.classes))
        problem = f"the run's classifier knows the classes {known}, and these images have {given}"
        fix = "Use other protocols, such as evaluate.protocols=[knn,linear]."
        raise UserError(problem, key="evaluate.protocols", value="head", fix=fix)
    return replace(settings, evaluate=replace(settings.evaluate, protocols=specs)), len(before)


def _append(run: Path, results: dict[str, Any]) -> None:
    line = {"date": time.strftime("%Y-%m-%dT%H:%M:%S"), **results}
    try:
        append_line(run / FILE, json.dumps(line))
    except OSError as error:  # the numbers are still worth seeing
        _warn(f"{run / FILE} cannot be written ({error.strerror})")


def _warn(line: str) -> None:
    say(f"fedssl: evaluate: {line}")
