"""The recipes of lightly's benchmark make the same updates as lightly's losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightly import loss as lightly
from torch import Tensor

from fedssl import config
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.siamese import Siamese
from fedssl.objectives.swav import SwAV

IMAGES, KEYS = 16, 64
Loss = Callable[..., Tensor]
cosine = lightly.NegativeCosineSimilarity()


def symmetric(one: Loss) -> Loss:
    """Return lightly's mean over both directions."""
    return lambda q1, q2, k1, k2: (one(q1, k2) + one(q2, k1)) / 2


def against_queue(query: Tensor, key: Tensor) -> Tensor:
    """Return lightly's NT-Xent loss with a memory bank, written out for a given bank."""
    q, k = F.normalize(query, dim=1), F.normalize(key, dim=1)
    logits = torch.cat(((q * k).sum(1, keepdim=True), q @ bank().T), dim=1) / 0.1
    return F.cross_entropy(logits, torch.zeros(IMAGES, dtype=torch.long))


def bank() -> Tensor:
    """Return the keys of earlier batches."""
    generator = torch.Generator().manual_seed(1)
    return F.normalize(torch.randn(KEYS, 8, generator=generator, dtype=torch.float64), dim=1)


# By method: lightly's loss, the encodings' width, and how near the updates are. In lightly, Barlow
# Twins divides by the unbiased standard deviation.
CASES: dict[str, tuple[Loss, int, float]] = {
    "barlow": (lambda a, b, *_: lightly.BarlowTwinsLoss()(a, b), 2048, 0.02),
    "byol": (symmetric(cosine), 8, 1e-9),
    "moco": (symmetric(against_queue), 8, 1e-9),
    "simclr": (lambda a, b, *_: lightly.NTXentLoss()(a, b), 8, 1e-9),
    "simsiam": (symmetric(cosine), 8, 1e-9),
    "swav": (lambda a, b, *_: lightly.SwaVLoss()([a, b], []), 512, 1e-9),
}


@pytest.mark.parametrize("method", CASES)
def test_rate_and_decay_fit_the_loss(method: str) -> None:
    theirs, width, near = CASES[method]
    rate, decay = (1e-3, 1e-6) if method == "swav" else (0.06, 5e-4)
    settings = config.resolve(config.read_recipe(f"benchmark/lightly/{method}"))
    objective: Any = config.variant("objective", settings.objective.name)(settings.objective)
    generator = torch.Generator().manual_seed(0)
    encodings = torch.rand((4, IMAGES, width), generator=generator, dtype=torch.float64)
    encodings = encodings.sub(0.5).requires_grad_()
    memory = {"queue": bank(), "seen": torch.tensor(KEYS)} if method == "moco" else {}
    seen = tuple(encodings[: 4 if isinstance(objective, Siamese | SwAV) else 2])
    losses = (objective.loss(EncodedBatch(seen, memory=memory)), theirs(*encodings))
    ours, lightlys = (torch.autograd.grad(loss, encodings)[0][:2] for loss in losses)
    difference = settings.client.lr * ours - rate * lightlys
    assert difference.norm() <= near * rate * lightlys.norm()
    assert settings.client.lr * settings.client.weight_decay == pytest.approx(rate * decay)
