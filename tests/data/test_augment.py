"""Augmentation: torchvision's operations in batches, each sample with its own random numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import refused
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as tv
from views import COLOUR, made

from fedssl.config import Augment
from fedssl.data import augment, operations, random
from fedssl.data.augment import PRESETS, Augmentation, Choices

EVERYTHING = Augment(
    "byol",
    rotate=30.0,
    blur=(0.5, 0.5),
    solarize=(0.5, 0.5),
    jitter=(0.8, 0.8, 0.8, 0.4),
    noise=0.1,
)


EACH = pytest.mark.parametrize("name", [*PRESETS, EVERYTHING])


def states(count: int) -> Tensor:
    return random.mix(random.key(0, "augment"), torch.arange(count))


def build(name: str | Augment, channels: int = 3, size: tuple[int, int] = (32, 32)) -> Augmentation:
    given = Augment(name) if isinstance(name, str) else name
    return Augmentation.from_config(given, channels, size)


# ---- the whole of a view


def torchvision_view(a: Augmentation, x: Tensor, c: Choices, noise: Tensor) -> Tensor:
    """One image through torchvision, by what was drawn for it (a batch of one)."""
    if c.degrees is not None:
        x = tv.rotate(x, c.degrees.item(), InterpolationMode.BILINEAR)
    if c.box is not None:
        box = [int(b.item()) for b in c.box]
        x = tv.resized_crop(x, *box, size=list(a.size), antialias=True)
    if c.flip is not None and c.flip:
        x = tv.horizontal_flip(x)
    if c.jitter is not None and c.jitter:
        for k in c.turns[0].tolist():
            x = list(COLOUR.values())[k][0](x, c.factors[0, k].item())
    if c.gray is not None and c.gray:
        x = tv.rgb_to_grayscale(x, 3)
    if c.blur is not None and c.blur:
        x = tv.gaussian_blur(x, [a.kernel] * 2, [c.sigma.item()] * 2)
    if c.solarize is not None and c.solarize:
        x = tv.solarize(x, 0.5)
    return (x + a.preset.noise * noise).clamp(0, 1)


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        (EVERYTHING, (3, 32, 32)),
        (EVERYTHING, (3, 20, 33)),
        (EVERYTHING, (1, 27, 18)),
        (Augment("dcco-derm"), (3, 32, 32)),
        (Augment("digits"), (1, 16, 16)),
        (Augment("flip"), (3, 8, 8)),
    ],
)
@pytest.mark.parametrize("view", [0, 1])
def test_a_view_is_torchvisions_operations_one_after_another(
    given: Augment, shape: tuple[int, int, int], view: int
) -> None:
    a = build(given, shape[0], shape[1:])
    x, state = made(24, *shape), states(24)
    result = a.views(x, state, view, torch.float64)
    stream = random.mix(random.mix(state, view), -1)
    noise = random.normal(stream, math.prod(shape)).view(-1, *shape).double()
    for i in range(len(x)):
        drawn = a.draw(state[i : i + 1], view)
        expected = torchvision_view(a, x[i].double() / 255, drawn, noise[i])
        torch.testing.assert_close(result[i], expected, rtol=0, atol=1e-5)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_does_not_depend_on_its_batch(name: str | Augment, dtype: torch.dtype) -> None:
    a = build(name)
    x, state = made(16, 3, 32, 32), states(16)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    for view in (0, 1):
        batch = a.views(x, state, view, dtype)
        alone = [a.views(x[i : i + 1], state[i : i + 1], view, dtype) for i in range(len(x))]
        torch.testing.assert_close(batch, torch.cat(alone), rtol=0, atol=tolerance)


@EACH
@pytest.mark.parametrize("channels", [1, 3])
def test_selecting_samples_and_computing_all_give_the_same(
    name: str | Augment, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = build(name, channels, (20, 24))
    x, state = made(32, channels, 20, 24), states(32)
    for view in (0, 1):
        monkeypatch.setattr(operations, "_computes_all", lambda _: False)
        chosen = a.views(x, state, view, torch.float64)
        assert chosen.shape == x.shape and 0 <= chosen.min() <= chosen.max() <= 1
        monkeypatch.setattr(operations, "_computes_all", lambda _: True)
        everywhere = a.views(x, state, view, torch.float64)
        torch.testing.assert_close(everywhere, chosen, rtol=0, atol=1e-13)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [1, 3])
def test_few_images_get_both_views_in_one_pass(
    name: str | Augment, channels: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers, also of two kinds of images (two modalities)."""
    a, state = build(name, channels, (20, 24)), states(32)
    images = [made(64, channels, 20, 24)[half::2] for half in (0, 1)]
    expected = [a.views(x, state, view, dtype) for view, x in enumerate(images)]
    sizes: list[int] = []
    draw = Augmentation.draw
    monkeypatch.setattr(
        Augmentation, "draw", lambda self, s, *v: sizes.append(len(s)) or draw(self, s, *v)
    )
    for most, passes in ((32 * channels * 20 * 24, [64]), (1000, [32, 32])):
        monkeypatch.setattr(augment, "FEW", most)
        sizes.clear()
        for found, view in zip(a.each(images, state, dtype), expected, strict=True):
            torch.testing.assert_close(found, view, rtol=0, atol=1e-6 if dtype.itemsize == 4 else 0)
        assert sizes == (passes if a.preset != PRESETS["none"] else [])


