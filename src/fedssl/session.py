"""From a configuration to everything that a run needs, with every check that needs no training."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl import config as configuration
from fedssl.algorithms.base import Algorithm, Server
from fedssl.client import Workspace
from fedssl.config import Config
from fedssl.data import datasets
from fedssl.data.augment import Augmentation
from fedssl.data.dataset import Dataset, Groups, Split
from fedssl.data.partition import partition
from fedssl.data.random import choose, key, mix
from fedssl.engines.local import LocalEngine
from fedssl.errors import UserError
from fedssl.evaluate import check as check_protocols
from fedssl.evaluate import judge, parse, protocols
from fedssl.evaluate.features import extract, pool_cases, top1
from fedssl.models.flat import Flat
from fedssl.models.network import Network, Tower, build
from fedssl.objectives.base import Objective

JUDGED_CLIENTS = 5  # personal models that an evaluation averages over


@dataclass
class Session:
    """A run that could start now."""

    config: Config
    dataset: Dataset
    engine: LocalEngine
    server: Server
    cohort: int  # clients in a round

    @property
    def work(self) -> Workspace:
        """The network and its data."""
        return self.engine.work

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that runs."""
        return self.engine.algorithm

    def cohort_ids(self, round: int) -> NDArray[np.int64]:
        """Who takes part in a round."""
        state = key(self.config.seed, "cohort", round)
        return choose(state, len(self.engine.groups), self.cohort)

    def encoder(self, tower: int = 0) -> Tower:
        """One tower of the network that clients train (whatever weights it holds now)."""
        return cast(Tower, self.work.network.towers[tower])

    def judge(self, weights: Tensor) -> dict[str, float]:
        """The numbers of an encoder under the configured protocols."""
        train, test = self.judged_splits
        settings, seed, device = self.config.evaluate, self.config.seed, self.work.device
        tower = int(settings.tower == "second")
        modality = tower % len(train.images)
        settings = replace(settings, protocols=self.protocols)
        self.work.load(weights)
        # A copy: judging changes neither the clients' network nor its precision.
        body = copy.deepcopy(self.encoder(tower)).float().eval()
        results = judge(
            body.encoder,
            train,
            test,
            len(self.dataset.classes),
            settings,
            seed,
            device,
            views=self._views,
            modality=modality,
        )
        if "head" in self.protocols and test is not None and test.labels is not None:
            # The head is linear, so a case's mean logits are those of its mean encoding.
            logits = extract(body, test.images[modality], device=device)
            scores, labels = pool_cases(logits, test.labels, test.cases)
            results["head_top1"] = top1(scores.argmax(1), labels)
        return results

    def untrained(self) -> Tensor:
        """Weights at random, whatever weights the run itself started from."""
        if self.config.encoder.init is None:
            return self.work.initial
        fresh = replace(self.config, encoder=replace(self.config.encoder, init=None))
        images = self.dataset.train.images
        channels = tuple(i.shape[1] for i in images)
        size, classes = min(images[0].shape[2:]), len(self.dataset.classes)
        network = build_network(fresh, self.work.objective, channels, size, classes)
        return Flat(network).vector.to(self.work.initial)

    def judge_result(self) -> dict[str, float]:
        """The numbers of the algorithm's result: the global model, or the mean of personal ones."""
        if self.algorithm.judges == "global":
            return self.judge(self.server.weights)
        rows = [self.judge(weights) for weights in self.personal(JUDGED_CLIENTS).values()]
        return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}

    def personal(self, most: int) -> dict[int, Tensor]:
        """The models of up to ``most`` clients that have one."""
        trained = sorted(k for k, state in self.engine.states.items() if "weights" in state)
        if not trained:
            return {0: self.work.initial}
        chosen = choose(key(self.config.seed, "judged"), len(trained), most)
        return {trained[i]: cast(Tensor, self.engine.states[trained[i]]["weights"]) for i in chosen}

    @cached_property
    def protocols(self) -> tuple[str, ...]:
        """What is measured; a network trained with labels is also judged by its own head."""
        named = protocols(self.config.evaluate, self.dataset.train, self.dataset.test)
        extra = self.work.objective.needs_labels and "head" not in named
        return (*named, "head") if extra and self.config.evaluate.protocols is None else named

    @cached_property
    def judged_splits(self) -> tuple[Split, Split | None]:
        """The data at the size at which the encoder is judged."""
        settings = self.config.evaluate
        if settings.size is None or settings.size == self.config.data.size:
            return self.dataset.train, self.dataset.test
        other = datasets.load(self.config.data, self.config.seed, settings.size)
        return other.train, other.test

    def _views(self, images: Tensor, indices: Tensor, view: int) -> Tensor:
        state = mix(key(self.config.seed, "views"), indices)
        height, width = images.shape[2:]
        augmentation = replace(self.work.augmentation, size=(height, width))
        return augmentation.views(images, state, view)


