"""Local training written again as one would without fedssl: modules, autograd, torch.optim.SGD.

Ours are only the network's layers and starting values, the order of the samples and the views.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from helpers import made_split
from torch import Tensor, nn

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.data.augment import Augmentation
from fedssl.data.dataset import Split
from fedssl.data.random import key, mix, permutation
from fedssl.engines.local import LocalEngine
from fedssl.runs.build import build_network

State = dict[str, Tensor]


def network_of(config: Config) -> Any:
    objective = configuration.variant("objective", config.objective.name)(config.objective)
    return build_network(config, objective, (1,), 8, 4).double().train()


class Plain:
    """One client, or all data in one place."""

    def __init__(self, config: Config, split: Split, members: range, client: int = 0) -> None:
        self.config, self.client = config, client
        self.images = split.images[0][members.start : members.stop]
        self.augmentation = Augmentation.from_config(config.augment, 1, (8, 8))
        self.network = network_of(config)
        self.target = copy.deepcopy(self.network.towers)
        self.queue = torch.zeros(0, 16, dtype=torch.float64)
        self.pull: tuple[float, list[Tensor]] | None = None

    def receive(self, state: State, target: bool = False) -> None:
        self.network.load_state_dict(state, strict=False)  # no counters of batches
        if target:
            own = {n: p for n, p in self.target.state_dict().items() if "running" in n}
            new = {n: p for n, p in self.network.towers.state_dict().items() if n not in own}
            self.target.load_state_dict(new | own, strict=False)

    def round(self, round: int) -> float:
        """E epochs; the mean loss of the steps."""
        config, p = self.config, self.config.algorithm
        assert p.local_epochs is not None and p.batch is not None
        lr = config.client.lr * 0.5 * (1 + math.cos(math.pi * round / config.rounds))
        learned = list(self.network.parameters())
        if not getattr(config.objective, "stop_gradient", True):
            learned += list(self.target.parameters())
        optimizer = torch.optim.SGD(
            learned, lr, momentum=config.client.momentum, weight_decay=config.client.weight_decay
        )
        losses = []
        for epoch in range(round * p.local_epochs, (round + 1) * p.local_epochs):
            for chosen in self.batches(epoch, p.batch):
                optimizer.zero_grad()
                loss = self.loss(*self.views(epoch, chosen))
                losses.append(float(loss.detach()))
                if self.pull is not None:
                    weight, anchor = self.pull
                    for own, other in zip(self.network.parameters(), anchor, strict=True):
                        loss = loss + weight / 2 * (own - other).square().sum()
                loss.backward()
                optimizer.step()
                self.follow()
        return float(np.mean(losses))

    def batches(self, epoch: int, batch: int) -> list[Tensor]:
        """The last partial one is dropped; a client smaller than a batch has one with all."""
        count = len(self.images)
        if batch >= count:
            return [torch.arange(count)]
        state = key(self.config.seed, "shuffle", self.client, epoch)
        order = torch.from_numpy(permutation(state, count))
        return [order[i : i + batch] for i in range(0, count - batch + 1, batch)]

    def views(self, epoch: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
        state = mix(key(self.config.seed, "augment", epoch), torch.full_like(chosen, self.client))
        state = mix(state, chosen)
        images = self.images[chosen]
        first, second = (
            self.augmentation.views(images, state, view, torch.float64) for view in (0, 1)
        )
        return first, second

    def loss(self, x1: Tensor, x2: Tensor) -> Tensor:
        objective: Any = self.config.objective
        tower = self.network.towers[0]
        z1, z2 = tower(x1), tower(x2)
        if objective.name == "simclr":
            return nt_xent(z1, z2, objective.temperature)
        p1, p2 = z1, z2
        if len(self.network.predictors):
            p1, p2 = (self.network.predictors[0](z) for z in (z1, z2))
        if objective.name == "simsiam":
            if objective.stop_gradient:
                z1, z2 = z1.detach(), z2.detach()
            return -(cosine(p1, z2) + cosine(p2, z1)).mean() / 2
        t1, t2 = (self.target[0](x) for x in (x1, x2))
        if getattr(objective, "stop_gradient", True):
            t1, t2 = t1.detach(), t2.detach()
        if objective.name == "byol":
            return ((2 - 2 * cosine(p1, t2)) + (2 - 2 * cosine(p2, t1))).mean()
        k1, k2 = F.normalize(t1, dim=1), F.normalize(t2, dim=1)
        loss = self.contrast(p1, k2) + self.contrast(p2, k1)
        self.queue = torch.cat((self.queue, k1, k2))[-objective.queue :]
        return loss

    def contrast(self, query: Tensor, keys: Tensor) -> Tensor:
        query = F.normalize(query, dim=1)
        logits = torch.cat(((query * keys).sum(1, keepdim=True), query @ self.queue.T), dim=1)
        temperature = self.config.objective.temperature
        return F.cross_entropy(logits / temperature, torch.zeros(len(query), dtype=torch.long))

    def follow(self) -> None:
        """θ_t ← m θ_t + (1 − m) θ."""
        m = getattr(self.config.objective, "momentum", None)
        if m is None:
            return
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.network.towers.parameters(), strict=True)
            for slow, fast in pairs:
                slow.copy_(m * slow + (1 - m) * fast)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(1)


def nt_xent(z1: Tensor, z2: Tensor, temperature: float) -> Tensor:
    n = len(z1)
    z = F.normalize(torch.cat((z1, z2)), dim=1)
    logits = (z @ z.T / temperature).masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(logits, torch.arange(2 * n).roll(n))


def mean_state(states: list[State], weights: list[int]) -> State:
    shares = [weight / sum(weights) for weight in weights]
    pairs = list(zip(shares, states, strict=True))
    return {name: sum(share * state[name].detach() for share, state in pairs) for name in states[0]}


def loops_of(kind: type[Plain], config: Config, *sizes: int) -> list[Any]:
    """Plain clients that hold the made images one after another."""
    ends = np.cumsum(sizes).tolist()
    return [
        kind(config, made_split(), range(end - size, end), client=k)
        for k, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def mean_network(loops: list[Any]) -> State:
    """The mean of the plain clients' networks by samples."""
    states = [loop.network.state_dict() for loop in loops]
    return mean_state(states, [len(loop.images) for loop in loops])


def assert_network(engine: LocalEngine, vector: Tensor, expected: State) -> None:
    """A flat vector has these parameters and buffers, up to rounding."""
    ours = engine.trainer.flat.named(vector)
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (ours[name] - tensor).norm() <= 1e-8 * tensor.norm() + 1e-10, name


def flat_params(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])
