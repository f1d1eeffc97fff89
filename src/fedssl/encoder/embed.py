"""``fedssl embed`` and ``fedssl search``: any images through a run's encoder."""

from __future__ import annotations

import base64
import contextlib
import csv
import glob
import html as markup
import io
import itertools
import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from fedssl.data.decode import decode_file, decode_files, list_failures, show_progress
from fedssl.data.image_files import find_images, image_extensions
from fedssl.encoder.load import ImageEncoder, load_encoder
from fedssl.util.devices import pick_device
from fedssl.util.errors import UserError
from fedssl.util.outputs import check_page, replacing

Rows = NDArray[np.float32]
THUMBNAIL = 192  # pixels a side


# Embeddings into a file ----------------------------------------------------------------------


class Table(ABC):
    """A file that takes embeddings a batch at a time."""

    def __init__(self, path: Path, features: int) -> None:
        self.path = path
        self.features = features

    @abstractmethod
    def write(self, paths: Sequence[str], rows: Rows) -> None:
        """Append some images."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more comes."""


class Parquet(Table):
    """``path`` and ``embedding``, a list of so many float32."""

    def __init__(self, path: Path, features: int) -> None:
        super().__init__(path, features)
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.pa = pa
        kind = pa.list_(pa.float32(), features)
        self.schema = pa.schema([("path", pa.string()), ("embedding", kind)])
        self.file = pq.ParquetWriter(path, self.schema)

    def write(self, paths: Sequence[str], rows: Rows) -> None:
        """One row group."""
        flat = self.pa.array(rows.reshape(-1))
        lists = self.pa.FixedSizeListArray.from_arrays(flat, self.features)
        names = self.pa.array(list(paths), self.pa.string())
        self.file.write_table(self.pa.Table.from_arrays([names, lists], schema=self.schema))

    def close(self) -> None:
        """With the footer, without which it is no Parquet file."""
        self.file.close()


class Csv(Table):
    """``path``, then a column a feature, with all digits of a float32."""

    def __init__(self, path: Path, features: int) -> None:
        super().__init__(path, features)
        self.file = path.open("w", encoding="utf-8", newline="")
        self.rows = csv.writer(self.file)
        self.rows.writerow(["path", *(f"e{i}" for i in range(features))])

    def write(self, paths: Sequence[str], rows: Rows) -> None:
        """A line an image."""
        self.rows.writerows([path, *map(str, row)] for path, row in zip(paths, rows, strict=True))

    def close(self) -> None:
        """All lines on the disk."""
        self.file.close()


class Npz(Table):
    """The arrays ``path`` and ``embedding``."""

    def __init__(self, path: Path, features: int) -> None:
        super().__init__(path, features)
        self.paths: list[str] = []
        self.parts: list[Rows] = []

    def write(self, paths: Sequence[str], rows: Rows) -> None:
        """Kept in memory: the file wants whole arrays."""
        self.paths += paths
        self.parts.append(rows)

    def close(self) -> None:
        """Write everything."""
        if self.parts:
            with self.path.open("wb") as file:
                np.savez(file, path=np.array(self.paths), embedding=np.concatenate(self.parts))


TABLES: dict[str, type[Table]] = {".parquet": Parquet, ".csv": Csv, ".npz": Npz}


def embed(run: Path, images: str, to: Path, batch: int, device: str) -> int:
    """Write the embeddings of all images that can be read; returns their number."""
    kind = _kind(to)
    with replacing(to, "--to", private=True) as new:
        encoder = _encoder(run, batch, device)
        paths, skipped, done = found(images), dict[str, str](), 0
        with contextlib.closing(kind(new, encoder.features)) as table:
            for some, rows in _embedded(encoder, paths, batch, skipped):
                table.write([text(path) for path in some], rows.numpy())
                done += len(some)
        _check_any(images, done, skipped)
    return done


def _kind(to: Path) -> type[Table]:
    if to.suffix.lower() not in TABLES:
        raise UserError(f"--to {to}: the name must end in one of {', '.join(TABLES)}")
    kind = TABLES[to.suffix.lower()]
    if kind is Parquet:
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise UserError(
                f"--to {to}: needs pyarrow; install it with: pip install 'fedssl[frames]', or "
                "write .csv or .npz"
            ) from None
    return kind


def _encoder(run: Path, batch: int, device: str) -> ImageEncoder:
    if batch < 1:
        raise UserError(f"--batch {batch}: must be at least 1")
    return load_encoder(run).to(pick_device(device))


def found(images: str) -> list[Path]:
    """The image files that a folder (at any depth), a file or a pattern means."""
    if not images:  # Path("") is the current folder
        raise UserError("IMAGES is empty; give a folder, a file, or a pattern in quotes")
    place = Path(images).expanduser()
    if place.is_dir():
        paths = [place / file.path for file in find_images(place, key=images)[0]]
    elif place.exists():
        return [place]
    else:
        names = map(Path, sorted(glob.glob(str(place), recursive=True)))  # noqa: PTH207
        paths = [p for p in names if p.suffix.lower() in image_extensions() and p.is_file()]
    if not paths:
        raise UserError(
            f"{images}: no images there; give a folder, a file, or a pattern in quotes such as "
            "'photos/**/*.jpg'"
        )
    return paths


