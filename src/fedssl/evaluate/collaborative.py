"""Collaborative fine-tuning (CCL, section 6.3): supervised FedAvg with few labels per client."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from fedssl.algorithms.fedavg import FedAvg
from fedssl.config import Augment, Cohort, Config, Evaluate, Optimizer, Privacy
from fedssl.data import random
from fedssl.data.augment import PRESETS
from fedssl.data.dataset import Dataset, Groups, Split
from fedssl.engines.base import Engine
from fedssl.evaluate.base import EvaluatedModel, EvaluationData, Protocol
from fedssl.evaluate.features import head_accuracy
from fedssl.evaluate.finetune import new_head
from fedssl.federation.driver import run_round
from fedssl.federation.sampling import draw_cohort
from fedssl.federation.server import Server
from fedssl.models.flat_weights import FlatWeights
from fedssl.models.network import Network, Tower
from fedssl.objectives.supervised import Supervised

# The paper says "supervised collaborative learning [McMahan et al., 2017] with few locally labeled
# data on clients" and leaves the rest to an appendix that we do not have, so all this is our
# reading. The classifier's learning rate is 20 times the encoder's, as in semi. The other values
# were chosen on training images held out of digits, Fashion-MNIST and CIFAR-10 (JPEG), IID and with
# two classes per client: a rate of 0.03 among 0.01, 0.03 and 0.1; batches of 32 among 32 and 128;
# 50 rounds of 2 epochs, from which 100 rounds of 1 and 20 rounds of 5 hardly differ.
ROUNDS, EPOCHS, BATCH = 50, 2, 32
RULE = Optimizer("sgd", 0.03, momentum=0.9)
HEAD = 20.0


class Collaborative(Protocol):
    """Accuracy after supervised fine-tuning at the run's clients."""

    name = "collaborative"
    option = "share"
    needs = "clients"
    _engine: Engine | None = None  # built once, and used for every model

    def check(self, data: EvaluationData) -> None:
        """Check that some clients hold labelled images of two classes."""
        self.check_test(data)
        self.check_train(data)
        self.check_single_images(data)
        members = self._draw_images(data).members
        if not len(members):
            two = count_least(data.config) > 1
            images = "two labelled training images" if two else "a labelled training image"
            raise self.error(f"no client holds {images}", "Use semi or linear.")
        if len(data.train.full_labels[torch.from_numpy(members)].unique()) < 2:
            problem = "the clients' labelled images would all be of one class"
            raise self.error(problem, "Use a larger share.")

    def list_warnings(self, data: EvaluationData) -> list[str]:
        """Warn of clients without labels, and of clients that label more than their share."""
        drawn, warnings = self._draw_images(data), []
        if without := int(np.count_nonzero(drawn.sizes == 0)):
            count = f"{without} of {len(data.clients)} clients"
            warnings.append(f"{self.spec}: {count} have too few labelled images and are left out")
        labels = data.train.full_labels.numpy()[data.clients.members]
        labelled = int(np.count_nonzero(labels >= 0))
        if len(drawn.members) > self.share * labelled + 1e-9:
            percent = 100 * len(drawn.members) / labelled
            warnings.append(
                f"{self.spec}: small clients label more than their share, in all {percent:.1f}% "
                "of the images"
            )
        return warnings

    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Fine-tune a copy of the encoder; every call starts anew."""
        data = model.data
        assert data.test is not None
        if self._engine is None:
            self._engine = self._build_engine(data, model.encoder)
        trainer = self._engine.trainer
        trainer.load(train(self._engine, model.encoder, data.classes))
        tower = copy.deepcopy(trainer.network.towers[0]).float()
        return {self.measure: head_accuracy(tower, data.test, data.modality)}

    def _build_engine(self, data: EvaluationData, encoder: nn.Module) -> Engine:
        """Build the federation of the clients that have labels, on the images that they label."""
        assert data.build_engine is not None
        drawn = self._draw_images(data)
        index, sizes = torch.from_numpy(drawn.members), drawn.sizes[drawn.sizes > 0]
        few = Split((data.train.images[data.modality][index],), data.train.full_labels[index])
        dataset = Dataset(data.dataset.name, few, None, data.dataset.classes)
        groups = Groups(np.arange(len(index)), np.concatenate(([0], np.cumsum(sizes))))
        config = configure(data.config, len(groups))
        network = build_classifier(encoder, data.classes)
        return data.build_engine(config, dataset, groups, network)

    def _draw_images(self, data: EvaluationData) -> Groups:
        return draw_images(data.config, data.clients, data.train, self.share)


def configure(config: Config, clients: int) -> Config:
    """Return the configuration of supervised FedAvg in the run's own federation.

    Its cohorts stay: as many clients as in a round of the run. Privacy, robust means and Flower do
    not: they are about how the encoder was trained. Images are flipped where the run's own
    augmentation flips (not digits); all of a contrastive augmentation cost 4 to 19 points.
    """
    cohort, augment = config.cohort, config.augment
    flip = PRESETS[augment.name].flip if augment.flip is None else augment.flip
    size = None if cohort.size is None else min(cohort.size, clients)
    return replace(
        config,
        objective=Supervised.Params("supervised"),
        algorithm=FedAvg.Params("fedavg", local_epochs=EPOCHS, batch=BATCH),
        augment=Augment("none", flip=flip),
        encoder=replace(config.encoder, towers=1),
        engine=replace(config.engine, name="local", updates="full", max_norm=None, sites=None),
        client=RULE,
        server=Optimizer("sgd", 1.0),
        schedule="cosine",
        cohort=Cohort(size=size, fraction=cohort.fraction),
        privacy=Privacy(),
        rounds=ROUNDS,
        evaluate=Evaluate(protocols=("head",)),
    )


def count_least(config: Config) -> int:
    """Return the fewest labelled images of a client: batch norm needs two in a batch."""
    return 2 if config.encoder.norm == "batch" else 1


def draw_images(config: Config, groups: Groups, train: Split, share: float) -> Groups:
    """Draw the images that each client labels; a client with too few labels none.

    They are the ``share`` of its labelled images, rounded down but no fewer than ``count_least``,
    and that share of each of its classes, rounded up or down: in a row sorted by class, places of
    equal distance from a random start.
    """
    labels, fewest, seed = train.full_labels.numpy(), count_least(config), config.seed
    is_labelled = labels[groups.members] >= 0
    owners = np.repeat(np.arange(len(groups)), groups.sizes)[is_labelled]
    members = groups.members[is_labelled]
    ranks = random.mix(random.key(seed, "collaborative"), members.astype(np.uint64))
    row = members[np.lexsort((ranks, labels[members], owners))]
    sizes = np.bincount(owners, minlength=len(groups))
    # Up, by less than any share that a person writes: 0.29 × 100 is 28.999999999999996.
    counts = np.maximum(np.floor(share * sizes + 1e-9).astype(np.int64), fewest)
    counts[sizes < fewest] = 0
    clients = torch.arange(len(groups))
    start = random.uniform(random.mix(random.key(seed, "collaborative", 1), clients), 1)[:, 0]
    of = np.repeat(np.arange(len(groups)), counts)
    place = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    at = (place + start.double().numpy()[of]) * sizes[of] / counts[of]
    chosen = row[(np.cumsum(sizes) - sizes)[of] + at.astype(np.int64)]
    return Groups(chosen, np.concatenate(([0], np.cumsum(counts))))


class Scaled(nn.Module):
    """Scale a layer's output: steps of SGD then act as if the rate had the factor's square."""

    def __init__(self, layer: nn.Module, factor: float) -> None:
        super().__init__()
        self.layer = layer
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled output."""
        return self.layer(x) * self.factor


def build_classifier(encoder: nn.Module, classes: int) -> Network:
    """Return a copy of the encoder with a new linear classifier of zeros."""
    head = Scaled(new_head(encoder, classes), math.sqrt(HEAD))
    return Network([Tower(copy.deepcopy(encoder), head)])


def train(engine: Engine, encoder: nn.Module, classes: int) -> Tensor:
    """Return the weights after all rounds from this encoder."""
    config = engine.trainer.config
    engine.trainer.load(FlatWeights(build_classifier(encoder, classes)).vector)
    server = Server(engine.trainer)
    while server.round < config.rounds:
        ids = draw_cohort(config, len(engine.groups), server.round)
        run_round(engine.algorithm, server, engine.cohort(ids, server.round))
    return server.weights
