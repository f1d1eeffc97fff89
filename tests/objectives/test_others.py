from __future__ import annotations

import pytest
import torch
from lightly.loss import NTXentLoss

from fedssl.config import build
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.cco import CCO
from fedssl.objectives.simclr import SimCLR
from fedssl.objectives.supervised import Supervised
from fedssl.util.errors import UserError


def pair(count: int, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    f = torch.randn(count, width, dtype=torch.float64, generator=generator)
    return f, f + torch.randn(count, width, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_simclr_agrees_with_lightly(temperature: float) -> None:
    f, g = pair(9)
    ours = SimCLR(SimCLR.Params("simclr", temperature=temperature)).loss(EncodedBatch((f, g)))
    theirs = NTXentLoss(temperature=temperature)(f, g)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_simclr_temperature_must_be_positive() -> None:
    with pytest.raises(UserError, match=r"objective\.temperature=0"):
        build({"objective": {"name": "simclr", "temperature": 0}, "algorithm": {"name": "fedavg"}})


@pytest.mark.parametrize("sizes", [[4, 4, 4], [2, 5, 3, 2], [12]])
@pytest.mark.parametrize("name", ["cco", "simclr", "supervised"])
def test_loss_within_clients_is_the_weighted_mean_of_each_clients(
    sizes: list[int], name: str
) -> None:
    import numpy as np

    objective = {
        "cco": CCO(CCO.Params("cco")),
        "simclr": SimCLR(SimCLR.Params("simclr")),
        "supervised": Supervised(Supervised.Params("supervised")),
    }[name]
    f, g = pair(12)
    labels = torch.arange(12) % 6
    used = labels if objective.needs_labels else None
    merged = EncodedBatch((f, g), used, np.array(sizes)).mean_over_clients(objective.loss)
    each = zip(f.split(sizes), g.split(sizes), labels.split(sizes), strict=True)
    one_by_one = sum(len(a) * objective.loss(EncodedBatch((a, b), y)) for a, b, y in each) / 12
    torch.testing.assert_close(merged, torch.as_tensor(one_by_one), rtol=1e-10, atol=1e-12)
