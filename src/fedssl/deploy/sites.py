"""A run on real machines: what a site says of itself, and the server's session without data."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedssl.config import Config, Evaluate
from fedssl.data.dataset import Dataset, Groups, Split
from fedssl.data.folders import check_all_used
from fedssl.data.load import load_dataset
from fedssl.runs.build import Experiment, assemble, build_site
from fedssl.runs.deployed import SITES
from fedssl.util.errors import UserError
from fedssl.util.files import LONGEST, write_text

SENT = "sent.jsonl"


@dataclass(frozen=True)
class Introduction:
    """All that a site tells before the first round: its name, how many images, and their shape.

    Only the version of its fedssl goes beside it.
    """

    site: str  # a random number that the site keeps: its name may not be unique
    name: str
    samples: int
    channels: tuple[int, ...]
    height: int
    width: int
    classes: tuple[str, ...] = ()  # only where the objective needs labels

    def __post_init__(self) -> None:
        """Refuse what no site of ours says: the server is not to fall over a stranger's words."""
        numbers = (self.samples, self.height, self.width, *self.channels)
        texts = (self.site, self.name, *self.classes)
        if not all(type(n) is int and 0 < n < 2**31 for n in numbers):
            raise ValueError("numbers")
        if not all(isinstance(t, str) and t.isprintable() and 0 < len(t) < 256 for t in texts):
            raise ValueError("names")


def state_folder(data: str) -> Path:
    """Where a site keeps what survives a restart: one folder for each folder of images."""
    home = Path(os.environ.get("FEDSSL_STATE") or "~/.local/state/fedssl").expanduser()
    path = Path(data).expanduser().resolve()
    mark = f"-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    name = os.fsencode(path.name)[: LONGEST - len(mark)].decode(errors="ignore")
    return home / f"{name}{mark}"


def site_session(config: Config, data: str) -> Experiment:
    """A site's session: all of its images are one client's.

    Of the server's machine and its judging nothing holds here; weights come with each request.
    """
    if not data:
        raise UserError(
            "node-config data: not given; start the SuperNode with "
            "--node-config 'data=\"/folder/with/images\"'"
        )
    config = replace(
        config,
        data=replace(config.data, name="folder", root=data, holdout=0.0, cache=None),
        device="auto",
        encoder=replace(config.encoder, init=None),
        # A new process does each message: compiling would be paid every time, and torch's number
        # of threads is still that of this machine (its cores, or OMP_NUM_THREADS).
        engine=replace(config.engine, compile="off", threads=torch.get_num_threads()),
        evaluate=Evaluate(),
    )
    try:
        dataset = load_dataset(config.data, config.seed)
        check_all_used(config.data)
    except UserError as error:
        raise _in_its_words(error) from None
    dataset = replace(dataset, test=None, clients=())
    return build_site(config, dataset)


def _in_its_words(error: UserError) -> UserError:
    """What is wrong with a site's images, by the names that its administrator knows.

    Names of files are for the site's log: nothing that was not made to be told is.
    """
    told = error.told or "its images cannot be used"
    key, fix = error.key or "", error.fix
    if key == "data.root":
        key, told = "node-config data", f"node-config data: {told}"
    elif key == "data.cache":
        key, fix = "FEDSSL_CACHE", fix.replace("data.cache", "FEDSSL_CACHE")
    elif key.startswith("data."):
        fix += " The server's operator sets this key of the app."
    return UserError(error.problem, told, key=key or None, value=error.value, fix=fix)


def introduce(session: Experiment, data: str) -> Introduction:
    """What a site tells of itself."""
    images = session.dataset.train.images
    labelled = session.trainer.objective.needs_labels
    height, width = images[0].shape[2:]
    return Introduction(
        identity(state_folder(data)),
        _printable(Path(data).expanduser().resolve().name),
        len(session.dataset.train),
        tuple(i.shape[1] for i in images),
        height,
        width,
        tuple(session.dataset.classes) if labelled else (),
    )


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)[:255] or "/"


def identity(folder: Path) -> str:
    """The site's random number, made the first time."""
    path = folder / "site"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text(path, uuid.uuid4().hex)
    return path.read_text(encoding="utf-8").strip()


def record(data: str, line: Mapping[str, Any]) -> None:
    """Add a line on a message to the site's own record, before the message is sent."""
    folder = state_folder(data)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with (folder / SENT).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": when, **line}) + "\n")


def server_session(config: Config, sites: Sequence[Introduction]) -> Experiment:
    """The server's session: the network, and clients of which it knows the sizes.

    With ``data.root`` (labelled images at the server) encoders are judged there; else not at all.
    """
    first = sites[0]
    for other in sites[1:]:
        for what in ("channels", "height", "width", "classes"):
            ours, theirs = getattr(first, what), getattr(other, what)
            if ours != theirs:
                raise UserError(
                    f"site {other.name}: its images have {what} {theirs} where those of "
                    f"{first.name} have {ours}; set data.size, or mend the site's folder"
                )
    dataset = nothing(first) if config.data.root is None else _own(config, first)
    sizes = np.array([site.samples for site in sites])
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    groups = Groups(np.zeros(offsets[-1], dtype=np.int64), offsets)
    return assemble(config, dataset, groups, numbered([site.name for site in sites]))


def numbered(names: Sequence[str]) -> list[str]:
    """Names that tell all of them apart: the second of two sites ``ward`` is ``ward (2)``."""
    found: list[str] = []
    for name in names:
        others = (f"{name} ({k})" for k in itertools.count(2))
        found.append(next(n for n in itertools.chain([name], others) if n not in found))
    return found


def nothing(site: Introduction) -> Dataset:
    """Images of the sites' shape, none of them here."""
    images = tuple(
        torch.empty((0, c, site.height, site.width), dtype=torch.uint8) for c in site.channels
    )
    labels = torch.empty(0, dtype=torch.int64) if site.classes else None
    return Dataset("sites", Split(images, labels), None, site.classes)


def _own(config: Config, site: Introduction) -> Dataset:
    """The server's labelled images, which are judged on; only public ones are trained on."""
    dataset = load_dataset(config.data, config.seed)
    shape = [tuple(i.shape[1:]) for i in dataset.train.images]
    wanted = [(c, site.height, site.width) for c in site.channels]
    if shape != wanted:
        raise UserError(
            f"data.root={config.data.root}: images of shape {shape} where the sites have {wanted}"
        )
    if site.classes and dataset.classes != site.classes:
        raise UserError(f"data.root={config.data.root}: not the sites' classes {site.classes}")
    return dataset


def write_sites(out: Path, sites: Sequence[Introduction]) -> None:
    """Which client of the run is which site, for a resume."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / SITES, json.dumps([asdict(site) for site in sites], indent=2) + "\n")


def read_sites(out: Path) -> list[Introduction]:
    """The inverse of :func:`write_sites`."""
    try:
        rows = json.loads((out / SITES).read_text(encoding="utf-8"))
        return [
            Introduction(
                **{**row, "channels": tuple(row["channels"]), "classes": tuple(row["classes"])}
            )
            for row in rows
        ]
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(f"resume: {out} holds no run of these sites; start it without") from None
