"""Clients of very different sizes: each holds a fixed share of what is left."""

from dataclasses import dataclass

import numpy as np

from fedssl.config import PartitionParams
from fedssl.data.dataset import Groups, Split
from fedssl.data.random import key, permutation


@dataclass(frozen=True)
class Halving:
    """The first client has half of the samples, the next a quarter, and so on."""

    @dataclass(frozen=True)
    class Params(PartitionParams):
        """``clients``: how many; the last takes the rest."""

        clients: int = 5

    params: Params

    def split(self, split: Split, classes: int, seed: int) -> Groups:
        """The samples' numbers, and where each client's begin."""
        order = permutation(key(seed, "halving"), len(split))
        left = [len(split) // 2**k for k in range(self.params.clients)]
        return Groups(order, np.array([*(len(split) - n for n in left), len(split)]))
