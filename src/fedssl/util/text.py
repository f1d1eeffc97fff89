"""Format numbers, lists and tables as plain text."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence

GAP = "  "  # between the columns of a table
LEAST = 8  # characters of a column in a narrow terminal
NOT_PERCENT = ("effective_rank", "alignment", "uniformity")  # measures of unlabeled


def shorten_list(texts: Sequence[str], most: int) -> str:
    """Join the first ``most`` texts, and count the others."""
    shown = ", ".join(texts[:most])
    return f"{shown} and {len(texts) - most} more" if len(texts) > most else shown


def printable(path: str | os.PathLike[str]) -> str:
    """Return a path as one line of text, with ``\\xe9`` for a byte that is not UTF-8."""
    return escape(os.fsencode(path).decode(errors="backslashreplace"))


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


def terminal_width() -> int | None:
    """Return the columns of the terminal that shows standard output; ``None`` without one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def fit_line(text: str, width: int | None) -> str:
    """Break a sentence between words where it exceeds ``width`` characters."""
    return text if width is None else "\n".join(_wrap(text, width))


def align_columns(lines: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Format a table with columns of equal width: numbers to the right, words to the left.

    Cells are wrapped if the table is wider than ``width`` characters.
    """
    lines = [[escape(cell) for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    if width is not None:
        widths = _shrink(widths, lines, width)
    rights = [_is_numeric(lines, column) for column in range(len(widths))]
    printed: list[str] = []
    for line in lines:
        cells = [_wrap(text, w) for text, w in zip(line, widths, strict=True)]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            each = zip(parts, widths, rights, strict=True)
            aligned = (text.rjust(w) if right else text.ljust(w) for text, w, right in each)
            printed.append(GAP.join(aligned).rstrip())
    return "\n".join(printed)


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(1, width), break_on_hyphens=False) or [""]


def _is_numeric(lines: Sequence[Sequence[str]], column: int) -> bool:
    cells = [line[column] for line in lines[1:]]
    if column == 0:
        return all(map(str.isdecimal, cells))
    return all(cell[:1] in "0123456789–-" for cell in cells)


def _shrink(widths: Sequence[int], lines: Sequence[Sequence[str]], width: int) -> list[int]:
    """Take characters from the widest columns until the table fits; break words only at last."""
    shrunk, gaps = list(widths), len(GAP) * (len(widths) - 1)
    words = [max(len(word) for line in lines for word in line[i].split() or [""])
             for i in range(len(widths))]  # fmt: skip
    for least in (words, [LEAST] * len(widths)):
        while sum(shrunk) + gaps > width:
            wide = [i for i in range(len(shrunk)) if shrunk[i] > least[i]]
            if not wide:
                break
            shrunk[max(wide, key=shrunk.__getitem__)] -= 1
    return shrunk


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


def format_measures(table: Mapping[str, Mapping[str, float]], width: int | None = None) -> str:
    """Format a table with a row for each model and a column for each measure.

    If that is wider than ``width`` characters, it has a row for each measure.
    """
    measures = list(dict.fromkeys(m for row in table.values() for m in row))
    head = ["", *map(name_measure, measures)]
    body = [[name, *(_cell(m, row.get(m)) for m in measures)] for name, row in table.items()]
    lines = [head, *body]
    text = align_columns(lines)
    if width is None or max(map(len, text.splitlines())) <= width:
        return text
    return align_columns(list(zip(*lines, strict=True)), width)


def _cell(measure: str, value: float | None) -> str:
    if value is None:
        return "–"
    if measure.startswith("rounds_to"):
        return f"{value:.0f}"
    return f"{value:.2f}" if measure in NOT_PERCENT else f"{value:.1f} %"