def _embedded(
    encoder: ImageEncoder, paths: Sequence[Path], batch: int, skipped: dict[str, str]
) -> Iterator[tuple[list[Path], Tensor]]:
    """Batches of files and their embeddings; what cannot be read is said, and goes to ``skipped``.

    While a batch is in the network, threads decode the next files.
    """
    reading = decode_files(paths, encoder.height, encoder.channels)
    what = f"embedding {len(paths)} image{'s' * (len(paths) != 1)}"
    with (
        warnings.catch_warnings(),
        contextlib.closing(reading) as read,
        show_progress(len(paths), what) as update,
    ):
        warnings.simplefilter("ignore")  # Pillow's remarks on odd files, one for each
        pairs = zip(paths, read, strict=True)
        while some := list(itertools.islice(pairs, batch)):
            for path, pixels in some:
                if isinstance(pixels, str):
                    skipped[text(path)] = pixels
                    tqdm.write(f"fedssl: {text(path)}: skipped ({pixels})", file=sys.stderr)
            good = {path: pixels for path, pixels in some if not isinstance(pixels, str)}
            if good:
                squares = torch.from_numpy(np.stack(list(good.values())))
                yield list(good), encoder.embed_bytes(encoder.crop(squares))
            update(len(some))


def _check_any(images: str, done: int, skipped: dict[str, str]) -> None:
    if not done:
        raise UserError(f"{images}: no image can be read: {list_failures(skipped)}")
    if skipped:
        print(f"fedssl: {len(skipped)} of {done + len(skipped)} files skipped", file=sys.stderr)


def text(path: Path) -> str:
    """A name for people and files, also where its bytes are no text."""
    return os.fsencode(path).decode(errors="backslashreplace")


# Search --------------------------------------------------------------------------------------


def search(
    run: Path, query: Path, images: str, top: int, html: Path | None, batch: int, device: str
) -> list[tuple[Path, float]]:
    """The images nearest to the query by cosine similarity; also as a page where ``html`` is."""
    if top < 1:
        raise UserError(f"--top {top}: must be at least 1")
    with contextlib.ExitStack() as stack:
        page = None
        if html is not None:
            check_page(html, "--html")
            page = stack.enter_context(replacing(html, "--html", private=True))
        encoder = _encoder(run, batch, device)
        wanted = F.normalize(encoder.embed([query])[0], dim=0)
        others = [path for path in found(images) if not _same(path, query)]
        if not others:
            raise UserError(f"{images}: no image there but the query itself")
        skipped, near = dict[str, str](), list[tuple[Path, float]]()
        for some, rows in _embedded(encoder, others, batch, skipped):
            near += zip(some, (F.normalize(rows) @ wanted).tolist(), strict=True)
            near = sorted(near, key=lambda pair: (-pair[1], pair[0]))[:top]
        _check_any(images, len(others) - len(skipped), skipped)
        if page is not None:
            page.write_text(_sheet(query, near, images), encoding="utf-8")
    return near


def _same(a: Path, b: Path) -> bool:
    with contextlib.suppress(OSError):
        return a.samefile(b)
    return False


STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1a1a1a; --faint: #666; --line: #ddd }
@media (prefers-color-scheme: dark) {
  :root { --back: #16181b; --text: #e6e6e6; --faint: #9a9a9a; --line: #33373c }
}
body { margin: 0 auto; padding: 1.25rem; max-width: 72rem; background: var(--back);
  color: var(--text); font: 16px/1.45 system-ui, sans-serif }
h1 { font-size: 1.25rem; margin: 0 0 1rem }
p { color: var(--faint); margin: 1.25rem 0 }
ol { list-style: none; margin: 0; padding: 0; display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(9rem, 42vw), 1fr)) }
figure { margin: 0; break-inside: avoid }
figure.query { max-width: 12rem }
img { display: block; width: 100%; aspect-ratio: 1; border: 1px solid var(--line);
  border-radius: 4px; box-sizing: border-box }
figcaption { font-size: .8rem; color: var(--faint); overflow-wrap: anywhere; padding-top: .3rem }
b { display: block; color: var(--text); font-variant-numeric: tabular-nums }
"""


def _sheet(query: Path, near: Sequence[tuple[Path, float]], images: str) -> str:
    """A page of its own: the query, then its neighbours, nearest first."""
    items = "\n".join(
        f"<li>{_figure(path, f'<b>{similarity:.3f}</b> ')}</li>" for path, similarity in near
    )
    where = markup.escape(text(Path(images)))
    name = markup.escape(text(Path(query.name)))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Nearest to {name}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Nearest to {name}</h1>
{_figure(query, "", "query")}
<p>The {len(near)} nearest of {where}, by the cosine similarity of embeddings (1: the same).</p>
<ol>
{items}
</ol>
</body>
</html>
"""


def _figure(path: Path, before: str, kind: str = "near") -> str:
    """The square that the encoder sees, at a size for people."""
    name = markup.escape(text(path))
    pixels = decode_file(path, THUMBNAIL)
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "JPEG", quality=85)
    source = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    picture = f'<img src="{source}" alt="{name}">'
    return f'<figure class="{kind}">{picture}<figcaption>{before}{name}</figcaption></figure>'
