"""Whole images in a frame: how they are stored, and the views and squares that come from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import refused
from image_folders import folder, gradient, paired, save
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from fedssl import config as configuration
from fedssl.config import Augment, Data
from fedssl.data import decode, random
from fedssl.data.augment import PRESETS, Augmentation
from fedssl.data.operations import rotate
from fedssl.data.squares import MiddleSquares, frame, middle_squares

FRAME, VIEW = 40, 24
# Geometry alone: colours do not depend on a frame (test_augment.py has them).
TURNED = Augment("none", size=VIEW, crop=(0.08, 1.0), flip=0.5, rotate=40.0)


def framed(count: int = 24, channels: int = 3, fill: int = 0) -> tuple[Tensor, Tensor]:
    """Images of many sizes in frames, whose rest has one value."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(5, FRAME + 1, (count, 2), generator=generator)
    sizes[0], sizes[1], sizes[2] = torch.tensor([[FRAME, FRAME], [FRAME, 5], [5, FRAME]])
    shape = (count, channels, FRAME, FRAME)
    frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for image, (height, width) in zip(frames, sizes.tolist(), strict=True):
        image[:, height:] = fill
        image[:, :, width:] = fill
    return frames, sizes


def states(count: int) -> Tensor:
    return random.mix(random.key(0, "augment"), torch.arange(count))


def build(given: Augment, channels: int = 3, how: str = "bilinear") -> Augmentation:
    return Augmentation.from_config(given, channels, (FRAME, FRAME), how)


# ---- views


@pytest.mark.parametrize(("channels", "how"), [(1, "bilinear"), (3, "bilinear"), (3, "bicubic")])
def test_a_view_is_torchvisions_view_of_the_image_without_its_frame(
    channels: int, how: str
) -> None:
    a, (frames, sizes) = build(TURNED, channels, how), framed(channels=channels)
    state = states(len(frames))
    found = a.views(frames, state, 0, torch.float64, sizes)
    assert found.shape == (len(frames), channels, VIEW, VIEW)
    drawn = a.draw(state, 0, (sizes[:, 0], sizes[:, 1]))
    assert drawn.box is not None and drawn.degrees is not None and drawn.flip is not None
    for i, (height, width) in enumerate(sizes.tolist()):
        x = frames[i, :, :height, :width].double() / 255
        x = tv.rotate(x, drawn.degrees[i].item(), InterpolationMode.BILINEAR)
        box = [int(side[i]) for side in drawn.box]
        mode = InterpolationMode(how)
        x = tv.resized_crop(x, *box, size=[VIEW, VIEW], interpolation=mode, antialias=True)
        x = x.clamp(0, 1)
        x = tv.horizontal_flip(x) if drawn.flip[i] else x
        torch.testing.assert_close(found[i], x, rtol=0, atol=1e-6)


