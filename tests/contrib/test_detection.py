"""Mask R-CNN on a run's encoder: data in COCO's format, where the weights come from, and its AP."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from encoders import made, saved
from helpers import refused
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from fedssl import cli
from fedssl import config as configuration
from fedssl.config import Encoder
from fedssl.contrib import detection
from fedssl.contrib.detection import CocoSplit, Settings, build_detector, load_body
from fedssl.models.encoders import encoder
from fedssl.models.norms import BatchNorm
from fedssl.runs import loop
from fedssl.runs.build import build_experiment

pytest.importorskip("pycocotools")
SIDE = 48
STATISTICS = ("stem.1.running_mean", "stem.1.running_var")


def shapes(root, train=12, val=6):
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


def a_run(folder, name="resnet18", channels=3, size=32):
    return saved(made(name, "batch", channels, size), folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return shapes(tmp_path_factory.mktemp("coco") / "shapes")


def test_the_weights_come_from_the_run_and_building_a_detector_changes_none(tmp_path):
    run = a_run(tmp_path / "run")
    stored = load_file(run / "encoder.safetensors")
    model = build_detector(load_body(run, random=False, seed=0), 2, SIDE)
    found = model.backbone.body.state_dict()
    assert stored.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    fresh = load_body(run, random=True, seed=1).state_dict()
    assert not torch.equal(fresh["stem.0.weight"], stored["stem.0.weight"])
    assert all(not torch.equal(fresh[name], stored[name]) for name in STATISTICS)
    note = json.loads((run / "encoder.json").read_text())
    note["encoder"]["initializer"] = "torch"  # as the run's network was drawn
    (run / "encoder.json").write_text(json.dumps(note))
    drawn = load_body(run, random=True, seed=1).state_dict()["stages.0.body.0.weight"]
    assert float(drawn.abs().max()) <= 1 / 24 < float(fresh["stages.0.body.0.weight"].abs().max())


def test_batch_norm_is_frozen_and_the_rest_of_the_encoder_is_trained(data, tmp_path):
    """As in Detectron; also the statistics, which training usually changes."""
    body = load_body(a_run(tmp_path / "run"), random=False, seed=0)
    before = {name: tensor.clone() for name, tensor in body.state_dict().items()}
    settings = Settings(steps=1, batch=2, size=SIDE, width=8)
    model = build_detector(body, 2, SIDE, 8)
    detection.fit(model, CocoSplit(data, "train"), settings, torch.device("cpu"))
    changed = {name for name, t in body.state_dict().items() if not torch.equal(t, before[name])}
    norms = {n for n, layer in body.named_modules() if isinstance(layer, BatchNorm)}
    assert norms and changed and not any(name.rpartition(".")[0] in norms for name in changed)


def test_the_rate_warms_up_and_falls_twice():
    """Detectron's default of 90,000 steps: 500 from a third, and drops after 60,000 and 80,000."""
    rate = [detection._scale_rate(step, 90_000) for step in range(90_000)]
    assert rate[0] == pytest.approx(1 / 3) and rate[250] == pytest.approx(2 / 3)
    assert rate[500] == rate[59_999] == 1
    assert rate[60_000] == rate[79_999] == pytest.approx(0.1)
    assert rate[80_000] == rate[-1] == pytest.approx(0.01)


def test_training_images_have_several_sizes_and_test_images_the_largest(data):
    model = build_detector(encoder(Encoder("resnet18", "batch"), 3, 128), 2, 800, 8)
    assert model.transform.min_size == (640, 672, 704, 736, 768, 800)
    assert model.transform.max_size == 1333
    image = torch.zeros(3, 80, 100)
    model.transform.train()
    sides = {min(model.transform([image])[0].image_sizes[0]) for _ in range(60)}
    assert len(sides) > 3 and sides <= set(model.transform.min_size)
    model.transform.eval()
    assert model.transform([image])[0].image_sizes == [(800, 1000)]


def test_a_flipped_image_is_the_mirror_image_with_its_target(data):
    train = CocoSplit(data, "train")
    image, target = train.image(1), train.target(1)
    mirrored, turned = detection.flip(image, target)
    assert torch.equal(mirrored[:, :, 0], image[:, :, -1])
    for box, mask, label in zip(turned["boxes"], turned["masks"], turned["labels"], strict=True):
        columns = torch.where(mask > 0)[1]
        assert abs(columns.min() - box[0]) <= 1 and abs(columns.max() + 1 - box[2]) <= 1
        assert int(mirrored[:, mask > 0].mean(1).argmax()) == int(label) - 1
    assert (turned["boxes"][:, 0] < turned["boxes"][:, 2]).all()


