"""Compare what the sites recorded (sent.jsonl) with what the server counted (metrics.jsonl)."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file in JSON."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(run: Path, states: Path) -> int:
    """0 if all bytes of all exchanges of all rounds agree."""
    sent: Counter[tuple[int, str]] = Counter()
    records = sorted(states.glob("*/sent.jsonl"))
    for record in records:
        for line in lines(record):
            if "round" in line:
                sent[line["round"], line["task"]] += line["bytes"]
    counted = {
        (row["round"], task): moved["up"]
        for row in lines(run / "metrics.jsonl")
        for task, moved in row["exchanges"].items()
    }
    total, theirs = sum(counted.values()), sum(sent.values())
    print(
        f"{len(counted)} exchanges: {total:,} bytes by the server's count, {theirs:,} by the sites'"
    )
    return 0 if records and counted == dict(sent) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
