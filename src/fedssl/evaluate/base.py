"""The contract of a protocol: one way to evaluate an encoder."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedssl.config import Config, Evaluate
from fedssl.data.dataset import Dataset, Groups, Split
from fedssl.data.labels import draw_labels, draw_share
from fedssl.engines.base import Engine
from fedssl.evaluate import linear
from fedssl.evaluate.features import Labelled, extract, pool_cases, top1, units
from fedssl.models.network import Network, Tower
from fedssl.util.errors import UserError

PROTOCOLS = "evaluate.protocols"
# (uint8 images, their numbers, view 0 or 1) → the float images of that augmented view
Views = Callable[[Tensor, Tensor, int], Tensor]
BuildEngine = Callable[[Config, Dataset, Groups, Network], Engine]


@dataclass(frozen=True)
class EvaluationData:
    """The data of an evaluation; ``clients`` are each client's training images."""

    config: Config
    dataset: Dataset
    clients: Groups
    names: Sequence[str] = ()  # of the clients
    build_engine: BuildEngine | None = None  # for protocols that train a federation

    @property
    def settings(self) -> Evaluate:
        """The keys of evaluation."""
        return self.config.evaluate

    @property
    def train(self) -> Split:
        """The training images."""
        return self.dataset.train

    @property
    def test(self) -> Split | None:
        """The test images."""
        return self.dataset.test

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.dataset.classes)

    @property
    def modality(self) -> int:
        """The images that the evaluated tower sees."""
        return int(self.settings.tower == "second") % len(self.train.images)


