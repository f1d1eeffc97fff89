"""Measure several local steps of DCCO against one, paired: equal clients and views at first steps.

    python results/local_steps.py OUT --cohort 32x4 --lr 0.01 --steps 5 --radius 1 [key=value ...]
    python results/local_steps.py OUT --table

The words hold for the default recipe. All clients of a round train side by side (torch.func.vmap),
which gives the program's numbers in a fraction of its time (tests/papers/test_dcco.py). In the
program a round with several steps draws other views than a round with one; here the first step of
round r draws those of epoch r. A run adds a line to OUT/local_steps.jsonl. ``--table`` prints the
mean differences from one step, with standard errors over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fedssl import config as configuration
from fedssl.models import norms
from fedssl.models.kernels import group_norm
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.moments import MomentObjective, Moments
from fedssl.runs.build import Experiment, build_experiment

FIXED = (
    *("data.size=8", "objective.projector=[64,64,32]", "schedule=constant"),
    *("server.optimizer=sgd", "server.lr=1", "evaluate.protocols=knn", "evaluate.baselines=[]"),
)


class Rounds:
    """Rounds of DCCO with several local steps, all clients side by side."""

    def __init__(self, experiment: Experiment, steps: int, radius: float, lr: float) -> None:
        self.experiment, self.steps, self.radius, self.lr = experiment, steps, radius, lr
        self.trainer = experiment.trainer
        self.objective = self.trainer.objective
        assert isinstance(self.objective, MomentObjective)
        self.kept: list[float] = []  # share of the later steps that were not undone, by round

    def epoch(self, round: int, step: int) -> int:
        """Return the epoch whose views a step uses."""
        return round if step == 0 else 10**6 + 100 * round + step

    def encode(self, weights: Tensor, views: Tensor) -> Tensor:
        """Encode each client's views by its own weights."""
        tower, spans = self.trainer.network.towers[0], self.trainer.flat.spans
        prefix = "towers.0."

        def one(vector: Tensor, x: Tensor) -> Tensor:
            named = {s.name.removeprefix(prefix): s.of(vector) for s in spans}
            return functional_call(tower, named, (x,))

        with self.trainer.autocast():
            return vmap(one)(weights, views).to(self.trainer.dtype)

    def moments(self, weights: Tensor, views: Tensor, centre: Moments) -> Moments:
        """Return each client's moments."""
        f, g = self.encode(weights, views).chunk(2, dim=1)
        return vmap(lambda f, g: self.objective.moments(EncodedBatch((f, g)), centre))(f, g)

    def views(self, round: int, step: int) -> Tensor:
        """Return both views of all clients, client by client."""
        ids = np.sort(self.experiment.draw_cohort(round))
        merged = self.experiment.engine.client(ids, round, remember=False)
        states = merged.random_state(self.epoch(round, step), slice(None))
        images = self.trainer.images[0][merged.members]
        each = self.trainer.augmentation.each([images, images], states, self.trainer.dtype)
        return torch.cat([view.unflatten(0, (len(ids), -1)) for view in each], dim=1)

    def start(self) -> tuple[Tensor, Moments]:
        """Return the first weights, and the centre of the first cohort."""
        weights, views = self.experiment.server.weights.clone(), self.views(0, 0)
        with torch.no_grad():
            f, g = self.encode(weights.expand(len(views), -1), views).chunk(2, dim=1)
        return weights, self.objective.centre(EncodedBatch((f.flatten(0, 1), g.flatten(0, 1))))

    def round(self, start: Tensor, centre: Moments, number: int) -> tuple[Tensor, Moments, float]:
        """Return the weights after a round, the next centre, and the cohort's loss before it."""
        views = self.views(number, 0)
        first = start.expand(len(views), -1)
        weights, active = first, torch.ones(len(views), dtype=torch.bool, device=start.device)
        total: Moments = {}
        loss = math.nan
        for step in range(self.steps):
            views = self.views(number, step) if step else views
            free = weights.clone().requires_grad_()
            now = self.moments(free, views, centre)
            here = {k: v.detach() for k, v in now.items()}
            with torch.no_grad():
                sent = self.moments(first, views, centre) if step else here
            total = total or {k: v.mean(0) for k, v in here.items()}
            value = {k: total[k] + (here[k] - sent[k]) / len(views) for k in here}
            losses = vmap(lambda m: self.objective.loss_of(m, centre))(
                {k: value[k] + now[k] - here[k] for k in now}
            )
            loss = losses[0].item() if step == 0 else loss  # the cohort's
            new = weights - self.lr * torch.autograd.grad(losses.sum(), free)[0]
            if step:
                with torch.no_grad():
                    after = self.moments(new, views, centre)["fg"]
                moved = torch.linalg.matrix_norm(after - sent["fg"])
                active = active & (moved <= self.radius * torch.linalg.matrix_norm(total["fg"]))
                self.kept.append(float(active.float().mean()))
                new = torch.where(active[:, None], new, weights)
            weights = new
            if not active.any():
                self.kept += [0.0] * (self.steps - step - 1)
                break
        centre = {k: centre[k] + total[k] for k in centre}
        return start + (weights - first).mean(0), centre, loss

    def train(self, rounds: int) -> tuple[Tensor, list[float]]:
        """Return the final weights, and the loss of each round until it diverges."""
        weights, centre = self.start()
        losses: list[float] = []
        for number in range(rounds):
            weights, centre, loss = self.round(weights, centre, number)
            losses.append(loss)
            if not math.isfinite(loss):
                break
        return weights, losses