def prepare(config: Config) -> Session:
    """Load the data, build the network, and refuse what could not run."""
    device = pick_device(config.device)
    torch.set_num_threads(config.engine.threads)
    dataset = datasets.load(config.data, config.seed)
    train = dataset.train
    objective: Objective = configuration.variant("objective", config.objective.name)(
        config.objective
    )
    groups = partition(config.partition, train, len(dataset.classes), config.seed)
    size = cohort_size(config, len(groups))
    algorithm_class: type[Algorithm] = configuration.variant("algorithm", config.algorithm.name)
    if algorithm_class.pools_data:
        config, groups = pooled(config, groups, size)
        size = 1
    algorithm = algorithm_class(config.algorithm, objective)
    check_objective(objective, train, config)
    algorithm.check_clients(groups.sizes)
    check_cohort(config, objective, groups, size)
    height, width = train.images[0].shape[2:]
    channels = tuple(images.shape[1] for images in train.images)
    augmentation = Augmentation.from_config(config.augment, channels[0], (height, width))
    network = build_network(config, objective, channels, min(height, width), len(dataset.classes))
    work = Workspace(config, network, objective, augmentation, train, device)
    check_evaluation(config, dataset, objective)
    engine = LocalEngine(work, algorithm, groups)
    session = Session(config, dataset, engine, Server(config, work.flat), size)
    _ = session.judged_splits  # a file that cannot be read at that size is found now
    return session


def build_network(
    config: Config, objective: Objective, channels: tuple[int, ...], size: int, classes: int
) -> Network:
    """The network of a configuration, initialized."""
    return build(
        config.encoder,
        channels,
        size,
        lambda features, norm: objective.head(features, norm, classes),
        config.seed,
    )


def cohort_size(config: Config, clients: int) -> int:
    """How many clients a round has."""
    cohort = config.cohort
    if cohort.size is not None and cohort.size > clients:
        raise UserError(
            f"cohort.size={cohort.size}: the partition has only {clients} clients; "
            f"take at most {clients}"
        )
    size = cohort.size or clients
    if cohort.fraction is not None:
        size = max(1, round(cohort.fraction * clients))
    if cohort.minimum > size:
        raise UserError(f"cohort.minimum={cohort.minimum}: more than the {size} clients of a round")
    return size


def pooled(config: Config, groups: Groups, cohort: int) -> tuple[Config, Groups]:
    """One client that holds all samples of the partition; a step sees as many as a cohort has."""
    total = len(groups.members)
    batch = config.algorithm.batch or max(1, round(cohort * total / len(groups)))
    algorithm = replace(config.algorithm, batch=min(batch, total))
    config = replace(config, algorithm=algorithm, cohort=replace(config.cohort, minimum=1))
    one = Groups(np.sort(groups.members), np.array([0, total]))
    return config, one


def check_cohort(config: Config, objective: Objective, groups: Groups, size: int) -> None:
    """Enough samples in every round for the loss, and in every batch for batch norm."""
    fewest = int(np.sort(groups.sizes)[:size].sum())
    if fewest < objective.minimum:
        raise UserError(
            f"cohort.size={size}: a round may hold only {fewest} sample, and "
            f"objective.name={config.objective.name} compares at least {objective.minimum}; "
            "take more clients a round"
        )
    smallest = min(int(groups.sizes.min()), config.algorithm.batch or len(groups.members))
    if config.encoder.norm == "batch" and smallest < 2:
        raise UserError(
            "encoder.norm=batch: needs batches of at least 2 samples, and a client or "
            "algorithm.batch has 1; use encoder.norm=group"
        )


def check_objective(objective: Objective, train: Split, config: Config) -> None:
    """Labels where the objective needs them, and a use for every tower."""
    if config.encoder.towers > objective.inputs:
        raise UserError(
            f"encoder.towers={config.encoder.towers}: objective.name={config.objective.name} looks "
            "at one input, so a second tower would learn nothing; use encoder.towers=1"
        )
    if objective.needs_labels and (train.labels is None or bool((train.labels < 0).any())):
        raise UserError(
            f"objective.name={objective.params.name}: needs a label for every training image; "
            "use labelled data, or another objective such as cco"
        )


def check_evaluation(config: Config, dataset: Dataset, objective: Objective) -> None:
    """Protocols that the data allows, of a tower that exists."""
    settings = config.evaluate
    check_protocols(settings, dataset.train, dataset.test, len(dataset.classes))
    if settings.tower == "second" and config.encoder.towers == 1:
        raise UserError("evaluate.tower=second: there is one tower; set encoder.towers=2")
    named = settings.protocols or ()
    if any(parse(spec)[0] == "head" for spec in named) and not objective.needs_labels:
        raise UserError(
            f"evaluate.protocols=head: objective.name={config.objective.name} trains no "
            "classifier; use linear"
        )


def pick_device(name: str) -> torch.device:
    """``auto`` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:100]
        raise UserError(f"device={name}: not available here ({reason}); use device=cpu") from None
    return device
