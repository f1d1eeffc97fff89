"""Make the documentation's pictures of reports and partitions (the drawings are written by hand).

    python docs/pictures.py FOLDER [--chromium PATH]

FOLDER holds ``runs/first`` (docs/start.md), and ``photos`` and ``runs/sites`` (docs/images.md).
Needs Playwright and Chromium.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent / "images"
WIDTH, HEIGHT, COLORS = 1400, 880, 128
SECTIONS = {"curves": "first", "neighbours": "first", "clients": "sites"}  # section: run
PARTITION = "fedssl partition sites data.root=photos data.levels=client,class encoder.name=tiny"


def main() -> None:
    """Write every picture, with few colors, so that the repository stays small."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    given = parser.parse_args()
    folder: Path = given.folder.resolve()
    words = [*PARTITION.split(), "--out", str(IMAGES / "partition.png")]
    subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    for name, content in _take_screenshots(folder, given.chromium):
        picture = Image.open(BytesIO(content)).convert("RGB").quantize(COLORS)
        picture.save(IMAGES / name, optimize=True)
        print(f"{IMAGES / name}: {picture.width} x {picture.height}")


def _take_screenshots(folder: Path, chromium: str) -> Iterator[tuple[str, bytes]]:
    """Yield the file name and the PNG of the top of the first run's report, and of sections."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto((folder / "runs" / "first" / "report.html").as_uri())
        yield "report.png", page.screenshot()
        for section, run in SECTIONS.items():
            page.goto((folder / "runs" / run / "report.html").as_uri())
            yield f"report-{section}.png", page.locator(f"section#{section}").screenshot()
        browser.close()


if __name__ == "__main__":
    main()
