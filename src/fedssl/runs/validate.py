"""Check a run's parts against each other, and list warnings for its user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from fedssl.config import OWN_DATA, Config
from fedssl.data.augment import Augmentation
from fedssl.data.dataset import Dataset, Groups
from fedssl.data.dirichlet import describe_imbalance
from fedssl.data.folders import describe_unused
from fedssl.data.heterogeneity import describe_clusters
from fedssl.data.partition import Folder
from fedssl.engines.base import Engine
from fedssl.engines.flower.environment import require_flower
from fedssl.evaluate.base import EvaluationData
from fedssl.evaluate.registry import check_protocols, list_protocols, parse_protocol
from fedssl.federation.aggregate import count_samples
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.sampling import check_client_sizes, cohort_size
from fedssl.models.encoders import Timm
from fedssl.models.network import Network, Tower
from fedssl.models.vit import ViT, check_patch
from fedssl.objectives.base import Objective
from fedssl.privacy.leakage import summarize_risks
from fedssl.runs import loggers
from fedssl.runs.folder import SITES, format_deploy_command
from fedssl.util.errors import UserError
from fedssl.util.text import name_client, shorten_list

if TYPE_CHECKING:
    from fedssl.runs.build import Experiment


def is_deployed(config: Config) -> bool:
    """Return whether clients are real sites."""
    return config.engine.name == "flower" and config.engine.sites is not None


def check_environment(settings: Config, out: Path | None = None) -> None:
    """Check what a run needs beside its data: no real sites, installed packages.

    ``out`` is the folder of the run, which may be that of a deployment.
    """
    if is_deployed(settings):
        fix = "Write an app for them with fedssl deploy init, or leave it out."
        if out is not None and (out / SITES).exists():
            fix = f"Continue with {format_deploy_command(out, 'resume=true')}"
        sites = settings.engine.sites
        raise UserError("sites are elsewhere", key="engine.sites", value=sites, fix=fix)
    loggers.require(settings)
    if settings.engine.name == "flower":
        require_flower()


def check_deployment(config: Config) -> None:
    """Refuse what needs the images of real sites on the server."""
    if not is_deployed(config):
        return
    source = getattr(config.partition, "source", "labels")
    if source != "labels":
        problem = "real sites have their own data, which is neither divided nor altered"
        raise UserError(problem, key="partition.source", value=source, fix="Leave it out.")
    for protocol in list_protocols(config.evaluate):
        if protocol.needs == "clients":
            problem = "the server of real sites does not have the clients' images"
            raise protocol.error(problem, "Leave it out.")


def check_clients(
    config: Config,
    algorithm: Algorithm,
    dataset: Dataset,
    clients: Groups,
    names: Sequence[str],
    trains: bool,
) -> list[str]:
    """Check algorithm and objective against all clients' data; return the algorithm's notes."""
    objective, towers = algorithm.objective, config.encoder.towers
    method, loss = config.algorithm.name, config.objective.name
    if towers > objective.views:
        problem = f"objective {loss} uses one input, so a second tower learns nothing"
        raise UserError(problem, key="encoder.towers", value=towers, fix="Use encoder.towers=1.")
    if trains:
        _check_labels(objective, dataset)
    if algorithm.pools_data and config.engine.name != "local":
        problem = f"{method} has all data in one place, so there is nothing to send"
        fix = "Use engine.name=local."
        raise UserError(problem, key="engine.name", value=config.engine.name, fix=fix)
    check_client_sizes(algorithm, clients.sizes, names)
    _check_cohort(config, objective, clients, names)
    return list(algorithm.validate(config, len(clients))) if trains else []


def check_site(algorithm: Algorithm, dataset: Dataset, clients: Groups) -> None:
    """Check algorithm and objective against a real site's own data."""
    _check_labels(algorithm.objective, dataset)
    check_client_sizes(algorithm, clients.sizes)


def _check_labels(objective: Objective, dataset: Dataset) -> None:
    labels = dataset.train.labels
    if objective.needs_labels and (labels is None or bool((labels < 0).any())):
        problem, name = "needs a label for every training image", objective.params.name
        fix = "Use labeled data, or another objective such as cco."
        raise UserError(problem, key="objective.name", value=name, fix=fix)


def _check_cohort(
    config: Config, objective: Objective, clients: Groups, names: Sequence[str]
) -> None:
    """Check that rounds have enough images for the loss, and batches for batch norm."""
    size, needed = cohort_size(config, len(clients)), objective.min_samples
    fewest = int(np.sort(clients.sizes)[:size].sum())
    if fewest < needed:
        loss = config.objective.name
        problem = f"a round may have only {fewest} image, and objective {loss} compares {needed}"
        fix = "Use more clients per round."
        raise UserError(problem, key="cohort.size", value=size, fix=fix)
    smallest, batch = int(clients.sizes.argmin()), config.algorithm.batch
    if config.encoder.norm == "batch" and (batch == 1 or clients.sizes[smallest] < 2):
        reason = "algorithm.batch is 1" if batch == 1 else f"{name_client(names, smallest)} has 1"
        problem = f"needs batches of at least 2 images, and {reason}"
        raise UserError(problem, key="encoder.norm", value="batch", fix="Use encoder.norm=group.")


def check_norms(config: Config, network: Network) -> None:
    """Check that a policy for running statistics has some to act on."""
    if config.algorithm.norm_policy == "reset" and not network.has_batch_norm:
        norm, fix = config.encoder.norm, "Use average or local."
        problem = f"resets batch norm's running statistics, and encoder.norm={norm} has none"
        raise UserError(problem, key="algorithm.norm_policy", value="reset", fix=fix)


