"""Find the images that are nearest to one image, by cosine similarity of embeddings."""

from __future__ import annotations

import base64
import contextlib
import io
from pathlib import Path

import torch.nn.functional as F
from PIL import Image

from fedssl.data.decode import decode_file
from fedssl.encoder.embed import embed_files, find_files, report_skipped
from fedssl.encoder.load import load_encoder
from fedssl.util.device import pick_device
from fedssl.util.errors import UserError
from fedssl.util.files import check_suffix, replace_output
from fedssl.util.templates import load_templates
from fedssl.util.text import printable

THUMBNAIL = 192  # pixels per side
TEMPLATES = Path(__file__).with_name("templates")


def search(
    run: Path, query: Path, images: str, top: int, html: Path | None, batch: int, device: str
) -> list[tuple[Path, float]]:
    """Return the nearest images with their similarity; also write them to the page ``html``."""
    if top < 1:
        raise UserError("too small", key="--top", value=top, fix="Use --top 1 or more.")
    with contextlib.ExitStack() as stack:
        page = None
        if html is not None:
            check_suffix(html, "--html", ".html", ".htm")
            page = stack.enter_context(replace_output(html, "--html", private=True))
        encoder = load_encoder(run).to(pick_device(device))
        direction = F.normalize(encoder.embed([query])[0], dim=0)
        files = [path for path in find_files(images) if path.resolve() != query.resolve()]
        if not files:
            fix = "Name a folder with other images."
            raise UserError("only the query itself is there", key="IMAGES", value=images, fix=fix)
        skipped, nearest = dict[str, str](), list[tuple[Path, float]]()
        for paths, rows in embed_files(encoder, files, batch, skipped):
            nearest += zip(paths, (F.normalize(rows) @ direction).tolist(), strict=True)
            nearest = sorted(nearest, key=lambda pair: (-pair[1], pair[0]))[:top]
        report_skipped(images, len(files) - len(skipped), skipped)
        if page is not None:
            page.write_text(_draw_page(query, nearest, images), encoding="utf-8")
    return nearest


def _draw_page(query: Path, nearest: list[tuple[Path, float]], images: str) -> str:
    filters = {"printable": printable, "thumbnail": _encode_thumbnail}
    template = load_templates(TEMPLATES, filters).get_template("search.html")
    return template.render(query=query, nearest=nearest, images=Path(images))


def _encode_thumbnail(path: Path) -> str:
    """Return the square that the encoder sees as a data URI."""
    pixels = decode_file(path, THUMBNAIL)
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
