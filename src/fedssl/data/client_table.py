"""Tables of a partition: how many samples of which classes each client holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedssl.data.dataset import Groups, Ints
from fedssl.util.text import align_columns

MOST_CLIENTS = 20  # listed in the table
MOST_COLUMNS = 12  # classes that get a column each


def count_labels(groups: Groups, labels: Ints, classes: int = 1) -> Ints:
    """Count the samples of each class that every client has, ``[clients, classes]``.

    Samples without a class (-1) are not counted. There may be more than the given ``classes``.
    """
    span = max(int(labels.max()) + 1, classes)
    owners, held = np.repeat(np.arange(len(groups)), groups.sizes), labels[groups.members]
    pairs = (owners * span + held)[held >= 0]
    return np.bincount(pairs, minlength=len(groups) * span).reshape(-1, span)


def mean_distance(groups: Groups, labels: Ints) -> float:
    """Return the mean earth mover's distance of a client's classes to all (Dec-SSL, Figure 17).

    Any two classes are at distance 1, so it is half the sum of the absolute differences of the
    shares: 0 for clients that are all alike, 1 - 1/C for one class of C equal ones each.
    """
    held = count_labels(groups, labels)
    held = held[held.sum(axis=1) > 0]
    shares = held / held.sum(axis=1, keepdims=True)
    return float(np.abs(shares - held.sum(axis=0) / held.sum()).sum(axis=1).mean() / 2)


def format_table(
    groups: Groups,
    labels: Ints,
    classes: Sequence[str],
    names: Sequence[str] = (),
    kind: str = "classes",
    width: int | None = None,
) -> str:
    """Format who holds what as plain text; ``names`` are the clients', ``kind`` the labels'."""
    used = len(groups.members)
    lines = [
        f"clients              {len(groups)}",
        f"samples              {used} used, {len(labels) - used} left out",
        f"samples per client   {_spread(groups.sizes)}",
    ]
    shown = [groups[k] for k in range(min(len(groups), MOST_CLIENTS))]
    names = names or [str(k) for k in range(len(shown))]
    rows = [["client", "samples"], *([names[k], str(len(s))] for k, s in enumerate(shown))]
    if (labels >= 0).any():
        held = count_labels(groups, labels, len(classes))
        lines.append(f"{kind + ' per client':<21}{_spread((held > 0).sum(axis=1))}")
        lines.append(
            f"distance             {mean_distance(groups, labels):.3f} on average (earth mover's, "
            f"from a client's {kind} to all)"
        )
        cells = _class_cells(held[:MOST_CLIENTS], classes, kind)
        rows = [a + b for a, b in zip(rows, cells, strict=True)]
    lines += ["", align_columns(rows, width)]
    if len(groups) > MOST_CLIENTS:
        lines.append(f"… and {len(groups) - MOST_CLIENTS} more clients")
    return "\n".join(lines)


def _spread(values: Ints) -> str:
    return f"{values.min()} smallest, {np.median(values):g} median, {values.max()} largest"


def _class_cells(held: Ints, classes: Sequence[str], kind: str) -> list[list[str]]:
    """Return a heading and a row per client; with many classes, one column of the most frequent."""
    if len(classes) <= MOST_COLUMNS:
        return [[name[:10] for name in classes], *(list(map(str, row)) for row in held.tolist())]
    lines = [[f"most frequent {kind}"]]
    for row in held:
        ranked = [c for c in np.argsort(-row, kind="stable") if row[c]]
        names = [f"{classes[c]}×{row[c]}" for c in ranked[:3]]
        lines.append([", ".join(names + ["…"] * (len(ranked) > 3))])
    return lines
