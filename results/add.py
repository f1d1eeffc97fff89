"""Put lines that runs wrote (their table.jsonl) into results/rows.jsonl.

    python results/add.py [--beside] FILE ...

``--beside``: they ran beside other programs, so their times are too long. A line takes the place of
an older one of the same recipe, images, settings and seed. ``python docs/generate.py`` then puts
them into docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

ROWS = Path(__file__).with_name("rows.jsonl")


def add(files: list[Path], rows: Path, commit: str, beside: bool = False) -> int:
    """How many lines there are then; ``commit`` is for those that do not say what code ran."""
    new = [line | {"commit": line.get("commit") or commit} for f in files for line in read(f)]
    new = [line | {"beside": True} for line in new] if beside else new
    found = {_which(line): line for line in (*(read(rows) if rows.exists() else []), *new)}
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in found.values())
    rows.write_text(text, encoding="utf-8")
    return len(found)


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a file, without the folders of the machine that they were measured on."""
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [{key: value for key, value in line.items() if key != "folder"} for line in lines]


def _which(line: dict[str, Any]) -> str:
    return json.dumps([line[key] for key in ("recipe", "data", "changed", "seed")], sort_keys=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", action="store_true", help="other programs ran at the time")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    o = parser.parse_args()
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    print(f"{add(o.files, ROWS, commit, o.beside)} lines in {ROWS}")
