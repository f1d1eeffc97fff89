"""Sections of the configuration about images and the encoder, as frozen dataclasses."""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass, replace
from typing import Literal

from fedssl.config import plugins
from fedssl.config.catalogue import TIMM, DataName, EncoderName, Initializer
from fedssl.config.keys import key
from fedssl.util.errors import UserError, suggest

LARGEST_IMAGE = 8192  # pixels


def _check_name(key: str, name: str, known: tuple[str, ...], *others: str) -> None:
    """Refuse a name that is neither fedssl's nor that of a user's own object."""
    if name not in known and not plugins.is_own(name):
        fix = f"Choose one of {', '.join((*known, *others))}, or FILE.py:NAME."
        raise UserError(f"unknown{suggest(name, known)}", key=key, value=name, fix=fix)


@dataclass(frozen=True)
class Data:
    """The images, and how they become arrays."""

    name: DataName | str = key(
        "digits",
        help="Data set. `folder` and `paired` read images of your own, `FILE.py:NAME` calls a "
        "function of your own.",
    )
    root: str | None = key(
        None,
        path=True,
        affects="location",
        help="Folder of the images. Data sets that fedssl downloads need none.",
    )
    size: int | None = key(
        None,
        ge=2,
        le=LARGEST_IMAGE,
        help="Height and width of stored images in pixels. `null`: the size of the data set or, "
        "for images of your own with `data.shape=whole`, 8/7 of `augment.size`.",
    )
    shape: Literal["square", "whole"] | None = key(
        None,
        help="Part of an image that is stored. `square`: the square in the middle, resized to "
        "`data.size`. `whole`: all of it, with its aspect ratio; a longer side than `data.size` is "
        "reduced to that. `null`: `whole` if `augment.size` is set, else `square`.",
    )
    interpolation: Literal["bilinear", "bicubic"] = key(
        "bilinear",
        help="Interpolation with which images are resized: when they are stored, in views and in "
        "evaluation. `encoder.pretrained` and `encoder.init` bring that of their weights.",
    )
    levels: tuple[Literal["class", "client", "case"], ...] | None = key(
        None,
        needs="name=folder|paired",
        help="Meaning of each folder level below `train/` and `test/`, from the top: "
        "`client,class` is `train/<site>/<class>/`. `null`: detected.",
    )
    channels: int = key(
        3,
        gt=0,
        needs="name=folder|paired",
        help="Channels of stored images. `1`: grey. `3`: in colour. Other numbers: TIFF files with "
        "so many channels.",
    )
    window: tuple[float, float] | None = key(
        None,
        needs="name=folder|paired",
        help="Center and width of the values that are stored as 0 to 255, for images of more than "
        "8 bits; lower and higher values become 0 and 255. `null`: the window in a DICOM file, "
        "else all its values; 0 to 65535 for others.",
    )
    frames: Literal["first", "middle", "all"] = key(
        "first",
        needs="name=folder",
        help="Frames that are used of a file with several: DICOM, TIFF, GIF or WebP.",
    )
    corrupt: Literal["fail", "skip"] = key(
        "fail",
        needs="name=folder|paired|tiny-imagenet",
        help="What happens with an image that cannot be read: stop, or leave it out.",
    )
    val: bool = key(
        False,
        needs="name=folder",
        help="Read the validation images in `val/`, on which `evaluate.preset=derm` chooses.",
    )
    halves: bool = key(False, help="Use the left and right half of each image as two modalities.")
    labels: int | None = key(
        None,
        gt=0,
        help="Train on this many images only, drawn evenly from the classes. `null`: on all.",
    )
    holdout: float = key(
        0.0,
        ge=0,
        lt=1,
        help="Share of the training images that no client gets, drawn evenly from the classes. "
        "The protocol `semi` fine-tunes on them (FedEMA, appendix B.3); `heldout` evaluates on "
        "them.",
    )
    stream: Literal["auto", "on", "off"] = key(
        "auto",
        affects="speed",
        help="Read the images of each step from the cache, ahead of the step. `off`: keep all "
        "images in the memory of the device. `auto`: stream images that take more than half of "
        "the free memory, of this machine or of the GPU.",
    )
    cache: str | None = key(
        None,
        path=True,
        affects="nothing",
        help="Folder for decoded images, downloads and compiled code. `null`: `$FEDSSL_CACHE`, "
        "else `~/.cache/fedssl`.",
    )

    def __post_init__(self) -> None:
        _check_name("data.name", self.name, typing.get_args(DataName))


