"""Build the parts of a run from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor

from fedssl import config as configuration
from fedssl.config import Config, plugins
from fedssl.data.augment import Augmentation, OwnAugmentation
from fedssl.data.dataset import Census, Dataset, Groups
from fedssl.data.heterogeneity import alter_training_images
from fedssl.data.partition import client_names
from fedssl.data.places import cache_folder
from fedssl.engines.base import Engine
from fedssl.engines.flower.simulation import SimulatedEngine
from fedssl.engines.local import LocalEngine
from fedssl.engines.remote.engine import RemoteEngine
from fedssl.evaluate.base import EvaluationData
from fedssl.evaluate.evaluator import ModelEvaluator
from fedssl.evaluate.models import TrainedModels
from fedssl.evaluate.registry import list_protocols
from fedssl.federation.algorithm import Algorithm, build_algorithm
from fedssl.federation.client import Client
from fedssl.federation.sampling import cohort_size, draw_cohort
from fedssl.federation.server import Server
from fedssl.models.network import Network, Tower, build
from fedssl.models.wrapped import OwnEncoder
from fedssl.objectives.base import Objective
from fedssl.privacy.aggregators import build_aggregator
from fedssl.privacy.noise import Noisy
from fedssl.runs import validate
from fedssl.runs.budget import Budget
from fedssl.runs.guard import Guard, check_guard
from fedssl.runs.memory_needs import check_memory
from fedssl.runs.metrics import Overhead
from fedssl.runs.split import (
    load_evaluated_dataset,
    load_run_dataset,
    pool_clients,
    public_images,
    split_clients,
)
from fedssl.training.trainer import Trainer
from fedssl.util.device import pick_device
from fedssl.util.tuning import count_threads, keep_compiled_code, keep_freed_memory

# Steps of a run from which compiling one is paid back. BYOL, ResNet-18, batch 128 on an H200
# (results/measured.jsonl): the first round took 22 to 63 s longer, a step 9 ms in place of 46.
WORTH_COMPILING = 2000


@dataclass
class Record:
    """Facts about the run's other files, which a checkpoint keeps."""

    config: str = ""  # the text of config.yaml
    metrics: str = ""  # the SHA-256 digest of metrics.jsonl


@dataclass
class Experiment:
    """A run's parts, ready to start.

    ``clients`` are each client's training images. ``config`` and ``engine`` have one client of all
    of them if the algorithm pools data.
    """

    config: Config
    dataset: Dataset
    clients: Groups
    names: list[str]
    engine: Engine
    server: Server
    of_sites: bool = False  # clients are real sites, which keep their images and models
    head_classes: int | None = None  # classes of the network's classifier, if not the data's
    overhead: Overhead = field(default_factory=Overhead)
    record: Record = field(default_factory=Record)
    notes: Sequence[str] = ()  # the algorithm's, for its user
    images: str = ""  # a digest of the training images or, of real sites, of their numbers
    drawn: tuple[int, NDArray[np.int64]] | None = None  # a round, and its clients

    @property
    def trainer(self) -> Trainer:
        """The network and its data."""
        return self.engine.trainer

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that runs."""
        return self.engine.algorithm

    @cached_property
    def guard(self) -> Guard:
        """The guard that keeps the best encoder (``evaluate.guard``)."""
        return Guard(self)

    @cached_property
    def models(self) -> TrainedModels:
        """The global and personal models."""
        return TrainedModels(self.engine, self.server, self.of_sites)

    @cached_property
    def evaluator(self) -> ModelEvaluator:
        """The evaluation of models by the configured protocols."""
        dataset = load_evaluated_dataset(self.config, self.dataset)
        data = EvaluationData(self.config, dataset, self.clients, self.names, build_federation)
        return ModelEvaluator(data, self.trainer)

    @cached_property
    def public(self) -> Client | None:
        """The server's public images, as a client of their own."""
        members = public_images(self.config, self.dataset)
        if not len(members):
            return None
        ids, sizes = np.array([len(self.engine.groups)]), np.array([len(members)])
        lr = self.config.client.lr
        return Client(self.trainer, members, ids, sizes, 0, lr, {})

    @cached_property
    def budget(self) -> Budget | None:
        """The count of the privacy that noise spends; ``None`` without noise."""
        aggregator = self.engine.aggregator
        return Budget(self.images, aggregator) if isinstance(aggregator, Noisy) else None

    def tower(self, number: int = 0) -> Tower:
        """Return a tower of the network that clients train, with its present weights."""
        return cast(Tower, self.trainer.network.towers[number])

    def draw_cohort(self, round: int) -> NDArray[np.int64]:
        """Draw the clients of a round, once: they are drawn ahead while the device is at work."""
        if self.drawn is None or self.drawn[0] != round:
            self.drawn = round, draw_cohort(self.config, len(self.engine.groups), round)
        return self.drawn[1]

    @property
    def starts_from_given(self) -> bool:
        """True if the encoder's first weights are a file's, or those of a user's own module."""
        encoder = self.config.encoder
        is_given = encoder.pretrained or encoder.init is not None
        return is_given or plugins.is_own(encoder.name)

    def untrained(self) -> Tensor | Network:
        """Return random weights, also if the run starts from given ones, or a network of them."""
        if not self.starts_from_given:
            return self.trainer.initial
        fresh = replace(self.config, encoder=self.config.encoder.without_weights())
        classes = self.head_classes or len(self.dataset.classes)
        shape = image_shape(fresh, self.dataset)
        network = build_network(fresh, self.trainer.objective, *shape, classes)
        for each in network.modules():
            if isinstance(each, OwnEncoder):
                each.draw_weights(fresh.seed)
        return network