class SplitFeatures:
    """One split under one encoder; features are computed once, when they are first needed."""

    def __init__(
        self, encoder: nn.Module, split: Split, modality: int, device: torch.device | str
    ) -> None:
        self.encoder = encoder
        self.split = split
        self.images = split.images[modality]
        self.device = device

    @cached_property
    def features(self) -> Tensor:
        """The features of every image."""
        return extract(self.encoder, self.images, device=self.device)

    @cached_property
    def pooled(self) -> tuple[Tensor, Tensor]:
        """Features and labels of the labelled cases."""
        return pool_cases(self.features, self.split.full_labels, self.split.cases)

    @cached_property
    def labelled(self) -> Labelled:
        """The labelled cases, in the order of ``pooled``."""
        return Labelled(self.images, *units(self.split.full_labels, self.split.cases))

    def take(self, chosen: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return copies of the features and labels of some labelled cases."""
        features, labels = self.pooled
        index = torch.as_tensor(chosen, device=features.device)
        return features[index], labels[index]


class EvaluatedModel:
    """A model under evaluation; ``has_head`` says whether its own classifier is evaluated too."""

    def __init__(
        self,
        data: EvaluationData,
        tower: Tower,
        device: torch.device | str,
        views: Views,
        has_head: bool = False,
    ) -> None:
        self.data = data
        self.tower = tower
        self.encoder: nn.Module = tower.encoder
        self.device = device
        self.views = views
        self.has_head = has_head
        self.train = SplitFeatures(self.encoder, data.train, data.modality, device)

    @cached_property
    def test(self) -> SplitFeatures:
        """The test images."""
        assert self.data.test is not None
        return SplitFeatures(self.encoder, self.data.test, self.data.modality, self.device)

    @cached_property
    def probe(self) -> linear.Head:
        """The linear classifier of all labelled training cases."""
        data = self.data
        return linear.fit(*self.train.pooled, data.classes, data.settings.preset, data.config.seed)

    def head_accuracy(self, split: Split) -> float:
        """Return the top-1 of the network's own classifier in percent."""
        # The head is linear, so a case's mean logits are those of its mean encoding.
        logits = extract(self.tower, split.images[self.data.modality], device=self.device)
        scores, labels = pool_cases(logits, split.full_labels, split.cases)
        return top1(scores.argmax(1), labels)


class Protocol(ABC):
    """One way to evaluate an encoder. A spec such as ``linear@500`` is its name and its option.

    >>> class Norms(Protocol):
    ...     name = "norms"
    ...
    ...     def evaluate(self, model):
    ...         return {"norms_mean": float(model.test.features.norm(dim=1).mean())}
    """

    name: ClassVar[str]
    # What may follow @: nothing, a number of labels or their share, or always their share.
    option: ClassVar[Literal["none", "labels", "share"]] = "none"
    # What it needs besides images for evaluation: the clients, or images held out of training.
    needs: ClassVar[Literal["nothing", "clients", "held-out images"]] = "nothing"

    def __init__(self, spec: str, option: str = "", key: str = PROTOCOLS) -> None:
        self.spec = spec
        self.key = key
        self.amount = self._parse(option)

    @abstractmethod
    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Return the measures of a model, by name."""

    def check(self, data: EvaluationData) -> None:
        """Check, before any training, that the data allows this protocol."""
        self.check_test(data)
        self.check_train(data)
        self.draw(data)

    def list_warnings(self, data: EvaluationData) -> list[str]:
        """List what a user should know before the first round."""
        return []

    def check_test(self, data: EvaluationData) -> None:
        """Check that there are labelled test images."""
        test, fix = data.test, f"Use {self.key}=[unlabeled]."
        if test is None:
            raise self.error("there is no test split", fix)
        if not (test.full_labels >= 0).any():
            raise self.error("the test split has no labels", fix)
        units(test.full_labels, test.cases)

    def check_train(self, data: EvaluationData) -> None:
        """Check that there are labelled training images of two classes."""
        labels = data.train.full_labels
        if len(labels[labels >= 0].unique()) < 2:
            problem = "the training split needs labels of at least two classes"
            raise self.error(problem, f"Use {self.key}=[unlabeled].")

    def draw(self, data: EvaluationData) -> NDArray[np.int64]:
        """Draw the training cases that have a label: all, or as many as the option says.

        A pure function of the seed, so that a smaller number is part of a larger one.
        """
        train, seed, names = data.train, data.config.seed, data.dataset.classes
        groups, labels = units(train.full_labels, train.cases)
        if self.amount is None:
            return np.arange(len(labels))
        if isinstance(self.amount, int):
            return draw_labels(
                labels, self.amount, data.classes, seed, key=self.key, value=self.spec, names=names
            ).numpy()
        # By the images' own numbers, as data.holdout draws: so they are among those that it keeps.
        source = labels if train.cases is not None else train.full_labels
        chosen = draw_share(
            source, self.amount, data.classes, seed, key=self.key, value=self.spec, names=names
        ).numpy()
        return chosen if train.cases is not None else np.searchsorted(groups.members, chosen)

    @property
    def measure(self) -> str:
        """The name of the accuracy that it measures."""
        return f"{self.spec}_top1"

    @property
    def share(self) -> float:
        """The share of the labels that it takes."""
        assert isinstance(self.amount, float)
        return self.amount

    def error(self, problem: str, fix: str) -> UserError:
        """Return an error about this protocol."""
        return UserError(problem, key=self.key, value=self.spec, fix=fix)

    def _parse(self, option: str) -> int | float | None:
        """Return the number of labels, or their share, that follows @."""
        example, _ = split_spec(self.spec)
        if self.option == "share" or (self.option == "labels" and option.endswith("%")):
            # As 10e-2, so that 0.7% is the same float as data.holdout=0.007; 0.7 / 100 is not.
            percent = re.fullmatch(r"(\d+(?:\.\d+)?)%", option, re.ASCII)
            share = float(f"{percent[1]}e-2") if percent else 0.0
            if not 0 < share < 1:
                problem = "needs the share of the labels, above 0% and below 100%"
                raise self.error(problem, f"Use for example {example}@10%.")
            return share
        if self.spec == example:
            return None
        if self.option == "none":
            raise self.error("takes no number of labels", f"Use {example}.")
        if not (option.isascii() and option.isdecimal() and int(option) > 0):
            problem = "the number of labels must be a whole number above 0"
            raise self.error(problem, f"Use for example {example}@500.")
        return int(option)


def split_spec(spec: str) -> tuple[str, str]:
    """Return a protocol's name and its option: ``path/to/file.py:Name`` may have an @ before it."""
    place, colon, end = spec.rpartition(":")
    name, _, option = end.partition("@")
    return place + colon + name, option
