"""A run's images, as far as they are on this machine, and how they are divided over clients."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from fedssl.config import Config
from fedssl.data.client_table import count_labels, mean_distance
from fedssl.data.dataset import Dataset
from fedssl.data.places import use_local_copy
from fedssl.runs.reader import RunReader
from fedssl.runs.sources import find_sources
from fedssl.runs.split import load_run_dataset, split_clients
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
        self._loaded: Dataset | None = None

    @property
    def settings(self) -> Config:
        """The configuration of a run whose data can be here."""
        if self.run.settings.engine.sites is not None:
            raise Unavailable("in a deployment, the images stay at their sites")
        return self.run.settings

    def dataset(self) -> Dataset:
        """Return the data set."""
        if self._loaded is None:
            self._loaded = self.resized(None)
        return self._loaded

    def resized(self, size: int | None) -> Dataset:
        """Return the data set with images of another size."""
        local = replace(self.settings, data=use_local_copy(self.settings.data))
        return load_run_dataset(local, size)


@dataclass(frozen=True)
class Holdings:
    """The images of each client, by class."""

    names: list[str]  # of the first clients, which the figure shows
    sizes: list[int]  # of all clients
    held: list[list[int]] | None  # by client and class; None without labels
    classes: list[str]
    word: str = "classes"  # or clusters, rotations, styles
    distance: float | None = None
    remark: str = "There are no labels to tell classes by."

    @property
    def figure(self) -> dict[str, object]:
        """The data of the bar chart."""
        sizes = self.sizes[: len(self.names)]
        return {"names": self.names, "sizes": sizes, "held": self.held, "classes": self.classes}

    @property
    def caption(self) -> str:
        """The figure's caption."""
        sizes, shown = self.sizes, len(self.names)
        text = (
            f"{len(sizes):,} clients; {min(sizes):,} images the smallest, "
            f"{statistics.median(sizes):g} median, {max(sizes):,} the largest."
        )
        if len(sizes) > shown:
            text += f" The first {shown} are shown."
        if self.distance is not None:
            text += (
                f" Mean earth mover's distance of a client's {self.word} to those of all clients: "
                f"{self.distance:.3f} (0: all clients have the same mixture)."
            )
        return text if self.held is not None else f"{text} {self.remark}"

    @property
    def columns(self) -> list[str]:
        """The headings of the table's classes."""
        return self.classes if self.held is not None else []

    @property
    def table(self) -> list[list[str]]:
        """The rows of the table."""
        rows = self.held or [[] for _ in self.names]
        each = zip(self.names, self.sizes, rows, strict=False)
        return [[name, f"{size:,}", *map(str, row)] for name, size, row in each]


def load_holdings(data: RunData) -> Holdings:
    """Return the partition; where the images are not here, only the clients' sizes."""
    clients = data.run.clients
    names = [str(client["name"]) for client in clients]
    try:
        config, dataset = data.settings, data.dataset()
        assigned = find_sources(config, dataset, pick_device("auto"))
        groups = split_clients(config, dataset, assigned)
    except (Unavailable, UserError, OSError) as reason:
        if not clients:
            raise
        sizes = [int(client["samples"]) for client in clients]
        remark = f"From clients.json, without classes: {str(reason).removesuffix('.')}."
        return Holdings(names[:MOST_CLIENTS], sizes, None, [], remark=remark)
    names = (names or list(map(str, range(len(groups)))))[:MOST_CLIENTS]
    sizes = groups.sizes.tolist()
    labels = None if assigned.labels is None else assigned.labels.numpy()
    if labels is None or not (labels[groups.members] >= 0).any():
        return Holdings(names, sizes, None, [], assigned.kind)
    held = count_labels(groups, labels)
    classes = list(assigned.names) or [str(c) for c in range(held.shape[1])]
    held = np.pad(held, ((0, 0), (0, max(0, len(classes) - held.shape[1]))))[:MOST_CLIENTS]
    apart = mean_distance(groups, labels)
    return Holdings(names, sizes, held.tolist(), classes, assigned.kind, apart)
