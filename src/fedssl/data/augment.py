"""Augmentation in batches on the device, where every sample has its own random numbers.

What is drawn for a sample is a pure function of its state and the view, so a batch gives what its
samples give one by one, in any order. Each operation is a public function that takes one parameter
a sample, and agrees with torchvision's functional operation of the same name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl import config
from fedssl.data import random
from fedssl.util.errors import UserError

View = int | Tensor
Box = tuple[Tensor, Tensor, Tensor, Tensor]
Table = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Preset:
    """The strength of each operation; pairs of probabilities are those of view 0 and view 1."""

    crop: tuple[float, float] = (1.0, 1.0)  # area range; (1, 1) leaves the image whole
    flip: float = 0.0
    rotate: float = 0.0
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    jitter_p: float = 0.8
    gray: float = 0.0
    blur: tuple[float, float] = (0.0, 0.0)
    solarize: tuple[float, float] = (0.0, 0.0)
    noise: float = 0.0


_BYOL = Preset(
    crop=(0.08, 1.0),
    flip=0.5,
    jitter=(0.4, 0.4, 0.2, 0.1),
    gray=0.2,
    blur=(1.0, 0.1),
    solarize=(0.0, 0.2),
)
_SIMCLR = Preset(crop=(0.08, 1.0), flip=0.5, jitter=(0.8, 0.8, 0.8, 0.2), gray=0.2, blur=(0.5, 0.5))
# Half the colour distortion, no blur.
_SIMCLR_SMALL = dataclasses.replace(_SIMCLR, jitter=(0.4, 0.4, 0.4, 0.1), blur=(0.0, 0.0))

PRESETS: dict[str, Preset] = {
    # Appendix B, CIFAR-100: "all the data augmentations from Grill et al. (2020) except blur".
    "dcco": dataclasses.replace(_BYOL, blur=(0.0, 0.0)),
    # Appendix B, DERM: "random rotation and all … except solarization". The paper does not say how
    # far it rotates; a skin photo has no upright, so any angle is our reading.
    "dcco-derm": dataclasses.replace(_BYOL, solarize=(0.0, 0.0), rotate=180.0),
    "byol": _BYOL,
    "simclr": _SIMCLR,
    "fedema": dataclasses.replace(_SIMCLR, blur=(0.0, 0.0)),
    # FedMoCoV1 of the FedEMA paper: "described in its paper" (He et al. 2020), which names the
    # operations and no numbers; these are the authors' program's.
    "moco-v1": _SIMCLR_SMALL,
    # SimCLR's own form for CIFAR.
    "dec-ssl": _SIMCLR_SMALL,
    # Small grey digits, where a flip or a half turn changes what the image means.
    "digits": Preset(crop=(0.5, 1.0), rotate=15.0, jitter=(0.4, 0.4, 0.0, 0.0)),
    "flip": Preset(flip=0.5),
    "none": Preset(),
}

_COLOURS = ("brightness", "contrast", "saturation", "hue")
_TRIES = 10
FEW = 200_000  # numbers of a view: 64 colour images of 32 pixels (benchmarks/NOTES.md)

# Which of a sample's draws serves what. The places are fixed, so that switching one operation off
# leaves the others as they were; the crop takes the most and stands last.
_HAPPENS = slice(0, 5)  # flip, jitter, gray, blur, solarize
_RANGES = slice(5, 11)  # degrees, sigma, the four colour factors
_TURNS = slice(11, 15)
_CROP = 15


@dataclass(frozen=True)
class Choices:
    """What is drawn for each sample of one view; none where the preset has no such operation."""

    flip: Tensor | None = None
    degrees: Tensor | None = None
    box: Box | None = None
    jitter: Tensor | None = None
    factors: Tensor | None = None  # [B, 4]: of brightness, contrast, saturation, hue
    turns: Tensor | None = None  # [B, n]: which of the n in use comes first, second, …
    gray: Tensor | None = None
    blur: Tensor | None = None
    sigma: Tensor | None = None
    solarize: Tensor | None = None


@dataclass(frozen=True)
class Augmentation:
    """A preset for images of one shape.

    >>> augmentation = Augmentation.from_config(config.Augment("byol"), 3, (32, 32))
    >>> first = augmentation.views(images, state, view=0)
    """

    preset: Preset
    channels: int
    size: tuple[int, int]
    # What ``draw`` compares, scales and sorts with, on each device: copying would make a GPU wait.
    _tables: dict[torch.device, Table] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def from_config(
        cls, augment: config.Augment, channels: int, size: tuple[int, int]
    ) -> Augmentation:
        """The named preset, with the configuration's own values in place of the preset's."""
        if augment.name not in PRESETS:
            raise UserError(
                f"augment.name={augment.name}: unknown; choose one of {', '.join(PRESETS)}"
            )
        given = {k: v for k, v in vars(augment).items() if k != "name" and v is not None}
        preset = dataclasses.replace(PRESETS[augment.name], **given)
        _check(preset)
        return cls(preset, channels, size)

    @property
    def colours(self) -> tuple[str, ...]:
        """The operations of the colour jitter that are in use."""
        known = _COLOURS if self.channels == 3 else _COLOURS[:2]
        strengths = dict(zip(_COLOURS, self.preset.jitter, strict=True))
        return tuple(name for name in known if strengths[name] and self.preset.jitter_p)

    @property
    def kernel(self) -> int:
        """The blur's kernel size: odd, about a tenth of the shorter side (23 for 224 pixels)."""
        return max(3, min(self.size) // 10 | 1)

    def views(
        self, images: Tensor, state: Tensor, view: View, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """View 0 or 1 of uint8 ``images [B, C, H, W]``: the same shape, between 0 and 1.

        ``state [B]`` is one state of the counter-based hash for each sample; ``view`` may be one
        number for each, too.
        """
        height, width = images.shape[2:]
        if (height, width) != self.size:
            raise ValueError(f"augmentation of {self.size} images got {(height, width)}")
        x = images.to(dtype) / 255
        if self.preset == PRESETS["none"]:
            return x
        c = self.draw(state, view)
        if c.degrees is not None:
            x = rotate(x, c.degrees)
        if c.box is not None:
            x = resized_crop(x, *c.box, self.size, c.flip)
        elif c.flip is not None:
            x = _where(c.flip, x, hflip)
        if c.jitter is not None and c.factors is not None and c.turns is not None:
            operation = functools.partial(jitter, names=self.colours)
            x = _where(c.jitter, x, operation, c.factors, c.turns)
        if c.gray is not None:
            x = _where(c.gray, x, grayscale)
        if c.blur is not None and c.sigma is not None:
            x = _where(c.blur, x, functools.partial(gaussian_blur, kernel=self.kernel), c.sigma)
        if c.solarize is not None:
            x = _where(c.solarize, x, solarize)
        if self.preset.noise:
            # Counters start at 0, so -1 leads to numbers that nothing else uses.
            values = random.normal(random.mix(random.mix(state, view), -1), x[0].numel())
            x = x + self.preset.noise * values.view(x.shape).to(dtype)
        return x.clamp_(0, 1)

    def each(
        self, images: Sequence[Tensor], state: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, ...]:
        """View 0 of the first images and view 1 of the second, as ``views`` gives them.

        Few numbers are handled in one pass: there the calls cost more than what they do.
        """
        first = images[0]
        few = first.device.type == "cpu" and first.numel() <= FEW
        if len(images) == 1 or not few or any(x.shape != first.shape for x in images):
            return tuple(self.views(x, state, view, dtype) for view, x in enumerate(images))
        view = torch.arange(len(images)).repeat_interleave(len(state))
        both = self.views(torch.cat(list(images)), state.repeat(len(images)), view, dtype)
        return both.split(len(state))

    def table(self, device: torch.device) -> Table:
        """The constants of ``draw``; ask once before compiling what uses them."""
        if device not in self._tables:
            self._tables[device] = _table(self.preset, self.colours, device)
        return self._tables[device]

    def draw(self, state: Tensor, view: View) -> Choices:
        """What ``views`` does to each sample."""
        p, colours = self.preset, self.colours
        blurs, solarizes = (
            pair[view] if isinstance(view, int) else max(pair) for pair in (p.blur, p.solarize)
        )
        crops = p.crop != (1.0, 1.0)
        u = random.uniform(random.mix(state, view), _CROP + (2 + 2 * _TRIES if crops else 0))
        probability, low, span, unused = self.table(state.device)
        flip, jitter, gray, blur, solarize = (u[:, _HAPPENS] < probability[view]).unbind(1)
        ranges = low + span * u[:, _RANGES]
        turns = (u[:, _TURNS] + unused).argsort(dim=1, stable=True) if colours else None
        return Choices(
            flip=flip if p.flip else None,
            degrees=ranges[:, 0] if p.rotate else None,
            box=crop_box(u[:, _CROP:], p.crop, self.size) if crops else None,
            jitter=jitter if colours else None,
            factors=ranges[:, 2:] if colours else None,
            turns=None if turns is None else turns[:, : len(colours)],
            gray=gray if p.gray and self.channels == 3 else None,
            blur=blur if blurs else None,
            sigma=ranges[:, 1] if blurs else None,
            solarize=solarize if solarizes else None,
        )


def _table(preset: Preset, colours: tuple[str, ...], device: torch.device) -> Table:
    """Probabilities, low ends and widths of ranges, and which colours are unused."""
    p = preset
    probability = [[p.flip, p.jitter_p, p.gray, p.blur[v], p.solarize[v]] for v in (0, 1)]
    ranges = [(-p.rotate, p.rotate), (0.1, 2.0)]
    ranges += [(max(0.0, 1 - strength), 1 + strength) for strength in p.jitter[:3]]
    ranges += [(-p.jitter[3], p.jitter[3])]
    low, high = torch.tensor(ranges, dtype=torch.float32).T
    unused = torch.tensor([float(name not in colours) for name in _COLOURS])  # sorts them last
    probabilities = torch.tensor(probability, dtype=torch.float32)
    return probabilities.to(device), low.to(device), (high - low).to(device), unused.to(device)


def _check(preset: Preset) -> None:
    """Refuse values that no operation has."""
    p = preset
    for key, value in (("flip", p.flip), ("jitter_p", p.jitter_p), ("gray", p.gray)):
        if not 0 <= value <= 1:
            raise UserError(f"augment.{key}={value}: a probability must be between 0 and 1")
    for key, pair in (("blur", p.blur), ("solarize", p.solarize)):
        if not all(0 <= value <= 1 for value in pair):
            raise UserError(
                f"augment.{key}={_list(pair)}: the probabilities of view 0 and view 1 must be "
                "between 0 and 1"
            )
    if not 0 < p.crop[0] <= p.crop[1] <= 1:
        raise UserError(
            f"augment.crop={_list(p.crop)}: expected the smallest and the largest share of the "
            "area, above 0 and at most 1, as in 0.08,1"
        )
    if not all(0 <= value < math.inf for value in p.jitter):
        raise UserError(f"augment.jitter={_list(p.jitter)}: strengths must not be negative")
    if p.jitter[3] > 0.5:
        raise UserError(
            f"augment.jitter={_list(p.jitter)}: the fourth, hue, must be at most 0.5 (half a turn)"
        )
    if not 0 <= p.rotate <= 180:
        raise UserError(f"augment.rotate={p.rotate}: must be between 0 and 180 degrees")
    if not 0 <= p.noise < math.inf:
        raise UserError(f"augment.noise={p.noise}: a standard deviation must not be negative")


def _list(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _dense(x: Tensor) -> bool:
    """Whether to compute for all samples and select.

    Finding the chosen ones would make a GPU wait, and a compiled step cannot do it.
    """
    return x.device.type != "cpu" or torch.compiler.is_compiling()


def _where(
    chosen: Tensor, x: Tensor, operation: Callable[..., Tensor], *parameters: Tensor
) -> Tensor:
    """``operation(x, *parameters)`` for the chosen samples; may overwrite ``x``."""
    if _dense(x):
        return torch.where(chosen.view(-1, 1, 1, 1), operation(x, *parameters), x)
    index = chosen.nonzero().squeeze(1)
    if len(index) == len(x):
        return operation(x, *parameters)
    if len(index) == 0:
        return x
    return x.index_copy_(0, index, operation(x[index], *(p[index] for p in parameters)))


def _each(parameter: Tensor, x: Tensor) -> Tensor:
    """One number a sample, to multiply images with."""
    return parameter.to(x.dtype).view(-1, 1, 1, 1)


def crop_box(u: Tensor, scale: tuple[float, float], size: tuple[int, int]) -> Box:
    """Top, left, height and width of random crops, from 22 uniform numbers a sample.

    As torchvision's RandomResizedCrop: the first of ten boxes with a random share of the area and
    an aspect ratio between 3/4 and 4/3 that fits; if none does, the largest one in the middle.
    """
    height, width = size
    # In float64, so that a rounding error practically never decides about a pixel.
    place, areas, ratios = u.double().split((2, _TRIES, _TRIES), 1)
    least, most = (share * height * width for share in scale)
    side = (least + (most - least) * areas).sqrt_()  # of a square
    stretch = (math.log(4 / 3) * (ratios - 0.5)).exp_()  # square root of the aspect ratio
    h, w = (side / stretch).round_(), (side * stretch).round_()
    fits = (h <= height) & (w <= width)
    if least < 1:
        fits &= h * w > 0
    # The fallback is one more try, which always fits.
    first = F.pad(fits, (0, 1), value=True).byte().argmax(1, keepdim=True)
    h = F.pad(h, (0, 1), value=min(height, round(width * 4 / 3))).gather(1, first)
    w = F.pad(w, (0, 1), value=min(width, round(height * 4 / 3))).gather(1, first)
    # Just under one half is the middle, rounded down.
    place = place.masked_fill(first == _TRIES, 0.5 - 1e-6)
    top = (place[:, :1] * (height + 1 - h)).floor_()
    left = (place[:, 1:] * (width + 1 - w)).floor_()
    return top[:, 0], left[:, 0], h[:, 0], w[:, 0]


def resized_crop(
    x: Tensor,
    top: Tensor,
    left: Tensor,
    height: Tensor,
    width: Tensor,
    size: tuple[int, int],
    flip: Tensor | None = None,
) -> Tensor:
    """Each sample's box, resized to ``size`` (bilinear, antialiased), then mirrored where told."""
    rows = _resize_weights(top, height, size[0], x.shape[2], x.dtype)
    columns = _resize_weights(left, width, size[1], x.shape[3], x.dtype, flip)
    return _separable(x, rows, columns)


def _resize_weights(
    start: Tensor,
    length: Tensor,
    out: int,
    total: int,
    dtype: torch.dtype,
    flip: Tensor | None = None,
) -> Tensor:
    """``[B, out, total]``: how much of each input pixel goes into each output pixel.

    A triangle around the output pixel's place, as wide as the larger of the two kinds of pixel.
    """
    start, length = start.to(dtype)[:, None], length.to(dtype)[:, None]
    target = torch.arange(out, device=start.device, dtype=dtype) + 0.5
    if flip is not None:
        target = torch.where(flip[:, None], out - target, target)
    scale = length / out
    reach = scale.clamp(min=1)
    centre = target * scale / reach
    source = torch.arange(total, device=start.device, dtype=dtype) + 0.5 - start
    outside = (source < 0) | (source > length)
    source = (source / reach).masked_fill(outside, math.inf)  # infinitely far: no weight
    weights = (source[:, None, :] - centre[:, :, None]).abs_().neg_().add_(1).clamp_(min=0)
    return weights.div_(weights.sum(2, keepdim=True))


def _separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """A linear map of each image's columns, and one of its rows."""
    batch, channels, height, width = x.shape
    # All channels in one product; the same for the rows would need them copied twice.
    x = x.reshape(batch, channels * height, width) @ columns.mT
    return rows[:, None] @ x.view(batch, channels, height, -1)


def hflip(x: Tensor) -> Tensor:
    """Mirror images, left to right."""
    return x.flip(3)


def rotate(x: Tensor, degrees: Tensor) -> Tensor:
    """Turn images counter-clockwise about their middle (bilinear, black outside)."""
    height, width = x.shape[2:]
    angle = torch.deg2rad(degrees.to(x.dtype))
    cos, sin, zero = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle)
    theta = torch.stack(
        (cos, -sin * (height / width), zero, sin * (width / height), cos, zero), dim=1
    )
    grid = F.affine_grid(theta.view(-1, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="zeros", align_corners=False)


def jitter(x: Tensor, factors: Tensor, turns: Tensor, names: tuple[str, ...]) -> Tensor:
    """Colour jitter: each sample applies the named operations in its own order.

    Of brightness, contrast, saturation and hue, sample ``i`` applies number ``turns[i, 0]`` first;
    number ``k`` is applied with ``factors[i, k]``.
    """
    for turn in turns.unbind(1):
        now = {name: turn == _COLOURS.index(name) for name in names}
        factor = factors.gather(1, turn[:, None]).squeeze(1)
        hue = now.get("hue")
        ratio = factor if hue is None else torch.where(hue, 1.0, factor)
        # Three of the four mix the image with another one, so one mixture serves all samples.
        x = _blend(
            x,
            ratio,
            gray=(1 - ratio) * now["saturation"] if "saturation" in now else None,
            mean=(1 - ratio) * now["contrast"] if "contrast" in now else None,
        )
        if hue is not None:
            x = _where(hue, x, adjust_hue, factor)
    return x


def _blend(
    x: Tensor, factor: Tensor, gray: Tensor | None = None, mean: Tensor | None = None
) -> Tensor:
    """``factor`` times ``x``, plus shares of its grey version and of that one's mean."""
    out = x * _each(factor, x)
    if gray is None and mean is None:
        return out.clamp_(0, 1)
    luma = _luma(x)
    if mean is not None:
        average = luma.mean((1, 2, 3), keepdim=True) * _each(mean, x)
        out += average if gray is None else luma * _each(gray, x) + average
    elif gray is not None:
        out += luma * _each(gray, x)
    return out.clamp_(0, 1)


def _luma(x: Tensor) -> Tensor:
    """The grey version of colour images ``[B, 1, H, W]``; other images are as grey as they get."""
    if x.shape[1] != 3:
        return x
    red, green, blue = x.split(1, dim=1)
    return (0.2989 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def adjust_brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Mix with black: factor 0 gives black, 1 the image itself, 2 twice the brightness."""
    return _blend(x, factor)


def adjust_contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Mix with the mean of the grey version."""
    return _blend(x, factor, mean=1 - factor)


def adjust_saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Mix with the grey version."""
    return _blend(x, factor, gray=1 - factor) if x.shape[1] == 3 else x


def adjust_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the colour circle by ``shift``, of which 1 is a whole turn; value and chroma stay."""
    if x.shape[1] != 3:
        return x
    red, green, blue = x.split(1, dim=1)
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    # Where two channels are highest, both formulas agree. (lerp selects faster than where.)
    turn = (4 * chroma + red - green).lerp_(2 * chroma + blue - red, (value == green).to(x.dtype))
    turn = turn.lerp_(green - blue, (value == red).to(x.dtype))
    turn = turn / (6 * chroma).clamp_(min=1e-12) + _each(shift, x)  # grey has no hue: any will do
    # A channel is lowest opposite its own hue: red at 1/2, green at 5/6, blue at 1/6 of the circle.
    opposite = torch.arange(3, device=x.device, dtype=x.dtype).view(3, 1, 1) / 3 + 1 / 2
    turn = turn - opposite
    turn -= turn.round()
    return turn.abs_().mul_(-6).add_(2).clamp_(0, 1).mul_(-chroma).add_(value)


def grayscale(x: Tensor) -> Tensor:
    """The grey version, with as many channels as before."""
    return _luma(x).expand_as(x).contiguous()


def gaussian_blur(x: Tensor, sigma: Tensor, kernel: int) -> Tensor:
    """Gaussian blur with an odd ``kernel`` size and reflected borders."""
    height, width = x.shape[2:]
    distance = torch.arange(kernel // 2 + 1, device=x.device, dtype=x.dtype)
    taps = torch.exp(-0.5 * (distance / sigma.to(x.dtype)[:, None]) ** 2)
    taps = taps / (2 * taps.sum(1, keepdim=True) - 1)  # all but the middle one stand on both sides
    rows = _blur_weights(taps, height)
    return _separable(x, rows, rows if height == width else _blur_weights(taps, width))


def _blur_weights(taps: Tensor, size: int) -> Tensor:
    """``[B, size, size]``: the weight of each pixel in each pixel, mirror images included."""
    i = torch.arange(size, device=taps.device)
    out, source = i[:, None], i[None, :]
    reach = torch.arange(taps.shape[1], device=taps.device)[:, None, None]
    last = size - 1
    count = ((out - source).abs() == reach).to(taps.dtype)
    count += (out + source == reach) & (source > 0)
    count += (2 * last - out - source == reach) & (source < last)
    return (taps @ count.flatten(1)).view(-1, size, size)


def solarize(x: Tensor) -> Tensor:
    """Invert what is 0.5 or brighter."""
    return 0.5 - (x - 0.5).abs_()
