"""Detection and segmentation with a run's encoder: Mask R-CNN, fine-tuned (Dec-SSL, Table 1).

The training follows the default of Detectron (Girshick et al. 2018). docs/papers/decssl.md lists
the differences.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm import tqdm

from fedssl.data.random import key, mix, permutation, uniform
from fedssl.encoder.load import load_encoder, parse_note
from fedssl.models.encoders import ResNet
from fedssl.models.encoders import encoder as make_encoder
from fedssl.models.network import initialize
from fedssl.util.errors import TrainingError, UserError
from fedssl.util.files import append_line

FILE = "detections.jsonl"
WIDTH = 256  # channels of the feature pyramid and the heads, as in Lin et al. 2017
FIELDS = {  # that entries of a file need
    "images": ("file_name", "height", "width"),
    "annotations": ("segmentation", "bbox", "area", "iscrowd", "category_id", "image_id"),
}
ANCHOR = 8  # side of an anchor in strides of its level: 32 pixels at stride 4
# Of training images, with their sizes if --size is 800; of the rate, with steps of 90,000.
SCALES = tuple(k / 25 for k in range(20, 26))  # of the shorter side: 640, 672, …, 800
LONGEST = 5 / 3  # the longest side, as a multiple of --size: 1,333
DROPS = (2 / 3, 8 / 9)  # shares of the steps after which the rate falls to a tenth: 60,000, 80,000
WARM_UP = 1 / 3  # share of the rate in the first step


@dataclass(frozen=True)
class Settings:
    """Length and size of the fine-tuning; Detectron's lr of 0.02 is for batches of 16."""

    steps: int = 9000
    batch: int = 4
    lr: float = 0.005
    size: int = 256  # the shorter side of test images, and at most of training images
    fraction: float = 1.0  # share of the training images
    seed: int = 0
    random: bool = False  # start from random weights, for comparison
    width: int = WIDTH  # smaller for a trial on a CPU, where the heads take most of the time

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "size", "lr", "width"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UserError("must be above 0", key=f"--{name}", value=value)
        if not 0 < self.fraction <= 1:
            fix = "Use a share of the training images, above 0 and at most 1."
            raise UserError("not a share", key="--fraction", value=self.fraction, fix=fix)


