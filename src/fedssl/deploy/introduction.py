"""A site's introduction: everything that it tells the server before the first round."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fedssl.data.dataset import Dataset, Split
from fedssl.runs.folder import SITES
from fedssl.util.errors import UserError
from fedssl.util.files import make_folders, write_json


@dataclass(frozen=True)
class Introduction:
    """A site's name, how many images it has, and their shape. Its fedssl's version goes beside.

    ``constants`` is a digest of the weights that do not train. They are not sent, so the server's
    and all sites' must be equal.
    """

    site: str  # a random number that the site keeps: its name may not be unique
    name: str
    samples: int
    channels: tuple[int, ...]
    height: int
    width: int
    classes: tuple[str, ...] = ()  # only where the objective needs labels
    constants: str = ""

    def __post_init__(self) -> None:
        """Refuse values that no site of ours sends, so that a stranger cannot end the server."""
        numbers = (self.samples, self.height, self.width, *self.channels)
        texts = (self.site, self.name, *self.classes)
        if not all(type(n) is int and 0 < n < 2**31 for n in numbers):
            raise ValueError("numbers")
        if not all(isinstance(t, str) and t.isprintable() and 0 < len(t) < 256 for t in texts):
            raise ValueError("names")
        if not re.fullmatch("([0-9a-f]{64})?", self.constants):
            raise ValueError("constants")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Introduction:
        """Read an introduction from JSON's types."""
        lists = {name: tuple(values[name]) for name in ("channels", "classes")}
        return cls(**(values | lists))


def write_sites(out: Path, sites: Sequence[Introduction]) -> None:
    """Write down which client of the run is which site, for a resume."""
    make_folders(out)
    write_json(out / SITES, [asdict(site) for site in sites])


def read_sites(out: Path) -> list[Introduction]:
    """Read the sites of a run, in the order of their numbers."""
    try:
        rows = json.loads((out / SITES).read_text(encoding="utf-8"))
        return [Introduction.from_dict(row) for row in rows]
    except (OSError, ValueError, TypeError, KeyError):
        problem, fix = f"{out} holds no run of real sites", "Start it without resume."
        raise UserError(problem, key="resume", value=True, fix=fix) from None


def empty_dataset(site: Introduction) -> Dataset:
    """Return a data set of the sites' shape that holds no image."""
    images = tuple(
        torch.empty((0, c, site.height, site.width), dtype=torch.uint8) for c in site.channels
    )
    labels = torch.empty(0, dtype=torch.int64) if site.classes else None
    return Dataset("sites", Split(images, labels), None, site.classes)