def test_a_share_of_the_images_is_drawn_and_half_of_the_images_are_flipped():
    def drawn(fraction, seed=0):
        settings = Settings(steps=300, batch=4, fraction=fraction, seed=seed)
        return [each for batch in detection._draw_batches(200, settings) for each in batch]

    all_, tenth, hundredth = ({i for i, _ in drawn(f)} for f in (1.0, 0.1, 0.01))
    assert len(all_) == 200 and len(tenth) == 20 and len(hundredth) == 2
    assert hundredth < tenth and tenth != {i for i, _ in drawn(0.1, seed=1)}
    assert 0.45 < np.mean([flipped for _, flipped in drawn(1.0)]) < 0.55
    seen = [flipped for i, flipped in drawn(0.01) if i in hundredth]
    assert len(set(seen)) == 2  # drawn anew in each epoch
    first = [i for i, _ in drawn(1.0)][:200]
    assert sorted(first) == list(range(200)) and first != sorted(first)


def test_targets_are_what_the_file_says(data):
    train = CocoSplit(data, "train")
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


def test_pyramid_levels_and_anchors_of_both_stems():
    small, large = [1, 2, 4, 8], [4, 8, 16, 32]
    for name, size, strides in (
        ("resnet18", 32, small), ("resnet18", 128, large), ("resnet50", 128, large),
    ):  # fmt: skip
        body = encoder(Encoder(name, "batch"), 3, size)
        model = build_detector(body, 2, 64)
        assert model.backbone.strides == strides
        maps = model.backbone(torch.zeros(2, 3, 64, 64))
        assert [m.shape[2] for m in maps.values()] == [64 // s for s in (*strides, 2 * strides[-1])]
        sides = [side for (side,) in model.rpn.anchor_generator.sizes]
        assert sides == [8 * s for s in (*strides, 2 * strides[-1])]


@pytest.mark.parametrize(("missing", "box_ap"), [(0.0, 100), (0.28, 50)])
def test_a_perfect_detector_and_one_whose_boxes_are_too_narrow(missing, box_ap, data):
    """Boxes of 72 % of the width overlap by 0.72: five of COCO's ten thresholds fall."""
    test = CocoSplit(data, "val")

    class Oracle(torch.nn.Module):
        number = 0

        def forward(self, images):
            target = test.target(self.number)
            self.number += 1
            boxes, masks = target["boxes"].clone(), target["masks"][:, None].float()
            boxes[:, 2] -= missing * (boxes[:, 2] - boxes[:, 0])
            scores = torch.ones(len(boxes))
            return [{**target, "boxes": boxes, "scores": scores, "masks": masks}]

    found = detection.evaluate(Oracle(), test, torch.device("cpu"))
    expected = {"box_ap": box_ap, "box_ap50": 100, "mask_ap": 100, "mask_ap50": 100}
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("part", "field", "value", "said"),
    [
        ("annotations", "category_id", 99, "annotation 1: the file does not list its category_id"),
        ("annotations", "image_id", 99, "annotation 1: the file does not list its image_id"),
        ("annotations", "bbox", None, "annotation 1 has no bbox"),
        ("annotations", "bbox", [1, 2, 3], "is not x, y, width and height"),
        ("annotations", "bbox", 5, "bbox=5 is not x, y, width and height"),
        ("annotations", "bbox", ["1", "2", "3", "4"], "is not x, y, width and height"),
        ("annotations", "area", None, "annotation 1 has no area"),
        ("annotations", "iscrowd", None, "annotation 1 has no iscrowd"),
        ("annotations", "segmentation", [], "annotation 1 has no segmentation"),
        ("annotations", "segmentation", [[1, 2]], "less than three points"),
        ("annotations", "segmentation", [1, 2, 3, 4, 5, 6], "less than three points"),
        ("images", "file_name", None, "has no file_name"),
        ("images", "height", None, "has no height"),
    ],
)
def test_a_file_that_is_not_cocos_is_refused(part, field, value, said, tmp_path):
    root = shapes(tmp_path, 2, 2)
    file = root / "annotations" / "instances_val2017.json"
    tree = json.loads(file.read_text())
    tree[part][0][field] = value
    if value is None:
        del tree[part][0][field]
    file.write_text(json.dumps(tree))
    with refused(None, says=said):
        CocoSplit(root, "val")


