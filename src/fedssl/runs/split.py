"""Divide a data set: the clients' images, public images, and images held out of training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedssl.config import Config
from fedssl.data.dataset import Dataset, Groups, Split
from fedssl.data.heterogeneity import Sources, alter_training_images
from fedssl.data.labels import draw_share
from fedssl.data.load import convert_channels, load_dataset
from fedssl.data.partition import partition
from fedssl.data.random import choose, key
from fedssl.data.squares import select_squares
from fedssl.runs.sources import find_sources
from fedssl.util.device import pick_device
from fedssl.util.errors import UserError


def load_run_dataset(config: Config, size: int | None = None) -> Dataset:
    """Load the data set; rotate or stylize training images if clients differ in that."""
    dataset = load_dataset(config.data, config.split_seed, size)
    return alter_training_images(config.partition, dataset, config.split_seed)


def load_evaluated_dataset(config: Config, dataset: Dataset) -> Dataset:
    """Return the images of a run as evaluation sees them, at its size.

    Squares of another size are read from their files. Of whole images they are the middle squares.
    """
    size, shapes = config.evaluate.size or config.augment.size, dataset.train.images
    if config.data.shape == "whole":
        return select_squares(dataset, size or shapes[0].shape[2], config.data.interpolation)
    if size in (None, config.data.size) or not len(dataset.train):
        return dataset
    return convert_channels(load_run_dataset(config, size), [each.shape[1] for each in shapes])


def split_clients(config: Config, dataset: Dataset, sources: Sources | None = None) -> Groups:
    """Assign training images to clients, except public and held-out ones.

    ``sources`` are what the partition divides by, if they were computed before.
    """
    train = dataset.train
    public, held_out = public_images(config, dataset), held_out_images(config, dataset)
    if len(public) and len(public) + len(held_out) == len(train):
        raise UserError(
            f"no image of {len(train)} is left for the clients",
            key="algorithm.public",
            value=getattr(config.algorithm, "public", len(public)),
            fix="Use fewer, or set algorithm.align=0 and algorithm.public=0.",
        )
    sources = sources or find_sources(config, dataset, pick_device(config.device))
    kept = np.setdiff1d(np.arange(len(train)), np.union1d(held_out, public))
    part = Split(
        (torch.empty(len(kept), 0),),  # only their number matters
        sources.labels[kept],
        None if train.clients is None else train.clients[kept],
        None if train.cases is None else train.cases[kept],
    )
    groups = partition(config.partition, part, len(sources.names), config.split_seed)
    return Groups(kept[groups.members], groups.offsets)


def public_images(config: Config, dataset: Dataset) -> NDArray[np.int64]:
    """Choose the public training images (``algorithm.public``), none of which is held out."""
    count, held_out = getattr(config.algorithm, "public", 0), held_out_images(config, dataset)
    free = np.setdiff1d(np.arange(len(dataset.train)), held_out)
    return free[choose(key(config.split_seed, "public"), len(free), count)]


def held_out_images(config: Config, dataset: Dataset) -> NDArray[np.int64]:
    """Choose the training images that ``data.holdout`` keeps out of training."""
    train, share = dataset.train, config.data.holdout
    if not share:
        return np.empty(0, dtype=np.int64)
    names = dataset.classes
    return draw_share(train.full_labels, share, len(names), config.split_seed, names=names).numpy()


def pool_clients(config: Config, groups: Groups, cohort: int) -> tuple[Config, Groups]:
    """Make one client of all; a step uses as many images as a cohort has."""
    total = len(groups.members)
    batch = config.algorithm.batch or max(1, round(cohort * total / len(groups)))
    algorithm = replace(config.algorithm, batch=min(batch, total))
    rounds = replace(config.cohort, size=None, fraction=None, minimum=1)
    config = replace(config, algorithm=algorithm, cohort=rounds)
    return config, Groups(np.sort(groups.members), np.array([0, total]))
