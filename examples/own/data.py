"""Images of one's own: scikit-learn's digits at three sites, read by Python code."""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from fedssl.config import Data

DIGITS = {"leeds": (0, 1, 2, 3), "oslo": (4, 5, 6), "turin": (7, 8, 9)}


def sites(data: Data) -> dict[str, Any]:
    """Return a data set for each site, and one for tests; ``data.root`` and others are keys."""
    pixels, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 16  # floats between 0 and 1, or uint8
    is_test = torch.arange(len(images)) % 5 == 4
    clients = {}
    for name, digits in DIGITS.items():
        chosen = torch.isin(labels, torch.tensor(digits)) & ~is_test
        clients[name] = TensorDataset(images[chosen], labels[chosen])
    return {"clients": clients, "test": TensorDataset(images[is_test], labels[is_test])}
