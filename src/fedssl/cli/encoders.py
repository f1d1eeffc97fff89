"""Commands that use a trained encoder: ``export``, ``embed``, ``search`` and ``detect``."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedssl.cli.arguments import Commands, load_torch, path

COCO = (
    "holds annotations/instances_NAME.json with its images in the folder NAME, for one NAME that "
    "begins with train and one that begins with val, such as train2017 and val2017"
)

DEVICE = "device, as torch names it (default: a GPU if there is one)"


def add_export(commands: Commands) -> None:
    """Add ``fedssl export``."""
    export = commands.add_parser("export", help="export a run's encoder")
    export.add_argument(
        "run", type=path, metavar="RUN",
        help="a run's folder, or a client's model: RUN/personal/client-0.safetensors",
    )  # fmt: skip
    export.add_argument(
        "--format",
        required=True,
        choices=("safetensors", "timm", "torchscript", "onnx", "hf"),
        help="format of the file; hf is a folder for the Hugging Face hub",
    )
    export.add_argument(
        "--out", type=path, metavar="PATH", help="a file or folder (default: RUN/export/…)"
    )
    export.set_defaults(command=_export)


def add_embed(commands: Commands) -> None:
    """Add ``fedssl embed``."""
    embed = commands.add_parser("embed", help="compute the embeddings of images")
    embed.add_argument("run", type=path, metavar="RUN", help="a run's folder, or an exported one")
    embed.add_argument("images", metavar="IMAGES", help="a folder, a file, or a pattern in quotes")
    embed.add_argument(
        "--to", type=path, default=Path("embeddings.parquet"), metavar="FILE",
        help="a .parquet, .csv or .npz file (default: embeddings.parquet)",
    )  # fmt: skip
    _add_device(embed)
    embed.set_defaults(command=_embed)


def add_search(commands: Commands) -> None:
    """Add ``fedssl search``."""
    search = commands.add_parser(
        "search", help="find the images that are most similar to one image"
    )
    search.add_argument("run", type=path, metavar="RUN", help="a run's folder, or an exported one")
    search.add_argument("query", type=path, metavar="QUERY", help="an image")
    search.add_argument("images", metavar="IMAGES", help="a folder, a file, or a pattern in quotes")
    search.add_argument("--top", type=int, default=10, help="number of images (default: 10)")
    search.add_argument(
        "--html", type=path, metavar="FILE.html", help="also write a page that shows the images"
    )
    _add_device(search)
    search.set_defaults(command=_search)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=256, help="images in a batch (default: 256)")
    parser.add_argument("--device", default="auto", help=DEVICE)


def add_detect(commands: Commands) -> None:
    """Add ``fedssl detect``."""
    detect = commands.add_parser(
        "detect", help="fine-tune Mask R-CNN from a run's encoder, on data in COCO's format"
    )
    detect.add_argument("run", type=path, metavar="RUN", help="a run's folder")
    detect.add_argument("data", type=path, metavar="DIR", help=COCO)
    detect.add_argument("--steps", type=int, default=9000, help="training steps (default: 9000)")
    detect.add_argument("--batch", type=int, default=4, help="images in a batch (default: 4)")
    detect.add_argument("--lr", type=float, default=0.005, help="learning rate (default: 0.005)")
    detect.add_argument(
        "--size", type=int, default=256, help="shorter side of images in pixels (default: 256)"
    )
    detect.add_argument(
        "--fraction", type=float, default=1.0,
        help="share of the training images to use, drawn by the seed (default: 1)",
    )  # fmt: skip
    detect.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    detect.add_argument(
        "--random", action="store_true", help="start from random weights, for comparison"
    )
    detect.add_argument("--device", default="auto", help=DEVICE)
    detect.set_defaults(command=_detect)


def _export(options: argparse.Namespace) -> int:
    load_torch()
    from fedssl.encoder import export

    for line in export.export(options.run, options.format, options.out):
        print(line)
    return 0


def _embed(options: argparse.Namespace) -> int:
    load_torch()
    from fedssl.encoder import embed

    done = embed.embed(options.run, options.images, options.to, options.batch, options.device)
    print(f"{done} image{'s' * (done != 1)}: {options.to}")
    return 0


def _search(options: argparse.Namespace) -> int:
    load_torch()
    from fedssl.encoder.search import search
    from fedssl.util.text import printable

    nearest = search(
        options.run, options.query, options.images, options.top, options.html,
        options.batch, options.device,
    )  # fmt: skip
    for image, similarity in nearest:
        print(f"{similarity:.3f}  {printable(image)}")
    if options.html is not None:
        print(f"\n{options.html}")
    return 0


def _detect(options: argparse.Namespace) -> int:
    from fedssl.contrib import detection
    from fedssl.util.device import pick_device

    names = ("steps", "batch", "lr", "size", "fraction", "seed", "random")
    settings = detection.Settings(**{name: getattr(options, name) for name in names})
    scores = detection.detect(options.run, options.data, settings, pick_device(options.device))
    print("   ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in scores.items()))
    return 0
