"""The dual encoding network (DCCO paper, Figure 1): one or two towers of encoder and head."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from fedssl.config import Encoder, Initializer
from fedssl.data.random import key
from fedssl.models.checkpoints import load_checkpoint
from fedssl.models.encoders import Timm
from fedssl.models.encoders import encoder as make_encoder
from fedssl.models.norms import BatchNorm, Norm, mixes_samples
from fedssl.models.published import load_published
from fedssl.models.trainable import choose_trainable
from fedssl.models.weights import find_model, tower_file
from fedssl.models.wrapped import OwnEncoder
from fedssl.util.errors import UserError, format_resume


class Backbone(Protocol):
    """An encoder, as the layers on it see it."""

    features: int


class Heads(NamedTuple):
    """The layers on an encoder: a tower's head, and a predictor that no target network has."""

    head: nn.Module
    predictor: nn.Module | None = None


def mlp(inputs: int, widths: tuple[int, ...], norm: Norm) -> nn.Sequential:
    """Build a projector: linear, norm and ReLU for each layer; the last layer is only linear.

    >>> mlp(2048, (1024, 1024, 1024), Norm("group"))[-1]
    Linear(in_features=1024, out_features=1024, bias=True)
    """
    layers: list[nn.Module] = []
    for width in widths[:-1]:
        layers += norm.linear(inputs, width)
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, widths[-1]))


class Tower(nn.Module):
    """An encoder, and the head that is discarded after training."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return the encoding that the objective uses."""
        return self.head(self.encoder(x))


class Network(nn.Module):
    """One tower for both inputs (Figure 1 a) or one for each (b and c).

    BYOL and SimSiam put a predictor on each tower. Predictors come after all towers, so that the
    towers' parameters are the first part of the flat vector: what a target network follows.
    """

    def __init__(
        self,
        towers: Iterable[nn.Module],
        predictors: Iterable[nn.Module] = (),
        joint: bool = False,
    ) -> None:
        super().__init__()
        self.joint = joint  # batch norm sees all inputs as one batch
        self.towers = nn.ModuleList(towers)
        self.predictors = nn.ModuleList(predictors)
        self.has_batch_norm = mixes_samples(self)
        self.start = ""  # a sentence on the weights that were loaded
        self._stacked = False

    @contextlib.contextmanager
    def stacked(self, views: int) -> Iterator[None]:
        """Compute all views in one pass, with fewer and larger kernels and the same numbers.

        Batch norm uses each view's own statistics. A joint network already needs one pass.
        """
        norms = [m for m in self.modules() if isinstance(m, BatchNorm)]
        self._stacked = bool(norms) and len(self.towers) == 1 and views > 1 and not self.joint
        for norm in norms if self._stacked else ():
            norm.views = views
        try:
            yield
        finally:
            self._stacked = False
            for norm in norms:
                norm.views = 1

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the encodings of the inputs: two or one (F and G), or with small views more."""
        one_tower = len(self.towers) == 1 and len(inputs) > 1
        # Without batch norm samples are independent, so one pass gives the same numbers.
        one_pass = one_tower and (self._stacked or self.joint or not self.has_batch_norm)
        if not one_pass:
            return tuple(self.towers[i % len(self.towers)](x) for i, x in enumerate(inputs))
        encodings: tuple[Tensor, ...] = ()
        while len(encodings) < len(inputs):  # one pass for neighbours of one shape
            first = last = len(encodings)
            while last < len(inputs) and inputs[last].shape == inputs[first].shape:
                last += 1
            encodings += self.towers[0](torch.cat(inputs[first:last])).chunk(last - first)
        return encodings

    def predict(self, encodings: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the predictions from encodings, or the encodings if there is no predictor."""
        if not self.predictors:
            return encodings
        if self._stacked:
            return self.predictors[0](torch.cat(encodings)).chunk(len(encodings))
        return tuple(self.predictors[i % len(self.predictors)](z) for i, z in enumerate(encodings))


def build(
    settings: Encoder,
    channels: tuple[int, ...],
    size: int,
    make_heads: Callable[[Backbone, Norm], Heads],
    seed: int,
    joint: bool = False,
) -> Network:
    """Build an initialized network; ``channels`` of each modality (one entry, or two for pairs)."""
    norm = Norm("batch" if settings.norm == "batch" else "group", settings.groups)
    towers, predictors = [], []
    for i in range(settings.towers):
        encoder = make_encoder(settings, channels[i % len(channels)], size, seed)
        heads = make_heads(encoder, norm)
        towers.append(Tower(encoder, heads.head))
        if heads.predictor is not None:
            predictors.append(heads.predictor)
    network = Network(towers, predictors, joint)
    initialize(network, seed, settings.initializer)
    load_encoders(network, settings)
    for tower in towers:
        choose_trainable(tower.encoder, settings, seed)
    network.has_batch_norm = mixes_samples(network)
    return network


def initialize(module: nn.Module, seed: int, initializer: Initializer = "he") -> None:
    """Draw every weight from a generator of its own, seeded by its name and ``seed``.

    Convolutions: He et al. 2015 (fan out). Linear layers: uniform within 1/√inputs, biases 0. With
    ``torch``, convolutions and biases are uniform too, as in torch's layers. A user's own encoder
    keeps the weights that it has.
    """
    own = (each for each in module.modules() if isinstance(each, OwnEncoder))
    kept = {layer for encoder in own for layer in encoder.modules()}
    for prefix, child in module.named_modules():
        if child in kept or not isinstance(child, (nn.Conv2d, nn.Linear)):
            continue
        name = zlib.crc32(prefix.encode())
        generator = torch.Generator().manual_seed(key(seed, "init", name) % 2**63)
        with torch.no_grad():
            bound = 1 / math.sqrt(child.weight[0].numel())
            if isinstance(child, nn.Conv2d) and initializer == "he":
                fan = child.out_channels * child.kernel_size[0] * child.kernel_size[1]
                child.weight.normal_(0, math.sqrt(2 / fan), generator=generator)
            else:
                child.weight.uniform_(-bound, bound, generator=generator)
            if child.bias is not None and initializer == "he":
                child.bias.zero_()
            elif child.bias is not None:
                child.bias.uniform_(-bound, bound, generator=generator)


def load_encoders(network: Network, settings: Encoder) -> None:
    """Load the weights that the encoders start from, if the configuration names any.

    A second tower takes the second encoder of a run if there is one, else the same weights.
    """
    encoders = [cast(Tower, tower).encoder for tower in network.towers]
    for encoder in encoders if settings.pretrained else ():
        network.start = load_published(cast(Timm, encoder))
    if settings.init is None:
        return
    path = find_model(Path(settings.init).expanduser(), "encoder.init")
    if (path / "config.yaml").exists() and not tower_file(path).exists():
        raise UserError(
            "the run is not finished",
            key="encoder.init",
            value=settings.init,
            fix=f"Finish it with {format_resume(settings.init)}.",
        )
    first, second = (tower_file(path, tower) for tower in range(2))
    first = first if first.exists() else path
    for encoder, file in zip(encoders, (first, second if second.exists() else first), strict=False):
        network.start = load_checkpoint(encoder, file, settings.init)
