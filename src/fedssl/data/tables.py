"""Tables with a column of image files: Parquet, and data sets of Hugging Face on disk (Arrow)."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedssl.util.errors import UserError

LABELS = ("label", "labels")  # names of the column of labels


class Table:
    """An open table. Arrow files are mapped, and Parquet files read by groups of rows."""

    def __init__(self, path: Path) -> None:
        arrow = _import_pyarrow()
        self.path = path
        try:
            if path.suffix.lower() == ".parquet":
                with arrow.parquet.ParquetFile(path) as file:
                    self.schema, groups = file.schema_arrow, file.metadata
                self.groups = [groups.row_group(k).num_rows for k in range(groups.num_row_groups)]
            else:
                self._arrow = arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()
                self.schema, self.groups = self._arrow.schema, [self._arrow.num_rows]
        except (arrow.ArrowInvalid, OSError) as error:
            raise self._error(f"cannot be read ({str(error).splitlines()[0]})") from None
        self.images = self._find_images(arrow)
        self.labels = next((name for name in LABELS if name in self.schema.names), None)

    def _find_images(self, arrow: Any) -> str:
        """Return the first column of bytes, or of structures with bytes, as of Hugging Face."""

        def holds_bytes(kind: Any) -> bool:
            if arrow.types.is_struct(kind):
                return kind.get_field_index("bytes") >= 0
            return arrow.types.is_binary(kind) or arrow.types.is_large_binary(kind)

        found = [field.name for field in self.schema if holds_bytes(field.type)]
        if not found:
            raise self._error("has no column of encoded image files")
        return "image" if "image" in found else found[0]

    def _error(self, problem: str) -> UserError:
        return UserError(
            f"{self.path.name} {problem}",
            f"a table {problem}",
            key="data.root",
            value=self.path.parent,
            fix="Replace it, or move it away.",
        )

    def list_labels(self) -> Iterator[str | None]:
        """Yield the label of each row; ``None`` if there is none, or -1."""
        if self.labels is None:
            yield from (None for _ in range(sum(self.groups)))
            return
        names = self._name_classes()
        for group in range(len(self.groups)):
            for label in self.read_group(group, self.labels).to_pylist():
                is_known = label is not None and label != -1
                yield (names[label] if names else str(label)) if is_known else None

    def _name_classes(self) -> list[str]:
        """Return the names that Hugging Face notes for the labels."""
        note = json.loads((self.schema.metadata or {}).get(b"huggingface", b"{}"))
        feature = note.get("info", {}).get("features", {}).get(self.labels, {})
        return feature.get("names", []) if isinstance(feature, dict) else []

    def read_group(self, group: int, column: str) -> Any:
        """Return a column of a group of rows."""
        if self.path.suffix.lower() != ".parquet":
            return self._arrow.column(column)
        with _import_pyarrow().parquet.ParquetFile(self.path) as file:
            return file.read_row_group(group, columns=[column]).column(column)

    def read_image(self, row: int) -> bytes:
        """Return the bytes of a row's image file."""
        group = 0
        while row >= self.groups[group]:
            row, group = row - self.groups[group], group + 1
        value = _images_of(self, group)[row].as_py()
        content = value["bytes"] if isinstance(value, dict) else value
        if not content:
            raise ValueError(f"no bytes in the column {self.images}")
        return content


def _import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        problem = "Parquet and Arrow files need pyarrow"
        fix = "Run pip install 'fedssl[frames]'."
        raise UserError(problem, "pyarrow is missing", key="data.root", fix=fix) from None
    return pyarrow


@functools.lru_cache(maxsize=256)
def open_table(path: Path, size: int, mtime: int) -> Table:
    """Open a table once, while its file is unchanged."""
    return Table(path)


@functools.lru_cache(maxsize=2)  # a group of rows may have hundreds of megabytes
def _images_of(table: Table, group: int) -> Any:
    return table.read_group(group, table.images)
