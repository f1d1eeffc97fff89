"""Rounds per second of one recipe on each engine, and of a plain Flower program, run in turn.

    python benchmarks/engines.py [--clients 64] [--samples 4] [--size 8 16] [--rounds 6]
        [--workers 2]

DCCO, one local step, `tiny`, scikit-learn's digits as they are (8 pixels) and as the default recipe
has them (16): merging saves what a client costs by itself, which is less beside larger images. The
plain program (plain_flower.py) is written the way Flower's tutorial does it. Starting Ray is not
counted: a round is timed from the end of the one before.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path

import common  # noqa: F401  (first: it says how waiting threads behave)
from plain_flower import plain_flower

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.runs.build import build_experiment


def settings(o: argparse.Namespace, size: int, *words: str) -> Config:
    """The recipe, with the data set cut to what the clients hold."""
    given = (
        *(f"data.size={size}", "partition.name=samples", f"partition.samples={o.samples}"),
        *(f"partition.clients={o.clients}", f"cohort.size={o.clients}", "encoder.groups=4"),
        *("objective.name=cco", "objective.projector=[64,64]", "algorithm.name=dcco"),
        *("algorithm.local_steps=1", "server.optimizer=sgd", "server.lr=1", "client.lr=0.05"),
        *("evaluate.baselines=[]", "schedule=constant", "rounds=100000"),
    )
    return configuration.resolve(configuration.read_recipe(None), [*given, *words])


def ours(config: Config, rounds: int) -> list[float]:
    """Seconds of each round."""
    session, ends = build_experiment(config), []

    def work() -> None:
        for _ in range(rounds + 1):
            server = session.server
            cohort = session.engine.cohort(session.draw_cohort(server.round), server.round)
            session.algorithm.round(server, cohort)
            server.round += 1
            float(server.log["loss"])
            assert not cohort.missing
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        session.engine.open(Path(folder))
        session.engine.drive(work)
    return [b - a for a, b in itertools.pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--size", type=int, nargs="+", default=[8, 16], help="pixels a side")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    o = parser.parse_args()
    for size in o.size:
        compare(o, size)


def compare(o: argparse.Namespace, size: int) -> None:
    """All four in turn."""
    # Everyone has the same processors: one process with as many threads, or workers of one each.
    local = f"engine.threads={o.workers}"
    flower = ("engine.name=flower", f"engine.workers={o.workers}", "engine.threads=1")
    rows = {
        "local, merged": ours(settings(o, size, local), 10 * o.rounds),
        "local, client by client": ours(settings(o, size, local, "engine.merge=off"), o.rounds),
        "flower": ours(settings(o, size, *flower), o.rounds),
        "plain Flower program": plain_flower(
            settings(o, size, "engine.threads=1"), o.rounds, o.workers
        ),
    }
    print(f"dcco, {o.clients} clients of {o.samples}, {size} px, tiny, {o.workers} workers, CPU")
    # The fastest of each: what a busy machine adds is not the program's.
    best = {name: min(seconds) for name, seconds in rows.items()}
    for name, seconds in best.items():
        print(f"  {name:<24} {1000 * seconds:9.1f} ms a round {1 / seconds:9.2f} rounds/s")
    plain, merged = best["plain Flower program"], best["local, merged"]
    print(f"flower / plain Flower program    {plain / best['flower']:7.2f}   (at least 1)")
    print(f"merged / flower                  {best['flower'] / merged:7.1f}   (at least 20)")
    print(f"merged / plain Flower program    {plain / merged:7.1f}   (at least 20)")


if __name__ == "__main__":
    main()
