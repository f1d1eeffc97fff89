"""Measure the cost of federation when clients train for epochs, as ratios of things run in turn.

    python benchmarks/silo.py [--algorithm fedema] [--objective byol] [--clients 5]
        [--samples 1024] [--batch 64] [--encoder tiny] [--width 256] [--device cpu]
        [--precision fp32] [--compile]

Rows: a federated round of one local epoch; the same images as one epoch of centralized training,
through our engine; and as a bare PyTorch loop of the same step with torch.optim. Then what it takes
to switch clients: states in and out, networks loaded and averaged.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch
from common import engine_of, even, made, rounds_of, seconds

from fedssl import config as configuration
from fedssl.data.random import key, mix
from fedssl.engines.local import LocalEngine
from fedssl.federation.client import Client
from fedssl.federation.server import Server
from fedssl.models.network import Network
from fedssl.objectives.base import Networks
from fedssl.objectives.batch import EncodedBatch

PIXELS = 32


def bare_loop(engine: LocalEngine, batch: int) -> Callable[[], None]:
    """One epoch over everything, as a script without a framework would write it."""
    trainer = engine.trainer
    network, objective = copy.deepcopy(trainer.network), trainer.objective
    follows = objective.memory.target
    target = None if follows is None else Network(copy.deepcopy(list(network.towers)))
    constant = None if target is None else torch.no_grad()(target.forward)
    networks = Networks(network, constant, trainer.memory)
    rule, images = trainer.config.client, trainer.images[0][:]

    def one() -> None:
        optimizer = torch.optim.SGD(
            network.parameters(), rule.lr, rule.momentum, weight_decay=rule.weight_decay
        )
        order = torch.randperm(len(images), device=images.device)
        total = torch.zeros((), device=images.device)
        for chosen in order.split(batch):
            if len(chosen) < batch:
                break
            state = mix(key(0, "augment", 0), chosen)
            views = tuple(
                trainer.augmentation.views(images[chosen], state, view, trainer.dtype)
                for view in (0, 1)
            )
            with trainer.autocast():
                encodings = objective.encode(networks, views, state)
            exact = tuple(e.float() for e in encodings)
            loss = objective.loss(EncodedBatch(exact, memory=trainer.memory))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if target is not None and follows is not None:
                with torch.no_grad():
                    for t, o in zip(target.parameters(), network.parameters(), strict=False):
                        t.lerp_(o, 1 - follows.momentum)
            objective.memory.update(trainer.memory, encodings)
            total += loss.detach()
        float(total)

    return one


def switch(engine: LocalEngine, server: Server) -> Callable[[], None]:
    """A round in which every client takes no step: all that is not training."""
    ids = np.arange(len(engine.groups))

    def nothing(self: Client, start: torch.Tensor, *rest: object) -> object:
        self.trainer.load(start)
        zero = start.new_zeros(())
        return zero if self.trainer.compiles else (zero, zero)

    def one() -> None:
        with (
            mock.patch.object(Client, "_steps", nothing),
            mock.patch.object(Client, "_compiled_steps", nothing),
        ):
            engine.algorithm.round(server, engine.cohort(ids, server.round))
        server.round += 1
        float(server.log["loss"])

    return one


def heads(objective: str, width: int) -> dict[str, object]:
    """The objective with heads of [width, width / 2]."""
    widths = [width, width // 2]
    predictor = {"predictor": widths} if objective in ("byol", "simsiam") else {}
    return {"name": objective, "projector": widths, **predictor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="fedema")
    parser.add_argument("--objective", default="byol")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--encoder", default="tiny")
    parser.add_argument("--width", type=int, default=256, help="of the heads; the paper's is 4096")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    o = parser.parse_args()

    torch.set_num_threads(2)
    tree = {
        "augment": {"name": "fedema"},
        "encoder": {"name": o.encoder, "norm": "batch"},
        "objective": heads(o.objective, o.width),
        "algorithm": {"name": o.algorithm, "local_epochs": 1, "batch": o.batch},
        "client": {"lr": 0.032, "momentum": 0.9, "weight_decay": 5e-4},
        "server": {"optimizer": "sgd", "lr": 1.0},
        "device": o.device,
        "precision": o.precision,
        "rounds": 1_000_000,
    }
    base = configuration.build(tree)
    images = o.clients * o.samples
    groups = even(o.clients, o.samples)
    split = made(images, 3, PIXELS)
    federated = engine_of(base, split, groups, o.compile)
    central = engine_of(configuration.with_algorithm(base, "centralized"), split, groups, o.compile)
    rows = {
        "federated round": rounds_of(*federated),
        "centralized": rounds_of(*central),
        "bare loop": bare_loop(central[0], o.batch),
        "switching clients": switch(*federated),
    }
    for work in rows.values():
        seconds(work, o.device)  # the first call allocates and compiles
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(o.repeats):
        for name, work in rows.items():
            times[name].append(seconds(work, o.device))
    print(
        f"{o.algorithm}, {o.objective}, {o.clients} clients of {o.samples}, batch {o.batch}, "
        f"{o.encoder}, {o.device}, {o.precision}{', compiled' if o.compile else ''}"
    )
    for name, values in times.items():
        took = min(values)
        rate = "" if name.startswith("switching") else f"{images / took:10,.0f} images/s"
        print(f"  {name:<18} {1000 * took:9.1f} ms {rate}")

    def ratio(first: str, second: str) -> float:
        # Of the fastest of each: what a busy machine adds is not the program's.
        return min(times[second]) / min(times[first])

    print(f"rate: federated / centralized   {ratio('federated round', 'centralized'):.3f}"
          "   (at least 0.95)")  # fmt: skip
    print(f"rate: federated / bare loop     {ratio('federated round', 'bare loop'):.3f}")
    alone = 100 / ratio("switching clients", "federated round")
    print(f"switching clients / local epoch {alone:.2f} % (of {o.samples} images, by itself)")
    if o.device == "cuda":  # where states travel while other clients train
        extra = 100 * (1 - ratio("federated round", "centralized"))
        print(f"what is left of it in a round   {extra:.2f} %   (under 1 %)")
    states = federated[0].states
    held = sum(t.numel() * t.element_size() for k in states for t in states.on_host(k).values())
    print(f"client states on the host       {held / 1e9:.2f} GB")
    if o.device == "cuda":
        print(f"most GPU memory                 {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
