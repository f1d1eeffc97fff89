"""Tables of who holds what, and the distance of clients to the whole."""

from __future__ import annotations

import numpy as np
import pytest
from partitions import groups_of

from fedssl.data.client_table import format_table, mean_distance

pytestmark = pytest.mark.filterwarnings("error")  # numpy warns where it divides 0 by 0


def test_distance_is_half_the_sum_of_differences() -> None:
    labels = np.array([0, 0, 0, 1, 1, 2, -1, 2])
    groups = groups_of([0, 1, 3], [4, 5, 6], [2])
    # Of all six: 1/2, 1/3, 1/6. Clients: (2/3, 1/3, 0), (0, 1/2, 1/2), (1, 0, 0).
    assert mean_distance(groups, labels) == pytest.approx((1 / 6 + 1 / 2 + 1 / 2) / 3)
    assert mean_distance(groups_of([0, 3], [1, 4]), labels) == 0
    # A client without any label says nothing.
    assert mean_distance(groups_of([0, 3], [1, 4], [6]), labels) == 0


def test_table_of_few_classes_has_a_column_each() -> None:
    groups = groups_of([0, 1, 2], [3], [5, 7])
    labels = np.array([0, 0, 1, 0, 1, 1, 0, -1])
    lines = format_table(groups, labels, ["0°", "a very long name"], kind="rotations")
    assert lines.splitlines() == [
        "clients              3",
        "samples              6 used, 2 left out",
        "samples per client   1 smallest, 2 median, 3 largest",
        "rotations per client 1 smallest, 1 median, 2 largest",
        "distance             0.356 on average (earth mover's, from a client's rotations to all)",
        "",
        "client  samples  0°  a very lon",
        "     0        3   2           1",
        "     1        1   1           0",
        "     2        2   0           1",
    ]


def test_table_of_many_classes_shows_the_three_most_frequent() -> None:
    labels = np.array([5, 12, 12, 3, 3, 3, 1, 2, -1, 2])
    lines = format_table(groups_of(list(range(7)), [7, 8]), labels, [f"c{i}" for i in range(13)])
    assert lines.splitlines()[-3:] == [
        "client  samples  most frequent classes",
        "     0        7  c3×3, c12×2, c1×1, …",
        "     1        2  c2×1",
    ]


@pytest.mark.parametrize("label", [0, -1])
def test_table_lists_twenty_clients(label: int) -> None:
    groups = groups_of(*([k] for k in range(25)))
    lines = format_table(groups, np.full(30, label), ["x", "unseen"]).splitlines()
    assert lines[-1] == "… and 5 more clients"
    assert lines[-2].split() == (["19", "1", "1", "0"] if label == 0 else ["19", "1"])
    full = format_table(groups_of(*([k] for k in range(20))), np.full(30, label), ["x", "unseen"])
    assert "more clients" not in full and ("classes" in full) == (label == 0)
