"""Detection and segmentation with a run's encoder: Mask R-CNN, fine-tuned (Dec-SSL, Table 1)."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from fedssl.config import Encoder
from fedssl.data.random import key, permutation
from fedssl.models.encoders import ResNet, encoder
from fedssl.models.network import initialize
from fedssl.util.errors import TrainingError, UserError

FILE = "detections.jsonl"
WIDTH = 256  # channels of the feature pyramid and the heads, as in Lin et al. 2017
REACH = 8  # an anchor's side in strides of its level: 32 pixels at stride 4


@dataclass(frozen=True)
class Settings:
    """How long and how large; detectron's rate of 0.02 is for batches of 16."""

    steps: int = 9000
    batch: int = 4
    lr: float = 0.005
    size: int = 256  # the shorter side of images
    seed: int = 0
    random: bool = False  # start from random weights instead, to compare with
    width: int = WIDTH  # smaller for a trial on a CPU, where the heads take most of the time

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "size", "lr", "width"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"--{name}={getattr(self, name)}: must be above 0")


class Shapes:
    """One split in COCO's format: ``annotations/instances_NAME.json`` and images in ``NAME/``."""

    def __init__(self, root: Path, prefix: str) -> None:
        found = sorted((root / "annotations").glob(f"instances_{prefix}*.json"))
        if len(found) != 1:
            raise UserError(
                f"{root}: expected one annotations/instances_{prefix}….json as COCO has it, "
                f"found {len(found)}"
            )
        self.file = found[0]
        self.images = root / self.file.stem.removeprefix("instances_")
        self.coco = _read(self.file)
        self.categories: list[int] = sorted(self.coco.getCatIds())
        self.ids: list[int] = sorted(self.coco.getImgIds())
        self._check()

    def _check(self) -> None:
        """All that training would stumble over."""
        if not self.categories or not self.ids:
            raise UserError(f"{self.file}: has no categories or no images")
        for note in self.coco.dataset["annotations"]:
            self._check_annotation(note)
        for image in self.coco.loadImgs(self.ids):
            for field in ("file_name", "height", "width"):
                if field not in image:
                    raise UserError(f"{self.file}: image {image.get('id')} has no {field}")
            path = self.images / image["file_name"]
            if not path.is_file():
                raise UserError(f"{self.file}: there is no image {path}")

    def _check_annotation(self, note: Mapping[str, Any]) -> None:
        what = f"{self.file}: annotation {note.get('id')}"
        if not note.get("segmentation"):
            raise UserError(
                f"{what} has no mask (segmentation); Mask R-CNN learns masks, so give one for "
                "every object"
            )
        for field in ("bbox", "area", "iscrowd", "category_id", "image_id"):
            if field not in note:
                raise UserError(f"{what} has no {field}; COCO's format has one in each")
        if note["category_id"] not in self.categories or note["image_id"] not in self.ids:
            raise UserError(f"{what} is of a category or an image that the file does not list")
        box, shape = note["bbox"], note["segmentation"]
        if not (isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))):
            raise UserError(f"{what}: bbox={box}: expected x, y, width and height")
        if isinstance(shape, list) and not all(isinstance(p, list) and len(p) >= 6 for p in shape):
            raise UserError(f"{what}: segmentation: a polygon needs at least three points")

    def __len__(self) -> int:
        return len(self.ids)

    def image(self, index: int) -> Tensor:
        """Float pixels ``[3, H, W]`` between 0 and 1, as encoders see them."""
        info = self.coco.loadImgs(self.ids[index])[0]
        with Image.open(self.images / info["file_name"]) as file:
            return torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1) / 255

    def target(self, index: int) -> dict[str, Tensor]:
        """Boxes, classes (1 to n) and masks; crowds are for judging only."""
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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


class Pyramid(nn.Module):
    """A feature pyramid (Lin et al. 2017) on the stages of a run's encoder."""

    def __init__(self, body: ResNet, width: int) -> None:
        from torchvision.ops import FeaturePyramidNetwork
        from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

        super().__init__()
        self.body = body
        self.out_channels = width
        self.levels, widths, self.strides = _stages(body)
        self.fpn = FeaturePyramidNetwork(widths, width, LastLevelMaxPool())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Maps of each stage, and one of half the last one's size."""
        x = self.body.stem(images)
        maps: dict[str, Tensor] = {}
        for i, block in enumerate(self.body.stages):
            x = block(x)
            if i in self.levels:
                maps[str(len(maps))] = x
        found: dict[str, Tensor] = self.fpn(maps)
        return found


