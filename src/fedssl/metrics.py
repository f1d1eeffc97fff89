"""``metrics.jsonl``: a line a round; the same numbers for TensorBoard where it is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"
BOARD_POINTS = 2000  # TensorBoard shows no more, and a point costs as much as a small round


class Metrics:
    """Appends to a run's metrics; lines after the checkpoint that is resumed are dropped."""

    def __init__(self, out: Path, round: int, rounds: int) -> None:
        path = out / FILE
        kept = [line for line in read(out) if line["round"] <= round] if path.exists() else []
        new = path.with_name(FILE + ".new")
        new.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        new.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._board = _board(out, round)
        self._every = max(1, rounds // BOARD_POINTS)

    def close(self) -> None:
        """Nothing more will be written."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, line: dict[str, Any]) -> None:
        """One round's numbers."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None and line["round"] % self._every == 0:
            for name, value in line.items():
                if isinstance(value, (int, float)) and name != "round":
                    self._board.add_scalar(name, value, line["round"])

    @staticmethod
    def totals(out: Path) -> dict[str, float]:
        """Sums over a run's rounds."""
        lines = list(read(out))
        seconds = sum(line["seconds"] for line in lines)
        images = sum(line["images"] for line in lines)
        return {
            "seconds": round(seconds, 3),
            "images": images,
            "images_per_second": round(images / seconds, 1) if seconds else 0.0,
            "bytes_up": sum(line["bytes_up"] for line in lines),
            "bytes_down": sum(line["bytes_down"] for line in lines),
            "missing": sum(line["missing"] for line in lines),
        }

    @staticmethod
    def first_rounds(
        out: Path, targets: tuple[float, ...], measure: str, result: dict[str, float]
    ) -> dict[str, int | None]:
        """The first evaluated round in which ``measure`` reached each accuracy.

        ``result`` are the numbers at the end; none: never reached (FedEMA, Table 11).
        """
        lines = list(read(out))
        end = {"round": lines[-1]["round"] if lines else 0, **result}
        known = [(line["round"], line[measure]) for line in (*lines, end) if measure in line]
        return {
            f"rounds_to_{target:g}": next((r for r, top1 in known if top1 >= target), None)
            for target in targets
        }


def read(out: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's metrics; a line that a kill cut short is passed over."""
    with (out / FILE).open(encoding="utf-8") as file:
        for text in file:
            with contextlib.suppress(json.JSONDecodeError):
                line = json.loads(text)
                if "round" in line:
                    yield line


def _board(out: Path, round: int) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(out / "tensorboard"), purge_step=round + 1)
