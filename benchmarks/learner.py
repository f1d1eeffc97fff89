"""A client of benchmarks/peers.py in plain PyTorch.

Ray's workers import this module: what stands in a script itself cannot be sent to them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import made
from torch import Tensor, nn

from fedssl import config as configuration
from fedssl.data.augment import Augmentation
from fedssl.models.network import Network
from fedssl.objectives.base import Networks
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.byol import BYOL
from fedssl.runs.build import build_network


@dataclass(frozen=True)
class Work:
    """What all peers do in a round."""

    name: str
    device: str
    clients: int
    samples: int  # of a client
    pixels: int
    batch: int  # of a local step
    tree: dict[str, Any]  # of fedssl's configuration

    @property
    def images(self) -> int:
        """How many images a round trains on."""
        return self.clients * (self.samples // self.batch) * self.batch

    @property
    def lr(self) -> float:
        """The clients' learning rate."""
        return float(self.tree["client"]["lr"])


class Learner(nn.Module):
    """Network, augmentation, loss and local training in plain PyTorch."""

    def __init__(self, work: Work, compiled: bool = False) -> None:
        super().__init__()
        config = configuration.build(work.tree)
        self.work, self.autocasts = work, config.precision == "bf16"
        self.objective = configuration.variant("objective", config.objective.name)(config.objective)
        network = build_network(config, self.objective, (3,), work.pixels, 0)
        self.network = network.to(work.device).to(memory_format=torch.channels_last)
        self.target: Network | None = None
        if isinstance(self.objective, BYOL):
            self.target = copy.deepcopy(Network(self.network.towers)).requires_grad_(False)
        self.augmentation = Augmentation.from_config(config.augment, 3, (work.pixels,) * 2)
        self.augmentation.constants(torch.device(work.device))
        self.loss: Callable[[Tensor], Tensor] = self._loss  # pfl-research calls it by this name
        if compiled:
            self.loss = torch.compile(self._loss, dynamic=False)
        torch.backends.cudnn.benchmark = True

    def _loss(self, images: Tensor) -> Tensor:
        state = torch.randint(2**62, (len(images),), device=images.device)
        views = tuple(self.augmentation.views(images, state, view) for view in (0, 1))
        with torch.autocast(self.work.device, torch.bfloat16, enabled=self.autocasts):
            networks = Networks(self.network, None if self.target is None else self._targets, {})
            encodings = self.objective.encode(networks, views, state)
        return self.objective.loss(EncodedBatch(tuple(e.float() for e in encodings)))

    @torch.no_grad()
    def _targets(self, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self.target is not None
        return tuple(self.target(views))

    def metrics(self, images: Tensor) -> dict[str, Any]:
        """Nothing: pfl-research asks for it, and nothing is evaluated."""
        return {}

    def optimizer(self, *parameters: Any, lr: float | None = None) -> torch.optim.Optimizer:
        """SGD; after each step the target network follows."""
        rule = self.work.tree["client"]
        online = self.network.parameters()
        sgd = torch.optim.SGD(
            online,
            lr=lr or rule["lr"],
            momentum=rule.get("momentum", 0.0),
            weight_decay=rule.get("weight_decay", 0.0),
        )
        if self.target is not None:
            sgd.register_step_post_hook(lambda *_: self._follow())
        return sgd

    @torch.no_grad()
    def _follow(self) -> None:
        assert self.target is not None and isinstance(self.objective, BYOL)
        followed: list[Tensor] = list(self.network.towers.parameters())
        share = 1 - self.objective.params.momentum
        follows: list[Tensor] = list(self.target.parameters())
        torch._foreach_lerp_(follows, followed, share)

    def train_client(self, images: Tensor) -> Tensor:
        """Train for an epoch of full batches; return the mean loss."""
        optimizer, losses = self.optimizer(), []
        order = torch.randperm(len(images), device=images.device)
        for chosen in order.split(self.work.batch)[: len(images) // self.work.batch]:
            loss = self.loss(images[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def take_target(self, target: dict[str, Tensor] | None) -> None:
        """Load a client's target network; in its first round, the model that it received."""
        if self.target is not None:
            begin = {k: v for k, v in self.network.state_dict().items() if k.startswith("towers")}
            load(self.target, begin if target is None else target)

    def leave_target(self) -> dict[str, Tensor]:
        """Copy the target network, for its client."""
        return {} if self.target is None else clone(self.target.state_dict())


def load(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load a model's tensors; batch norm here has no counter of batches."""
    module.load_state_dict(state, strict=False)


def clone(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy a model's tensors."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def images_of(work: Work) -> Tensor:
    """The images of all clients: ``[clients, samples, C, H, W]``."""
    images = made(work.clients * work.samples, 3, work.pixels).images[0][:].to(work.device)
    return images.view(work.clients, work.samples, *images.shape[1:])


_opened: dict[str, tuple[Learner, Tensor]] = {}


def open_learner(work: Work) -> tuple[Learner, Tensor]:
    """A learner and the images; made once in each process."""
    if work.name not in _opened:
        _opened[work.name] = Learner(work), images_of(work)
    return _opened[work.name]
