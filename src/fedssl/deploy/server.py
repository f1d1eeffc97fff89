"""The server's program of a deployment: wait for sites, run, and resume."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedssl import report
from fedssl.config import Config
from fedssl.data.dataset import Dataset, Groups
from fedssl.data.load import load_dataset
from fedssl.deploy.introduction import Introduction, empty_dataset, read_sites, write_sites
from fedssl.deploy.plugin_files import unpack_plugins, write_plugins
from fedssl.deploy.recipe import check_initial_weights, check_public_images
from fedssl.deploy.site import read_config
from fedssl.deploy.transport import SiteTransport, say
from fedssl.engines.flower.apps import build_server_app
from fedssl.engines.remote.engine import RemoteEngine
from fedssl.runs import loggers
from fedssl.runs.build import Experiment, assemble
from fedssl.runs.folder import check_folder, lock
from fedssl.runs.loop import Interrupted, RunInFolder, execute
from fedssl.util.errors import TrainingError, UserError, refuse, resume_hint
from fedssl.util.files import explain_write_errors
from fedssl.util.text import shorten_list

if TYPE_CHECKING:
    from flwr.serverapp import Grid, ServerApp


def server_app(recipe: Path) -> ServerApp:
    """Build the server app of a recipe; ``out`` of the ``--run-config`` names the run's folder."""

    def main(grid: Grid, run_config: Mapping[str, Any]) -> None:
        out, resume = Path(str(run_config["out"])), run_config["resume"]
        try:
            if not isinstance(resume, bool):
                problem, value = "not a truth value", json.dumps(resume)
                fix = "Write resume=true or resume=false, unquoted."
                raise UserError(problem, key="resume", value=value, fix=fix)
            with resume_hint("Then continue with --run-config 'resume=true'."):
                serve(grid, read_config(recipe.read_text(encoding="utf-8")), out, resume)
        except Interrupted:
            say(f"stopped with a checkpoint in {out}. Continue with --run-config 'resume=true'.")
            raise
        except (UserError, TrainingError) as error:
            say(error)
            raise

    return build_server_app(main)


def serve(grid: Grid, config: Config, out: Path, resume: bool) -> dict[str, Any]:
    """Run or resume a whole run with real sites, and return its summary."""
    with claim_folder(out, resume):
        summary = _serve(grid, config, out, resume)
    report.write_page_or_warn(out)
    return summary


@contextlib.contextmanager
def claim_folder(out: Path, resume: bool) -> Iterator[None]:
    """Keep the run's folder for one server at a time, however the previous one ended."""
    started = (out / "config.yaml").exists()
    if started and not resume:
        raise UserError(
            "holds a run",
            key="out",
            value=out,
            fix="Continue it with --run-config 'resume=true', or name another folder with "
            "--run-config 'out=\"/another/folder\"'.",
        )
    if resume and not started:
        raise UserError(f"{out} holds no run", key="resume", value=True, fix="Leave it out.")
    fix = "Wait for its end, or end it with flwr stop, or kill the process."
    with lock(out, key="out", fix=fix):
        yield


def _serve(grid: Grid, config: Config, out: Path, resume: bool) -> dict[str, Any]:
    kept, plugin_texts = unpack_plugins(config, out)
    if resume:
        with explain_write_errors("out", out):
            write_plugins(out, plugin_texts)
    check_folder(kept, out, resume)
    # Otherwise these would be refused only after all sites have come.
    check_initial_weights(config)
    loggers.require(config)
    own = None if config.data.root is None else load_dataset(config.data, config.split_seed)
    check_public_images(config, own)
    transport = SiteTransport(grid, config.engine, config.cohort.minimum)
    timeout = config.engine.timeout
    if resume:
        transport.sites = read_sites(out)
        members = {site.site for site in transport.sites}
        transport.wait(config.cohort.minimum, timeout, members)
    else:
        assert config.engine.sites is not None
        transport.sites = transport.wait(config.engine.sites, timeout)
        write_sites(out, transport.sites)
    experiment = build_server_experiment(config, transport.sites, own)
    assert isinstance(experiment.engine, RemoteEngine)
    experiment.engine.transport = transport
    if experiment.budget is not None and config.rounds and not resume:
        experiment.budget.check()
    with explain_write_errors("out", out):
        write_plugins(out, plugin_texts)
    return execute([RunInFolder(experiment, kept, out, resume)])[out]


def build_server_experiment(
    config: Config, sites: Sequence[Introduction], own: Dataset | None = None
) -> Experiment:
    """Build the server's experiment, which knows its clients' sizes but not their images.

    With labelled images of its ``own`` (``data.root``) the server evaluates encoders.
    """
    first = sites[0]
    for other in sites[1:]:
        for fact in ("channels", "height", "width", "classes"):
            ours, theirs = getattr(first, fact), getattr(other, fact)
            if ours != theirs:
                raise UserError(
                    f"site {other.name}: the images' {fact} is {theirs}, at {first.name} {ours}",
                    fix="Set data.size, or correct the site's folder.",
                )
    if own is not None:
        _check_own(config, own, first)
    sizes = np.array([site.samples for site in sites])
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    images = np.broadcast_to(np.int64(0), offsets[-1])  # none of them is here
    groups = Groups(images, offsets)
    names = _number_equal_names([site.name for site in sites])
    experiment = assemble(config, own or empty_dataset(first), groups, names)
    _check_weights(experiment, sites)
    experiment.images = " ".join(sorted(site.site for site in sites))
    return experiment


def _check_weights(experiment: Experiment, sites: Sequence[Introduction]) -> None:
    """Check that the weights that are never sent are the same everywhere."""
    ours = experiment.trainer.flat.digest_constants()
    others = [site.name for site in sites if site.constants != ours]
    if others:
        encoder = experiment.config.encoder
        key = "encoder.init" if encoder.init is not None else "encoder.pretrained"
        raise UserError(
            f"the weights that do not train are others at {shorten_list(others, 5)}",
            key=key,
            value=getattr(encoder, key.rpartition(".")[2]),
            fix="Give all sites the server's file of weights, and the same version of timm.",
        )


def _number_equal_names(names: Sequence[str]) -> list[str]:
    """Tell equal names apart: the second of two sites ``ward`` becomes ``ward (2)``."""
    unique: list[str] = []
    for name in names:
        others = (f"{name} ({k})" for k in itertools.count(2))
        unique.append(next(n for n in itertools.chain([name], others) if n not in unique))
    return unique


def _check_own(config: Config, own: Dataset, site: Introduction) -> None:
    """Check the server's images, for evaluation or shown to the sites, against the sites'."""
    shape = [tuple(i.shape[1:]) for i in own.train.images]
    wanted = [(c, site.height, site.width) for c in site.channels]
    classes, fix = ", ".join(site.classes), "Name a folder like the sites'."
    other_classes = bool(site.classes) and own.classes != site.classes
    refuse(
        config,
        (shape != wanted, "data.root", f"images of {shape}, but the sites have {wanted}", fix),
        (other_classes, "data.root", f"the sites have other classes: {classes}", fix),
    )