def test_a_views_box_is_that_of_an_image_without_a_frame() -> None:
    a, (frames, sizes) = build(Augment("simclr", size=VIEW)), framed()
    state = states(len(frames))
    found = a.views(frames, state, 1, torch.float64, sizes)
    for i, (height, width) in enumerate(sizes.tolist()):
        image = frames[i : i + 1, :, :height, :width]
        alone = a.views(image, state[i : i + 1], 1, torch.float64)
        torch.testing.assert_close(found[i : i + 1], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", PRESETS)
def test_no_view_shows_the_frame(name: str) -> None:
    a = build(Augment(name, size=VIEW, rotate=0.0))
    (black, sizes), (white, _) = framed(), framed(fill=255)
    state = states(len(black))
    views = [a.views(frames, state, 0, torch.float64, sizes) for frames in (black, white)]
    assert torch.equal(*views)


def test_both_views_in_one_pass_have_their_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    a, (frames, sizes) = build(TURNED), framed()
    state, images = states(12), (frames[:12], frames[12:])
    parts = (sizes[:12], sizes[12:])
    together = a.each(images, state, torch.float64, parts)
    monkeypatch.setattr("fedssl.data.augment.FEW", 0)
    apart = a.each(images, state, torch.float64, parts)
    assert all(map(torch.equal, together, apart))


def test_a_preset_without_crops_takes_the_middle_square() -> None:
    (frames, sizes), state = framed(), states(24)
    a = build(Augment("flip", flip=0.0, size=VIEW))
    found = a.views(frames, state, 0, torch.float64, sizes) * 255
    squares = MiddleSquares(frames, sizes, VIEW)[:]
    assert float((found - squares).abs().max()) < 1.01  # bytes are rounded in both directions
    alike = frames[:5]  # all fill their frames
    found = build(Augment("none", size=VIEW)).views(alike, states(5), 0, torch.float64) * 255
    assert float((found - middle_squares(alike, VIEW)).abs().max()) < 1.01


def test_images_are_turned_about_their_own_middle() -> None:
    frames, sizes = framed()
    degrees = torch.linspace(-180, 180, len(frames), dtype=torch.float64)
    turned = rotate(frames.double(), degrees, sizes)
    for i, (height, width) in enumerate(sizes.tolist()):
        image = frames[i, :, :height, :width].double()
        expected = tv.rotate(image, degrees[i].item(), InterpolationMode.BILINEAR)
        torch.testing.assert_close(turned[i, :, :height, :width], expected, rtol=0, atol=1e-4)


def test_compiled_views_of_whole_images_are_the_same() -> None:
    a, (frames, sizes) = build(TURNED), framed()
    state = states(len(frames))
    a.constants(state.device)
    compiled = torch.compile(a.views, backend="aot_eager", fullgraph=True, dynamic=False)
    expected = a.views(frames, state, 0, torch.float64, sizes)
    assert torch.equal(compiled(frames, state, 0, torch.float64, sizes), expected)


# ---- storing


@pytest.mark.parametrize(
    ("sides", "stored"),
    [((90, 30), (30, 10)), ((30, 90), (10, 30)), ((64, 37), (30, 17)), ((20, 7), (20, 7))],
)
def test_whole_images_keep_their_aspect_ratio_and_are_only_reduced(
    root: Path, sides: tuple[int, int], stored: tuple[int, int]
) -> None:
    image = gradient(*sides)
    save(root / "x.png", image)
    split = folder(root, size=30, shape="whole").train
    (width, height), (frames,) = stored, split.images
    assert split.sizes is not None and split.sizes[0].tolist() == [[height, width]]
    assert frames.shape == (1, 3, 30, 30)
    wanted = np.asarray(image.resize(stored, Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert np.array_equal(frames[0, :, :height, :width].numpy(), wanted)
    assert not frames[0, :, height:].any() and not frames[0, :, :, width:].any()


def test_large_jpegs_are_decoded_at_a_fraction_without_losing_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "x.jpg", gradient(640, 240), quality=95)
    drafted = decode.decode_file(path, 32, whole=True).astype(int)
    sizes: list[tuple[int, int]] = []
    reduce = decode._reduce
    monkeypatch.setattr(decode, "_reduce", lambda i, *a: sizes.append(i.size) or reduce(i, *a))
    decode.decode_file(path, 32, whole=True)
    monkeypatch.setattr(decode.JpegImageFile, "draft", lambda *a: None)
    full = decode.decode_file(path, 32, whole=True)
    assert sizes == [(80, 30), (640, 240)]  # an eighth has still twice 32 × 12
    assert drafted.shape == (3, 12, 32) and np.abs(drafted - full).max() <= 3


def test_sizes_come_from_the_cache_and_stay_with_their_images(root: Path) -> None:
    for k, side in enumerate((8, 12, 16, 20)):
        save(root / f"train/{k % 2}/{k}.png", gradient(side, 10))
    (root / "train/1/bad.png").write_text("no")
    for _ in range(2):  # decoded, then from the cache
        train = folder(root, size=16, shape="whole", corrupt="skip").train
        assert train.sizes is not None
        assert train.sizes[0].tolist() == [[10, 8], [10, 16], [10, 12], [8, 16]]
    few = train.select(torch.tensor([3, 0]))
    assert few.sizes is not None and few.sizes[0].tolist() == [[8, 16], [10, 8]]
    assert folder(root, size=16, corrupt="skip").train.sizes is None  # squares have a cache too


def test_without_a_size_the_frame_is_as_large_as_the_largest_image(root: Path) -> None:
    for k, sides in enumerate(((8, 12), (31, 4))):
        save(root / f"{k}.png", gradient(*sides))
    split = folder(root, shape="whole").train
    assert split.images[0].shape == (2, 3, 31, 31)


def test_modalities_have_sizes_of_their_own(root: Path) -> None:
    save(root / "photo/a.png", gradient(20, 10))
    save(root / "scan/a.png", gradient(6, 8))
    split = paired(root, size=16, shape="whole").train
    assert split.sizes is not None
    assert [each.tolist() for each in split.sizes] == [[[8, 16]], [[8, 6]]]


def test_frames_of_tensors() -> None:
    images = torch.randint(0, 256, (4, 5, 30, 20), dtype=torch.uint8)
    frames, sizes = frame(images, 30)
    assert torch.equal(frames[..., :20], images) and not frames[..., 20:].any()
    assert sizes.tolist() == [[30, 20]] * 4
    frames, sizes = frame(images, 15)
    assert frames.shape == (4, 5, 15, 15) and sizes.tolist() == [[15, 10]] * 4


# ---- middle squares


@pytest.mark.parametrize("how", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC])
def test_middle_squares_are_those_of_pillow(how: Image.Resampling) -> None:
    frames, sizes = framed()
    squares = MiddleSquares(frames, sizes, VIEW, how.name.lower())
    assert squares.shape == (24, 3, VIEW, VIEW) and len(squares) == 24
    for i, (height, width) in enumerate(sizes.tolist()):
        image = Image.fromarray(frames[i, :, :height, :width].permute(1, 2, 0).numpy())
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        box = (left, top, left + side, top + side)
        wanted = image.crop(box).resize((VIEW, VIEW), how)
        difference = squares[i : i + 1][0].permute(1, 2, 0).int() - np.asarray(wanted)
        assert int(difference.abs().max()) <= 1
    every = squares[:]
    assert torch.equal(squares[torch.tensor([5, 2])], every[[5, 2]])
    assert torch.equal(squares[np.array([7])], every[7:8])


# ---- keys


def resolve(*words: str) -> configuration.Config:
    return configuration.resolve({"data": {"name": "folder", "root": "x"}}, words)


def test_a_view_smaller_than_the_image_stores_whole_images(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert resolve().data.shape == "square"
    given = resolve("data.size=300", "augment.size=224").data
    assert (given.size, given.shape) == (300, "whole")
    assert capsys.readouterr().err == ""
    recommended = resolve("augment.size=224").data  # 64 would be too small
    assert (recommended.size, recommended.shape) == (256, "whole")
    assert "data.size=256 in place of 64" in capsys.readouterr().err
    square = resolve("data.size=300", "augment.size=224", "data.shape=square").data
    assert square == Data("folder", "x", 300, "square")
    assert configuration.resolve({}, ["augment.size=12", "data.name=cifar10"]).data.size is None


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("data.size=64", "data.size"),
        ("data.halves=true", "data.halves"),
        ("partition.name=dirichlet partition.source=style", "partition.source"),
    ],
)
def test_refusals(word: str, key: str) -> None:
    with refused(key):
        resolve("augment.size=224", *word.split())
