"""Find the sources by which a partition divides images: labels, or features of an encoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedssl import config as configuration
from fedssl.config import Config, SourceParams
from fedssl.data.dataset import Dataset, ImageArray
from fedssl.data.heterogeneity import Sources, assign_sources
from fedssl.data.squares import MiddleSquares
from fedssl.evaluate.features import extract
from fedssl.models.network import Heads, Tower, build
from fedssl.util.errors import UserError
from fedssl.util.tuning import count_threads


def find_sources(config: Config, dataset: Dataset, device: torch.device | str = "cpu") -> Sources:
    """Return the source of each training image; features are computed on ``device``."""
    train = dataset.train

    def embed(images: ImageArray) -> NDArray[np.float32]:
        if config.data.shape == "whole":
            sizes = None if train.sizes is None else train.sizes[0]
            size = config.augment.size or images.shape[2]
            images = MiddleSquares(images, sizes, size, config.data.interpolation)
        return _embed(config, images, device)

    return assign_sources(config.partition, dataset, config.split_seed, embed)


def _embed(config: Config, images: ImageArray, device: torch.device | str) -> NDArray[np.float32]:
    """Embed images with ``partition.encoder``, or with an untrained encoder of the run's kind."""
    params, settings = config.partition, config.encoder
    assert isinstance(params, SourceParams)
    if params.encoder is not None:
        settings = _read_settings(Path(params.encoder)) or settings
    settings = replace(settings.without_weights(), init=params.encoder, towers=1)
    size = min(images.shape[2:])
    channels, seed = (images.shape[1],), config.split_seed
    try:
        network = build(settings, channels, size, lambda *_: Heads(nn.Identity()), seed)
    except UserError as error:
        if error.key in (None, "encoder.init"):
            error.key, error.value = "partition.encoder", params.encoder
        raise
    torch.set_num_threads(count_threads(config.engine.threads))  # the order of sums depends on it
    tower = cast(Tower, network.towers[0])
    return extract(tower.encoder.to(device), images).cpu().numpy()


def _read_settings(path: Path) -> configuration.Encoder | None:
    """Return the encoder section of a run's folder, if its configuration is there."""
    file = (path if path.is_dir() else path.parent) / "config.yaml"
    return configuration.build(configuration.read_yaml(file)).encoder if file.is_file() else None
