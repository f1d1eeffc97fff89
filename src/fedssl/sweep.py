"""A sweep: a recipe whose keys hold lists (``partition.alpha: [5, 1]``) is a run for each value."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fedssl import config, run, tables
from fedssl.config import Config
from fedssl.data import datasets, sources
from fedssl.data.dataset import Dataset
from fedssl.errors import TrainingError, UserError
from fedssl.files import write_text
from fedssl.session import assemble, client_data

FILE = "sweep.yaml"


def runs(tree: config.Tree) -> dict[str, Config]:
    """The settings of each run, by what is its own: every combination of the lists' values."""
    found: dict[str, Config] = {}
    lists = config.swept(tree)
    for values in itertools.product(*lists.values()):
        own = dict(zip(lists, values, strict=True))
        label = ",".join(f"{key}={_text(value)}" for key, value in own.items())
        if label in found:
            raise UserError(f"{label}: stands in a list twice; leave one out")
        try:
            found[label] = config.build(config.with_values(tree, own))
        except UserError as error:
            raise UserError(f"{label}: {error}") from None
    return found


def sweep(tree: config.Tree, out: Path, resume: bool) -> dict[str, dict[str, Any]]:
    """Run what is not finished, one after another; the summaries of all, by what is their own.

    A run that diverges is said and passed over.
    """
    settings = runs(tree)
    started = (out / FILE).exists()
    if started and not resume:
        raise UserError(f"--out {out}: holds a sweep; choose another folder, or use --resume")
    waiting = {label: own for label, own in settings.items() if _summary(out / label) is None}
    for label, own in settings.items():
        run.check_folder(own, out / label, (out / label / "config.yaml").exists())
    check(waiting)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / FILE, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    for number, (label, own) in enumerate(settings.items(), 1):
        before = "" if label in waiting else ": finished before"
        print(f"[{number}/{len(settings)}] {label}{before}", file=sys.stderr)
        if label in waiting:
            try:
                run.run(own, out / label, (out / label / "config.yaml").exists())
            except TrainingError as error:
                print(f"[{number}/{len(settings)}] {label}: {error}", file=sys.stderr)
    found = {label: _summary(out / label) for label in settings}
    return {label: summary for label, summary in found.items() if summary is not None}


def check(waiting: Mapping[str, Config]) -> None:
    """Refuse, before the first run, whatever any of them would be refused for in its turn."""
    loaded: dict[tuple[config.Data, int], Dataset] = {}
    for label, own in waiting.items():
        place = (own.data, own.seed)
        names = sorted(set(own.evaluate.baselines) - {own.algorithm.name})
        try:
            if own.engine.name == "flower":
                from fedssl.engines import flower

                flower.require()
            if place not in loaded:
                loaded[place] = datasets.load(*place)
            data = sources.altered(own, loaded[place])
            groups = client_data(own, data)
            for settings in (own, *(config.with_algorithm(own, name) for name in names)):
                assemble(settings, data, groups, weights=_needs_weights(settings))
        except UserError as error:
            raise UserError(f"{label}: {error}") from None


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
    """A row for each run; after an untrained network's, where that is the same for all."""
    rows: dict[str, Mapping[str, float]] = {}
    first = next(iter(summaries.values()))["untrained"]
    if all(summary["untrained"] == first for summary in summaries.values()):
        rows["untrained"] = first
    rows |= {label: summary["result"] for label, summary in summaries.items()}
    return tables.rows(rows)


def _summary(folder: Path) -> dict[str, Any] | None:
    path = folder / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _text(value: Any) -> str:
    """A value in the name of a folder."""
    parts = value if isinstance(value, list) else [value]
    return "+".join(str(part).replace("/", "-") for part in parts)
