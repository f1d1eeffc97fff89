"""The program of a real site: its data, its state, its record of what it sent, and its app."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from fedssl import __version__
from fedssl import config as configuration
from fedssl.config import Config, Evaluate
from fedssl.data.folders import check_all_used
from fedssl.data.load import load_dataset
from fedssl.data.places import state_home
from fedssl.deploy.introduction import Introduction
from fedssl.engines.flower.apps import build_client_app
from fedssl.engines.flower.messages import (
    GREETING,
    list_content,
    read_clients,
    read_request,
    write_greeting,
    write_replies,
)
from fedssl.engines.remote.messages import Reply, Request
from fedssl.engines.remote.secure_site import IDENTITY, NodeKeys
from fedssl.engines.remote.site import Site, describe_fault
from fedssl.engines.remote.site_budget import find_budget
from fedssl.runs.build import Experiment, build_site
from fedssl.util.errors import UserError
from fedssl.util.files import LONGEST, append_line, make_folders, remove_strays, write_text

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from flwr.clientapp import ClientApp

RECORD = "sent.jsonl"
DATA = "node-config data"  # the one setting that every site has
WEIGHTS = "node-config weights"
STRAY_AGE = 60.0  # seconds after which no other process can be at work on a file


def client_app(recipe: Path) -> ClientApp:
    """Build the client app of a recipe; a site adds only ``--node-config data=…``."""
    text = recipe.read_text(encoding="utf-8")

    def answer(content: RecordDict, node: Mapping[str, Any]) -> RecordDict:
        data, about = str(node.get("data", "")), dict[str, Any]()

        def reply() -> RecordDict:
            request = read_request(content)
            about.update(_summarize(request))
            # A run keeps the name of its first attempt, however often its server restarts.
            folder = state_folder(data) / request.history.names[0]
            engine = load_experiment(text, data, str(node.get("weights", ""))).engine
            site = Site(engine, folder, "0", True, node_keys(node))
            return write_replies(site.answer(request))

        def refuse(error: Exception) -> RecordDict:
            fault = Reply(fault=describe_fault(error))
            return write_replies(dict.fromkeys(read_clients(content), fault))

        return _reply_and_record(reply, refuse, data, about)

    def greet(content: RecordDict, node: Mapping[str, Any]) -> RecordDict:
        data = str(node.get("data", ""))

        def reply() -> RecordDict:
            if read_config(text).privacy.secure:
                node_keys(node).check(state_folder(data) / IDENTITY)
            experiment = load_experiment(text, data, str(node.get("weights", "")))
            if budget := find_budget(experiment.engine, state_folder(data)):
                budget.check()
            facts = json.dumps(asdict(introduce(experiment, data)))
            return write_greeting({"version": __version__, "facts": facts})

        def refuse(error: Exception) -> RecordDict:
            return write_greeting({"version": __version__, "fault": describe_fault(error)})

        return _reply_and_record(reply, refuse, data, {"task": GREETING})

    return build_client_app(_list_tasks(text), answer, greet)


def node_keys(node: Mapping[str, Any]) -> NodeKeys:
    """Read which key files the ``--node-config`` names."""
    return NodeKeys(str(node.get("key", "")), str(node.get("peers", "")))


def _list_tasks(text: str) -> tuple[str, ...]:
    """List the algorithm's tasks; none if the recipe cannot be read, as the greeting says."""
    try:
        algorithm = configuration.variant("algorithm", read_config(text).algorithm.name)
    except Exception:  # Flower would send its text, and there would be no record of it
        return ()
    return tuple(algorithm.tasks())


@functools.lru_cache(maxsize=1)
def read_config(text: str) -> Config:
    """Build the configuration of an app's recipe, once per process."""
    return configuration.build(yaml.safe_load(text))


@functools.lru_cache(maxsize=1)
def load_experiment(text: str, data: str, weights: str = "") -> Experiment:
    """Load a site's images and build its network, once per process."""
    remove_strays((Path(place) for place, _, _ in os.walk(state_folder(data))), STRAY_AGE)
    return build_site_experiment(read_config(text), data, weights)


def needs_copy(config: Config) -> bool:
    """Return whether each site needs the weights of ``encoder.init``: some are never sent."""
    encoder = config.encoder
    return encoder.init is not None and (encoder.train != "all" or encoder.norm == "frozen")


