"""Mask R-CNN on a run's encoder: data in COCO's format, where the weights come from, and its AP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from fedssl import cli, detection
from fedssl.config import Encoder
from fedssl.detection import Settings, Shapes, detector, load
from fedssl.errors import UserError
from fedssl.files import save, write_json
from fedssl.models.encoders import encoder
from fedssl.models.network import initialize

pytest.importorskip("pycocotools")
SIDE = 48


def shapes(root: Path, train: int = 12, val: int = 6) -> Path:
    """Squares and triangles on noise: one or two in an image."""
    generator = np.random.default_rng(0)
    (root / "annotations").mkdir(parents=True)
    for split, count in (("train2017", train), ("val2017", val)):
        (root / split).mkdir()
        images, notes = [], []
        for i in range(count):
            picture = Image.fromarray(
                generator.integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8), "RGB"
            )
            draw = ImageDraw.Draw(picture)
            for part in range(1 + i % 2):
                x, y, s = 2 + 22 * part + i % 3, 4 + i % 7, 18 + i % 4
                kind = (i + part) % 2
                corners = [(x, y), (x + s, y), (x + s, y + s), (x, y + s)]
                corners = corners if kind == 0 else [(x, y + s), (x + s // 2, y), (x + s, y + s)]
                draw.polygon(corners, fill=(220, 60, 60) if kind == 0 else (60, 200, 90))
                flat = [float(v) for corner in corners for v in corner]
                note = {"image_id": i, "category_id": 3 + 4 * kind, "bbox": [x, y, s, s]}
                notes.append(
                    {**note, "id": len(notes), "segmentation": [flat], "area": s * s, "iscrowd": 0}
                )
            picture.save(root / split / f"{i}.png")
            images.append({"id": i, "file_name": f"{i}.png", "width": SIDE, "height": SIDE})
        kinds = [{"id": 3, "name": "square"}, {"id": 7, "name": "triangle"}]
        tree = {"images": images, "annotations": notes, "categories": kinds}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(tree))
    return root


def a_run(folder: Path, name: str = "resnet18", channels: int = 3, seed: int = 5) -> Path:
    """What a run leaves of its encoder."""
    folder.mkdir()
    body = encoder(Encoder(name, "batch"), channels, 32)  # type: ignore[arg-type]
    initialize(body, seed)
    save(folder / "encoder.safetensors", {k: v.clone() for k, v in body.state_dict().items()}, {})
    made = {"name": name, "norm": "batch", "groups": 32, "towers": 1, "init": None}
    write_json(folder / "encoder.json", {"encoder": made, "channels": [channels], "size": [32, 32]})
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes(tmp_path_factory.mktemp("coco") / "shapes")


def test_the_weights_come_from_the_run_and_building_a_detector_changes_none(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    stored = load_file(run / "encoder.safetensors")
    model: Any = detector(load(run, random=False, seed=0), 2, SIDE)
    found = model.backbone.body.state_dict()
    assert stored.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    fresh = load(run, random=True, seed=0).state_dict()
    assert not torch.equal(fresh["stem.0.weight"], stored["stem.0.weight"])


def test_targets_are_what_the_file_says(data: Path) -> None:
    train = Shapes(data, "train")
    assert len(train) == 12 and train.categories == [3, 7]
    image, target = train.image(1), train.target(1)
    assert image.shape == (3, SIDE, SIDE) and float(image.min()) >= 0 and float(image.max()) <= 1
    assert target["labels"].tolist() == [2, 1]
    for box, mask, label in zip(target["boxes"], target["masks"], target["labels"], strict=True):
        rows, columns = torch.where(mask > 0)
        left, top, right, bottom = box.tolist()
        assert abs(columns.min() - left) <= 1 and abs(columns.max() + 1 - right) <= 1
        assert abs(rows.min() - top) <= 1 and abs(rows.max() + 1 - bottom) <= 1
        channel = int(label) - 1  # squares are red, triangles green
        inside = image[:, mask > 0].mean(1)
        assert int(inside.argmax()) == channel


def test_pyramid_levels_and_anchors_of_both_stems() -> None:
    for size, strides in ((32, [1, 2, 4, 8]), (128, [4, 8, 16, 32])):
        body: Any = encoder(Encoder("resnet18", "batch"), 3, size)
        model: Any = detector(body, 2, 64)
        assert model.backbone.strides == strides
        maps = model.backbone(torch.zeros(2, 3, 64, 64))
        assert [m.shape[2] for m in maps.values()] == [64 // s for s in (*strides, 2 * strides[-1])]
        sides = [side for (side,) in model.rpn.anchor_generator.sizes]
        assert sides == [8 * s for s in (*strides, 2 * strides[-1])]


def test_a_perfect_detector_has_an_ap_of_100(data: Path) -> None:
    test = Shapes(data, "val")

    class Oracle(torch.nn.Module):
        number = 0

        def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
            target = test.target(self.number)
            self.number += 1
            scores = torch.ones(len(target["labels"]))
            return [{**target, "scores": scores, "masks": target["masks"][:, None].float()}]

    found = detection.score(Oracle(), test, torch.device("cpu"))
    assert found == pytest.approx(
        {"box_ap": 100, "box_ap50": 100, "mask_ap": 100, "mask_ap50": 100}, abs=1e-6
    )


def test_end_to_end_from_the_command_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run")
    words = ["--steps", "3", "--batch", "2", "--size", str(SIDE), "--device", "cpu"]
    assert cli.main(["detect", str(run), str(data), *words]) == 0
    assert "box ap " in capsys.readouterr().out
    (line,) = (json.loads(text) for text in (run / "detections.jsonl").read_text().splitlines())
    assert line["steps"] == 3 and not line["random"] and 0 <= line["mask_ap"] <= 100


def refused(*words: str) -> list[str]:
    return ["detect", *words, "--steps", "1", "--device", "cpu"]


def test_bad_input_is_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, gray = a_run(tmp_path / "run"), a_run(tmp_path / "gray", channels=1)
    tiny = a_run(tmp_path / "tiny", name="tiny")
    bare, lost, odd = (shapes(tmp_path / name, 2, 2) for name in ("bare", "lost", "odd"))
    file = bare / "annotations" / "instances_train2017.json"
    tree = json.loads(file.read_text())
    tree["annotations"][1]["segmentation"] = []
    file.write_text(json.dumps(tree))
    (lost / "val2017" / "1.png").unlink()
    (odd / "annotations" / "instances_val2017.json").write_text("[]")
    for words, said in (
        (refused(str(run), str(bare)), "annotation 2 has no mask (segmentation)"),
        (refused(str(run), str(lost)), "there is no image"),
        (refused(str(run), str(odd)), "not in COCO's format"),
        (refused(str(run), str(tmp_path)), "expected one annotations/instances_train"),
        (refused(str(tmp_path), str(data)), "holds no encoder.json"),
        (refused(str(gray), str(data)), "1 channel(s), not colours"),
        (refused(str(tiny), str(data)), "has no stages to detect with; use a ResNet"),
        ([*refused(str(run), str(data)), "--batch", "0"], "--batch=0: must be above 0"),
    ):
        assert cli.main(words) == 2
        found = capsys.readouterr().err
        assert said in found and found.count("\n") == 1


def test_settings_out_of_range() -> None:
    with pytest.raises(UserError, match="--lr=-1: must be above 0"):
        Settings(lr=-1)
