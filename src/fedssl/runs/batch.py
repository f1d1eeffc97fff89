"""Run several configurations one after another: those of a sweep, or of a paper's table."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fedssl import config
from fedssl.config import Config, plugins
from fedssl.data.dataset import Dataset
from fedssl.data.heterogeneity import alter_training_images
from fedssl.data.load import load_dataset
from fedssl.runs import checkpoint, loop
from fedssl.runs.build import assemble, is_shipped
from fedssl.runs.folder import check_folder, is_started, write_config
from fedssl.runs.reader import RunReader, read_json
from fedssl.runs.split import split_clients
from fedssl.runs.validate import check_environment
from fedssl.util.errors import TrainingError, UserError, shorten
from fedssl.util.files import explain_write_errors
from fedssl.util.status import stage


@dataclass(frozen=True)
class PlannedRun:
    """A run of several: its name on the screen, its configuration and its folder."""

    label: str
    settings: Config
    folder: Path

    @property
    def checkable(self) -> Config:
        """The settings as far as they can be checked before any run."""
        return self.settings

    def summary(self) -> dict[str, Any] | None:
        """Return the summary of the run; ``None`` if it is not finished."""
        found, budget = read_json(self.folder / "summary.json", {}), self.settings.privacy.budget
        is_spent = budget is not None and found.get("budget_spent") == budget
        return found if is_spent or found.get("rounds", -1) >= self.settings.rounds else None


Run = TypeVar("Run", bound=PlannedRun)


def check_all(runs: Sequence[PlannedRun]) -> None:
    """Check all runs before the first one starts, also that they have the same images."""
    loaded: dict[tuple[config.Data, int], Dataset] = {}  # by data and seed
    for run in runs:
        is_final = run.summary() is not None
        check_folder(run.settings, run.folder, is_started(run.folder), is_final=is_final)
    for run in (run for run in runs if run.summary() is None):
        source = run.settings.data, run.settings.split_seed
        checking = stage(f"checking {run.label}")
        with checking, name_in_errors(run.label), plugins.translate_errors():
            check_environment(run.checkable)
            if source not in loaded:
                loaded[source] = load_dataset(*source)
            _check_parts(run.checkable, loaded[source])
    _check_same_images(runs, {data: dataset for (data, _), dataset in loaded.items()})


def _check_same_images(runs: Sequence[PlannedRun], datasets: dict[config.Data, Dataset]) -> None:
    """Check that started runs have their images still; load those that were moved."""
    for run in (run for run in runs if is_started(run.folder)):
        data, before = run.settings.data, RunReader(run.folder).settings.data
        if data not in datasets and before != config.with_absolute_paths(run.settings).data:
            datasets[data] = load_dataset(data, run.settings.split_seed)
        if data in datasets:
            otherwise = "start anew in another folder"
            checkpoint.check_images(run.folder, data, datasets[data], otherwise)


def _check_parts(settings: Config, images: Dataset) -> None:
    """Build a run and its baselines, without weights where nothing looks at them."""
    dataset = alter_training_images(settings.partition, images, settings.split_seed)
    clients = split_clients(settings, dataset)
    others = sorted(set(settings.evaluate.baselines) - {settings.algorithm.name})
    for each in (settings, *(config.with_algorithm(settings, name) for name in others)):
        has_weights = not is_shipped(each) or each.encoder.init is not None
        assemble(each, dataset, clients, weights=has_weights)


def run_all(runs: Sequence[Run]) -> Iterator[tuple[Run, TrainingError | None]]:
    """Run what is not finished; yield each run, with its error if it diverged."""
    _update_places(runs)
    for number, run in enumerate(runs, 1):
        title, error = f"[{number}/{len(runs)}] {run.label}", None
        if run.summary() is not None:
            print(f"{title}: finished before", file=sys.stderr)
            continue
        print(title, file=sys.stderr)
        try:
            loop.run(run.settings, run.folder, is_started(run.folder))
        except TrainingError as caught:
            error = caught
            print(f"{title}: {error}", file=sys.stderr)
        yield run, error


def _update_places(runs: Sequence[PlannedRun]) -> None:
    """Write where the images of runs and their baselines are now, also of finished ones."""
    for run in runs:
        for folder in (run.folder, *(run.folder / "baselines").glob("*")):
            if is_started(folder):
                before, now = RunReader(folder).settings, run.settings.data
                data = replace(before.data, root=now.root, cache=now.cache)
                if data != before.data:
                    with explain_write_errors("--out", folder):
                        write_config(replace(before, data=data), folder)


@contextlib.contextmanager
def name_in_errors(name: str, kind: str = "run") -> Iterator[None]:
    """Name the run in errors, unless there is only one."""
    try:
        yield
    except UserError as error:
        if name:
            error.problem = f"{error.problem} ({kind} {shorten(name)})"
        raise