def build_site_experiment(config: Config, data: str, weights: str = "") -> Experiment:
    """Build the experiment of a site, whose images are all one client's.

    Settings of the server's machine and of evaluation do not hold here, and weights come with
    each request. Those that do not train come from the site's copy, the file ``weights``.
    """
    if not data:
        fix = "Start the SuperNode with --node-config 'data=\"/folder/with/images\"'."
        raise UserError("not given", key=DATA, fix=fix)
    if needs_copy(config) and not weights:
        problem = "a part of the encoder is not sent, and this site has no copy of its weights"
        fix = 'Add weights="/full/path" to --node-config: a file from the server\'s operator.'
        raise UserError(problem, problem, key=WEIGHTS, fix=fix)
    config = replace(
        config,
        data=replace(config.data, name="folder", root=data, holdout=0.0, cache=None),
        device="auto",
        encoder=replace(config.encoder, init=weights if needs_copy(config) else None),
        # Each message gets a new process, which would pay for compiling. Torch's number of threads
        # is still that of this machine (its cores, or OMP_NUM_THREADS).
        engine=replace(config.engine, compile="off", threads=torch.get_num_threads()),
        evaluate=Evaluate(),
    )
    try:
        dataset = load_dataset(config.data, config.split_seed)
        check_all_used(config.data)
    except UserError as error:
        raise _in_site_terms(error) from None
    dataset = replace(dataset, test=None, clients=())
    try:
        return build_site(config, dataset)
    except UserError as error:
        if error.key == "encoder.init":  # the path is the site's own
            error.key, error.public = WEIGHTS, "its copy of the weights cannot be used"
        raise


def _in_site_terms(error: UserError) -> UserError:
    """Name the setting that the site's administrator knows; file names stay in the site's log."""
    key, fix, problem = error.key, error.fix, error.public or "its images cannot be used"
    if key == "data.root":
        key, problem = DATA, f"{DATA}: {problem}"
    elif key == "data.cache":
        key, fix = "FEDSSL_CACHE", "Set FEDSSL_CACHE to a folder that can be written and has room."
    else:
        fix = f"{fix} The server's operator sets this key."
    return UserError(error.problem, problem, key=key, value=error.value, fix=fix)


def introduce(experiment: Experiment, data: str) -> Introduction:
    """Write the site's introduction."""
    images = experiment.dataset.train.images
    labelled = experiment.trainer.objective.needs_labels
    height, width = images[0].shape[2:]
    return Introduction(
        _site_number(state_folder(data)),
        _printable(Path(data).expanduser().resolve().name),
        len(experiment.dataset.train),
        tuple(i.shape[1] for i in images),
        height,
        width,
        tuple(experiment.dataset.classes) if labelled else (),
        experiment.trainer.flat.digest_constants(),
    )


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)[:255] or "/"


def state_folder(data: str) -> Path:
    """Return the folder that survives a restart of the site: one for each folder of images."""
    path = Path(data).expanduser().resolve()
    suffix = f"-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    name = os.fsencode(path.name)[: LONGEST - len(suffix)].decode(errors="ignore")
    return state_home() / f"{name}{suffix}"


def _site_number(folder: Path) -> str:
    """Return the site's random number, drawn the first time."""
    path = folder / "site"
    if not path.exists():
        make_folders(folder, 0o700)
        write_text(path, uuid.uuid4().hex)
    return path.read_text(encoding="utf-8").strip()


def _summarize(request: Request) -> dict[str, Any]:
    """Summarize a request for the site's record; rounds count as in the server's metrics."""
    step = {} if request.secure is None else {"step": request.secure.step}
    run = request.history.names[0]
    return {"run": run, "round": request.round + 1, "task": request.task, **step}


def _reply_and_record(
    reply: Callable[[], RecordDict],
    refuse: Callable[[Exception], RecordDict],
    data: str,
    about: Mapping[str, Any],
) -> RecordDict:
    """Reply, or say what failed, and return what now stands in the site's own record.

    A reply that cannot be recorded is not sent. A fault that says so is sent in its place.
    """
    try:
        content = reply()
    except Exception as error:
        content = refuse(error)
    if not data:  # nothing is known of the site, and there is no place for a record
        return content
    try:
        size, entries = list_content(content)
        if facts := entries.pop(f"{GREETING}/facts", None):  # one entry each, as elsewhere
            entries |= {f"{GREETING}/{name}": value for name, value in json.loads(facts).items()}
        _append_line(state_folder(data), {**about, "bytes": size, "sent": entries})
    except Exception as error:  # Flower would send its text, which may tell of the site
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        text = f"cannot be written ({reason})"
        return refuse(UserError(f"{RECORD} {text}", f"the site's record {text}"))
    return content


def _append_line(folder: Path, line: Mapping[str, Any]) -> None:
    make_folders(folder, 0o700)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    append_line(folder / RECORD, json.dumps({"time": when, **line}))
