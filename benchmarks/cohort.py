"""How much a merged DCCO round saves, as ratios of things run in turn in this process.

    python benchmarks/cohort.py [--clients 128] [--samples 4] [--encoder tiny] [--device cpu]

Rows: the round merged; the round client by client; one centralized step on as many samples; a bare
Python loop of the client-by-client round's steps; and what a round costs outside the network
passes, for a cohort of 512 out of 50,000 clients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from common import engine_of, even, made, rounds_of, seconds

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.data.random import choose, key, mix
from fedssl.engines.local import LocalEngine
from fedssl.federation.server import Server
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.moments import MomentObjective

PIXELS = 16


def bare_loop(engine: LocalEngine, server: Server, samples: int) -> Callable[[], None]:
    """The two exchanges of a DCCO round as a script without a framework would write them."""
    trainer = engine.trainer
    network, flat, augmentation = trainer.network, trainer.flat, trainer.augmentation
    objective = trainer.objective
    assert isinstance(objective, MomentObjective)
    images, members = trainer.images[0], torch.from_numpy(engine.groups.members).to(trainer.device)
    weights = server.weights
    centre = {name: weights.new_zeros(128) for name in "fg"}
    lr = trainer.config.client.lr
    clients = len(engine.groups)

    def encode(client: int) -> tuple[torch.Tensor, ...]:
        flat.vector.copy_(weights)
        positions = torch.arange(samples, device=trainer.device)
        state = mix(mix(key(0, "augment", 0), client), positions)
        own = images[members[client * samples : (client + 1) * samples]]
        views = [augmentation.views(own, state, view, torch.float32) for view in (0, 1)]
        both: torch.Tensor = network.towers[0](torch.cat(views))
        return both.chunk(2)

    def one() -> None:
        total: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for client in range(clients):
                local = objective.moments(EncodedBatch(encode(client)), centre)
                total = {k: total.get(k, 0) + v / clients for k, v in local.items()}
        change = torch.zeros_like(weights)
        for client in range(clients):
            local = objective.moments(EncodedBatch(encode(client)), centre)
            combined = {k: local[k] + (total[k] - local[k]).detach() for k in local}
            flat.gradient.zero_()
            objective.loss_of(combined, centre).backward()
            change.sub_(flat.gradient, alpha=lr / clients)

    return one


def overhead(config: Config, repeats: int) -> float:
    """Seconds a round outside the passes: cohort, indexing, augmentation parameters, logging."""
    clients, cohort = 50_000, 512
    engine, _ = engine_of(config, made(clients, 1, PIXELS), even(clients, 1))
    times = []
    with (
        tempfile.TemporaryDirectory() as folder,
        (Path(folder) / "metrics.jsonl").open("w", encoding="utf-8") as metrics,
    ):
        for round in range(repeats):
            start = time.perf_counter()
            ids = choose(key(0, "cohort", round), clients, cohort)
            asked = engine.cohort(ids, round)
            client = engine.client(ids, round, remember=True)
            state = client.random_state(round, slice(None))
            for view in (0, 1):
                engine.trainer.augmentation.draw(state, view)
            line = {"round": round + 1, "loss": 1.0, "clients": len(asked.ids)}
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--encoder", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()

    base = configuration.resolve(
        configuration.read_recipe(None),
        [f"encoder.name={options.encoder}", f"device={options.device}", "rounds=1000000"],
    )
    groups = even(options.clients, options.samples)
    split = made(options.clients * options.samples, 1, PIXELS)
    off = replace(base, engine=replace(base.engine, merge="off"))
    central = configuration.with_algorithm(base, "centralized")
    plain = engine_of(off, split, groups)
    rows = {
        "merged": rounds_of(*engine_of(base, split, groups)),
        "centralized step": rounds_of(*engine_of(central, split, groups)),
        "client by client": rounds_of(*plain),
        "bare loop": bare_loop(*plain, options.samples),
    }
    for work in rows.values():
        work()  # the first call allocates
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(options.repeats):
        for name, work in rows.items():
            times[name].append(seconds(work, options.device))
    took = {name: statistics.median(values) for name, values in times.items()}
    print(f"{options.clients} clients of {options.samples}, {options.encoder}, {options.device}")
    for name, value in took.items():
        print(f"  {name:<18} {1000 * value:9.1f} ms")

    def ratio(first: str, second: str, bound: str) -> None:
        # Of things timed right after each other, so that a busy moment of the machine hits both.
        value = statistics.median(a / b for a, b in zip(times[first], times[second], strict=True))
        print(f"{first + ' / ' + second:<35} {value:6.2f}   ({bound})")

    ratio("client by client", "merged", "at least 6")
    ratio("merged", "centralized step", "at most 1.15")
    ratio("client by client", "bare loop", "at most 1.2")
    cost = overhead(base, 50)
    print(f"overhead a round, 512 of 50,000     {1000 * cost:6.2f} ms (under 2)")


if __name__ == "__main__":
    main()
