"""Semi-supervised: a new head on a copy of the encoder, all trained on a share of the labels."""

from __future__ import annotations

import functools
from typing import cast

from torch import nn

from fedssl.config import Optimizer
from fedssl.evaluate.base import EvaluatedModel, EvaluationData, Protocol
from fedssl.evaluate.features import first_weight
from fedssl.evaluate.finetune import fine_tune, new_head, score
from fedssl.evaluate.heldout import check_held_out
from fedssl.evaluate.linear import Training, stairs
from fedssl.models.network import initialize
from fedssl.training import optim

# FedEMA, appendix B.3. Its "new two-layer MLP" is read as the one of B.2 (4096, batch norm, ReLU),
# ending in the classes. The paper names no augmentation, so images are plain.
HIDDEN = 4096
MLP = Training(Optimizer("adam", 1e-3), epochs=100, batch=128, schedule=optim.constant)

# CCL, section 6: 20 epochs of SGD as in SwAV (Caron et al. 2020). SwAV's program has batches of
# 256, no weight decay and these learning rates, 20 times as large for the classifier. They fall to
# a fifth at epoch 12 and again at 16. Its command for 1% of ImageNet's labels has rates of 0.02
# and 5, which were far worse with ten classes and few steps (digits, training images held out). So
# every share uses the program's default. Its augmentation is a flip and a random resized crop, of
# 8 to 100% of the area.
AREA = (0.08, 1.0)
LINEAR = Training(
    Optimizer("sgd", 0.01, momentum=0.9),
    epochs=20,
    batch=256,
    schedule=functools.partial(stairs, factor=0.2),
    head=20.0,
)


class SemiSupervised(Protocol):
    """Accuracy after training a new head and the encoder on a share of the labels."""

    name = "semi"
    option = "share"

    def check(self, data: EvaluationData) -> None:
        """Check that its images were not trained on (FedEMA, appendix B.3)."""
        super().check(data)
        if data.config.data.holdout:
            check_held_out(self, data)

    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Fine-tune a copy of the encoder as FedEMA (``mlp``) or CCL (``linear``) does."""
        data, encoder, seed = model.data, model.encoder, model.data.config.seed
        train = model.train.labelled.take(self.draw(data))
        if data.settings.head == "mlp":
            mlp = build_mlp(encoder, data.classes, seed)
            tuned = fine_tune(encoder, mlp, train, MLP, seed, flips=False)
        else:
            head = new_head(encoder, data.classes)
            tuned = fine_tune(encoder, head, train, LINEAR, seed, area=AREA)
        return {self.measure: score(tuned, model.test.labelled)}


def build_mlp(encoder: nn.Module, classes: int, seed: int) -> nn.Sequential:
    """Build FedEMA's two layers (appendix B.2) for an encoder, initialized by the seed."""
    layers = nn.Sequential(
        nn.Linear(cast(int, encoder.features), HIDDEN),
        nn.BatchNorm1d(HIDDEN),
        nn.ReLU(inplace=True),
        nn.Linear(HIDDEN, classes),
    )
    initialize(layers, seed)
    return layers.to(first_weight(encoder))
