"""Compute features, and group labelled images into cases, for all protocols."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedssl.data.dataset import Groups, ImageArray, Split, split_for_encoding
from fedssl.util.errors import TrainingError, UserError


def extract(encoder: nn.Module, images: ImageArray) -> Tensor:
    """Return the features ``[N, d]`` of uint8 images, in float32 on the encoder's device."""
    like = first_weight(encoder)
    return encode(encoder, (pixels(part, like) for part in split_for_encoding(images)), len(images))


def encode(encoder: nn.Module, batches: Iterable[Tensor], count: int) -> Tensor:
    """Return the features of batches of float images, in evaluation mode, without gradients.

    ``count`` is how many images there are in all.
    """
    modes = [(module, module.training) for module in encoder.modules()]
    features, are_finite, end = torch.empty(0), list[Tensor](), 0
    encoder.eval()
    try:
        with torch.no_grad():
            for part in (encoder(images).float() for images in batches):
                if not end:
                    features = part.new_empty((count, *part.shape[1:]))
                start, end = end, end + len(part)
                features[start:end] = part
                are_finite.append(torch.isfinite(part).all())  # of all at once: two more tables
    finally:
        for module, mode in modes:
            module.training = mode
    if are_finite and not torch.stack(are_finite).all():
        raise TrainingError("the encoder's features are not finite, so it cannot be evaluated")
    return features


def pixels(images: Tensor, like: Tensor) -> Tensor:
    """Convert uint8 images to images in [0, 1], on the device and of the type of ``like``."""
    return images.to(like.device).to(like.dtype) / 255


def first_weight(module: nn.Module) -> Tensor:
    """Return a tensor on the module's device and of its type."""
    return next(module.parameters(), torch.zeros(())).detach()


def units(labels: Tensor, cases: NDArray[np.int64] | None) -> tuple[Groups, Tensor]:
    """Group labelled images into cases; return the groups and a label for each.

    Without ``cases``, every image is a case. Images without a label (-1) are in no group.
    """
    labels = labels.cpu()
    labelled = np.flatnonzero((labels >= 0).numpy())
    if cases is None:
        return Groups(labelled, np.arange(len(labelled) + 1)), labels[labelled]
    names, case_of = np.unique(cases[labelled], return_inverse=True)
    inside = Groups.from_labels(case_of, len(names))
    groups = Groups(labelled[inside.members], inside.offsets)
    first = groups.members[groups.offsets[:-1]]
    differ = (labels[groups.members] != labels[np.repeat(first, groups.sizes)]).numpy()
    if differ.any():
        image = groups.members[differ.argmax()]
        raise UserError(
            f"case {cases[image]}: image {image} has another label than the case's first image; "
            "give all images of a case the same class"
        )
    return groups, labels[first]


@dataclass(frozen=True)
class Labelled:
    """Images in groups, one for each case, and the cases' labels; a single image is a case too."""

    images: ImageArray
    groups: Groups
    labels: Tensor

    def take(self, chosen: NDArray[np.int64]) -> Labelled:
        """Select cases."""
        members, sizes = self.groups.select(chosen)
        groups = Groups(members, np.concatenate(([0], np.cumsum(sizes))))
        return Labelled(self.images, groups, self.labels[chosen])


def average(features: Tensor, sizes: NDArray[np.int64]) -> Tensor:
    """Average each block of ``sizes[k]`` rows (DCCO, section 4.2: a case's pooled encoding)."""
    if (sizes == 1).all():
        return features
    lengths = torch.as_tensor(sizes, device=features.device)
    return torch.segment_reduce(features, "mean", lengths=lengths, axis=0)


def pool_cases(
    features: Tensor, labels: Tensor, cases: NDArray[np.int64] | None
) -> tuple[Tensor, Tensor]:
    """Return features and labels of the cases, or of the images if there are no cases."""
    groups, labels = units(labels, cases)
    if cases is not None or len(groups) < len(features):
        features = features[torch.as_tensor(groups.members, device=features.device)]
    return average(features, groups.sizes), labels.to(features.device)


def head_accuracy(tower: nn.Module, split: Split, modality: int = 0) -> float:
    """Return the top-1 in percent of a tower's own classifier."""
    # The head is linear, so a case's mean logits are those of its mean encoding.
    logits, labels = pool_cases(
        extract(tower, split.images[modality]), split.full_labels, split.cases
    )
    return top1(logits.argmax(1), labels)


def top1(predicted: Tensor, labels: Tensor) -> float:
    """Return the share of correct predictions, in percent."""
    return 100.0 * (predicted == labels).double().mean().item()
