"""Evaluate a run's models: one model, the result of the run, and each client's."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data.dataset import Groups, ImageArray
from fedssl.data.heterogeneity import alter_images, alters_images, assign_sources
from fedssl.data.random import key, mix
from fedssl.data.squares import MiddleSquares
from fedssl.evaluate import linear, per_client
from fedssl.evaluate.base import EvaluatedModel, EvaluationData, Protocol
from fedssl.evaluate.features import extract
from fedssl.evaluate.models import TrainedModels
from fedssl.evaluate.per_client import PerClient
from fedssl.evaluate.registry import choose_protocols, parse_protocol
from fedssl.models.network import Network, Tower
from fedssl.models.trainable import merge_factors
from fedssl.training.trainer import Trainer
from fedssl.util.status import stage

Probes = dict[int | None, linear.Head]  # by client; None: of the global model
Weights = Tensor | Network  # of what trains in the run's network, or another one
MOST_EVALUATED = 5  # personal models that an evaluation averages over


class ModelEvaluator:
    """Evaluate models by the protocols of a configuration."""

    def __init__(self, data: EvaluationData, trainer: Trainer) -> None:
        self.data = data
        self.trainer = trainer
        # Each client's accuracy in the last ``evaluate_clients``, by kind of model.
        self.client_scores: dict[str, dict[str, float]] = {}
        self._protocols: dict[str, Protocol] = {}

    @property
    def is_possible(self) -> bool:
        """True if there are images to evaluate on."""
        return len(self.data.train) > 0

    @cached_property
    def protocols(self) -> tuple[str, ...]:
        """The protocols after training."""
        data, has_head = self.data, self.trainer.objective.needs_labels
        return choose_protocols(data.settings, data.train, data.test, has_head)

    def tower(self, weights: Weights) -> Tower:
        """Return a copy of the evaluated tower with these weights, all of which can train."""
        network = self.trainer.network if isinstance(weights, Tensor) else weights
        if isinstance(weights, Tensor):
            self.trainer.load(weights)
        number = int(self.data.settings.tower == "second")
        tower = copy.deepcopy(cast(Tower, network.towers[number]))
        return merge_factors(tower).to(self.trainer.device).float().eval()

    def evaluate(self, weights: Weights, specs: tuple[str, ...] | None = None) -> dict[str, float]:
        """Measure a model by the protocols ``specs``, or by the configured ones."""
        return self._evaluate(self.load(weights), specs or self.protocols)

    def load(self, weights: Weights) -> EvaluatedModel:
        """Return a model with these weights, to be evaluated."""
        return EvaluatedModel(self.data, self.tower(weights), self._views, "head" in self.protocols)

    def _evaluate(self, model: EvaluatedModel, specs: tuple[str, ...]) -> dict[str, float]:
        results: dict[str, float] = {}
        for spec in specs:
            if spec not in self._protocols:
                self._protocols[spec] = parse_protocol(spec)
            with stage(spec):
                results |= self._protocols[spec].evaluate(model)
        return results

    def evaluate_untrained(self, weights: Weights) -> dict[str, float]:
        """Measure random weights, which are the same for all clients."""
        model = self.load(weights)
        results = self._evaluate(model, self.protocols)
        if PerClient.name in self.protocols:
            scores = self._score_clients(weights, model.probe)
            results |= per_client.summarize(PerClient.name, scores)
        return results

    def evaluate_result(
        self, models: TrainedModels, specs: tuple[str, ...] | None = None
    ) -> dict[str, float]:
        """Measure a run's result: the global model, or the mean over personal models.

        If the result is personal and there is a global model, its measures are ``global_…``. Where
        the global model is the mean of peers, ``peers_…`` are the mean and the worst over them.
        """
        specs, probes = specs or self.protocols, Probes()

        def measure(weights: Tensor, client: int | None) -> dict[str, float]:
            model = self.load(weights)
            results = self._evaluate(model, specs)
            if PerClient.name in specs:
                probes[client] = model.probe
            return results

        if models.result == "global":
            results = measure(models.global_model(), None)
            results |= self._evaluate_peers(models, specs)
        else:
            personal = models.personal_models(MOST_EVALUATED).items()
            rows = [measure(weights, client) for client, weights in personal]
            results = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
            if models.algorithm.result.has_global:
                measures = measure(models.global_model(), None)
                results |= {f"global_{name}": value for name, value in measures.items()}
        if PerClient.name in specs:
            results |= self.evaluate_clients(models, probes)
        return results

    def _evaluate_peers(self, models: TrainedModels, specs: tuple[str, ...]) -> dict[str, float]:
        """Measure every peer's model: the mean and the minimum of each accuracy."""
        rows = [self._evaluate(self.load(weights), specs) for weights in models.peer_models()]
        results: dict[str, float] = {}
        for name in rows[0] if rows else ():
            protocol, _, kind = name.rpartition("_")
            if kind == "top1":
                each = [row[name] for row in rows]
                results[f"peers_{name}"] = float(np.mean(each))
                results[f"peers_{protocol}_worst"] = min(each)
        return results

    def evaluate_clients(
        self, models: TrainedModels, probes: Mapping[int | None, linear.Head] | None = None
    ) -> dict[str, float]:
        """Measure the global model and personal models, on each client's own test images.

        ``probes`` are linear classifiers that were fitted to these models before.
        """
        probes, scores = probes or {}, dict[str, NDArray[np.float64]]()
        if models.algorithm.result.has_global:
            scores["global"] = self._score_clients(models.global_model(), probes.get(None))
        for kind, k, weights in models.list_client_models():
            if kind not in scores:
                scores[kind] = np.full(len(self.data.clients), np.nan)
            probe = probes.get(k) if kind == "personal" else None
            scores[kind][k] = self._score_clients(weights, probe)[k]
        results: dict[str, float] = {}
        self.client_scores.clear()
        for kind, values in scores.items():
            each = zip(self.data.names, values.tolist(), strict=True)
            self.client_scores[kind] = {k: round(v, 4) for k, v in each if not math.isnan(v)}
            results |= per_client.summarize(f"{PerClient.name}_{kind}", values)
        return results

    @cached_property
    def client_tests(self) -> Groups:
        """The test images of each client."""
        return per_client.deal_tests(self.data)

    @cached_property
    def client_test_images(self) -> ImageArray:
        """The test images, rotated or stylized like their client's training images."""
        data, seed = self.data, self.data.config.split_seed
        test, params = data.test, data.config.partition
        assert test is not None
        images = test.images[data.modality]
        if not alters_images(params):
            return images
        of_train = assign_sources(params, data.dataset, seed).labels
        of_test = per_client.sources(
            self.client_tests, data.clients, of_train.numpy(), len(test), seed
        )
        return alter_images(params, images[:], torch.from_numpy(of_test))

    def _score_clients(
        self, weights: Weights, probe: linear.Head | None = None
    ) -> NDArray[np.float64]:
        """Return each client's accuracy; without a ``probe`` one is fitted."""
        test = self.data.test
        assert test is not None
        model = self.load(weights)
        features = extract(model.encoder, self.client_test_images)
        labels = test.full_labels.to(features.device)
        return per_client.accuracies(probe or model.probe, features, labels, self.client_tests)

    def _views(self, indices: Tensor, view: int) -> Tensor:
        """Return a view of training images, which come from whole images if these are stored."""
        images, index, sizes = self.data.train.images[self.data.modality], indices.cpu(), None
        height, width = images.shape[2:]
        augmentation = replace(self.trainer.augmentation, size=(height, width))
        if isinstance(images, MiddleSquares):
            sizes = None if images.sizes is None else images.sizes[index].to(indices.device)
            images = images.images
        state = mix(key(self.data.config.seed, "views"), indices)
        return augmentation.views(images[index].to(indices.device), state, view, sizes=sizes)
