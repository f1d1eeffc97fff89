"""Measure what a run on a GPU spends on anything but training.

    python benchmarks/overhead.py [key=value ...] [--rounds 3] [--images 50000] [--test 10000]

FedBYOL of the FedEMA paper's Table 3 (ResNet-18, 5 clients, batches of 128, 5 local epochs) on
images of noise, or on those that ``data.`` keys name. A few rounds are measured, with an evaluation
and a checkpoint each, and projected to the recipe's own number of rounds, evaluations and
checkpoints. The device is waited for where a measured part begins and ends, so nothing of one part
is hidden behind another: a run without us is faster. Checkpoints go to TMPDIR's disk.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import made

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.data.dataset import Dataset
from fedssl.evaluate import base, knn, linear
from fedssl.evaluate.evaluator import ModelEvaluator
from fedssl.federation.client import Client
from fedssl.runs import build, checkpoint, finish, loop, split
from fedssl.runs.callbacks import MetricsLog
from fedssl.runs.progress import Progress
from fedssl.training.compiled import CompiledStep

RECIPE = "fedema/table3/fedbyol/cifar10-noniid"
CLASSES, PIXELS = 10, 32
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "round": ((loop, "run_one_round"),),
    "training": ((Client, "_compiled_steps"), (Client, "_steps")),
    "compiling": ((CompiledStep, "__init__"),),
    "logging": ((MetricsLog, "after_round"), (Progress, "update")),
    "checkpoint": ((checkpoint, "write"),),
    "judging": ((ModelEvaluator, "evaluate"),),
    "features": ((base, "extract"),),
    "kNN": ((knn, "accuracy"),),
    "linear": ((linear, "fit"),),
    "finish": ((finish, "finish_run"),),
}
Span = tuple[float, float]


class Clock:
    """When each part of a run began and ended."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = defaultdict(list)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed on the device too. A client's training has a stream of its own,
        which is all that it waits for: others may train beside it."""

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            start = now(part == "training")
            try:
                return function(*arguments, **named)
            finally:
                self.spans[part].append((start, now(part == "training")))

        return call

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Every part is timed."""
        with contextlib.ExitStack() as stack:
            for part, places in PARTS.items():
                for owner, name in places:
                    own = self.timed(part, getattr(owner, name))
                    stack.enter_context(mock.patch.object(owner, name, own))
            yield

    def all(self, part: str) -> list[float]:
        """Seconds of each call."""
        return [b - a for a, b in self.spans[part]]

    def within(self, part: str, outer: Span) -> float:
        """Seconds of ``outer`` in which a part was under way, once or several times at once."""
        total, end = 0.0, outer[0]
        for a, b in sorted(self.spans[part]):
            a, b = max(a, end), min(b, outer[1])
            total += max(0.0, b - a)
            end = max(end, b)
        return total

    def steady(self) -> list[Span]:
        """The rounds in which nothing was compiled; the last one if there are none."""
        rounds = self.spans["round"]
        return [r for r in rounds if not self.within("compiling", r)] or rounds[-1:]


def now(own_stream: bool) -> float:
    """The time when the device has done all that it was given so far."""
    if torch.cuda.is_available():
        (torch.cuda.current_stream() if own_stream else torch.cuda).synchronize()
    return time.perf_counter()


def noise(images: int, test: int) -> Dataset:
    """A labelled data set of the given size."""
    learn, judged = (
        replace(made(count, 3, PIXELS), labels=torch.arange(count) % CLASSES)
        for count in (images, test)
    )
    return Dataset("noise", learn, judged, tuple(map(str, range(CLASSES))))


def carry_out(config: Config, dataset: Dataset | None) -> tuple[Clock, float]:
    """A whole run, and how long it took."""
    clock, real = Clock(), split.load_run_dataset

    def load(config: Config, size: int | None = None) -> Dataset:
        return dataset or real(config, size)

    given = mock.patch.object(build, "load_run_dataset", load)
    with tempfile.TemporaryDirectory() as folder, given, clock.watching():
        start = now(False)
        loop.run(config, Path(folder) / "run")
        return clock, now(False) - start


def projected(config: Config, clock: Clock) -> dict[str, float]:
    """Seconds of each part in a run of the recipe's own length."""
    rounds, settings = config.rounds, config.evaluate
    looks = rounds // settings.every if settings.every else 0
    spans = clock.steady()
    training = statistics.mean(clock.within("training", span) for span in spans)
    switching = statistics.mean(b - a for a, b in spans) - training
    logging = sum(clock.all("logging")) / len(clock.spans["round"])
    seconds = {
        "local training": rounds * training,
        "switching clients, averaging": rounds * switching,
        "metrics and progress": rounds * logging,
        "evaluation on the way": looks * clock.all("judging")[0],
        "evaluation and files at the end": clock.all("finish")[0],
    }
    cost = statistics.median(clock.all("checkpoint")[1:-1])  # the first and last hold no clients
    wait = max(config.checkpoint.seconds, 50 * cost)  # as the loop over rounds has it
    return {**seconds, "checkpoints": (sum(seconds.values()) / wait + 2) * cost}


def report(config: Config, clock: Clock, wall: float) -> None:
    """Two tables."""
    rounds, once = clock.spans["round"], sum(clock.all("compiling"))
    print(f"{len(rounds)} rounds, evaluations and checkpoints: {wall:.1f} s")
    print(f"  compiling, once    {once:.1f} s")
    for number, span in enumerate(rounds, 1):
        took, trained = span[1] - span[0], clock.within("training", span)
        note = "" if span in clock.steady() else ", compiling: not counted below"
        print(f"  round {number:<12} {took:.3f} s, local training {trained:.3f} s{note}")
    for part in ("logging", "checkpoint", "features", "kNN", "linear"):
        print(f"  {part + ', each':<18} {', '.join(f'{v:.4f}' for v in clock.all(part))} s")
    full = clock.all("judging")[-1]
    print(f"kNN and linear, with features: {full:.2f} s   (under 15)")
    seconds = projected(config, clock)
    total = sum(seconds.values())
    print(f"projected to {config.rounds} rounds, without compiling: {total:.0f} s")
    for name, value in seconds.items():
        print(f"  {name:<32} {value:9.2f} s {100 * value / total:6.2f} %")
    rest = 1 - seconds["local training"] / total
    print(f"all but local training: {100 * rest:.2f} %   (under 5)")


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="key=value", help="of the recipe")
    parser.add_argument("--rounds", type=int, default=3, help="that are measured")
    parser.add_argument("--images", type=int, default=50_000, help="of noise")
    parser.add_argument("--test", type=int, default=10_000, help="of noise")
    o = parser.parse_args()
    config = configuration.resolve(configuration.read_recipe(RECIPE), o.words)
    own_data = any(word.startswith("data.") for word in o.words)
    short = replace(
        config,
        rounds=o.rounds,
        evaluate=replace(config.evaluate, every=o.rounds),
        checkpoint=replace(config.checkpoint, seconds=0),
    )
    clock, wall = carry_out(short, None if own_data else noise(o.images, o.test))
    report(config, clock, wall)


if __name__ == "__main__":
    main()
