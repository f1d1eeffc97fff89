"""Evaluate a run's models: one model, the result of the run, and each client's."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedssl.config import Config, SourceParams
from fedssl.data.dataset import Dataset, Groups, Split
from fedssl.data.heterogeneity import alter_images, alters_images, assign_sources
from fedssl.data.labels import draw_share
from fedssl.data.random import key, mix
from fedssl.engines.base import Engine
from fedssl.evaluate import collaborative, evaluate_encoder, linear, parse, per_client, protocols
from fedssl.evaluate.collaborative import FineTuning
from fedssl.evaluate.features import extract, pool_cases, top1
from fedssl.evaluate.models import TrainedModels
from fedssl.models.network import Network, Tower
from fedssl.training.trainer import Trainer

Probes = dict[int | None, list[linear.Head]]  # by client; None: of the global model
MOST_EVALUATED = 5  # personal models that an evaluation averages over


@dataclass
class ModelEvaluator:
    """Evaluate models by the protocols of a configuration.

    ``dataset`` has images of the size of evaluation. ``clients`` are each client's training images.
    ``build_engine`` builds the federation in which ``collaborative`` fine-tunes.
    """

    config: Config
    trainer: Trainer
    dataset: Dataset
    clients: Groups
    names: Sequence[str]
    build_engine: Callable[[Config, Dataset, Groups, Network], Engine]
    # Each client's accuracy in the last ``evaluate_clients``, by kind of model.
    client_scores: dict[str, dict[str, float]] = field(default_factory=dict)
    _federations: dict[str, FineTuning] = field(
        default_factory=dict
    )  # of ``collaborative``, by spec

    @property
    def is_possible(self) -> bool:
        """Whether there are images to evaluate on."""
        return len(self.dataset.train) > 0

    @property
    def modality(self) -> int:
        """Which images the evaluated tower sees."""
        return self._tower % len(self.dataset.train.images)

    @property
    def _tower(self) -> int:
        return int(self.config.evaluate.tower == "second")

    @cached_property
    def protocols(self) -> tuple[str, ...]:
        """The protocols in use; by default with the network's own classifier if it has one."""
        given = self.config.evaluate.protocols
        named = protocols(self.config.evaluate, self.dataset.train, self.dataset.test)
        has_head = self.trainer.objective.needs_labels
        return (*named, "head") if given is None and has_head else named

    def tower(self, weights: Tensor) -> Tower:
        """Return a copy of the evaluated tower with these weights."""
        self.trainer.load(weights)
        tower = cast(Tower, self.trainer.network.towers[self._tower])
        return copy.deepcopy(tower).float().eval()

    def evaluate(
        self,
        weights: Tensor,
        specs: tuple[str, ...] | None = None,
        probes: list[linear.Head] | None = None,
    ) -> dict[str, float]:
        """Measure a model by the protocols ``specs``, or by the configured ones."""
        train, test = self.dataset.train, self.dataset.test
        specs = specs or self.protocols
        # A network with a classifier needs no probe on held-out images.
        with_head = [s for s in specs if "head" in self.protocols and parse(s)[0] == "heldout"]
        rest = tuple(spec for spec in specs if spec not in with_head)
        tower = self.tower(weights)
        results = evaluate_encoder(
            tower.encoder,
            train,
            test,
            len(self.dataset.classes),
            replace(self.config.evaluate, protocols=rest),
            self.config.seed,
            self.trainer.device,
            views=self._views,
            modality=self.modality,
            holdout=self.config.data.holdout,
            probes=probes,
        )
        for spec in specs:
            name, share = parse(spec)
            if name == "head" and test is not None:
                results["head_top1"] = self._head_accuracy(tower, test)
            elif spec in with_head and share is not None:
                held_out = self._held_out(train, share)
                results[f"{spec}_top1"] = self._head_accuracy(tower, held_out)
            elif name == "collaborative" and share is not None:
                results[f"{spec}_top1"] = self._fine_tune(tower.encoder, spec, share)
        return results

    def evaluate_untrained(self, weights: Tensor) -> dict[str, float]:
        """Measure random weights, which are the same for all clients."""
        probes = list[linear.Head]()
        results = self.evaluate(weights, probes=probes)
        if "per-client" in self.protocols:
            summary = per_client.summary("global", self._score_clients(weights, *probes))
            results |= {name.replace("_global", ""): value for name, value in summary.items()}
        return results

    def evaluate_result(
        self, models: TrainedModels, specs: tuple[str, ...] | None = None
    ) -> dict[str, float]:
        """Measure a run's result: the global model, or the mean over personal models.

        If the result is personal and there is a global model, its measures are ``global_…``.
        """
        probes: Probes = defaultdict(list)
        if models.result == "global":
            results = self.evaluate(models.global_model(), specs, probes[None])
        else:
            personal = models.personal_models(MOST_EVALUATED).items()
            rows = [self.evaluate(weights, specs, probes[k]) for k, weights in personal]
            results = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
            if models.algorithm.result.has_global:
                measures = self.evaluate(models.global_model(), specs, probes[None])
                results |= {f"global_{name}": value for name, value in measures.items()}
        if "per-client" in (specs or self.protocols):
            results |= self.evaluate_clients(models, probes)
        return results

    def evaluate_clients(
        self, models: TrainedModels, probes: Probes | None = None
    ) -> dict[str, float]:
        """Measure the global model and personal models, on each client's own test images.

        ``probes`` are linear classifiers that were fitted to these models before.
        """
        results: dict[str, float] = {}
        probes = probes or {}
        self.client_scores.clear()
        if models.algorithm.result.has_global:
            scores = self._score_clients(models.global_model(), *probes.get(None, []))
            self.client_scores["global"] = self._by_name(scores)
            results |= per_client.summary("global", scores)
        personal = models.personal_models()
        if personal:
            scores = np.full(len(self.clients), np.nan)
            for k, weights in personal.items():
                scores[k] = self._score_clients(weights, *probes.get(k, []))[k]
            self.client_scores["personal"] = self._by_name(scores)
            results |= per_client.summary("personal", scores)
        return results

    @cached_property
    def client_tests(self) -> Groups:
        """Which test images belong to which client."""
        train, test = self.dataset.train, self.dataset.test
        assert test is not None
        mode, classes = self.config.evaluate.client_test, len(self.dataset.classes)
        return per_client.deal(mode, self.clients, train, test, classes, self.config.seed)

    @cached_property
    def client_test_images(self) -> Tensor:
        """The test images, rotated or stylized like their client's training images."""
        test, params = self.dataset.test, self.config.partition
        assert test is not None
        images = test.images[self.modality]
        if not isinstance(params, SourceParams) or not alters_images(params):
            return images
        of_train = assign_sources(params, self.dataset, self.config.seed).labels
        assert of_train is not None
        of_test = per_client.sources(
            self.client_tests, self.clients, of_train.numpy(), len(test), self.config.seed
        )
        return alter_images(params, images, torch.from_numpy(of_test))

    def _score_clients(
        self, weights: Tensor, probe: linear.Head | None = None
    ) -> NDArray[np.float64]:
        train, test = self.dataset.train, self.dataset.test
        assert train.labels is not None and test is not None and test.labels is not None
        encoder, device = self.tower(weights).encoder, self.trainer.device
        features = extract(encoder, self.client_test_images, device=device)
        tests = (features, test.labels.to(device), self.client_tests)
        if probe is not None:
            return per_client.accuracies(probe, *tests)
        return per_client.scores(
            extract(encoder, train.images[self.modality], device=device),
            train.labels.to(device),
            *tests,
            len(self.dataset.classes),
            self.config.evaluate.preset,
            self.config.seed,
        )

    def _by_name(self, scores: NDArray[np.float64]) -> dict[str, float]:
        each = zip(self.names, scores.tolist(), strict=True)
        return {name: round(score, 4) for name, score in each if score == score}

    def _head_accuracy(self, tower: Tower, split: Split) -> float:
        """Top-1 of the network's own classifier."""
        assert split.labels is not None
        # The head is linear, so a case's mean logits are those of its mean encoding.
        logits = extract(tower, split.images[self.modality], device=self.trainer.device)
        scores, labels = pool_cases(logits, split.labels, split.cases)
        return top1(scores.argmax(1), labels)

    def _held_out(self, train: Split, share: float) -> Split:
        """Return the training images that ``heldout`` evaluates on."""
        assert train.labels is not None
        classes, seed = len(self.dataset.classes), self.config.seed
        index = draw_share(train.labels, share, classes, seed)
        return Split(tuple(images[index] for images in train.images), train.labels[index])

    def _fine_tune(self, encoder: nn.Module, spec: str, share: float) -> float:
        """Top-1 after supervised federated fine-tuning of this encoder."""
        train, test = self.dataset.train, self.dataset.test
        assert test is not None
        if spec not in self._federations:
            drawn = collaborative.draw(self.config, self.clients, train, share)
            few, groups = collaborative.data(self.dataset, train, test, self.modality, drawn)
            settings = collaborative.settings(self.config, len(groups))
            network = collaborative.classifier(encoder, len(few.classes))
            engine = self.build_engine(settings, few, groups, network)
            self._federations[spec] = FineTuning(engine, few)
        return self._federations[spec].accuracy(encoder)

    def _views(self, images: Tensor, indices: Tensor, view: int) -> Tensor:
        state = mix(key(self.config.seed, "views"), indices)
        height, width = images.shape[2:]
        augmentation = replace(self.trainer.augmentation, size=(height, width))
        return augmentation.views(images, state, view)