# ---- small views


def test_small_views_are_small_parts_of_each_image_in_turn() -> None:
    given = Augment("none", small=3, small_size=6, small_crop=(0.1, 0.2))
    a, state = build(given), states(500)
    images = [made(500, 3, 32, 32)[:500].roll(k, 0) for k in (0, 1)]
    views = a.small_views(images, state, torch.float64)
    assert [tuple(view.shape) for view in views] == [(500, 3, 6, 6)] * 3
    assert not torch.equal(views[0], views[2])  # of the same images
    for k, view in enumerate(views):
        (small,) = set(a.small)
        box = small.draw(state, 2 + k, (32, 32)).box
        assert box is not None
        area = box[2] * box[3] / 32**2
        assert 0.06 < float(area.min()) < 0.12 and 0.18 < float(area.max()) < 0.24
        x = images[k % 2].double() / 255
        expected = operations.resized_crop(x, *box, (6, 6))
        torch.testing.assert_close(view, expected)
    alone = a.small_views([x[7:8] for x in images], state[7:8], torch.float64)
    torch.testing.assert_close([v[7:8] for v in views], list(alone))


def test_small_views_have_the_probabilities_of_both_views_in_turn() -> None:
    a = build(Augment("flip", flip=0.0, small=2, small_crop=(1.0, 1.0), solarize=(1.0, 0.0)))
    first, second = a.small_views([made(20, 3, 32, 32)] * 2, states(20), torch.float64)
    assert not torch.equal(first, second)
    torch.testing.assert_close(0.5 - (second - 0.5).abs(), first)


def test_the_size_of_small_views() -> None:
    assert build(Augment("simclr", small=1), size=(224, 224)).small[0].size == (96, 96)
    assert build(Augment("simclr", small=1, small_size=80)).small[0].size == (80, 80)
    assert build(Augment("simclr", small=1, size=112)).small[0].size == (48, 48)


def test_none_leaves_images_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    x = made(5, 3, 8, 8)
    monkeypatch.setattr(random, "uniform", None)  # nothing to draw
    assert torch.equal(build("none", 3, (8, 8)).views(x, states(5), 0), x.float() / 255)


def test_noise_is_fresh_normal_noise() -> None:
    a = build(Augment("none", noise=0.1), 1, (16, 16))
    x = torch.full((400, 1, 16, 16), 128, dtype=torch.uint8)
    noise = [(a.views(x, states(400), view) - 128 / 255) for view in (0, 1)]
    assert abs(noise[0].mean()) < 5 * 0.1 / math.sqrt(noise[0].numel())
    assert noise[0].std() == pytest.approx(0.1, rel=0.02)
    pairs = torch.stack((noise[0].flatten(), noise[1].flatten()))
    assert abs(torch.corrcoef(pairs)[0, 1]) < 5 / math.sqrt(noise[0].numel())


