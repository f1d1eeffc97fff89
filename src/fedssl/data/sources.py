"""What clients differ in (``partition.source``): a number for each image that partitions go by.

Classes, clusters of features, or an angle or a style that the images themselves are given
(Dec-SSL, section 3.1, B.4 and C.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedssl import config as configuration
from fedssl.config import Config, PartitionParams, SourceParams
from fedssl.data.augment import rotate
from fedssl.data.dataset import Dataset, Split
from fedssl.data.random import key, permutation
from fedssl.util.errors import UserError

if TYPE_CHECKING:
    from fedssl.models.network import Tower

COMPONENTS = 30  # of the features, before they are clustered (Dec-SSL, C.2)
_CHUNK = 1024  # images altered at once


@dataclass(frozen=True)
class Sources:
    """The source of each image, and what the sources are called."""

    of: Tensor | None  # int64, -1 where there is none
    names: tuple[str, ...]
    word: str = "classes"  # what they are


def assign(config: Config, dataset: Dataset, device: torch.device | str = "cpu") -> Sources:
    """What the partition goes by: the labels, or the ``partition.source`` of each image."""
    params, train = config.partition, dataset.train
    if not isinstance(params, SourceParams):
        return Sources(train.labels, dataset.classes)
    check(params, len(train))
    count = params.sources
    if params.source == "labels":
        return Sources(train.labels, dataset.classes)
    if params.source == "features":
        found = clusters(_features(config, params, train, device), count, config.seed)
        names = [f"cluster {k}" for k in range(count)]
        return Sources(torch.from_numpy(found), tuple(names), "clusters")
    of = torch.from_numpy(_drawn(len(train), count, config.seed))
    if params.source == "style":
        return Sources(of, tuple(STYLES)[:count], "styles")
    return Sources(of, tuple(f"{_degrees(k, count):g}°" for k in range(count)), "rotations")


def altered(config: Config, dataset: Dataset) -> Dataset:
    """Turned or stylized training images, where clients differ in that (Dec-SSL, B.4).

    It is a copy: the files and the cache keep the images as they are. So does the test split: it is
    for judging what holds for all; of a client's own test images see ``ModelEvaluator``.
    """
    params, train = config.partition, dataset.train
    if not isinstance(params, SourceParams) or not alters(params):
        return dataset
    check(params, len(train))
    of = torch.from_numpy(_drawn(len(train), params.sources, config.seed))
    images = tuple(alter(params, x, of) for x in train.images)
    return replace(dataset, train=replace(train, images=images))


def alters(params: PartitionParams) -> bool:
    """Whether sources are something that images are given."""
    return isinstance(params, SourceParams) and params.source in ("rotation", "style")


def alter(params: SourceParams, images: Tensor, of: Tensor) -> Tensor:
    """A copy in which every image is turned or stylized as its source has it; -1 stays as it is."""
    return _each(images, of, _alteration(params))


def check(params: SourceParams, total: int) -> None:
    """Refuse numbers of sources that cannot be."""
    count, source = params.sources, params.source
    if count < 2:
        raise UserError(f"partition.sources={count}: must be at least 2, or clients cannot differ")
    if params.encoder is not None and source != "features":
        raise UserError(
            f"partition.encoder={params.encoder}: only partition.source=features looks at one; "
            "leave it out"
        )
    if source != "labels" and count > total:
        what = "clusters" if source == "features" else "sources"
        raise UserError(
            f"partition.sources={count}: more {what} than the {total} samples there are; use at "
            f"most {total}"
        )
    if source == "style" and count > len(STYLES):
        raise UserError(
            f"partition.sources={count}: there are {len(STYLES)} styles ({', '.join(STYLES)}); "
            f"use at most {len(STYLES)}"
        )


def _drawn(total: int, count: int, seed: int) -> NDArray[np.int64]:
    """A source for each image, whatever its class; as many of each to within one."""
    return permutation(key(seed, "source"), total) % count


# Images that change ----------------------------------------------------------------------------


def _each(images: Tensor, of: Tensor, alter: Callable[[Tensor, int], Tensor]) -> Tensor:
    """A copy in which every image is altered as its source has it."""
    changed = images.clone()
    for k in range(int(of.max()) + 1):
        for part in torch.nonzero(of == k)[:, 0].split(_CHUNK):
            floats = alter(images[part].float(), k)
            changed[part] = floats.round().clamp(0, 255).to(torch.uint8)
    return changed


def _alteration(params: SourceParams) -> Callable[[Tensor, int], Tensor]:
    """What source k does to float images from 0 to 255."""
    if params.source == "style":
        styles = list(STYLES.values())
        return lambda x, k: styles[k](x)
    return lambda x, k: (
        x if k == 0 else rotate(x, torch.full((len(x),), _degrees(k, params.sources)))
    )


def _degrees(source: int, count: int) -> float:
    """Angles that divide the circle evenly, the first one 0 (Dec-SSL, Figure 10)."""
    return 360.0 * source / count


def _gains(x: Tensor, first: float, last: float) -> Tensor:
    """A factor for each channel; a gray image has the first."""
    return torch.linspace(first, last, x.shape[1]).view(1, -1, 1, 1)


def _filter(x: Tensor, kernel: list[list[float]]) -> Tensor:
    """Every channel through a 3 × 3 filter, the border repeated."""
    channels = x.shape[1]
    weight = torch.tensor(kernel).expand(channels, 1, 3, 3)
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), weight, groups=channels)


def _blur(x: Tensor) -> Tensor:
    row = torch.tensor([0.25, 0.5, 0.25])
    kernel = torch.outer(row, row).tolist()
    return _filter(_filter(x, kernel), kernel)


def _canvas(x: Tensor) -> Tensor:
    """Dark threads, every third row and column."""
    height, width = x.shape[2:]
    rows, columns = torch.arange(height)[:, None] % 3 == 0, torch.arange(width) % 3 == 0
    return torch.where(rows ^ columns, x * 0.5, x)


# Ours: the paper took stylizations of Geirhos et al. 2019, which need a network and paintings.
STYLES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "sepia": lambda x: x.mean(1, keepdim=True) * _gains(x, 1.25, 0.6),
    "contrast": lambda x: (x - 128) * 2.5 + 128,
    "canvas": _canvas,
    "blur": _blur,
    "negative": lambda x: 255 - x,
    "cold": lambda x: x * _gains(x, 0.5, 1.25),
    "poster": lambda x: (x / 85).round() * 85,
    "relief": lambda x: 128 + _filter(x, [[-1, -0.5, 0], [-0.5, 0, 0.5], [0, 0.5, 1]]),
    "faded": lambda x: 150 + 0.35 * (x - 128),
}


# Clusters of features --------------------------------------------------------------------------


def clusters(features: NDArray[np.float32], count: int, seed: int) -> NDArray[np.int64]:
    """The cluster of each row: PCA to 30 numbers, then k-means (Dec-SSL, C.2)."""
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    state = key(seed, "clusters") % 2**32
    # With several threads sums differ in their last bits from call to call; all workers of a
    # simulation must find the same clusters.
    with threadpool_limits(1):
        width = min(COMPONENTS, *features.shape)
        reduced = PCA(width, random_state=state).fit_transform(features)
        found = KMeans(count, n_init=10, random_state=state).fit_predict(reduced)
    return cast(NDArray[np.int64], found.astype(np.int64))


def _features(
    config: Config, params: SourceParams, train: Split, device: torch.device | str
) -> NDArray[np.float32]:
    """The training images as the given encoder sees them, or an untrained one of the run's kind."""
    from fedssl.evaluate.features import extract
    from fedssl.models.network import build

    settings, path = config.encoder, params.encoder
    if path is not None:
        settings = _kind(Path(path)) or settings
    images = train.images[0]
    settings = replace(settings, init=path, towers=1)
    try:
        network = build(
            settings,
            (images.shape[1],),
            min(images.shape[2:]),
            lambda features, norm: nn.Identity(),
            config.seed,
        )
    except UserError as error:  # the user knows it by another name
        text = str(error).replace("encoder.init=", "partition.encoder=")
        raise UserError(text) from None
    torch.set_num_threads(config.engine.threads)  # the order of sums, see Engine
    tower = cast("Tower", network.towers[0])
    return extract(tower.encoder.to(device), images, device=device).cpu().numpy()


def _kind(path: Path) -> configuration.Encoder | None:
    """What kind of encoder a run's folder holds; none: its configuration is not there."""
    known = (path if path.is_dir() else path.parent) / "config.yaml"
    return configuration.build(configuration.read_yaml(known)).encoder if known.is_file() else None
