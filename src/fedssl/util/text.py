"""Format numbers, lists and tables as plain text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

NOT_PERCENT = ("effective_rank", "alignment", "uniformity")  # measures of unlabeled


def shorten_list(texts: Sequence[str], most: int) -> str:
    """Join the first ``most`` texts, and count the others."""
    shown = ", ".join(texts[:most])
    return f"{shown} and {len(texts) - most} more" if len(texts) > most else shown


def printable(path: str | os.PathLike[str]) -> str:
    """Return a path as text, with ``\\xe9`` for a byte that is not UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


def escape(text: object) -> str:
    """Return text on one line, with ``\\x1b`` for an escape character: names may hold any.

    >>> escape("ward\\n")
    'ward\\\\n'
    """
    # Python's own escapes: what a terminal would obey is no printable character.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def format_bytes(count: float) -> str:
    """Format a number of bytes with a unit.

    >>> format_bytes(1500)
    '1.5 kB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def name_client(names: Sequence[str], client: int) -> str:
    """Return a client's name for a sentence: its folder's, else its number."""
    return format_client(names[client] if names else str(client))


def format_client(name: str) -> str:
    """Format a client's name for a sentence; a number alone would say nothing."""
    return f"client {name}" if name.isdecimal() else escape(name)


def align_columns(lines: Sequence[Sequence[str]]) -> str:
    """Format a table with columns of equal width: numbers to the right, words to the left."""
    lines = [[escape(cell) for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def cell(text: str, width: int, column: int) -> str:
        cells = [line[column] for line in lines[1:]]
        if column == 0:
            numeric = all(map(str.isdecimal, cells))
        else:
            numeric = all(cell[:1] in "0123456789–-" for cell in cells)
        return text.rjust(width) if numeric else text.ljust(width)

    return "\n".join(
        "  ".join(cell(t, w, i) for i, (t, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )


def name_measure(measure: str) -> str:
    """Return the title of a measure.

    >>> name_measure("linear@500_top1")
    'linear, 500 labels'
    """
    name = measure.removesuffix("_top1")
    protocol, at, labels = name.partition("@")
    labels, _, rest = labels.partition("_")  # a protocol with several measures
    if at and labels.endswith("%"):
        return f"{protocol}, {labels[:-1]} % of labels"
    return f"{protocol}, {labels} labels{rest and f' {rest}'}" if at else name.replace("_", " ")


def format_measures(table: Mapping[str, Mapping[str, float]]) -> str:
    """Format a table with a row for each model and a column for each measure."""
    measures = list(dict.fromkeys(m for row in table.values() for m in row))
    head = ["", *map(name_measure, measures)]
    body = [[name, *(_cell(m, row.get(m)) for m in measures)] for name, row in table.items()]
    return align_columns([head, *body])


def _cell(measure: str, value: float | None) -> str:
    if value is None:
        return "–"
    if measure.startswith("rounds_to"):
        return f"{value:.0f}"
    return f"{value:.2f}" if measure in NOT_PERCENT else f"{value:.1f} %"
