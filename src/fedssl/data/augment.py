"""Augmentation in batches on the device, where every sample has its own random numbers.

The numbers of a sample are a pure function of its state and the view, so a batch gives the same
views as its samples one by one, in any order.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedssl import config
from fedssl.config import plugins
from fedssl.data import random
from fedssl.data.operations import (
    apply_where,
    gaussian_blur,
    grayscale,
    jitter,
    resized_crop,
    rotate,
    solarize,
)
from fedssl.util.errors import UserError, suggest

View = int | Tensor
Sides = tuple[int, int] | tuple[Tensor, Tensor]  # height and width of all images, or of each
Box = tuple[Tensor, Tensor, Tensor, Tensor]
Constants = tuple[Tensor, ...]  # see Augmentation._build_constants
TORCHVISION = (
    "A transform of torchvision: lambda images, draw: torch.stack([transform(i) for i in images])."
)


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

SMALL = 3 / 7  # of the size of a view: 96 pixels for 224
_TRIES = 10
CROP_NUMBERS = 2 + 2 * _TRIES  # uniform numbers that a random crop takes
FEW = 200_000  # numbers of a view: 64 colour images of 32 pixels (benchmarks/NOTES.md)

# Places of a sample's random numbers. They are fixed, so that switching one operation off leaves
# the others unchanged; the crop takes the most and stands last.
_HAPPENS = slice(0, 5)  # flip, jitter, gray, blur, solarize
_RANGES = slice(5, 11)  # degrees, sigma, the four colour factors
_TURNS = slice(11, 15)
_CROP = 15


@dataclass(frozen=True)
class Choices:
    """Random choices for each sample of one view; ``None`` for operations that the preset lacks."""

    flip: Tensor | None = None
    degrees: Tensor | None = None
    box: Box | None = None
    jitter: Tensor | None = None
    factors: Tensor | None = None  # [B, 4]: brightness, contrast, saturation, hue
    turns: Tensor | None = None  # [B, n]: the order of the n colour operations in use
    gray: Tensor | None = None
    blur: Tensor | None = None
    sigma: Tensor | None = None
    solarize: Tensor | None = None


@dataclass(frozen=True)
class Augmentation:
    """A preset for images of some channels, whose views have one size.

    >>> augmentation = Augmentation.from_config(config.Augment("byol"), 3, (32, 32))
    >>> first = augmentation.views(images, state, view=0)
    """

    preset: Preset
    channels: int
    size: tuple[int, int]  # of a view
    interpolation: str = "bilinear"
    small: tuple[Augmentation, ...] = ()  # of each small view
    # The constants of ``draw`` on each device: copying them would make a GPU wait.
    _constants: dict[torch.device, Constants] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def from_config(
        cls,
        augment: config.Augment,
        channels: int,
        size: tuple[int, int],
        interpolation: str = "bilinear",
    ) -> Augmentation:
        """Build the named preset, with values of the configuration in place of the preset's.

        Views have ``augment.size``, else the ``size`` of the images.
        """
        if augment.size is not None:
            size = (augment.size, augment.size)
        if plugins.is_own(augment.name):
            if augment.small:
                problem, fix = "a function of your own makes all views alike", "Leave it out."
                raise UserError(problem, key="augment.small", value=augment.small, fix=fix)
            return OwnAugmentation(
                PRESETS["none"], channels, size, interpolation, name=augment.name
            )
        if augment.name not in PRESETS:
            problem = f"unknown preset{suggest(augment.name, PRESETS)}"
            fix = f"Use one of {', '.join(PRESETS)}, or FILE.py:NAME."
            raise UserError(problem, key="augment.name", value=augment.name, fix=fix)
        names = {field.name for field in dataclasses.fields(Preset)}
        given = {k: v for k, v in vars(augment).items() if k in names and v is not None}
        preset = dataclasses.replace(PRESETS[augment.name], **given)
        _check(preset)
        small = dataclasses.replace(preset, crop=augment.small_crop)
        _check(small, "augment.small_crop")
        side = augment.small_size or max(1, round(min(size) * SMALL))
        views = (cls(small, channels, (side, side), interpolation),) * augment.small
        return cls(preset, channels, size, interpolation, views)

    @property
    def colours(self) -> tuple[bool, ...]:
        """Return for each operation of the colour jitter whether it is in use."""
        # Grey images have no saturation and no hue.
        strengths = self.preset.jitter if self.channels == 3 else (*self.preset.jitter[:2], 0, 0)
        return tuple(bool(strength and self.preset.jitter_p) for strength in strengths)

    @property
    def kernel(self) -> int:
        """Kernel size of the blur: odd, about a tenth of the shorter side (23 for 224 pixels)."""
        return max(3, min(self.size) // 10 | 1)

    def views(
        self,
        images: Tensor,
        state: Tensor,
        view: View,
        dtype: torch.dtype = torch.float32,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Return view 0 or 1 of uint8 ``images [B, C, H, W]``: floats between 0 and 1.

        ``state [B]`` is one state of the counter-based hash for each sample. ``view`` may be one
        number for each sample, too. ``sizes [B, 2]`` are the true heights and widths of images that
        do not fill their frame. Of images that are larger or smaller than a view, a preset without
        crops takes the middle square.
        """
        x, sides = images.to(dtype) / 255, self._sides(images, sizes)
        if self.preset == PRESETS["none"] and sides is None:
            return x
        c = self.draw(state, view, sides)
        if c.degrees is not None:
            x = rotate(x, c.degrees, sizes)
        if c.box is not None:
            x = resized_crop(x, *c.box, self.size, c.flip, self.interpolation)
        elif c.flip is not None:
            x = apply_where(c.flip, x, lambda kept: kept.flip(3))
        if c.jitter is not None and c.factors is not None and c.turns is not None:
            x = apply_where(c.jitter, x, jitter, c.factors, c.turns)
        if c.gray is not None:
            x = apply_where(c.gray, x, grayscale)
        if c.blur is not None and c.sigma is not None:
            blur = functools.partial(gaussian_blur, kernel=self.kernel)
            x = apply_where(c.blur, x, blur, c.sigma)
        if c.solarize is not None:
            x = apply_where(c.solarize, x, solarize)
        if self.preset.noise:
            # Counters start at 0, so -1 leads to numbers that nothing else uses.
            values = random.normal(random.mix(random.mix(state, view), -1), x[0].numel())
            x = x + self.preset.noise * values.view(x.shape).to(dtype)
        return x.clamp_(0, 1)

    def _sides(self, images: Tensor, sizes: Tensor | None) -> Sides | None:
        """Return the images' heights and widths, or ``None`` if they are those of a view."""
        if sizes is not None:
            return sizes[:, 0], sizes[:, 1]
        height, width = images.shape[2:]
        return None if (height, width) == self.size else (height, width)

    def each(
        self,
        images: Sequence[Tensor],
        state: Tensor,
        dtype: torch.dtype = torch.float32,
        sizes: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return view 0 of the first images and view 1 of the second, as ``views`` does.

        Few images are handled in one pass, because calls then cost more than their work.
        """
        first = images[0]
        is_small = first.device.type == "cpu" and first.numel() <= FEW
        if len(images) == 1 or not is_small or any(x.shape != first.shape for x in images):
            return tuple(
                self.views(x, state, view, dtype, None if sizes is None else sizes[view])
                for view, x in enumerate(images)
            )
        view = torch.arange(len(images)).repeat_interleave(len(state))
        together, states = torch.cat(list(images)), state.repeat(len(images))
        both_sizes = None if sizes is None else torch.cat(list(sizes))
        return self.views(together, states, view, dtype, both_sizes).split(len(state))

    def small_views(
        self,
        images: Sequence[Tensor],
        state: Tensor,
        dtype: torch.dtype = torch.float32,
        sizes: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the small views, of the first and of the second images in turn.

        They count as views 2, 3 and so on. Even ones have the probabilities of view 0.
        """
        return tuple(
            small.views(x, state, 2 + k, dtype, None if sizes is None else sizes[k % len(images)])
            for k, small in enumerate(self.small)
            for x in [images[k % len(images)]]
        )

    def constants(self, device: torch.device) -> Constants:
        """Return the constants of ``draw``; call it once before compiling what uses them."""
        for small in set(self.small):
            small.constants(device)
        if device not in self._constants:
            constants = self._build_constants()
            self._constants[device] = tuple(each.to(device) for each in constants)
        return self._constants[device]

    def _build_constants(self) -> Constants:
        """Return probabilities, low ends and widths of ranges, and which colours are unused."""
        p = self.preset
        probabilities = [[p.flip, p.jitter_p, p.gray, p.blur[v], p.solarize[v]] for v in (0, 1)]
        ranges = [(-p.rotate, p.rotate), (0.1, 2.0)]
        ranges += [(max(0.0, 1 - strength), 1 + strength) for strength in p.jitter[:3]]
        ranges += [(-p.jitter[3], p.jitter[3])]
        low, high = torch.tensor(ranges, dtype=torch.float32).T
        unused = torch.tensor([float(not used) for used in self.colours])  # sorted last
        return torch.tensor(probabilities, dtype=torch.float32), low, high - low, unused

    def draw(self, state: Tensor, view: View, sides: Sides | None = None) -> Choices:
        """Draw what ``views`` does to each sample; ``sides`` are those of images of other sizes."""
        p, colours = self.preset, sum(self.colours)
        blurs, solarizes = (
            pair[view % 2] if isinstance(view, int) else max(pair) for pair in (p.blur, p.solarize)
        )
        crops, box = p.crop != (1.0, 1.0), None
        u = random.uniform(random.mix(state, view), _CROP + (CROP_NUMBERS if crops else 0))
        probability, low, span, unused = self.constants(state.device)
        flip, jitter, gray, blur, solarize = (u[:, _HAPPENS] < probability[view % 2]).unbind(1)
        ranges = low + span * u[:, _RANGES]
        turns = (u[:, _TURNS] + unused).argsort(dim=1, stable=True) if colours else None
        if crops:
            box = crop_box(u[:, _CROP:], p.crop, sides or self.size)
        elif sides is not None:
            box = middle_box(u, sides)
        return Choices(
            flip=flip if p.flip else None,
            degrees=ranges[:, 0] if p.rotate else None,
            box=box,
            jitter=jitter if colours else None,
            factors=ranges[:, 2:] if colours else None,
            turns=None if turns is None else turns[:, :colours],
            gray=gray if p.gray and self.channels == 3 else None,
            blur=blur if blurs else None,
            sigma=ranges[:, 1] if blurs else None,
            solarize=solarize if solarizes else None,
        )


@dataclass(frozen=True)
class OwnAugmentation(Augmentation):
    """A user's function (``augment.name=FILE.py:NAME``, or ``fedssl.train(augment=function)``).

    It gets float images ``[B, C, H, W]`` between 0 and 1, and ``draw``: ``draw(n)`` returns ``n``
    uniform random numbers in [0, 1) for each image, ``[B, n]``. They depend on the seed, the round,
    the client, the image and the view alone; so do the function's views if it draws no others.
    """

    name: str = dataclasses.field(kw_only=True)

    @functools.cached_property
    def function(self) -> Callable[[Tensor, Callable[[int], Tensor]], Tensor]:
        """The user's function; a class is called first, without arguments."""
        place = ("augment.name", self.name)
        given = plugins.find_object(*place)
        with plugins.translate_errors(place):
            function: Any = given() if inspect.isclass(given) else given
        problem = plugins.find_call_error(function, "images", "draw")
        if problem is not None:
            fix = f"Take a batch of images and a function that draws random numbers. {TORCHVISION}"
            raise self._error(f"cannot be called with images, draw ({problem})", fix)
        return function

    def views(
        self,
        images: Tensor,
        state: Tensor,
        view: View,
        dtype: torch.dtype = torch.float32,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Return what the function makes of uint8 ``images``, or of their middle squares."""
        images = super().views(images, state, view, dtype, sizes)
        state = random.mix(state, view)
        result = self.function(images, lambda count: random.uniform(state, count).to(dtype))
        if not isinstance(result, Tensor) or result.shape[:2] != images.shape[:2]:
            kind = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            fix = f"Return a tensor with as many images and channels. {TORCHVISION}"
            raise self._error(f"made {kind} of images of the shape {tuple(images.shape)}", fix)
        return result

    def _error(self, problem: str, fix: str) -> UserError:
        return UserError(problem, key="augment.name", value=self.name, fix=fix)


def _check(preset: Preset, key: str = "augment.crop") -> None:
    """Check what the ranges of single numbers do not; ``key`` is that of the crop."""
    if preset.crop[0] > preset.crop[1]:
        problem = "the smallest area is larger than the largest"
        fix = f"Name the smallest first, as in {key}=0.08,1."
        raise UserError(problem, key=key, value=preset.crop, fix=fix)
    if preset.jitter[3] > 0.5:
        problem, fix = "the fourth strength, hue, is more than half a turn", "Use at most 0.5."
        raise UserError(problem, key="augment.jitter", value=preset.jitter, fix=fix)


def crop_box(u: Tensor, scale: tuple[float, float], sides: Sides) -> Box:
    """Return top, left, height and width of random crops, from 22 uniform numbers per sample.

    ``sides`` are the height and width of all images, or of each. The rule is that of torchvision's
    RandomResizedCrop: the first of ten boxes with a random share of the area and an aspect ratio
    between 3/4 and 4/3 that fits; if none does, the largest one in the middle.
    """
    # In float64, so that a rounding error practically never decides about a pixel.
    place, areas, ratios = u.double().split((2, _TRIES, _TRIES), 1)
    height, width = (_column(side, u) for side in sides)
    least, most = (share * height * width for share in scale)
    side = (least + (most - least) * areas).sqrt_()  # of a square
    stretch = (math.log(4 / 3) * (ratios - 0.5)).exp_()  # square root of the aspect ratio
    h, w = (side / stretch).round_(), (side * stretch).round_()
    fits = (h <= height) & (w <= width) & (h * w > 0)
    # The fallback is one more try, which always fits.
    first = F.pad(fits, (0, 1), value=True).byte().argmax(1, keepdim=True)
    last = torch.minimum(height, (width * 4 / 3).round())
    h = torch.cat((h, last), 1).gather(1, first)
    last = torch.minimum(width, (height * 4 / 3).round())
    w = torch.cat((w, last), 1).gather(1, first)
    # Just under one half is the middle, rounded down.
    place = place.masked_fill(first == _TRIES, 0.5 - 1e-6)
    top = (place[:, :1] * (height + 1 - h)).floor_()
    left = (place[:, 1:] * (width + 1 - w)).floor_()
    return top[:, 0], left[:, 0], h[:, 0], w[:, 0]


def middle_box(u: Tensor, sides: Sides) -> Box:
    """Return top, left, height and width of the middle squares, for each row of ``u``."""
    height, width = (_column(side, u)[:, 0] for side in sides)
    side = torch.minimum(height, width)
    return ((height - side) / 2).floor(), ((width - side) / 2).floor(), side, side


def _column(side: int | Tensor, like: Tensor) -> Tensor:
    """Return a side of all images, or of each, as a float64 number for each row of ``like``."""
    if isinstance(side, Tensor):
        return side.to(torch.float64)[:, None]
    return torch.full((len(like), 1), side, dtype=torch.float64, device=like.device)
