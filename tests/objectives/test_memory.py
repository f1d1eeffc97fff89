"""A queue holds the last targets; plain loops in tests/papers keep it across rounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import normal_rows

from fedssl.objectives.memory import Queue
from fedssl.objectives.swav import SwAV


@pytest.mark.parametrize("per_view", [True, False])
@pytest.mark.parametrize("places", [16, 12, 8, 5, 1, 1000])
def test_it_holds_exactly_the_last_targets(places: int, per_view: bool) -> None:
    queue = Queue(places, 3, per_view)
    tensors, entered = queue.start(torch.zeros((), dtype=torch.float64)), torch.zeros(2, 0, 3)
    for step in range(9):
        views = [normal_rows(4, 3, 4 * step + view) for view in range(4)]  # two are predictions
        queue.update(tensors, tuple(views))
        new = F.normalize(torch.stack(views[2:]), dim=2)
        entered = torch.cat((entered, new if per_view else new.view(1, 8, 3).expand(2, -1, -1)), 1)
        seen = entered.shape[1]
        assert int(tensors["seen"]) == seen
        assert queue.free_places(tensors).sum() == max(0, places - seen)
        expected = torch.zeros(2, places, 3, dtype=torch.float64)
        for place in range(max(0, seen - places), seen):
            expected[:, place % places] = entered[:, place]
        torch.testing.assert_close(tensors["queue"], expected if per_view else expected[0])


def test_without_a_queue_there_is_no_memory() -> None:
    assert SwAV(SwAV.Params("swav")).memory.is_empty
    assert not SwAV(SwAV.Params("swav", queue=4)).memory.is_empty
