"""Heterogeneity beyond labels: partitions by clusters of features, rotations or styles.

A partition divides images by a source of each: its class, or with ``partition.source`` the cluster
of its features, or a rotation or a style that it is given (Dec-SSL, section 3.1, B.4 and C.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedssl.config import PartitionParams, SourceParams
from fedssl.data.dataset import Dataset, ImageArray, Ints
from fedssl.data.operations import rotate
from fedssl.data.partition import key_error
from fedssl.data.random import key, permutation

COMPONENTS = 30  # of the features, before they are clustered (Dec-SSL, C.2)
CHUNK = 1024  # images altered at once

Embed = Callable[[ImageArray], NDArray[np.float32]]  # images to features
Alter = Callable[[Tensor], Tensor]  # float images from 0 to 255 to such images


@dataclass(frozen=True)
class Sources:
    """The source of each image, and the names of the sources."""

    labels: Tensor  # int64, -1 where an image has none
    names: tuple[str, ...]
    kind: str = "classes"


def assign_sources(
    params: PartitionParams, dataset: Dataset, seed: int, embed: Embed | None = None
) -> Sources:
    """Return what the partition divides by: the labels, or the ``partition.source`` of each image.

    Only ``partition.source=features`` needs ``embed``, whose features are clustered.
    """
    train = dataset.train
    if not isinstance(params, SourceParams) or params.source == "labels":
        return Sources(train.full_labels, dataset.classes)
    count, is_style = params.sources, params.source == "style"
    most, kind = (len(STYLES), "styles") if is_style else (len(train), "samples")
    if count > most:
        raise key_error(params, "sources", f"more than the {most} {kind}", f"Use at most {most}.")
    if params.source == "features":
        assert embed is not None
        clusters = find_clusters(embed(train.images[0]), count, seed)
        names = tuple(f"cluster {k}" for k in range(count))
        return Sources(torch.from_numpy(clusters), names, "clusters")
    # Whatever the class of an image, and equally often to within one.
    labels = torch.from_numpy(permutation(key(seed, "source"), len(train)) % count)
    if is_style:
        return Sources(labels, tuple(STYLES)[:count], "styles")
    return Sources(labels, tuple(f"{_degrees(k, count):g}°" for k in range(count)), "rotations")


def alter_training_images(params: PartitionParams, dataset: Dataset, seed: int) -> Dataset:
    """Rotate or stylize the training images if clients differ in that (Dec-SSL, B.4).

    The result is a copy: the files and the cache keep their images. The test split stays as it is,
    because it measures what holds for all clients.
    """
    if not alters_images(params):
        return dataset
    labels = assign_sources(params, dataset, seed).labels
    images = tuple(
        alter_images(params, x, labels) for x in dataset.train.images if isinstance(x, Tensor)
    )
    if len(images) < len(dataset.train.images):
        problem = "alters all images in memory, and these are streamed (data.stream)"
        raise key_error(params, "source", problem, "Use partition.source=labels.")
    return replace(dataset, train=replace(dataset.train, images=images))


def alters_images(params: PartitionParams) -> TypeGuard[SourceParams]:
    """Return whether clients differ in a rotation or style that their images are given."""
    return isinstance(params, SourceParams) and params.source in ("rotation", "style")


def alter_images(params: SourceParams, images: Tensor, labels: Tensor) -> Tensor:
    """Rotate or stylize a copy of uint8 images by their source; -1 leaves an image unchanged."""
    changed = images.clone()
    for k in range(int(labels.max()) + 1):
        for part in torch.nonzero(labels == k)[:, 0].split(CHUNK):
            floats = _alter(params, images[part].float(), k)
            changed[part] = floats.round().clamp(0, 255).to(torch.uint8)
    return changed


def describe_clusters(params: PartitionParams) -> Iterator[str]:
    """Warn if images are clustered by the features of an untrained network."""
    if isinstance(params, SourceParams) and params.source == "features" and params.encoder is None:
        recipe = params.encoder_recipe
        fix = "Set partition.encoder=RUN to use a trained encoder, as the paper does"
        if recipe is not None:
            fix = (
                f"`fedssl reproduce` trains {recipe} first and uses its encoder. Or train it with "
                f"`fedssl run {recipe} --out RUN`, and set partition.encoder=RUN"
            )
        yield (
            "partition.source=features: clusters are made from the features of an untrained "
            f"network. {fix}"
        )


# Rotations and styles --------------------------------------------------------------------------


def _alter(params: SourceParams, x: Tensor, source: int) -> Tensor:
    if params.source == "style":
        return list(STYLES.values())[source](x)
    return rotate(x, torch.full((len(x),), _degrees(source, params.sources)))


def _degrees(source: int, count: int) -> float:
    """Divide the circle evenly; the first angle is 0 (Dec-SSL, Figure 10)."""
    return 360.0 * source / count


def _scale_channels(x: Tensor, first: float, last: float) -> Tensor:
    """Multiply channels by factors from ``first`` to ``last``; a gray image takes the first."""
    return x * torch.linspace(first, last, x.shape[1]).view(1, -1, 1, 1)


def _filter(x: Tensor, kernel: list[list[float]]) -> Tensor:
    """Apply a 3 × 3 filter to every channel, with repeated borders."""
    weight = torch.tensor(kernel).expand(x.shape[1], 1, 3, 3)
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), weight, groups=x.shape[1])


def _blur(x: Tensor) -> Tensor:
    row = torch.tensor([0.25, 0.5, 0.25])
    kernel = torch.outer(row, row).tolist()
    return _filter(_filter(x, kernel), kernel)


def _canvas(x: Tensor) -> Tensor:
    """Darken every third row and column, like threads."""
    height, width = x.shape[2:]
    rows, columns = torch.arange(height)[:, None] % 3 == 0, torch.arange(width) % 3 == 0
    return torch.where(rows ^ columns, x * 0.5, x)


# The paper took stylizations of Geirhos et al. 2019, which need a network and paintings.
STYLES: dict[str, Alter] = {
    "plain": lambda x: x,
    "sepia": lambda x: _scale_channels(x.mean(1, keepdim=True).expand_as(x), 1.25, 0.6),
    "contrast": lambda x: (x - 128) * 2.5 + 128,
    "canvas": _canvas,
    "blur": _blur,
    "negative": lambda x: 255 - x,
    "cold": lambda x: _scale_channels(x, 0.5, 1.25),
    "poster": lambda x: (x / 85).round() * 85,
    "relief": lambda x: 128 + _filter(x, [[-1, -0.5, 0], [-0.5, 0, 0.5], [0, 0.5, 1]]),
    "faded": lambda x: 150 + 0.35 * (x - 128),
}


# Clusters of features --------------------------------------------------------------------------


def find_clusters(features: NDArray[np.float32], count: int, seed: int) -> Ints:
    """Return the cluster of each row: PCA to 30 numbers, then k-means (Dec-SSL, C.2).

    The numbers are whitened, as in the authors' program: each has a variance of 1.
    """
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    state = key(seed, "clusters") % 2**32
    # With several threads sums differ in their last bits from call to call; all workers of a
    # simulation must find the same clusters.
    with threadpool_limits(1):
        rows, columns = features.shape
        width = min(COMPONENTS, rows - 1, columns)  # another one would be rounding errors alone
        reduced = PCA(width, whiten=True, random_state=state).fit_transform(features)
        clusters: NDArray[Any] = KMeans(count, n_init=10, random_state=state).fit_predict(reduced)
    return clusters.astype(np.int64)
