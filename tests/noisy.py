"""Noise on DCCO's sums, and a small run with it, for tests of privacy."""

from __future__ import annotations

import math
from typing import Any

from helpers import settings

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.federation.algorithm import build_algorithm
from fedssl.privacy.noise import Noisy

SMALL = (
    "rounds=4", "data.size=8", "data.labels=80", "partition.name=iid", "partition.clients=6",
    "cohort.size=3", "objective.projector=32,16", "evaluate.protocols=knn",
    "evaluate.baselines=[]", "engine.threads=1", "schedule=constant", "checkpoint.seconds=0",
)  # fmt: skip
BOUND = math.sqrt(2 * 0.7**2 + 3 * 0.7**4)


def small(*words: str) -> Config:
    return configuration.resolve(configuration.read_recipe(None), [*SMALL, *words])


def noisy(*words: str, clients: int = 100, cohort: int = 10, **others: Any) -> Noisy:
    """DCCO's, with encodings up to 0.7, unless told otherwise."""
    config = settings("objective.bound=0.7", "privacy.noise=3", *words)
    return Noisy(config, build_algorithm(config), clients, cohort, **others)
