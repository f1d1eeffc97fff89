"""Clients of very different sizes: each holds a fixed share of what is left."""

from dataclasses import dataclass

import numpy as np

from fedssl import config
from fedssl.config import PartitionParams
from fedssl.data.dataset import Groups, Split
from fedssl.data.random import key, permutation


@dataclass(frozen=True)
class Halving:
    """The first client has half of the samples, the next a quarter, and so on."""

    @dataclass(frozen=True)
    class Params(PartitionParams):
        """Keys of this partition, beside those of every partition."""

        clients: int = config.key(5, ge=1, help="Number of clients. The last takes the rest.")

    params: Params

    def split(self, split: Split, classes: int, seed: int) -> Groups:
        """The samples' numbers, and where each client's begin."""
        order = permutation(key(seed, "halving"), len(split))
        left = [len(split) // 2**k for k in range(self.params.clients)]
        return Groups(order, np.array([*(len(split) - n for n in left), len(split)]))