def build_experiment(
    config: Config,
    dataset: Dataset | None = None,
    head_classes: int | None = None,
    trains: bool = True,
) -> Experiment:
    """Load the data, unless it is given, and build a run whose clients are simulated.

    ``head_classes`` is the number of classes of the network's own classifier, if it is not the
    data's. If it does not train, it evaluates a run's checkpoint.
    """
    list_protocols(config.evaluate)  # reports errors before images are decoded, which may be long
    if dataset is None:
        dataset = load_run_dataset(config)
    else:
        dataset = alter_training_images(config.partition, dataset, config.split_seed)
    clients = split_clients(config, dataset)
    if trains and is_shipped(config):
        bare = replace(config, encoder=config.encoder.without_weights())
        check_memory(assemble(bare, dataset, clients, head_classes=head_classes, weights=False))
    experiment = assemble(config, dataset, clients, head_classes=head_classes, trains=trains)
    labels, groups = dataset.train.labels, experiment.engine.groups
    if trains and labels is not None and bool((labels[groups.members] >= 0).all()):
        census = Census(labels.to(experiment.trainer.device), groups, len(dataset.classes))
        experiment.trainer.census = experiment.server.census = census
    augmentation = experiment.trainer.augmentation
    if trains and isinstance(augmentation, OwnAugmentation):
        _ = augmentation.function  # reports now if it cannot be called; evaluation needs none
    check_guard(experiment)
    _ = experiment.evaluator  # reports now if a file cannot be read at the size of evaluation
    return experiment


def is_shipped(config: Config) -> bool:
    """Return whether a network can be built without weights: a user's own may read values."""
    return (
        config.objective.name in configuration.VARIANTS["objective"]
        and config.algorithm.name in configuration.VARIANTS["algorithm"]
        and not config.encoder.name.startswith(configuration.TIMM)
        and not plugins.is_own(config.encoder.name)
    )


def assemble(
    config: Config,
    dataset: Dataset,
    clients: Groups,
    site_names: Sequence[str] | None = None,
    *,
    head_classes: int | None = None,
    trains: bool = True,
    weights: bool = True,
) -> Experiment:
    """Check the configuration against the data, and build the parts.

    ``site_names`` are those of real sites. Without ``weights`` the network is on the meta device:
    it takes no memory and cannot run.
    """
    validate.check_deployment(config)
    names, of_sites = site_names, site_names is not None
    if names is None and validate.is_deployed(config):
        names = list(map(str, range(len(clients))))
    names = list(names or client_names(config.partition, clients, dataset))
    groups, kind = clients, configuration.variant("algorithm", config.algorithm.name)
    if kind.pools_data:
        config, groups = pool_clients(config, clients, cohort_size(config, len(clients)))
    algorithm = build_algorithm(config)
    known = () if kind.pools_data else names
    notes = validate.check_clients(config, algorithm, dataset, groups, known, trains)
    classes = head_classes or len(dataset.classes)
    with torch.device("cpu" if weights else "meta"):
        network = build_network(config, algorithm.objective, *image_shape(config, dataset), classes)
    validate.check_norms(config, network)
    if len(dataset.train):
        data = EvaluationData(config, dataset, clients, names)
        validate.check_evaluation(data, algorithm.objective)
    trainer = build_trainer(config, algorithm.objective, dataset, network)
    validate.check_small_views(config, network, trainer.augmentation)
    engine = build_engine(trainer, algorithm, groups)
    validate.check_engine(engine)
    server = Server(trainer, known)
    experiment = Experiment(
        config, dataset, clients, names, engine, server, of_sites, head_classes, notes=notes
    )
    experiment.images = dataset.files.get("train", dataset.name)
    return experiment


def build_site(config: Config, dataset: Dataset) -> Experiment:
    """Build what a real site needs, whose images are those of one of ``engine.sites`` clients."""
    total = len(dataset.train)
    clients = Groups(np.arange(total), np.array([0, total]))
    algorithm = build_algorithm(config)
    validate.check_site(algorithm, dataset, clients)
    classes = len(dataset.classes)
    network = build_network(config, algorithm.objective, *image_shape(config, dataset), classes)
    trainer = build_trainer(config, algorithm.objective, dataset, network)
    engine = build_engine(trainer, algorithm, clients, config.engine.sites)
    return Experiment(config, dataset, clients, [], engine, Server(trainer))


