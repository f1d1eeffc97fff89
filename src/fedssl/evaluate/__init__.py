"""How an encoder is judged: one file a protocol, and ``judge`` to run those a recipe names."""

from __future__ import annotations

import difflib
import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedssl.config import Evaluate
from fedssl.data.dataset import Groups, Split
from fedssl.errors import UserError
from fedssl.evaluate import finetune, knn, linear, unlabeled
from fedssl.evaluate.features import Labelled, extract, pool_cases, units
from fedssl.evaluate.unlabeled import Views

FEW_LABEL = ("knn", "linear", "finetune")  # these take a number of labels, as in linear@500
# head is the accuracy of a network's own classifier: whoever trained it measures it, not judge.
NAMES = (*FEW_LABEL, "head", "unlabeled")


def parse(spec: str) -> tuple[str, int | None]:
    """Name and number of labels of a protocol.

    >>> parse("linear@500"), parse("knn")
    (('linear', 500), ('knn', None))
    """
    name, at, count = spec.partition("@")
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(
            f"evaluate.protocols={spec}: unknown{hint}; choose of {', '.join(NAMES)}, "
            "or a number of labels as in linear@500"
        )
    if not at:
        return name, None
    if name not in FEW_LABEL:
        raise UserError(f"evaluate.protocols={spec}: {name} takes no number of labels")
    if not (count.isascii() and count.isdecimal() and int(count) > 0):
        raise UserError(
            f"evaluate.protocols={spec}: the number of labels must be a whole number above 0, "
            f"as in {name}@500"
        )
    return name, int(count)


def protocols(settings: Evaluate, train: Split, test: Split | None) -> tuple[str, ...]:
    """The protocols that a recipe names; none: kNN and linear, or unlabeled without classes."""
    if settings.protocols is not None:
        return settings.protocols
    usable = test is not None and _kinds(test) > 0 and _kinds(train) > 1
    return ("knn", "linear") if usable else ("unlabeled",)


def check(settings: Evaluate, train: Split, test: Split | None, classes: int) -> None:
    """Refuse, before any training, what could not be judged after it."""
    for spec in protocols(settings, train, test):
        name, _ = parse(spec)
        where = f"evaluate.protocols={spec}"
        if name == "unlabeled":
            if len(train) < 2:
                raise UserError(f"{where}: needs at least two training images, not {len(train)}")
            continue
        if test is None or not _kinds(test):
            missing = "there is no test split" if test is None else "the test split has no labels"
            raise UserError(f"{where}: {missing}; use evaluate.protocols=[unlabeled]")
        if _kinds(train) < 2:
            raise UserError(
                f"{where}: the training split needs labels of at least two classes; "
                "use evaluate.protocols=[unlabeled]"
            )
        _units(test)
        _, labels = _units(train)
        _draw(labels, spec, classes, 0)


def judge(
    encoder: nn.Module,
    train: Split,
    test: Split | None,
    classes: int,
    settings: Evaluate,
    seed: int,
    device: torch.device | str,
    *,
    views: Views,
    modality: int = 0,
) -> dict[str, float]:
    """Every measure by name, such as ``{"knn_top1": 93.1, "linear@500_top1": 62.0}``.

    ``unlabeled`` looks at the training images, so that its numbers do not depend on whether there
    is a test split.
    """
    check(settings, train, test, classes)
    learn = _Side(encoder, train, modality, device)
    held_out = None if test is None else _Side(encoder, test, modality, device)
    results: dict[str, float] = {}
    for spec in protocols(settings, train, test):
        name, _ = parse(spec)
        if name == "unlabeled":
            images = train.images[modality]
            results |= unlabeled.measures(encoder, images, learn.features, views, seed, device)
        if name not in FEW_LABEL or held_out is None:
            continue
        chosen = _draw(learn.labelled.labels, spec, classes, seed)
        if name == "knn":
            score = knn.accuracy(
                *learn.take(chosen), *held_out.pooled, classes, settings.k, settings.temperature
            )
        elif name == "linear":
            score = linear.accuracy(
                *learn.take(chosen), *held_out.pooled, classes, settings.preset, seed
            )
        else:
            part = learn.labelled.take(chosen)
            score = finetune.accuracy(
                encoder, part, held_out.labelled, classes, seed, device, settings.preset
            )
        results[f"{spec}_top1"] = score
    return results


class _Side:
    """One split seen by one encoder; everything is computed once, when it is first asked for."""

    def __init__(
        self, encoder: nn.Module, split: Split, modality: int, device: torch.device | str
    ) -> None:
        self.encoder = encoder
        self.split = split
        self.images = split.images[modality]
        self.device = device

    @functools.cached_property
    def features(self) -> Tensor:
        """Of every image."""
        return extract(self.encoder, self.images, device=self.device)

    @functools.cached_property
    def pooled(self) -> tuple[Tensor, Tensor]:
        """Features and labels of the labelled cases."""
        return pool_cases(self.features, _labels(self.split), self.split.cases)

    @functools.cached_property
    def labelled(self) -> Labelled:
        """The labelled cases, in the order of ``pooled``."""
        return Labelled(self.images, *_units(self.split))

    def take(self, chosen: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Features and labels of some of the labelled cases."""
        features, labels = self.pooled
        index = torch.as_tensor(chosen, device=features.device)
        return features[index], labels[index]


def _draw(labels: Tensor, spec: str, classes: int, seed: int) -> NDArray[np.int64]:
    """Which cases have a label: all, or as many as the protocol says, the same for each of them."""
    from fedssl.data.datasets import draw_labels

    _, count = parse(spec)
    if count is None:
        return np.arange(len(labels))
    key = f"evaluate.protocols={spec}: labels"
    return draw_labels(labels, count, classes, seed, key).numpy()


def _labels(split: Split) -> Tensor:
    return torch.full((len(split),), -1) if split.labels is None else split.labels


def _units(split: Split) -> tuple[Groups, Tensor]:
    return units(_labels(split), split.cases)


def _kinds(split: Split) -> int:
    """How many different labels a split has."""
    labels = _labels(split)
    return len(labels[labels >= 0].unique())
