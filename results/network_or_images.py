"""Find out which of network and images made CCO + FedAvg need a rate of 1e-4 (DCCO's Table 1).

    python results/network_or_images.py IMAGES OUT [key=value ...]

IMAGES holds CIFAR-10 as train/CLASS/*.png and test/CLASS/*.png. Eight runs at the paper's rate of
1e-3: 16 and 4 images a client, today's ResNet-14 and version 0.2's (bottlenecks, 2,048 features),
the original images and a JPEG copy of quality 75, which is made in OUT. The same command continues.
About two minutes a run on an H200.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from PIL import Image

from fedssl import config
from fedssl.models import encoders
from fedssl.runs import loop
from fedssl.runs.folder import is_started

NETWORKS = {"today": encoders.RESNETS["resnet14"], "0.2": ((1, 1, 1, 1), True)}
ROUNDS = (1, 10, 100, 500, 1000, 2500)  # whose losses are printed


def copy_as_jpeg(images: Path, copy: Path) -> Path:
    """Write all images as JPEG files of quality 75."""
    for file in images.glob("*/*/*.png"):
        new = (copy / file.relative_to(images)).with_suffix(".jpg")
        if not new.exists():
            new.parent.mkdir(parents=True, exist_ok=True)
            Image.open(file).convert("RGB").save(new, quality=75)
    return copy


def main() -> None:
    """Run what is not finished, and print losses and accuracies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="*", metavar="key=value")
    o = parser.parse_args()
    roots = {"png": o.images, "jpeg": copy_as_jpeg(o.images, o.out / "images")}
    for samples in (16, 4):
        for network, shape in NETWORKS.items():
            for kind, root in roots.items():
                out = o.out / f"{network}-{kind}-{samples}"
                words = ["data.name=folder", f"data.root={root}", "data.size=32", "server.lr=0.001"]
                words += ["rounds=2500", "evaluate.protocols=[linear@5000,knn]", *o.words]
                encoders.RESNETS["resnet14"] = shape
                recipe = config.read_recipe(f"dcco/table1/cco-fedavg/noniid-{samples}")
                if not (out / "summary.json").exists():
                    loop.run(config.resolve(recipe, words), out, resume=is_started(out))
                summary = json.loads((out / "summary.json").read_text())
                lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
                losses = {line["round"]: line["loss"] for line in lines if line["round"] in ROUNDS}
                found = {"losses": losses, **summary["result"], "untrained": summary["untrained"]}
                print(json.dumps({"run": out.name, **found}), flush=True)


if __name__ == "__main__":
    main()
