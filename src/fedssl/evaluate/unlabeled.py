"""Measure an encoder without any label."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl.data import random
from fedssl.evaluate.base import EvaluatedModel, EvaluationData, Protocol
from fedssl.evaluate.features import encode

SAMPLES = 2048  # images that alignment and uniformity look at: two million pairs
BATCH = 512
ROWS = 1 << 16  # of a table that is in memory in float64


class Unlabeled(Protocol):
    """Measures of the training images' features that need no label."""

    name = "unlabeled"

    def check(self, data: EvaluationData) -> None:
        """Check that there are two images."""
        if len(data.train) < 2:
            problem = f"needs at least two training images, not {len(data.train)}"
            raise self.error(problem, "Use a folder with more.")

    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Measure training images, which there are with and without a test split."""
        images, features = model.train.images, model.train.features
        seed = random.key(model.data.config.seed, "unlabeled")
        index = torch.as_tensor(random.choose(seed, len(images), SAMPLES))
        device, parts = features.device, index.split(BATCH)
        first, second = (
            encode(model.encoder, (model.views(p.to(device), view) for p in parts), len(index))
            for view in (0, 1)
        )
        return {
            "effective_rank": effective_rank(features),
            "alignment": alignment(first, second),
            "uniformity": uniformity(features[index.to(device)]),
            "views_matched": views_matched(first, second),
        }


def effective_rank(features: Tensor) -> float:
    """Return exp of the entropy of the normalized singular values of the centred features.

    Roy and Vetterli 2007; RankMe (Garrido et al. 2023). From 1, a line, to the number of
    features, a cloud that is equally wide everywhere; 0 when all features are the same point.
    """
    parts = features.split(ROWS)
    means = torch.stack([part.double().mean(dim=0) for part in parts])
    shares = torch.tensor([len(part) / len(features) for part in parts], dtype=torch.float64)
    mean = shares.to(means.device) @ means
    size = torch.stack([torch.linalg.vector_norm(part.double()) for part in parts]).norm()
    # The eigenvalues of a d × d matrix: the number of samples does not matter.
    products = sum((x.T @ x for x in (part.double() - mean for part in parts)), mean.new_zeros(()))
    sigma = torch.linalg.eigvalsh(products).clamp(min=0).sqrt()
    sigma = sigma[sigma > torch.finfo(torch.float32).eps * size]  # what is left is rounding
    share = sigma / sigma.sum()
    return float((-(share * share.log()).sum()).exp()) if len(sigma) else 0.0


def alignment(first: Tensor, second: Tensor) -> float:
    """Return the mean squared distance of two views' normalized features.

    (Wang and Isola 2020, section 4.1.)
    """
    apart = F.normalize(first.double()) - F.normalize(second.double())
    return apart.square().sum(dim=1).mean().item()


def uniformity(features: Tensor) -> float:
    """Return log mean exp(-2 d²) over pairs of normalized features.

    (Wang and Isola 2020, section 4.2, t = 2.)
    """
    distances = torch.pdist(F.normalize(features.double()))
    return distances.square().mul(-2).exp().mean().log().item()


def views_matched(first: Tensor, second: Tensor) -> float:
    """Return the share of images, in percent, whose second view is nearest to their first one.

    Nearest among the second views of all images, by cosine similarity. Alignment and uniformity
    both change with the scale of the angles between features; this share does not.
    """
    similarity = F.normalize(first.double()) @ F.normalize(second.double()).T
    found = similarity.argmax(dim=1) == torch.arange(len(first), device=first.device)
    return 100.0 * found.double().mean().item()
