"""Write images of three sites, to try the documentation with: scikit-learn's digits as PNG files.

    python docs/samples.py photos

photos/train/SITE/CLASS/…   training images: each site has mostly its own digits
photos/test/SITE/CLASS/…    test images
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

SITES = {"leeds": (0, 1, 2, 3), "oslo": (4, 5, 6), "turin": (7, 8, 9)}


def main(out: Path) -> None:
    """Write the folders; one image of five goes to another site, and one of four is for tests."""
    pixels, labels = load_digits(return_X_y=True)
    names = list(SITES)
    for index, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        home = next(i for i, name in enumerate(SITES) if label in SITES[name])
        site = names[(home + (index % 5 == 0)) % len(names)]
        folder = out / ("test" if index % 4 == 0 else "train") / site / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray((image.reshape(8, 8) * 15.9).astype(np.uint8))
        picture.resize((32, 32), Image.Resampling.BICUBIC).save(folder / f"{index:04d}.png")
    for site in names:
        count = len(list((out / "train" / site).glob("*/*.png")))
        print(f"{out / 'train' / site}: {count} images")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