# ---- what is drawn


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("view", [0, 1])
def test_operations_happen_as_often_as_the_preset_says(name: str, view: int) -> None:
    count = 20_000
    c, p = build(name).draw(states(count), view), PRESETS[name]
    expected = {
        "flip": p.flip,
        "jitter": p.jitter_p if any(p.jitter) else 0.0,
        "gray": p.gray,
        "blur": p.blur[view],
        "solarize": p.solarize[view],
    }
    for operation, probability in expected.items():
        chosen = getattr(c, operation)
        share = 0.0 if chosen is None else chosen.double().mean().item()
        error = math.sqrt(probability * (1 - probability) / count)
        assert abs(share - probability) <= 4.5 * error + 1e-12, operation


def test_parameters_fill_their_ranges_evenly() -> None:
    c = build(EVERYTHING).draw(states(20_000), 0)
    ranges = [(c.factors[:, k], 0.2, 1.8) for k in range(3)]
    ranges += [(c.factors[:, 3], -0.4, 0.4), (c.sigma, 0.1, 2.0), (c.degrees, -30, 30)]
    for values, low, high in ranges:
        position = (values.double() - low) / (high - low)
        assert -1e-6 <= position.min() < 1e-3
        assert 0.999 < position.max() <= 1 + 1e-6
        seen = torch.histc(position, 20, 0, 1)
        assert ((seen - 1000).abs() < 4.5 * math.sqrt(1000)).all()
    strong = build(Augment("byol", jitter=(1.5, 0, 0, 0))).draw(states(20_000), 0).factors[:, 0]
    assert strong.min() >= 0 and strong.max() > 2.49


def test_every_order_of_the_jitter_is_equally_likely() -> None:
    turns = build("byol").draw(states(24_000), 0).turns
    codes = (turns * torch.tensor([64, 16, 4, 1])).sum(1)
    orders, seen = codes.unique(return_counts=True)
    assert len(orders) == 24
    assert ((seen - 1000).abs() < 4.5 * math.sqrt(1000)).all()


def test_draws_of_different_operations_are_independent() -> None:
    c = build(EVERYTHING).draw(states(20_000), 0)
    columns = [*c.box, c.flip, c.degrees, c.jitter, *c.factors.T, c.gray, c.blur, c.sigma]
    columns += [c.solarize, *c.turns.T[:1]]
    table = np.corrcoef(torch.stack([v.double() for v in columns]).numpy())
    table[:4, :4] = 0  # a box is one thing
    np.fill_diagonal(table, 0)
    assert abs(table).max() < 4.5 / math.sqrt(20_000)


def test_an_operation_switched_off_leaves_the_others_as_they_were() -> None:
    all_on = build(EVERYTHING).draw(states(50), 1)
    without = build(Augment("byol", blur=(0, 0), jitter=(0, 0.8, 0.8, 0.4))).draw(states(50), 1)
    assert without.blur is None
    assert torch.equal(torch.stack(all_on.box), torch.stack(without.box))
    assert torch.equal(all_on.factors[:, 1:], without.factors[:, 1:])
    order = all_on.turns[all_on.turns > 0].view(-1, 3)
    assert torch.equal(order, without.turns)
    assert torch.equal(all_on.flip, without.flip)
    whole = build(Augment("byol", crop=(1, 1))).draw(states(50), 1)
    assert whole.box is None
    assert torch.equal(whole.gray, all_on.gray)


@pytest.mark.parametrize(
    ("name", "channels", "used"),
    [
        ("flip", 3, {"flip"}),
        ("dcco", 3, {"flip", "box", "jitter", "factors", "turns", "gray"}),
        ("dcco", 1, {"flip", "box", "jitter", "factors", "turns"}),
        ("digits", 1, {"degrees", "box", "jitter", "factors", "turns"}),
    ],
)
def test_nothing_is_drawn_for_operations_that_a_preset_lacks(
    name: str, channels: int, used: set[str]
) -> None:
    choices = build(name, channels).draw(states(8), 0)
    assert {key for key, value in vars(choices).items() if value is not None} == used
    assert build(name, channels).colours[3] == (name == "dcco" and channels == 3)