def _stages(body: ResNet) -> tuple[list[int], list[int], list[int]]:
    """The last block of each stage, its channels and its stride."""
    body.eval()  # a look at shapes leaves no trace in batch norm
    with torch.no_grad():
        x, shapes = body.stem(torch.zeros(2, 3, 64, 64)), []
        for block in body.stages:
            x = block(x)
            shapes.append(x.shape)
    body.train()
    last = [i for i, s in enumerate(shapes) if i + 1 == len(shapes) or s[1] != shapes[i + 1][1]]
    return last, [shapes[i][1] for i in last], [64 // shapes[i][2] for i in last]


def load(run: Path, random: bool, seed: int) -> ResNet:
    """A run's encoder, or one of its kind with random weights."""
    from safetensors.torch import load_file

    note = run / "encoder.json"
    if not note.is_file():
        raise UserError(f"{run}: holds no encoder.json; give the folder of a finished run")
    known = json.loads(note.read_text(encoding="utf-8"))
    if known["channels"][0] != 3:
        raise UserError(f"{run}: its encoder sees {known['channels'][0]} channel(s), not colours")
    settings = Encoder(**known["encoder"])
    body = encoder(settings, 3, min(known["size"]))
    if not isinstance(body, ResNet):
        raise UserError(
            f"{run}: encoder.name={settings.name} has no stages to detect with; use a ResNet"
        )
    if random:
        initialize(body, seed, settings.initializer)
    else:
        body.load_state_dict(load_file(run / "encoder.safetensors"), strict=False)
    return body


def detector(body: ResNet, classes: int, size: int, width: int = WIDTH) -> nn.Module:
    """Mask R-CNN (He et al. 2017) for so many classes, on images of this size."""
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

    pyramid = Pyramid(body, width)
    sides = [REACH * stride for stride in (*pyramid.strides, 2 * pyramid.strides[-1])]
    anchors = AnchorGenerator(tuple((s,) for s in sides), ((0.5, 1.0, 2.0),) * len(sides))
    # At a width of 256 the heads are torchvision's own.
    return MaskRCNN(
        pyramid,
        min_size=size,
        max_size=2 * size,
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
    """Fine-tune and judge: box and mask AP in percent, also appended to the run's folder."""
    require()
    train, test = Shapes(data, "train"), Shapes(data, "val")
    if train.categories != test.categories:
        raise UserError(f"{test.file}: not the categories of {train.file.name}")
    torch.manual_seed(settings.seed)  # torchvision draws new layers and proposals from here
    body = load(run, settings.random, settings.seed)
    model = detector(body, len(train.categories), settings.size, settings.width).to(device)
    fit(model, train, settings, device)
    found = score(model, test, device)
    line = {"data": str(data), **asdict(settings), **found}
    with (run / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return found


def fit(model: nn.Module, train: Shapes, settings: Settings, device: torch.device) -> None:
    """SGD with a short warm-up, a tenth of the rate in the last quarter."""
    model.train()
    params = [p for p in model.parameters() if p.requires_grad]
    rule = torch.optim.SGD(params, settings.lr, momentum=0.9, weight_decay=1e-4)
    warm, late = max(1, min(500, settings.steps // 10)), 3 * settings.steps // 4
    bar = tqdm(total=settings.steps, desc="mask r-cnn", unit="step", disable=None)
    for step, chosen in enumerate(_batches(len(train), settings)):
        factor = min(1.0, (step + 1) / warm) * (0.1 if step >= late else 1.0)
        rule.param_groups[0]["lr"] = settings.lr * factor
        images = [train.image(i).to(device) for i in chosen]
        targets = [{k: v.to(device) for k, v in train.target(i).items()} for i in chosen]
        loss = sum(model(images, targets).values())
        assert isinstance(loss, Tensor)
        if not bool(torch.isfinite(loss)):
            raise TrainingError(f"step {step + 1}: the loss is {float(loss)}; lower --lr")
        rule.zero_grad()
        loss.backward()
        rule.step()
        bar.update()
    bar.close()


def _batches(count: int, settings: Settings) -> Iterator[list[int]]:
    """One shuffled epoch after another."""
    waiting: list[int] = []
    epoch = 0
    for _ in range(settings.steps):
        while len(waiting) < settings.batch:
            waiting += permutation(key(settings.seed, "detection", epoch), count).tolist()
            epoch += 1
        yield waiting[: settings.batch]
        del waiting[: settings.batch]


@torch.no_grad()
def score(model: nn.Module, test: Shapes, device: torch.device) -> dict[str, float]:
    """COCO's AP of boxes and masks (and at IoU 0.5), in percent, by pycocotools."""
    from pycocotools import mask as masks
    from pycocotools.cocoeval import COCOeval

    model.eval()
    rows: list[dict[str, Any]] = []
    for index, number in enumerate(test.ids):
        (found,) = model([test.image(index).to(device)])
        shapes = (found["masks"][:, 0] > 0.5).to(torch.uint8).cpu().numpy()
        each = zip(found["boxes"], found["labels"], found["scores"], shapes, strict=True)
        for box, label, certainty, shape in each:
            left, top, right, bottom = box.tolist()
            rows.append(
                {
                    "image_id": number,
                    "category_id": test.categories[int(label) - 1],
                    "bbox": [left, top, right - left, bottom - top],
                    "score": float(certainty),
                    "segmentation": masks.encode(np.asfortranarray(shape)),
                }
            )
    results: dict[str, float] = {}
    for kind, name in (("bbox", "box"), ("segm", "mask")):
        results |= {f"{name}_ap": 0.0, f"{name}_ap50": 0.0}
        if rows:
            with contextlib.redirect_stdout(io.StringIO()):
                judge = COCOeval(test.coco, test.coco.loadRes(rows), kind)
                judge.evaluate()
                judge.accumulate()
                judge.summarize()
            results |= {
                f"{name}_ap{at}": 100 * float(judge.stats[i]) for i, at in enumerate(("", "50"))
            }
    return results


def _read(file: Path) -> Any:
    from pycocotools.coco import COCO

    coco = COCO()
    try:
        coco.dataset = json.loads(file.read_text(encoding="utf-8"))
        for number, note in enumerate(coco.dataset["annotations"], 1):
            note["id"] = number  # the judge takes an object with the number 0 for none
        with contextlib.redirect_stdout(io.StringIO()):
            coco.createIndex()
        return coco
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: not in COCO's format ({type(error).__name__}: {error})") from None


def require() -> None:
    """Both come with an extra."""
    try:
        import pycocotools  # noqa: F401
        import torchvision  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error.name} is missing: pip install 'fedssl[detection]'") from None
