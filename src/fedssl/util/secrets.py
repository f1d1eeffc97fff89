"""Random numbers that protect people: from the operating system, never from ``seed``."""

from __future__ import annotations

import os

import numpy as np


def system_generator() -> np.random.Generator:
    """Return a generator that nobody can repeat."""
    return np.random.Generator(np.random.Philox(key=int.from_bytes(os.urandom(16))))