def test_end_to_end_from_the_command_line(data, tmp_path, capsys, monkeypatch):
    run = a_run(tmp_path / "run", size=128)
    # Narrow heads on coarse maps: the same work in little time.
    monkeypatch.setattr(detection, "Settings", functools.partial(Settings, width=16))
    words = ["--steps", "3", "--batch", "2", "--size", str(SIDE), "--fraction", "0.5"]
    words += ["--device", "cpu"]
    assert cli.main(["detect", str(run), str(data), *words]) == 0
    assert "box ap " in capsys.readouterr().out
    (line,) = (json.loads(text) for text in (run / "detections.jsonl").read_text().splitlines())
    assert (
        line["steps"] == 3
        and line["fraction"] == 0.5
        and not line["random"]
        and 0 <= line["mask_ap"] <= 100
    )


def test_detection_starts_where_pretraining_ended(data, tmp_path, monkeypatch):
    """A run of the same images without labels, and what Mask R-CNN has before its first step."""
    words = [
        *("data.name=folder", f"data.root={data / 'train2017'}", f"data.cache={tmp_path}"),
        *("data.size=96", "partition.clients=2", "encoder.name=resnet18", "encoder.norm=batch"),
        *("objective.name=simclr", "objective.projector=[16,16]", "algorithm.name=fedavg"),
        *("algorithm.local_epochs=1", "algorithm.batch=6", "client.lr=0.1", "rounds=1"),
        *("augment.name=flip", "evaluate.protocols=unlabeled", "device=cpu"),
    ]
    folder, settings = tmp_path / "run", configuration.resolve({}, words)
    loop.run(settings, folder)
    learned = load_file(folder / "encoder.safetensors")
    starts = []

    def look(model, *_):
        starts.append({k: v.clone() for k, v in model.backbone.body.state_dict().items()})

    monkeypatch.setattr(detection, "fit", look)
    monkeypatch.setattr(detection, "evaluate", lambda *_: {"box_ap": 0.0})
    for random in (False, True):
        detection.detect(folder, data, Settings(random=random, width=8), torch.device("cpu"))
    ours, fresh = starts
    assert ours.keys() == learned.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in learned.items())
    assert not torch.equal(fresh["stem.0.weight"], learned["stem.0.weight"])
    session = build_experiment(settings)
    before = session.evaluator.tower(session.trainer.initial).encoder.state_dict()
    assert not torch.equal(before["stem.0.weight"], learned["stem.0.weight"])  # it has learned


def test_heads_of_full_width_are_torchvisions():
    from torchvision.models.detection import MaskRCNN

    body = encoder(Encoder("resnet18", "batch"), 3, 128)
    ours = build_detector(body, 2, 64)
    theirs = MaskRCNN(ours.backbone, 3)
    for part in ("box_head", "box_predictor", "mask_head", "mask_predictor"):
        shapes_of = [
            {k: v.shape for k, v in getattr(m.roi_heads, part).state_dict().items()}
            for m in (ours, theirs)
        ]
        assert shapes_of[0] == shapes_of[1]
    sampler = ours.roi_heads.fg_bg_sampler.batch_size_per_image
    assert sampler == theirs.roi_heads.fg_bg_sampler.batch_size_per_image


def test_bad_input_is_one_line(data, tmp_path, capsys):
    run, gray = a_run(tmp_path / "run"), a_run(tmp_path / "gray", channels=1)
    tiny = a_run(tmp_path / "tiny", name="tiny")
    lost, odd = (shapes(tmp_path / name, 2, 2) for name in ("lost", "odd"))
    (lost / "val2017" / "1.png").unlink()
    (odd / "annotations" / "instances_val2017.json").write_text("[]")
    for run_, data_, said in (
        (run, lost, "no image"),
        (run, odd, "not in COCO's format"),
        (run, tmp_path, "0 files are called annotations/instances_train"),
        (tmp_path, data, "no encoder there"),
        (gray, data, "takes gray images"),
        (tiny, data, "has no stages"),
    ):
        assert cli.main(["detect", str(run_), str(data_), "--steps", "1", "--device", "cpu"]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


def test_the_help_says_where_images_are_looked_for(data, capsys):
    with pytest.raises(SystemExit):
        cli.main(["detect", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "annotations/instances_NAME.json with its images in the folder NAME" in said
    for split in ("train", "val"):
        file = CocoSplit(data, split).file
        assert CocoSplit(data, split).images == data / file.stem.removeprefix("instances_")


def test_settings_out_of_range():
    with refused("--lr", -1):
        Settings(lr=-1)
    for share in (0, 1.5, float("nan")):
        with refused("--fraction", share):
            Settings(fraction=share)
