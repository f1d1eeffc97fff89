"""Embed images with a trained encoder and write the embeddings to a file."""

from __future__ import annotations

import contextlib
import csv
import glob
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data.decode import decode_files, list_failures
from fedssl.data.image_files import find_images, image_extensions
from fedssl.encoder.load import ImageEncoder, load_encoder
from fedssl.util.device import pick_device
from fedssl.util.errors import UserError
from fedssl.util.files import replace_output
from fedssl.util.status import say, stage
from fedssl.util.text import printable

Rows = NDArray[np.float32]
Write = Callable[[Sequence[str], Rows], object]  # appends paths and their embeddings to a file
HINT = "Give a folder, a file, or a pattern in quotes such as 'photos/**/*.jpg'."


@contextlib.contextmanager
def open_parquet(path: Path, features: int) -> Iterator[Write]:
    """Write the columns ``path`` and ``embedding``, a list of float32, a row group per batch."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("path", pa.string()), ("embedding", pa.list_(pa.float32(), features))])

    def write(paths: Sequence[str], rows: Rows) -> None:
        lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), features)
        columns = [pa.array(list(paths), pa.string()), lists]
        file.write_table(pa.Table.from_arrays(columns, schema=schema))

    with pq.ParquetWriter(path, schema) as file:
        yield write


@contextlib.contextmanager
def open_csv(path: Path, features: int) -> Iterator[Write]:
    """Write ``path`` and a column for each feature, with all digits of a float32."""
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["path", *(f"e{i}" for i in range(features))])
        yield lambda paths, rows: lines.writerows(
            [path, *map(str, row)] for path, row in zip(paths, rows, strict=True)
        )


@contextlib.contextmanager
def open_npz(path: Path, features: int) -> Iterator[Write]:
    """Write the arrays ``path`` and ``embedding`` at the end."""
    names: list[str] = []
    parts: list[Rows] = [np.zeros((0, features), np.float32)]

    def write(paths: Sequence[str], rows: Rows) -> None:
        names.extend(paths)
        parts.append(rows)

    yield write
    with path.open("wb") as file:
        np.savez(file, path=np.array(names), embedding=np.concatenate(parts))


FORMATS: dict[str, Callable[[Path, int], AbstractContextManager[Write]]] = {
    ".parquet": open_parquet,
    ".csv": open_csv,
    ".npz": open_npz,
}


def embed(run: Path, images: str, to: Path, batch: int, device: str) -> int:
    """Write the embeddings of all readable images and return their number."""
    if to.suffix.lower() not in FORMATS:
        fix = f"Use a name that ends in one of {', '.join(FORMATS)}."
        raise UserError("unknown format", key="--to", value=to, fix=fix)
    if to.suffix.lower() == ".parquet":
        _check_pyarrow(to)
    skipped, count = dict[str, str](), 0
    with replace_output(to, "--to", private=True) as new:
        encoder = load_encoder(run).to(pick_device(device))
        files = find_files(images)
        with FORMATS[to.suffix.lower()](new, encoder.features) as write:
            for paths, rows in embed_files(encoder, files, batch, skipped):
                write([printable(path) for path in paths], rows.numpy())
                count += len(paths)
        report_skipped(images, count, skipped)
    return count


def _check_pyarrow(to: Path) -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        fix = "Run pip install 'fedssl[frames]', or write .csv or .npz."
        raise UserError("needs pyarrow", key="--to", value=to, fix=fix) from None


def find_files(images: str) -> list[Path]:
    """Return the image files in a folder (at any depth), of one name or of a pattern."""
    if not images:  # Path("") is the current folder
        raise UserError("an empty name", key="IMAGES", value='""', fix=HINT)
    path = Path(images).expanduser()
    if path.is_dir():
        files = [path / file.path for file in find_images(path, key=images)[0]]
    elif path.exists():
        return [path]
    else:
        names = map(Path, sorted(glob.glob(str(path), recursive=True)))  # noqa: PTH207
        files = [p for p in names if p.suffix.lower() in image_extensions() and p.is_file()]
    if not files:
        raise UserError("no images there", key="IMAGES", value=images, fix=HINT)
    return files


def embed_files(
    encoder: ImageEncoder, files: Sequence[Path], batch: int, skipped: dict[str, str]
) -> Iterator[tuple[list[Path], Tensor]]:
    """Yield batches of files with their embeddings; add unreadable files to ``skipped``.

    Threads decode the next files while the network computes.
    """
    if batch < 1:
        raise UserError("too small", key="--batch", value=batch, fix="Use --batch 1 or more.")
    text = f"embedding {len(files)} image{'s' * (len(files) != 1)}"
    with (
        warnings.catch_warnings(),
        contextlib.closing(decode_files(files, encoder.decode)) as decoded,
        stage(text, len(files)) as progress,
    ):
        warnings.simplefilter("ignore")  # Pillow warns once for each odd file
        pairs = zip(files, decoded, strict=True)
        while part := list(itertools.islice(pairs, batch)):
            squares: dict[Path, Tensor] = {}
            for path, pixels in part:
                if isinstance(pixels, str):
                    skipped[printable(path)] = pixels
                    say(f"fedssl: {printable(path)}: skipped ({pixels})")
                else:
                    squares[path] = pixels
            if squares:
                yield list(squares), encoder.embed_bytes(torch.stack(list(squares.values())))
            progress.advance(len(part))


def report_skipped(images: str, count: int, skipped: dict[str, str]) -> None:
    """Print how many files were skipped; it is an error if no file was read."""
    if not count:
        failures = list_failures(skipped)
        raise UserError(f"no image can be read ({failures})", key="IMAGES", value=images)
    if skipped:
        print(f"fedssl: {len(skipped)} of {count + len(skipped)} files skipped", file=sys.stderr)
