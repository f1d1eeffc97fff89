"""Three (or more) sites' folders of images on this machine, to try a deployment with.

    python make_sites.py OUT --sites 3

OUT/site-a, OUT/site-b, …   what each site has: scikit-learn's digits as PNG, different ones at each
OUT/all                     the same images as one folder, for the same run without Flower:
                            fedssl run data.name=folder data.root=OUT/all data.levels=client \
                                partition.name=folder …
OUT/labelled                the digits' test set in train/CLASS and test/CLASS: images that a server
                            might have to judge encoders with (data.root=OUT/labelled)
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path

import numpy as np
from PIL import Image

from fedssl.config import Data
from fedssl.data.load import load_dataset


def make(out: Path, sites: int, most: int | None = None, size: int = 16) -> list[Path]:
    """Write the folders; the digits 0 to 9 are dealt to the sites in runs, ``most`` images each."""
    digits = load_dataset(Data("digits", size=size))
    train, test = digits.train, digits.test
    assert train.labels is not None and test is not None and test.labels is not None
    pixels, labels = train.images[0][:, 0].numpy(), train.labels.numpy()
    names = [f"site-{letter}" for letter in string.ascii_lowercase[:sites]]
    (out / "all" / "train").mkdir(parents=True)
    for name, own in zip(names, np.array_split(np.arange(10), sites), strict=True):
        (out / name).mkdir()
        for index in np.flatnonzero(np.isin(labels, own))[:most]:
            Image.fromarray(pixels[index]).save(out / name / f"{index:04d}.png")
        (out / "all" / "train" / name).symlink_to(Path("..", "..", name))
    for index, label in enumerate(test.labels.tolist()):
        folder = out / "labelled" / ("test" if index % 3 == 0 else "train") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(test.images[0][index, 0].numpy()).save(folder / f"{index:04d}.png")
    return [out / name for name in names]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("--sites", type=int, default=3, choices=range(1, 11), metavar="1..10")
    parser.add_argument("--most", type=int, metavar="N", help="images a site; otherwise all")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists; name a new folder")
    for folder in make(options.out, options.sites, options.most):
        print(f"{folder}: {len(list(folder.iterdir()))} images")


if __name__ == "__main__":
    main()
