"""A run's images, as far as they are on this machine, and how they are divided over clients."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from fedssl.config import Config
from fedssl.data.client_table import count_labels, mean_distance
from fedssl.data.dataset import Dataset
from fedssl.data.places import use_local_copy
from fedssl.runs.reader import RunReader
from fedssl.runs.sources import find_sources
from fedssl.runs.split import load_evaluated_dataset, load_run_dataset, split_clients
from fedssl.util.device import pick_device
from fedssl.util.errors import UserError

MOST_CLIENTS = 60  # in the figure
T = TypeVar("T")


class Unavailable(Exception):
    """Why a section of the page is empty."""


def try_section(build: Callable[[], T]) -> T | str:
    """Return a section's content, or the reason why there is none."""
    try:
        return build()
    except (Unavailable, UserError) as reason:
        return str(reason).removesuffix(".")
    except Exception as error:  # the other sections are still useful
        return f"it could not be made ({type(error).__name__}: {str(error)[:200]})"


class RunData:
    """A run's data set, loaded when it is first needed and never downloaded."""

    def __init__(self, run: RunReader) -> None:
        self.run = run

    @property
    def settings(self) -> Config:
        """The configuration of a run whose data can be here."""
        if self.run.settings.engine.sites is not None:
            raise Unavailable("in a deployment, the images stay at their sites")
        return self.run.settings

    @cached_property
    def dataset(self) -> Dataset:
        """The data set."""
        return load_run_dataset(self._local_settings)

    @property
    def evaluated(self) -> Dataset:
        """The data set as evaluation sees it."""
        return load_evaluated_dataset(self._local_settings, self.dataset)

    @property
    def _local_settings(self) -> Config:
        return replace(self.settings, data=use_local_copy(self.settings.data))


@dataclass(frozen=True)
class Holdings:
    """The images of each client, by class."""

    names: list[str]  # of the first clients, which the figure shows
    sizes: list[int]  # of all clients
    held: list[list[int]] | None = None  # by client and class; None without labels
    classes: Sequence[str] = ()
    word: str = "classes"  # or clusters, rotations, styles
    distance: float | None = None
    remark: str = ""

    @property
    def median(self) -> float:
        """The number of images of a typical client."""
        return statistics.median(self.sizes)


def load_holdings(data: RunData) -> Holdings:
    """Return the partition; where the images are not here, only the clients' sizes."""
    clients = data.run.clients
    names = [str(client["name"]) for client in clients[:MOST_CLIENTS]]
    recorded = [int(client["samples"]) for client in clients]
    del clients  # there may be a million
    try:
        config, dataset = data.settings, data.dataset
        assigned = find_sources(config, dataset, pick_device("auto"))
        groups = split_clients(config, dataset, assigned)
    except (Unavailable, UserError, OSError) as reason:
        if not recorded:
            raise
        remark = f"From clients.json, without classes: {str(reason).removesuffix('.')}."
        return Holdings(names, recorded, remark=remark)
    names = names or list(map(str, range(min(len(groups), MOST_CLIENTS))))
    sizes = groups.sizes.tolist()
    labels = assigned.labels.numpy()
    if not (labels[groups.members] >= 0).any():
        return Holdings(names, sizes, remark="The images have no labels.")
    held = count_labels(groups, labels, len(assigned.names))[:MOST_CLIENTS]
    classes = list(assigned.names) or [str(c) for c in range(held.shape[1])]
    apart = mean_distance(groups, labels)
    return Holdings(names, sizes, held.tolist(), classes, assigned.kind, apart)
