"""Full fine-tuning: a linear classifier on a copy of the encoder, and all of it trained."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedssl import optim
from fedssl.config import Optimizer
from fedssl.data import random
from fedssl.evaluate.features import Labelled, average, extract, pixels, precision, top1
from fedssl.evaluate.linear import FEW, Training, batches, descend, zero_head
from fedssl.models.flat import Flat

# DCCO, appendix B: 5,000 labels and 500 labels. Its rate suits weights that 100,000 rounds have
# made large; it destroys an encoder of 2,000 rounds (results/measured.jsonl). The other preset
# takes a fifth of it.
RATES = {"dcco": 5e-3, "logistic": 1e-3}
MANY_LABELS = Training(Optimizer("adam", 5e-3), steps=100, batch=256)
FEW_LABELS = Training(Optimizer("adam", 5e-3), steps=40, batch=128)


class Classifier(nn.Module):
    """An encoder and a linear classifier on the mean of a case's encodings (section 4.2)."""

    def __init__(self, encoder: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, images: Tensor, sizes: NDArray[np.int64]) -> Tensor:
        """The scores of cases of ``sizes[k]`` images, the images one case after another."""
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
    """Top-1 in percent on ``test`` after training on ``train``.

    Batch norm learns with the rest; flips are the only augmentation (appendix B). The encoder
    that is given stays as it is.
    """
    model = fit(encoder, train, classes, seed, device, preset)
    images = test.images[torch.as_tensor(test.groups.members)]
    features = extract(model.encoder, images, device=device)
    with torch.no_grad():
        pooled = average(features, test.groups.sizes).to(model.head.weight.dtype)
        predicted = model.head(pooled).argmax(dim=1)
    return top1(predicted, test.labels.to(device))


def fit(
    encoder: nn.Module,
    train: Labelled,
    classes: int,
    seed: int,
    device: torch.device | str,
    preset: str = "dcco",
) -> Classifier:
    """The classifier, trained on the labelled cases."""
    training = FEW_LABELS if len(train.groups) < FEW else MANY_LABELS
    training = replace(training, rule=replace(training.rule, lr=RATES[preset]))
    dtype = precision(encoder)
    sample = extract(encoder, train.images[:1], device=device).to(dtype)
    model = Classifier(copy.deepcopy(encoder), zero_head(sample.shape[1], classes, sample))
    model.requires_grad_(True).train()
    flat = Flat(model)
    state = optim.start(training.rule, flat.params)
    for step, cases in enumerate(batches(seed, "finetune", len(train.groups), training)):
        members, sizes = train.groups.select(cases)
        index = torch.as_tensor(members)
        images = pixels(train.images[index], device, dtype)
        images = flip(images, index, random.key(seed, "flip", step))
        flat.gradient.zero_()
        with _reproducible():
            loss = F.cross_entropy(model(images, sizes), train.labels[cases].to(device))
            loss.backward()
        descend(flat, state, training, step)
    return model


def _reproducible() -> AbstractContextManager[None]:
    """cuDNN's convolutions in those forms that add up in the same order on every run."""
    cudnn = torch.backends.cudnn
    return cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32
    )


def flip(images: Tensor, index: Tensor, state: int) -> Tensor:
    """Mirror each image with probability one half, by the number of the image."""
    chosen = random.uniform(random.mix(state, index), 1)[:, 0] < 0.5
    return torch.where(chosen.to(images.device)[:, None, None, None], images.flip(-1), images)
