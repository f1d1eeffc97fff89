"""Shared parts of the benchmarks: made data, an engine on it, and a stopwatch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from fedssl.util.tuning import keep_freed_memory, shorten_thread_waits

shorten_thread_waits()  # as the command line does, before torch
keep_freed_memory()

import numpy as np
import torch
from torch import Tensor

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.data.augment import Augmentation
from fedssl.data.dataset import Groups, Split
from fedssl.data.stored import StoredArray
from fedssl.engines.local import LocalEngine
from fedssl.federation.server import Server
from fedssl.runs.build import build_network
from fedssl.runs.split import pool_clients
from fedssl.training.trainer import Trainer


def made(count: int, channels: int, pixels: int) -> Split:
    """Images of noise."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, channels, pixels, pixels)
    return Split((torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),))


def write_images(path: Path, images: Tensor) -> StoredArray:
    """Write images into a file, from which they are streamed."""
    np.save(path, images.numpy())
    return StoredArray(path)


def even(clients: int, samples: int) -> Groups:
    """Clients of one size."""
    return Groups(np.arange(clients * samples), np.arange(clients + 1) * samples)


def engine_of(
    config: Config, split: Split, groups: Groups, compiled: bool = False
) -> tuple[LocalEngine, Server]:
    """Build an experiment on given data."""
    objective = configuration.variant("objective", config.objective.name)(config.objective)
    algorithm = configuration.variant("algorithm", config.algorithm.name)
    if algorithm.pools_data:
        config, groups = pool_clients(config, groups, len(groups))
    _, channels, height, width = split.images[0].shape
    network = build_network(config, objective, (channels,), height, 0)
    augmentation = Augmentation.from_config(config.augment, channels, (height, width))
    trainer = Trainer(config, network, objective, augmentation, split, torch.device(config.device))
    trainer.compiles = compiled
    engine = LocalEngine(trainer, algorithm(config.algorithm, objective), groups)
    return engine, Server(trainer)


def rounds_of(engine: LocalEngine, server: Server) -> Callable[[], None]:
    """One round after another, of all clients."""
    ids = np.arange(len(engine.groups))

    def one() -> None:
        engine.algorithm.round(server, engine.cohort(ids, server.round))
        server.round += 1
        float(server.log["loss"])

    return one


def seconds(work: Callable[[], None], device: str) -> float:
    """How long a call takes, on the device too."""
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
