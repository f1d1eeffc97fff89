"""The contract of a protocol: one way to evaluate an encoder."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedssl.config import Config, Evaluate
from fedssl.data.dataset import Dataset, Groups, ImageArray, Split
from fedssl.data.labels import draw_any, draw_labels, draw_share
from fedssl.engines.base import Engine
from fedssl.evaluate import linear
from fedssl.evaluate.features import Labelled, extract, pool_cases, units
from fedssl.models.network import Network, Tower
from fedssl.util.errors import UserError

PROTOCOLS = "evaluate.protocols"
# (numbers of training images, view 0 or 1) → the float images of that augmented view
Views = Callable[[Tensor, int], Tensor]
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


@dataclass(eq=False)
class SplitFeatures:
    """One split under one encoder; features are computed once, when they are first needed."""

    encoder: nn.Module
    split: Split
    images: ImageArray  # those of the split that the encoder sees

    @cached_property
    def features(self) -> Tensor:
        """The features of every image."""
        return extract(self.encoder, self.images)

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


@dataclass(eq=False)
class EvaluatedModel:
    """A model under evaluation; ``has_head`` says whether its own classifier is evaluated too."""

    data: EvaluationData
    tower: Tower
    views: Views
    has_head: bool = False

    @property
    def encoder(self) -> nn.Module:
        """The encoder of the tower."""
        return self.tower.encoder

    @cached_property
    def train(self) -> SplitFeatures:
        """The training images."""
        return self.features_of(self.data.train)

    @cached_property
    def val(self) -> SplitFeatures:
        """The validation images."""
        assert self.data.dataset.val is not None
        return self.features_of(self.data.dataset.val)

    @cached_property
    def test(self) -> SplitFeatures:
        """The test images."""
        assert self.data.test is not None
        return self.features_of(self.data.test)

    def features_of(self, split: Split) -> SplitFeatures:
        """Return the features of a split's images, computed when they are needed."""
        return SplitFeatures(self.encoder, split, split.images[self.data.modality])

    @cached_property
    def probe(self) -> linear.Head:
        """The linear classifier of all labelled training cases."""
        data = self.data
        return linear.fit(*self.train.pooled, data.classes, data.settings.preset, data.config.seed)


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

    def check_single_images(self, data: EvaluationData) -> None:
        """Check that no images are pooled into cases."""
        for split in (data.train, data.test):
            if split is not None and split.cases is not None:
                fix = "Use linear or knn, which pool a case's images."
                raise self.error("needs single images, and this data has cases", fix)

    def draw(self, data: EvaluationData) -> NDArray[np.int64]:
        """Draw the training cases that have a label: all, or as many as the option says.

        A pure function of the seed, so that a smaller number is part of a larger one.
        """
        train, classes = data.train, data.dataset.classes
        groups, labels = units(train.full_labels, train.cases)
        if self.amount is None:
            return np.arange(len(labels))
        keywords: dict[str, Any] = {"classes": len(classes), "seed": data.config.split_seed}
        keywords |= {"key": self.key, "value": self.spec, "names": classes}
        if isinstance(self.amount, int) and data.settings.preset == "derm":
            place: dict[str, Any] = {"key": self.key, "value": self.spec}
            return draw_any(labels, self.amount, data.config.seed, **place).numpy()
        if isinstance(self.amount, int):
            return draw_labels(labels, self.amount, **keywords).numpy()
        if train.cases is not None:
            return draw_share(labels, self.amount, **keywords).numpy()
        # By the images' own numbers, as data.holdout draws: so they are among those that it keeps.
        chosen = draw_share(train.full_labels, self.amount, **keywords).numpy()
        return np.searchsorted(groups.members, chosen)

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
        name, _ = split_spec(self.spec)
        if self.option == "share" or (self.option == "labels" and option.endswith("%")):
            # As 10e-2, so that 0.7% is the same float as data.holdout=0.007; 0.7 / 100 is not.
            percent = re.fullmatch(r"(\d+(?:\.\d+)?)%", option, re.ASCII)
            share = float(f"{percent[1]}e-2") if percent else 0.0
            if not 0 < share < 1:
                problem = "needs the share of the labels, above 0% and below 100%"
                raise self.error(problem, f"Use for example {name}@10%.")
            return share
        if self.spec == name:
            return None
        if self.option == "none":
            raise self.error("takes no number of labels", f"Use {name}.")
        if not (option.isascii() and option.isdecimal() and int(option) > 0):
            problem = "the number of labels must be a whole number above 0"
            raise self.error(problem, f"Use for example {name}@500.")
        return int(option)


def split_spec(spec: str) -> tuple[str, str]:
    """Return a protocol's name and its option: ``path/to/file.py:Name`` may have an @ before it."""
    place, colon, end = spec.rpartition(":")
    name, _, option = end.partition("@")
    return place + colon + name, option
