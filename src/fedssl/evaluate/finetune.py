"""Full fine-tuning: a classifier on a copy of the encoder, and all of it trained."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedssl.config import Optimizer
from fedssl.data import random
from fedssl.evaluate.base import EvaluatedModel, Protocol
from fedssl.evaluate.features import (
    Labelled,
    average,
    encode,
    extract,
    pixels,
    precision,
    top1,
)
from fedssl.evaluate.linear import FEW, Training, batches, descend, zero_head
from fedssl.models.flat_weights import FlatWeights
from fedssl.training import optim

# DCCO, appendix B: 5,000 labels and 500 labels. Its rate suits weights that 100,000 rounds have
# made large; it destroys an encoder of 2,000 rounds (results/measured.jsonl). The other presets
# take a fifth of it.
RATES = {"dcco": 5e-3, "logistic": 1e-3, "fedema": 1e-3, "ccl": 1e-3}
MANY_LABELS = Training(Optimizer("adam", 5e-3), steps=100, batch=256)
FEW_LABELS = Training(Optimizer("adam", 5e-3), steps=40, batch=128)


class FineTuned(Protocol):
    """Accuracy after training a classifier and the encoder on labelled images."""

    name = "finetune"
    option = "labels"

    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Fine-tune a copy of the encoder."""
        data = model.data
        train, test = model.train.labelled.take(self.draw(data)), model.test.labelled
        seed, preset = data.config.seed, data.settings.preset
        score = accuracy(model.encoder, train, test, data.classes, seed, model.device, preset)
        return {self.measure: score}


class Classifier(nn.Module):
    """An encoder and a head on the mean of a case's encodings (DCCO, section 4.2)."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, images: Tensor, sizes: NDArray[np.int64]) -> Tensor:
        """Score cases of ``sizes[k]`` images, given one case after another."""
        return self.head(average(self.encoder(images), sizes))


def accuracy(
    encoder: nn.Module,
    train: Labelled,
    test: Labelled,
    classes: int,
    seed: int,
    device: torch.device | str,
    preset: str = "dcco",
) -> float:
    """Return the top-1 in percent on ``test`` after training a copy of the encoder on ``train``.

    Batch norm is trained too. Flips are the only augmentation (appendix B).
    """
    return score(fit(encoder, train, classes, seed, device, preset), test, device)


def score(model: Classifier, test: Labelled, device: torch.device | str) -> float:
    """Return a classifier's top-1 in percent."""
    images = test.images[torch.as_tensor(test.groups.members)]
    features = extract(model.encoder, images, device=device)
    pooled = average(features, test.groups.sizes).to(precision(model))
    return top1(encode(model.head, [pooled]).argmax(dim=1), test.labels.to(device))


def fit(
    encoder: nn.Module,
    train: Labelled,
    classes: int,
    seed: int,
    device: torch.device | str,
    preset: str = "dcco",
) -> Classifier:
    """Train a linear classifier and a copy of the encoder on the labelled cases."""
    training = FEW_LABELS if len(train.groups) < FEW else MANY_LABELS
    training = replace(training, rule=replace(training.rule, lr=RATES[preset]))
    sample = features_like(encoder, train, device)
    model = Classifier(copy.deepcopy(encoder), zero_head(sample.shape[1], classes, sample))
    descent(model, train, training, seed, device)
    return model


def features_like(encoder: nn.Module, data: Labelled, device: torch.device | str) -> Tensor:
    """Return the features of one image, for the width, type and device of a new head."""
    return extract(encoder, data.images[:1], device=device).to(precision(encoder))


def descent(
    model: Classifier,
    train: Labelled,
    training: Training,
    seed: int,
    device: torch.device | str,
    flips: bool = True,
) -> None:
    """Train encoder and head of a classifier on the labelled cases."""
    training = training.over(len(train.groups))
    model.requires_grad_(True).train()
    flat = FlatWeights(model)
    state = optim.start(training.rule, flat.params)
    for step, cases in enumerate(batches(seed, "finetune", len(train.groups), training)):
        members, sizes = train.groups.select(cases)
        index = torch.as_tensor(members)
        images = pixels(train.images[index], device, flat.params.dtype)
        if flips:
            images = flip(images, index, random.key(seed, "flip", step))
        flat.gradient.zero_()
        with _reproducible():
            loss = F.cross_entropy(model(images, sizes), train.labels[cases].to(device))
            loss.backward()
        for weight in model.head.parameters():
            assert weight.grad is not None
            weight.grad.mul_(training.head)
        descend(flat, state, training, training.rate(step))


def _reproducible() -> AbstractContextManager[None]:
    """Use cuDNN's convolutions that add up in the same order on every run."""
    cudnn = torch.backends.cudnn
    return cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32
    )


def flip(images: Tensor, index: Tensor, state: int) -> Tensor:
    """Mirror each image with probability one half, by the number of the image."""
    chosen = random.uniform(random.mix(state, index), 1)[:, 0] < 0.5
    return torch.where(chosen.to(images.device)[:, None, None, None], images.flip(-1), images)