class CocoSplit:
    """One split in COCO's format: ``annotations/instances_NAME.json`` and images in ``NAME/``."""

    def __init__(self, root: Path, prefix: str) -> None:
        files = sorted((root / "annotations").glob(f"instances_{prefix}*.json"))
        if len(files) != 1:
            pattern = f"annotations/instances_{prefix}*.json"
            raise UserError(f"{root}: {len(files)} files are called {pattern}", fix="Keep one.")
        self.file = files[0]
        self.images = root / self.file.stem.removeprefix("instances_")
        self.coco = _read_coco(self.file)
        self.categories: list[int] = sorted(self.coco.getCatIds())
        self.ids: list[int] = sorted(self.coco.getImgIds())
        if not self.categories or not self.ids:
            raise UserError(f"{self.file}: has no categories or no images")
        self._check()

    def _check(self) -> None:
        """Check that entries are complete, and that what they refer to is there."""
        known = {"category_id": set(self.categories), "image_id": set(self.ids)}
        for kind, fields in FIELDS.items():
            for entry in self.coco.dataset[kind]:
                where = f"{self.file}: {kind[:-1]} {entry['id']}"
                for field in fields:
                    if entry.get(field) in (None, []):
                        raise UserError(f"{where} has no {field}", fix="Mask R-CNN needs it.")
                    if field in known and entry[field] not in known[field]:
                        raise UserError(f"{where}: the file does not list its {field}")
        for image in self.coco.dataset["images"]:
            if not (self.images / image["file_name"]).is_file():
                raise UserError(f"{self.file}: no image {self.images / image['file_name']}")
        for note in self.coco.dataset["annotations"]:
            where = f"{self.file}: annotation {note['id']}"
            box, polygons = note["bbox"], note["segmentation"]
            is_box = isinstance(box, list) and len(box) == 4
            if not is_box or not all(isinstance(value, int | float) for value in box):
                raise UserError(f"{where}: bbox={box} is not x, y, width and height")
            if isinstance(polygons, list) and not all(
                isinstance(polygon, list) and len(polygon) >= 6 for polygon in polygons
            ):
                raise UserError(f"{where}: a polygon has less than three points")

    def __len__(self) -> int:
        return len(self.ids)

    def image(self, index: int) -> Tensor:
        """Return float pixels ``[3, H, W]`` between 0 and 1."""
        info = self.coco.loadImgs(self.ids[index])[0]
        with Image.open(self.images / info["file_name"]) as file:
            return torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1) / 255

    def target(self, index: int) -> dict[str, Tensor]:
        """Return boxes, classes (1 to n) and masks, without crowds."""
        notes = self.coco.loadAnns(self.coco.getAnnIds(self.ids[index], iscrowd=False))
        notes = [note for note in notes if note["bbox"][2] >= 1 and note["bbox"][3] >= 1]
        info = self.coco.loadImgs(self.ids[index])[0]
        boxes = torch.tensor([n["bbox"] for n in notes], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        masks = [torch.from_numpy(self.coco.annToMask(note)) for note in notes]
        empty = torch.zeros(0, info["height"], info["width"], dtype=torch.uint8)
        labels = [1 + self.categories.index(note["category_id"]) for note in notes]
        return {
            "boxes": boxes,
            "labels": torch.tensor(labels, dtype=torch.int64),
            "masks": torch.stack(masks) if masks else empty,
        }


class Pyramid(nn.Module):
    """Feature pyramid (Lin et al. 2017) on the stages of a run's encoder."""

    def __init__(self, body: ResNet, width: int) -> None:
        from torchvision.ops import FeaturePyramidNetwork
        from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

        super().__init__()
        self.body = body
        self.out_channels = width
        self.levels, widths, self.strides = _find_stages(body)
        self.fpn = FeaturePyramidNetwork(widths, width, LastLevelMaxPool())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return a map for each stage, and one of half the last one's size."""
        x = self.body.stem(self.body.input(images))
        maps: dict[str, Tensor] = {}
        for i, block in enumerate(self.body.stages):
            x = block(x)
            if i in self.levels:
                maps[str(len(maps))] = x
        return self.fpn(maps)


def _find_stages(body: ResNet) -> tuple[list[int], list[int], list[int]]:
    """Return the last block of each stage, its channels and its stride."""
    body.eval()  # keep the running statistics of batch norm
    with torch.no_grad():
        x, shapes = body.stem(body.input(torch.zeros(2, 3, 64, 64))), []
        for block in body.stages:
            x = block(x)
            shapes.append(x.shape)
    body.train()
    last = [i for i, s in enumerate(shapes) if i + 1 == len(shapes) or s[1] != shapes[i + 1][1]]
    return last, [shapes[i][1] for i in last], [64 // shapes[i][2] for i in last]


def load_body(run: Path, random: bool, seed: int) -> ResNet:
    """Load a run's encoder, or an untrained one of its kind."""
    encoder = load_encoder(run)
    if encoder.channels != 3:
        raise UserError(f"{run}: its encoder takes gray images", fix="Use a run on color images.")
    if not isinstance(encoder.body, ResNet):
        raise UserError(f"{run}: its encoder has no stages", fix="Use a run of a ResNet.")
    if not random:
        return encoder.body
    settings = parse_note(encoder.note, run)
    body = make_encoder(settings, encoder.channels, min(encoder.note["size"]))
    initialize(body, seed, settings.initializer)
    return cast(ResNet, body)


def freeze_batch_norm(module: nn.Module) -> None:
    """Keep the weights and running statistics of batch norm as they are, in training too."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval().requires_grad_(False)


def build_detector(body: ResNet, classes: int, size: int, width: int = WIDTH) -> nn.Module:
    """Build Mask R-CNN (He et al. 2017) for ``classes`` classes and images of ``size`` pixels."""
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

    pyramid = Pyramid(body, width)
    sides = [ANCHOR * stride for stride in (*pyramid.strides, 2 * pyramid.strides[-1])]
    anchors = AnchorGenerator(tuple((s,) for s in sides), ((0.5, 1.0, 2.0),) * len(sides))
    # With a width of 256 the heads are torchvision's own.
    return MaskRCNN(
        pyramid,
        min_size=tuple(round(size * scale) for scale in SCALES),  # tests have the last
        max_size=round(size * LONGEST),
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        rpn_anchor_generator=anchors,
        box_head=TwoMLPHead(width * 7**2, 4 * width),
        box_predictor=FastRCNNPredictor(4 * width, classes + 1),
        box_batch_size_per_image=2 * width,
        mask_head=MaskRCNNHeads(width, (width,) * 4, 1),
        mask_predictor=MaskRCNNPredictor(width, width, classes + 1),
    )


def detect(run: Path, data: Path, settings: Settings, device: torch.device) -> dict[str, float]:
    """Fine-tune and evaluate; return AP in percent and append it to the run's folder."""
    _check_installed()
    train, test = CocoSplit(data, "train"), CocoSplit(data, "val")
    if train.categories != test.categories:
        raise UserError(f"{test.file}: its categories differ from those of {train.file.name}")
    torch.manual_seed(settings.seed)  # torchvision draws new layers and proposals from here
    body = load_body(run, settings.random, settings.seed)
    model = build_detector(body, len(train.categories), settings.size, settings.width).to(device)
    fit(model, train, settings, device)
    scores = evaluate(model, test, device)
    line = {"data": str(data), **asdict(settings), **scores}
    append_line(run / FILE, json.dumps(line))
    return scores


def fit(model: nn.Module, train: CocoSplit, settings: Settings, device: torch.device) -> None:
    """Train with SGD on flipped and scaled images, with frozen batch norm and a falling rate."""
    model.train()
    freeze_batch_norm(model)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, settings.lr, momentum=0.9, weight_decay=1e-4)
    bar = tqdm(total=settings.steps, desc="mask r-cnn", unit="step", disable=None)
    for step, chosen in enumerate(_draw_batches(len(train), settings)):
        optimizer.param_groups[0]["lr"] = settings.lr * _scale_rate(step, settings.steps)
        images, targets = [], []
        for i, is_flipped in chosen:
            image, target = train.image(i), train.target(i)
            image, target = flip(image, target) if is_flipped else (image, target)
            images.append(image.to(device))
            targets.append({name: value.to(device) for name, value in target.items()})
        loss = sum(model(images, targets).values())
        assert isinstance(loss, Tensor)
        if not bool(torch.isfinite(loss)):
            raise TrainingError(f"step {step + 1}: the loss is {float(loss)}. Lower --lr.")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.update()
    bar.close()


def _scale_rate(step: int, steps: int) -> float:
    """Return the factor of the rate: a linear warm-up, and a tenth after each drop."""
    warm = max(1, min(500, steps // 10))
    rise = min(1.0, WARM_UP + (1 - WARM_UP) * step / warm)
    return rise * 0.1 ** sum(step >= drop * steps for drop in DROPS)


def flip(image: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Mirror an image with its boxes and masks, left to right."""
    left, top, right, bottom = target["boxes"].unbind(1)
    width = image.shape[2]
    boxes = torch.stack((width - right, top, width - left, bottom), dim=1)
    return image.flip(2), {**target, "boxes": boxes, "masks": target["masks"].flip(2)}


def _draw_batches(count: int, settings: Settings) -> Iterator[list[tuple[int, bool]]]:
    """Yield batches of images, and whether each is flipped: half of them are.

    Every epoch is shuffled. A batch may begin in one epoch and end in the next.
    """
    kept = permutation(key(settings.seed, "fraction"), count)
    kept = kept[: max(1, round(settings.fraction * count))]

    def draw() -> Iterator[tuple[int, bool]]:
        for epoch in itertools.count():
            order = permutation(key(settings.seed, "detection", epoch), len(kept))
            states = torch.arange(len(kept))
            drawn = uniform(mix(key(settings.seed, "flip", epoch), states), 1)[:, 0]
            yield from zip(kept[order].tolist(), (drawn < 0.5).tolist(), strict=True)

    images = draw()
    for _ in range(settings.steps):
        yield list(itertools.islice(images, settings.batch))


@torch.no_grad()
def evaluate(model: nn.Module, test: CocoSplit, device: torch.device) -> dict[str, float]:
    """Return COCO's AP of boxes and masks (and at IoU 0.5) in percent, by pycocotools."""
    from pycocotools import mask as masks
    from pycocotools.cocoeval import COCOeval

    model.eval()
    rows: list[dict[str, Any]] = []
    for index, number in enumerate(test.ids):
        (output,) = model([test.image(index).to(device)])
        shapes = (output["masks"][:, 0] > 0.5).to(torch.uint8).cpu().numpy()
        each = zip(output["boxes"], output["labels"], output["scores"], shapes, strict=True)
        for box, label, confidence, shape in each:
            left, top, right, bottom = box.tolist()
            rows.append(
                {
                    "image_id": number,
                    "category_id": test.categories[int(label) - 1],
                    "bbox": [left, top, right - left, bottom - top],
                    "score": float(confidence),
                    "segmentation": masks.encode(np.asfortranarray(shape)),
                }
            )
    results = dict.fromkeys(("box_ap", "box_ap50", "mask_ap", "mask_ap50"), 0.0)
    for kind, name in (("bbox", "box"), ("segm", "mask")) if rows else ():
        with contextlib.redirect_stdout(io.StringIO()):
            evaluator = COCOeval(test.coco, test.coco.loadRes(rows), kind)
            evaluator.evaluate()
            evaluator.accumulate()
            evaluator.summarize()
        results[f"{name}_ap"] = 100 * float(evaluator.stats[0])
        results[f"{name}_ap50"] = 100 * float(evaluator.stats[1])
    return results


def _read_coco(file: Path) -> Any:
    from pycocotools.coco import COCO

    coco = COCO()
    try:
        coco.dataset = json.loads(file.read_text(encoding="utf-8"))
        for number, note in enumerate(coco.dataset["annotations"], 1):
            note["id"] = number  # pycocotools takes an object with the number 0 for none
        with contextlib.redirect_stdout(io.StringIO()):
            coco.createIndex()
        return coco
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: not in COCO's format ({type(error).__name__}: {error})") from None


def _check_installed() -> None:
    try:
        import pycocotools  # noqa: F401
        import torchvision  # noqa: F401
    except ImportError as error:
        fix = "Install it with: pip install 'fedssl[detection]'"
        raise UserError(f"detection needs {error.name}", fix=fix) from None