# ---- crop boxes


def crop_as_documented(
    u: list[float], scale: tuple[float, float], size: tuple[int, int]
) -> tuple[int, int, int, int]:
    """RandomResizedCrop's rule, one sample at a time."""
    height, width = size
    for area, ratio in zip(u[2:12], u[12:22], strict=True):
        target = height * width * (scale[0] + (scale[1] - scale[0]) * area)
        aspect = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * ratio)
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(u[0] * (height - h + 1)), int(u[1] * (width - w + 1)), h, w
    w, h = min(width, round(height * 4 / 3)), min(height, round(width / (3 / 4)))
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize("size", [(32, 32), (20, 33), (40, 17), (2, 3)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.9, 1.0), (0.3, 0.3), (0.01, 0.5)])
def test_crop_boxes_follow_the_rule(size: tuple[int, int], scale: tuple[float, float]) -> None:
    u = random.uniform(states(500), 22)
    boxes = torch.stack(augment.crop_box(u, scale, size), 1)
    expected = [crop_as_documented(row, scale, size) for row in u.double().tolist()]
    assert boxes.long().tolist() == [list(box) for box in expected]


@pytest.mark.parametrize("size", [(10, 100), (10, 101), (99, 12), (98, 12)])
def test_boxes_that_never_fit_give_torchvisions_middle(size: tuple[int, int]) -> None:
    u = random.uniform(states(20), 22)
    boxes = torch.stack(augment.crop_box(u, (0.9, 1.0), size), 1)
    expected = v2.RandomResizedCrop(8, scale=(0.9, 1.0)).make_params([torch.zeros(3, *size)])
    assert (boxes.long() == torch.tensor(list(expected.values()))).all()


# ---- the configuration


def test_configured_values_replace_the_presets_of_the_papers() -> None:
    byol, dcco, moco = PRESETS["byol"], PRESETS["dcco"], PRESETS["moco-v1"]
    assert (byol.blur, byol.solarize) == ((1.0, 0.1), (0.0, 0.2))
    assert dcco.blur == PRESETS["dcco-derm"].solarize == (0.0, 0.0)
    # FedEMA's program: torchvision's ColorJitter(0.4, 0.4, 0.4, 0.1).
    assert (moco.crop, moco.flip, moco.gray) == ((0.08, 1.0), 0.5, 0.2)
    assert (moco.jitter, moco.jitter_p) == ((0.4, 0.4, 0.4, 0.1), 0.8)
    assert moco.blur == moco.solarize == (0.0, 0.0)
    a = build(Augment("dcco", flip=0.0, blur=(0.3, 0.4), crop=(0.5, 0.9)))
    assert a.preset == replace(dcco, flip=0.0, blur=(0.3, 0.4), crop=(0.5, 0.9))


@pytest.mark.parametrize(("side", "kernel"), [(8, 3), (32, 3), (64, 7), (96, 9), (224, 23)])
def test_blur_kernel_is_a_tenth_of_the_side(side: int, kernel: int) -> None:
    assert build("byol", 3, (side, side + 50)).kernel == kernel


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (Augment("dco"), "name"),
        (Augment(crop=(0.5, 0.4)), "crop"),
        (Augment(small_crop=(0.5, 0.4)), "small_crop"),
        (Augment(jitter=(0.4, 0.4, 0.4, 0.6)), "jitter"),
    ],
)
def test_refusals(given: Augment, key: str) -> None:
    with refused(f"augment.{key}", getattr(given, key)):
        build(given)


# ---- the GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@EACH
def test_a_captured_graph_on_the_gpu_gives_what_the_cpu_gives(name: str | Augment) -> None:
    a, x, state = build(name), made(64, 3, 32, 32), states(64)
    images, counters = x.cuda(), torch.zeros_like(state).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        a.views(images, counters, 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = a.views(images, counters, 1)
    counters.copy_(state)
    graph.replay()
    torch.testing.assert_close(result.cpu(), a.views(x, state, 1), rtol=0, atol=2e-5)