def convolve(self: norms.StandardizedConv2d, x: Tensor) -> Tensor:
    """Convolve by a product of matrices, which vmap turns into one batched product."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    (k, _), (stride, _), (pad, _) = self.kernel_size, self.stride, self.padding
    x = torch.nn.functional.pad(x, (pad,) * 4)
    patches = x.unfold(2, k, stride).unfold(3, k, stride).permute(0, 2, 3, 1, 4, 5)
    y = patches.flatten(3) @ norms.standardize(self.weight).flatten(1).T
    return y.permute(0, 3, 1, 2).contiguous()


def measure(cohort: str, seed: int, lr: float, o: argparse.Namespace) -> dict[str, Any]:
    """Train one run."""
    clients, samples = cohort.split("x")
    words = [*FIXED, f"cohort.size={clients}", f"partition.samples={samples}", f"seed={seed}"]
    recipe = configuration.read_recipe(None)
    experiment = build_experiment(configuration.resolve(recipe, [*words, *o.words]))
    rounds = Rounds(experiment, o.steps, o.radius, lr)
    _, losses = rounds.train(o.rounds)
    last = losses[-max(1, o.rounds // 3) :]
    result = {"loss": statistics.mean(last), "kept": statistics.mean(rounds.kept or [0.0])}
    key = {"cohort": cohort, "lr": lr, "steps": o.steps, "radius": o.radius, "seed": seed}
    return {**key, "rounds": o.rounds, "words": o.words, **result}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield lines: one step's loss, and the differences of several steps from it."""
    yield "| clients × images | rate | one step | steps | radius | kept | difference |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    one = {(r["cohort"], r["lr"], r["seed"]): r["loss"] for r in rows if r["steps"] == 1}
    cells = {(r["cohort"], r["lr"], r["steps"], r["radius"]) for r in rows if r["steps"] > 1}
    for cell in sorted(cells):
        cohort, lr, steps, radius = cell
        mine = [r for r in rows if cell == (r["cohort"], r["lr"], r["steps"], r["radius"])]
        pairs = [(r, one[cohort, lr, r["seed"]]) for r in mine if (cohort, lr, r["seed"]) in one]
        if len(pairs) < 2:
            continue
        apart = [r["loss"] - loss for r, loss in pairs]
        error = statistics.stdev(apart) / math.sqrt(len(apart))
        kept = statistics.mean(r["kept"] for r, _ in pairs)
        before = statistics.mean(loss for _, loss in pairs)
        yield (
            f"| {cohort.replace('x', ' × ')} | {lr:g} | {before:.2f} | {steps} | {radius:g} | "
            f"{kept:.0%} | {statistics.mean(apart):+.2f} ± {error:.2f} |"
        )


def main() -> None:
    """Run, or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--cohort", nargs="*", default=["32x4"], help="clients x images of each")
    parser.add_argument("--lr", type=float, nargs="*", default=[0.01])
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--radius", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("words", nargs="*", metavar="key=value")
    o = parser.parse_intermixed_args()
    file = o.out / "local_steps.jsonl"
    if o.table:
        print("\n".join(table([json.loads(line) for line in file.read_text().splitlines()])))
        return
    o.out.mkdir(parents=True, exist_ok=True)
    group_norm.applies = lambda *_: False  # its kernels cannot be batched
    group_norm.layout = lambda images: images
    norms.StandardizedConv2d.forward = convolve
    for cohort in o.cohort:
        for lr in o.lr:
            for seed in range(o.seeds):
                with file.open("a") as handle:
                    handle.write(json.dumps(measure(cohort, seed, lr, o)) + "\n")


if __name__ == "__main__":
    main()