@dataclass(frozen=True)
class Augment:
    """Augmentation of training images: a preset, and keys that replace its values."""

    name: str = key(
        "dcco",
        help="Preset, named after the paper that uses it. `FILE.py:NAME`: a function of your own.",
    )
    size: int | None = key(
        None,
        ge=2,
        le=LARGEST_IMAGE,
        help="Height and width of a view in pixels, and of images in evaluation. `null`: "
        "`data.size`.",
    )
    crop: tuple[float, float] | None = key(
        None,
        gt=0,
        le=1,
        help="Smallest and largest area of a random resized crop, as shares of the image.",
    )
    flip: float | None = key(None, ge=0, le=1, help="Probability of a horizontal flip.")
    rotate: float | None = key(
        None, ge=0, le=180, help="Largest random rotation to either side, in degrees."
    )
    jitter: tuple[float, float, float, float] | None = key(
        None, ge=0, help="Strength of changes of brightness, contrast, saturation and hue."
    )
    jitter_p: float | None = key(None, ge=0, le=1, help="Probability of colour jitter.")
    gray: float | None = key(None, ge=0, le=1, help="Probability of conversion to grayscale.")
    blur: tuple[float, float] | None = key(
        None, ge=0, le=1, help="Probabilities of Gaussian blur in the first and in the second view."
    )
    solarize: tuple[float, float] | None = key(
        None, ge=0, le=1, help="Probabilities of solarization in the first and in the second view."
    )
    noise: float | None = key(
        None, ge=0, help="Standard deviation of Gaussian noise. Pixels are between 0 and 1."
    )
    small: int = key(
        0,
        ge=0,
        help="Number of small views of each image beside its two views (multi-crop), for "
        "`objective.name=swav`.",
    )
    small_size: int | None = key(
        None,
        ge=2,
        le=LARGEST_IMAGE,
        needs="small",
        help="Height and width of a small view in pixels. `null`: 3/7 of a view's, 96 for 224.",
    )
    small_crop: tuple[float, float] = key(
        (0.05, 0.14),
        gt=0,
        le=1,
        needs="small",
        help="Smallest and largest area of a small view, as shares of the image. SwAV has 0.14 to "
        "1 for `augment.crop` beside it.",
    )


@dataclass(frozen=True)
class Encoder:
    """The network that a run trains and keeps."""

    name: EncoderName | str = key(
        "tiny",
        help="Architecture. `timm/NAME`: a backbone from timm. `FILE.py:NAME`: a module of your "
        "own.",
    )
    norm: Literal["batch", "group", "frozen"] = key(
        "group",
        help="Normalization layers. With `group`, convolutions have weight standardization. "
        "`frozen`: batch norm that stays at the statistics of `encoder.pretrained` or "
        "`encoder.init`, with group norm in projector and predictor. `vit-tiny` and backbones from "
        "timm keep their normalization; there `batch` and `group` apply to projector and "
        "predictor.",
    )
    groups: int = key(32, gt=0, help="Number of groups of group normalization.")
    train: str = key(
        "all",
        help="Parameters of the encoder that train; only these are sent, averaged and stored. "
        "`all`. `last:N`: the last N blocks. `norms`: weights and biases of normalization layers. "
        "`lora:RANK`: low-rank updates of linear layers and 1 × 1 convolutions. `none`. Projector, "
        "predictor and other heads always train.",
    )
    factors: Literal["one", "both"] = key(
        "one",
        help="Factors of `encoder.train=lora:RANK` that train. `one`: the other is random and "
        "constant, so that the mean of the clients' factors gives the mean of their updates. "
        "`both`: twice as many numbers, and after several local steps only an approximate mean.",
    )
    towers: Literal[1, 2] = key(
        1,
        help="Number of networks: one for both views or modalities, or one for each.",
    )
    pretrained: bool = key(
        False,
        help="Start from timm's published weights of a `timm/NAME` backbone, from the cache of "
        "this machine or from the Hugging Face hub.",
    )
    init: str | None = key(
        None,
        path=True,
        help="Weights to start from: the folder of a run or an export, or a file of weights "
        "(safetensors, or a checkpoint of timm, torchvision, Hugging Face or lightly).",
    )
    mean: tuple[float, ...] | None = key(
        None,
        nonempty=True,
        help="Mean that the encoder subtracts from pixels between 0 and 1: one number, or one per "
        "channel. With three numbers, grey images are repeated in three channels. `null`: none, "
        "or that of `encoder.pretrained` or `encoder.init`.",
    )
    std: tuple[float, ...] | None = key(
        None,
        gt=0,
        nonempty=True,
        help="Standard deviation that the encoder divides by, like `encoder.mean`.",
    )
    initializer: Initializer = key(
        "he",
        help="Random initial weights. `he`: He et al. 2015, as torchvision's ResNets. `torch`: "
        "uniform within 1/√inputs, as torch's layers.",
    )
    patch: int = key(2, gt=0, needs="name=vit-tiny", help="Height and width of patches in pixels.")

    def __post_init__(self) -> None:
        if not self.name.startswith(TIMM):
            _check_name("encoder.name", self.name, typing.get_args(EncoderName), f"{TIMM}NAME")
            if self.pretrained:
                raise UserError(
                    f"encoder.name={self.name} has no published weights",
                    key="encoder.pretrained",
                    value=True,
                    fix=f"Use encoder.name={TIMM}NAME, or encoder.init=FILE.",
                    against="encoder.name",
                )
        if not re.fullmatch(r"all|norms|none|(last|lora):[1-9]\d*", self.train):
            raise UserError(
                "unknown",
                key="encoder.train",
                value=self.train,
                fix="Use all, last:N, norms, lora:RANK or none.",
            )
        if self.pretrained and self.init is not None:
            raise UserError(
                f"given together with encoder.init={self.init}",
                key="encoder.pretrained",
                value=True,
                fix="Give one of the two.",
                against="encoder.init",
            )
        if (self.mean and len(self.mean)) != (self.std and len(self.std)):
            raise UserError(
                f"encoder.std={self.std} has another length",
                key="encoder.mean",
                value=self.mean,
                fix="Give both keys, with as many numbers each.",
            )

    def without_weights(self) -> Encoder:
        """Return the settings of the same network with random weights, all of which train."""
        return replace(self, init=None, pretrained=False, train="all")
