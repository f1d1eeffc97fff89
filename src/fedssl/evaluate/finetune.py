"""Full fine-tuning: a classifier on a copy of the encoder, and all of it trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedssl.config import Optimizer
from fedssl.data import random
from fedssl.data.augment import CROP_NUMBERS, crop_box
from fedssl.data.operations import resized_crop
from fedssl.evaluate.base import EvaluatedModel, EvaluationData, Protocol
from fedssl.evaluate.features import (
    Labelled,
    average,
    encode,
    extract,
    first_weight,
    pixels,
    top1,
)
from fedssl.evaluate.linear import FEW, Training, batches, make_step, zero_head
from fedssl.models.flat_weights import FlatWeights
from fedssl.training import optim
from fedssl.util.errors import UserError

DERM_RATES = (3e-4, 1e-4)
DERM = Training(Optimizer("adam", 3e-4), steps=100_000, batch=128, schedule=optim.constant)
LOOK_EVERY = 500  # steps between looks at the validation cases
PATIENCE = 20  # looks


class FineTuned(Protocol):
    """Accuracy after training a classifier and the encoder on labelled images."""

    name = "finetune"
    option = "labels"

    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Fine-tune a copy of the encoder; flips are the only augmentation (appendix B)."""
        data, encoder = model.data, model.encoder
        train = model.train.labelled.take(self.draw(data))
        if data.settings.preset == "derm":
            tuned = search(encoder, data.classes, train, model.val.labelled, data.config.seed)
            return {self.measure: score(tuned, model.test.labelled)}
        training = choose_training(len(train.groups), data.settings.preset)
        head = new_head(encoder, data.classes)
        tuned = fine_tune(encoder, head, train, training, data.config.seed)
        return {self.measure: score(tuned, model.test.labelled)}

    def check(self, data: EvaluationData) -> None:
        """Check that there are validation images if the preset chooses on them."""
        super().check(data)
        val = data.dataset.val
        if data.settings.preset == "derm" and (val is None or not (val.full_labels >= 0).any()):
            fix = "Put labelled images into val/ and set data.val=true, or use the preset dcco."
            problem = "there are no labelled validation images to choose the training on"
            raise UserError(problem, key="evaluate.preset", value="derm", fix=fix)


def choose_training(count: int, preset: str) -> Training:
    """Return the training on ``count`` labels (DCCO, appendix B: rows for 5,000 and for 500).

    The paper's rate suits weights that 100,000 rounds have made large; it destroys an encoder of
    2,000 rounds (results/measured.jsonl). The other presets take a fifth of it.
    """
    rule = Optimizer("adam", 5e-3 if preset == "dcco" else 1e-3)
    steps, batch = (40, 128) if count < FEW else (100, 256)
    return Training(rule, steps=steps, batch=batch)


def search(
    encoder: nn.Module, classes: int, train: Labelled, val: Labelled, seed: int
) -> Classifier:
    """Fine-tune with each of DERM's rates; return the model that is best on validation cases.

    DCCO, appendix B: Adam with batches of 128, the best of two rates and of up to 100,000 steps.
    The paper names no schedule, so the rate is constant: fewer steps are the same training cut
    short. Training stops where ``PATIENCE`` looks in a row bring nothing better.
    """
    best, chosen = -1.0, None
    for rate in DERM_RATES:
        training = replace(DERM, rule=replace(DERM.rule, lr=rate)).over(len(train.groups))
        worse = 0

        def look(step: int, model: Classifier, steps: int = training.steps) -> bool:
            nonlocal best, chosen, worse
            if step % LOOK_EVERY and step != steps:
                return False
            found = score(model, val)
            worse = 0 if found > best else worse + 1
            if found > best:
                best, chosen = found, copy.deepcopy(model)
            return worse == PATIENCE

        fine_tune(encoder, new_head(encoder, classes), train, training, seed, look=look)
    assert chosen is not None
    return chosen


def new_head(encoder: nn.Module, classes: int) -> nn.Linear:
    """Return a linear classifier of zeros for an encoder's features."""
    return zero_head(cast(int, encoder.features), classes, first_weight(encoder))


class Classifier(nn.Module):
    """An encoder and a head on the mean of a case's encodings (DCCO, section 4.2)."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, images: Tensor, sizes: NDArray[np.int64]) -> Tensor:
        """Score cases of ``sizes[k]`` images, given one case after another."""
        return self.head(average(self.encoder(images), sizes))


def score(model: Classifier, test: Labelled) -> float:
    """Return a classifier's top-1 in percent."""
    features = extract(model.encoder, test.images[torch.as_tensor(test.groups.members)])
    pooled = average(features, test.groups.sizes).to(first_weight(model).dtype)
    logits = encode(model.head, [pooled], len(pooled))
    return top1(logits.argmax(dim=1), test.labels.to(pooled.device))


def fine_tune(
    encoder: nn.Module,
    head: nn.Module,
    train: Labelled,
    training: Training,
    seed: int,
    flips: bool = True,
    area: tuple[float, float] | None = None,
    look: Callable[[int, Classifier], bool] | None = None,
) -> Classifier:
    """Train a head and a copy of the encoder on the labelled cases, batch norm included.

    ``area`` has the smallest and largest share of an image that a random crop keeps. ``look`` sees
    the model after each step, and returns whether that was the last one.
    """
    model, training = Classifier(copy.deepcopy(encoder), head), training.over(len(train.groups))
    model.requires_grad_(True).train()
    flat = FlatWeights(model)
    state = optim.start(training.rule, flat.params)
    for step, cases in enumerate(batches(seed, "finetune", len(train.groups), training)):
        members, sizes = train.groups.select(cases)
        index = torch.as_tensor(members)
        images = pixels(train.images[index], flat.params)
        if flips:
            images = flip(images, index, random.key(seed, "flip", step))
        if area is not None:
            images = crop(images, index, random.key(seed, "crop", step), area)
        flat.gradient.zero_()
        with _reproducible():
            loss = F.cross_entropy(model(images, sizes), train.labels[cases].to(images.device))
            loss.backward()
        for weight in head.parameters():
            assert weight.grad is not None
            weight.grad.mul_(training.head)
        make_step(flat, state, training, training.rate(step))
        if look is not None and look(step + 1, model):
            break
    return model


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


def crop(images: Tensor, index: Tensor, state: int, area: tuple[float, float]) -> Tensor:
    """Crop and resize each image at random, by the number of the image."""
    size = (images.shape[2], images.shape[3])
    drawn = random.uniform(random.mix(state, index), CROP_NUMBERS).to(images.device)
    return resized_crop(images, *crop_box(drawn, area, size), size)