def build_network(
    config: Config, objective: Objective, channels: tuple[int, ...], size: int, classes: int
) -> Network:
    """Build the network, initialized, for images of ``size`` pixels with these channels."""
    return build(
        config.encoder,
        channels,
        size,
        lambda encoder, norm: objective.heads(encoder, norm, classes),
        config.seed,
        objective.joint,
    )


def image_shape(config: Config, dataset: Dataset) -> tuple[tuple[int, ...], int]:
    """Return the channels of each modality, and the length of a view's shorter side."""
    images = dataset.train.images
    size = config.augment.size or min(images[0].shape[2:])
    return tuple(each.shape[1] for each in images), size


def describe_images(config: Config, dataset: Dataset) -> dict[str, Any]:
    """Describe an encoder's images, for its note (``encoder.json``).

    ``stored`` is the size of the frame into which a whole image is reduced at first.
    """
    images, size = dataset.train.images, config.augment.size
    return {
        "channels": [each.shape[1] for each in images],
        "size": list(images[0].shape[2:]) if size is None else [size, size],
        "stored": images[0].shape[2] if config.data.shape == "whole" else None,
        "interpolation": config.data.interpolation,
        "window": config.data.window,
    }


def build_trainer(
    config: Config, objective: Objective, dataset: Dataset, network: Network
) -> Trainer:
    """Put the network and the data on the device, and set up this process."""
    device = pick_device(config.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams and kernels that name no device mean this one
    torch.set_num_threads(count_threads(config.engine.threads))
    keep_freed_memory()
    if any(weight.is_meta for weight in network.parameters()):
        device = torch.device("meta")
    train = dataset.train
    height, width = train.images[0].shape[2:]
    channels = train.images[0].shape[1]
    augmentation = Augmentation.from_config(
        config.augment, channels, (height, width), config.data.interpolation
    )
    return Trainer(config, network, objective, augmentation, train, device)


def build_engine(
    trainer: Trainer, algorithm: Algorithm, groups: Groups, clients: int | None = None
) -> Engine:
    """Build the engine of ``groups``, the images of all ``clients`` or of the one that is here."""
    config, clients = trainer.config, clients or len(groups)
    trainer.compiles = compiles_steps(trainer, algorithm, groups)
    aggregator = build_aggregator(config, algorithm, clients, cohort_size(config, clients))
    engine: Engine
    if config.engine.name == "local":
        engine = LocalEngine(trainer, algorithm, groups, aggregator)
    elif validate.is_deployed(config):
        engine = RemoteEngine(trainer, algorithm, groups, aggregator)
    else:
        engine = SimulatedEngine(trainer, algorithm, groups, aggregator, build=build_worker_engine)
    if config.evaluate.drift:
        trainer.watched = {}
    passes = compiles_passes(engine)
    if trainer.compiles or passes:
        keep_compiled_code(cache_folder(config.data) / "compiled")
    if passes:
        trainer.compile_passes()
    return engine


@lru_cache(maxsize=1)
def build_worker_engine(text: str) -> Engine:
    """Build the engine of a simulation's worker from its configuration, once per process."""
    return build_experiment(configuration.build(yaml.safe_load(text))).engine


def build_federation(config: Config, dataset: Dataset, groups: Groups, network: Network) -> Engine:
    """Build an engine for a given network; protocols that train use it."""
    algorithm = build_algorithm(config)
    trainer = build_trainer(config, algorithm.objective, dataset, network)
    return build_engine(trainer, algorithm, groups)


def compiles_steps(trainer: Trainer, algorithm: Algorithm, groups: Groups) -> bool:
    """Return whether local training goes through a compiled step (``engine.compile``)."""
    config = trainer.config
    possible = trainer.batches.size is not None and trainer.objective.needs_batch_only
    if not possible or config.engine.compile != "auto":
        return possible and config.engine.compile == "on"
    clients = cohort_size(config, len(groups))
    steps = config.rounds * clients * trainer.batches.per_round(int(np.median(groups.sizes)))
    return trainer.device.type == "cuda" and steps >= WORTH_COMPILING


def compiles_passes(engine: Engine) -> bool:
    """Return whether merged cohorts go through compiled passes: one shape for all rounds.

    A round of 512 images of ResNet-14 took 16 ms so, on an H200 (results/measured.jsonl). Plain, a
    step takes about six times that, so that a minute or two of compiling is paid back.
    """
    config, sizes = engine.trainer.config, engine.groups.sizes
    possible = engine.merges and bool((sizes == sizes[0]).all())
    if not possible or config.engine.compile != "auto":
        return possible and config.engine.compile == "on"
    return engine.trainer.device.type == "cuda" and config.rounds >= WORTH_COMPILING