def check_small_views(config: Config, network: Network, augmentation: Augmentation) -> None:
    """Check that the encoder takes small views."""
    for (height, width), tower in product({s.size for s in augmentation.small}, network.towers):
        encoder = cast(Tower, tower).encoder
        if isinstance(encoder, ViT):
            check_patch(encoder.patch, height, width)
        elif isinstance(encoder, Timm) and encoder.size not in (None, height):
            problem = f"{config.encoder.name} takes images of one size"
            fix = "Use a convolutional encoder, or augment.small=0."
            raise UserError(problem, key="augment.small", value=config.augment.small, fix=fix)


def check_evaluation(data: EvaluationData, objective: Objective) -> None:
    """Check that the data allows the protocols, before any training."""
    check_protocols(data, has_head=objective.needs_labels)
    if data.settings.tower == "second" and data.config.encoder.towers == 1:
        problem, fix = "the network has one tower", "Set encoder.towers=2."
        raise UserError(problem, key="evaluate.tower", value="second", fix=fix)


def check_engine(engine: Engine) -> None:
    """Check what was asked of the engine."""
    trainer, config = engine.trainer, engine.trainer.config
    method, problem = config.algorithm.name, ""
    if config.evaluate.drift:  # local models must be seen here, one by one
        if config.engine.name != "local":
            problem, fix = "clients' models never come here whole", "Use engine.name=local."
        elif engine.algorithm.pools_data:
            problem, fix = f"{method} has no clients to compare", "Leave it out."
        elif engine.merges:
            problem, fix = "a merged cohort has no local models", "Set engine.merge=off."
        if problem:
            raise UserError(problem, key="evaluate.drift", value=True, fix=fix)
    if config.engine.compile == "on" and not trainer.compiles and not trainer.compiles_passes:
        problem = (
            f"{method} with {config.objective.name} cannot be compiled: it takes local training in "
            "batches of one size (algorithm.batch), or merged cohorts of clients of one size"
        )
        fix = "Use engine.compile=auto."
        raise UserError(problem, key="engine.compile", value="on", fix=fix)


def list_warnings(experiment: Experiment) -> Iterator[str]:
    """List what a user should know before the first round."""
    config, evaluator = experiment.config, experiment.evaluator
    if experiment.of_sites:
        yield from _describe_weights(experiment)
    if start := experiment.trainer.network.start:
        yield start
    yield from experiment.notes
    yield from list_evaluation_warnings(experiment)
    every, rounds = config.evaluate.every, config.rounds
    size, clients = config.cohort.size, len(experiment.engine.groups)
    if size is not None and size > clients:
        yield f"cohort.size={size}: there are only {clients} clients, so all are in each round."
    if evaluator.is_possible and 0 < rounds < every:
        yield f"evaluate.every={every}: there are {rounds} rounds, so only the end is evaluated"
    if not experiment.of_sites:
        yield from _list_data_warnings(experiment)


def describe_privacy(experiment: Experiment) -> str | None:
    """Describe in one line what the server could learn, where images may be of real people.

    A simulation on published images needs none. The report and docs/privacy.md have the details.
    """
    config = experiment.config
    if not experiment.of_sites and config.data.name not in OWN_DATA:
        return None
    sizes = experiment.engine.groups.sizes.tolist()
    return summarize_risks(config, experiment.algorithm, sizes, experiment.names)


def _describe_weights(experiment: Experiment) -> Iterator[str]:
    """Name a site that alone decides what the mean is; it only claims its number of images."""
    algorithm, batches = experiment.algorithm, experiment.trainer.batches
    sizes = experiment.engine.groups.sizes.tolist()
    if algorithm.weight != "uniform" and len(sizes) > 1:
        weights = [count_samples(algorithm.weight, batches, size) for size in sizes]
        largest = int(np.argmax(weights))
        share = weights[largest] / sum(weights)
        if share > 0.5:
            yield (
                f"Site {experiment.names[largest]} has {share:.2%} of the weight in the mean, by "
                f"its claim of {sizes[largest]:,} images. engine.max_samples limits such claims."
            )


def list_evaluation_warnings(experiment: Experiment) -> Iterator[str]:
    """List what a user should know before an evaluation."""
    evaluator, monitor = experiment.evaluator, experiment.config.evaluate.monitor
    if evaluator.is_possible:
        for spec in dict.fromkeys((*evaluator.protocols, *(monitor or ()))):
            yield from parse_protocol(spec).list_warnings(evaluator.data)


def _list_data_warnings(experiment: Experiment) -> Iterator[str]:
    config, clients = experiment.config, experiment.clients
    if config.data.name == "folder":
        yield _describe_folders(experiment)
        yield from describe_unused(config.data)
    partition, folders = config.partition.name, experiment.dataset.clients
    if folders and partition != "folder" and not experiment.algorithm.pools_data:
        yield (
            f"partition.name={partition}: your {len(folders)} client folders are ignored. Use them "
            "with partition.name=folder."
        )
    yield from describe_imbalance(config.partition, clients.sizes)
    yield from describe_clusters(config.partition)


def _describe_folders(experiment: Experiment) -> str:
    """Describe how the user's folders were read."""
    classes, names = experiment.dataset.classes, experiment.names
    labels = f"{len(classes)} classes ({shorten_list(classes, 5)})" if classes else "no labels"
    if isinstance(experiment.config.partition, Folder.Params):
        return f"Folders: {labels}, {len(names)} clients ({shorten_list(names, 5)})."
    partition = experiment.config.partition.name
    text = f"Folders: {labels}. partition.name={partition} makes {len(names)} simulated clients."
    if experiment.dataset.clients:
        return text
    return f"{text} If your folders are sites, set data.levels=client partition.name=folder."
