"""Words for people."""

from __future__ import annotations

from collections.abc import Sequence


def shorten_list(texts: Sequence[str], most: int) -> str:
    """Join the first ``most`` texts, and count the others."""
    shown = ", ".join(texts[:most])
    return f"{shown} and {len(texts) - most} more" if len(texts) > most else shown
