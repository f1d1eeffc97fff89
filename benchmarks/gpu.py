"""Our engine beside a bare centralized loop of the same step, on a GPU.

    python benchmarks/gpu.py [--rows silo dcco] [--samples 9984] [--repeats 5] [--warm]

``silo``: FedBYOL, ResNet-18, 5 clients, batches of 128, one local epoch. ``ccl``, ``featarc``,
``ditto``, ``simclr``: 5 clients under a recipe's settings, 5 local epochs. ``dcco``: ResNet-14,
128 clients of 4 images and 512 of 1. The bare loop calls the same compiled step on all images as
one data set: no clients, no states, no averaging, and no features that clients compute between
steps. Ditto has two steps, one for each of its models. Engine and loop run in turn; times are the
fastest of the repeats. ``--warm`` only compiles (into torch's cache, for a later call).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import engine_of, even, made, rounds_of, seconds

from fedssl import config as configuration
from fedssl.algorithms.ccl import CCL
from fedssl.config import Config
from fedssl.data.random import key, mix
from fedssl.engines.local import LocalEngine
from fedssl.training import optim
from fedssl.training.trainer import Trainer

CLIENTS, PIXELS = 5, 32
SETTINGS = {"device": "cuda", "precision": "bf16", "rounds": 1_000_000, "schedule": "constant"}
RECIPES = {
    "ccl": "ccl/table1/ccl/cifar10-iid",
    "featarc": "decssl/table2-top/featarc/iid",
    "ditto": "perfcl/table2/fedbyol/lambda-0.1",
    "simclr": "ccl/table1/fedsimclr/cifar10-iid",
}
ROWS = ("silo", "dcco", *RECIPES)
Row = tuple[str, int, Callable[[], None], Callable[[], None]]


def silo(samples: int) -> Row:
    """FedBYOL with one local epoch."""
    tree: dict[str, Any] = {
        "augment": {"name": "fedema"},
        "encoder": {"name": "resnet18", "norm": "batch"},
        "objective": {"name": "byol"},
        "algorithm": {"name": "fedavg", "local_epochs": 1, "batch": 128},
        "client": {"lr": 0.032, "momentum": 0.9, "weight_decay": 5e-4},
        "server": {"optimizer": "sgd", "lr": 1.0},
    }
    return local("FedBYOL, ResNet-18", configuration.build({**tree, **SETTINGS}), samples)


def local(name: str, config: Config, samples: int) -> Row:
    """Images in a round, our round, and the same steps on all images in a bare loop."""
    images, epochs = CLIENTS * samples, config.algorithm.local_epochs
    assert epochs is not None
    split = made(images, 3, PIXELS)
    engine, server = engine_of(config, split, even(CLIENTS, samples), compiled=True)
    trainer = engine.trainer
    if isinstance(engine.algorithm, CCL):  # all shapes are those of later rounds from the first on
        rows = min(engine.algorithm.features, samples), engine.algorithm.width
        server.state["banks"] = {
            str(k): torch.randn(rows).to(trainer.device) for k in range(CLIENTS)
        }
    bare = bare_loop(trainer, images, epochs)
    return f"{name}, {CLIENTS} clients", images * epochs, rounds_of(engine, server), bare


def bare_loop(trainer: Trainer, images: int, epochs: int) -> Callable[[], None]:
    """The compiled steps of a trainer, on all images as one data set."""
    config, batch = trainer.config, trainer.config.algorithm.batch
    assert batch is not None

    def bare() -> None:
        for replay in list(trainer.compiled_steps.by_shape.values()):
            replay.begin(config.client.lr, replay.pull)
            for _ in range(epochs):
                order = torch.randperm(images, device=trainer.device)
                states = mix(key(0, "augment", 0), order)
                for chosen, state in zip(order.split(batch), states.split(batch), strict=True):
                    replay(chosen, state, *replay.inputs)
            float(replay.total)

    return bare


def dcco(clients: int, each: int) -> Row:
    """Settings of a merged cohort: a round is one step."""
    tree: dict[str, Any] = {
        "augment": {"name": "dcco"},
        "encoder": {"name": "resnet14", "norm": "group"},
        "objective": {"name": "cco"},
        "algorithm": {"name": "dcco"},
        "server": {"optimizer": "adam", "lr": 1e-3},
    }
    engine, server = build(tree, clients * each, clients, each)
    trainer = engine.trainer
    trainer.compile_passes()
    assert engine.merges
    members = torch.arange(clients * each, device=trainer.device)
    rule_state = optim.start(trainer.config.server, trainer.flat.params)

    def bare() -> None:
        flat = trainer.flat
        seen = trainer.encode_batch(members, mix(key(0, "augment", 0), members))
        loss = trainer.objective.loss(seen)
        trainer.differentiate(loss)
        step = optim.step(
            trainer.config.server, rule_state, flat.params, flat.gradient, 1e-3, flat.layers
        )
        flat.params.add_(step)
        float(loss.detach())

    return f"DCCO, ResNet-14, {clients} × {each}", clients * each, rounds_of(engine, server), bare


def build(tree: dict[str, Any], images: int, clients: int, each: int) -> tuple[LocalEngine, Any]:
    """An engine on images of noise."""
    config = configuration.build({**tree, **SETTINGS})
    return engine_of(config, made(images, 3, PIXELS), even(clients, each))


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=["silo", "dcco"], choices=ROWS)
    parser.add_argument("--samples", type=int, default=9984, help="of each of 5 clients")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm", action="store_true", help="compile only")
    o = parser.parse_args()
    makers: list[Callable[[], Row]] = []
    for row in o.rows:
        if row == "silo":
            makers.append(lambda: silo(256 if o.warm else o.samples))
        elif row == "dcco":
            makers += [lambda: dcco(128, 4), lambda: dcco(512, 1)]
        else:
            words = [f"{name}={value}" for name, value in SETTINGS.items()]
            recipe = configuration.read_recipe(RECIPES[row])
            config = configuration.resolve(recipe, words)
            makers.append(partial(local, RECIPES[row], config, o.samples))
    torch.backends.cudnn.benchmark = True  # as a run has it
    for maker in makers:
        name, images, ours, bare = maker()
        for work in (ours, bare):
            seconds(work, "cuda")
            seconds(work, "cuda")
        if o.warm:
            continue
        times = [[seconds(work, "cuda") for work in (ours, bare)] for _ in range(o.repeats)]
        us, loop = (min(column) for column in zip(*times, strict=True))
        print(
            f"{name:46} ours {images / us:8.0f} images/s, {1e3 * us:8.1f} ms a round;  "
            f"bare {images / loop:8.0f} images/s, {1e3 * loop:8.1f} ms;  ratio {loop / us:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
