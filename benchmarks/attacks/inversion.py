"""Measure how much of the images can be computed from what clients send.

    python benchmarks/attacks/inversion.py [NAME ...] [--victims N] [--picture FILE]

The attacker is the server, or reads its messages. It has the recipe, so it knows the network, the
loss and the seed from which clients draw their augmentation, and it has other images of the kind.
From an update it looks for likely images whose update has the same direction (after Geiping et al.
2020). From DCCO's moments it computes the encodings (benchmarks/moments.py), and then likely images
that have these encodings. It is told which encoding is of which client's first, second, … image.

How much likelihood counts is chosen on other images and another network than those reported. All
are digits of 8 pixels, the encoder is `tiny`. Where several images are attacked at once,
reconstructions are put in the order that suits them best, and so are those of chance.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fedssl.util.tuning import keep_freed_memory

keep_freed_memory()  # before torch

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
from moments import doubled, last_layer, solve

from fedssl import config
from fedssl.algorithms.dcco import DCCO
from fedssl.federation.client import Client
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.moments import SecondMomentObjective
from fedssl.runs.build import Experiment, build_experiment

Ints = NDArray[np.int64]
Miss = Callable[[Tensor], Tensor]  # [problems, images, C, H, W] → what each misses: [problems, n]

BASE = (
    *("data.size=8", "encoder.name=tiny", "encoder.norm=group", "algorithm.batch=null"),
    *("client.optimizer=sgd", "client.lr=0.1", "partition.name=samples", "evaluate.baselines=[]"),
    *("evaluate.protocols=knn", "device=cpu", "engine.threads=1", "precision=fp64"),
)
UPDATE = (
    *("algorithm.name=fedavg", "objective.name=simsiam", "objective.projector=[64,64]"),
    *("objective.predictor=[64,64]", "algorithm.local_epochs=null", "algorithm.local_steps=1"),
)
MOMENTS = ("algorithm.name=dcco", "objective.name=cco")
WEIGHTS = (0.01, 0.1, 1.0)  # of the prior
STEPS, STARTS, DRAWS = 12, 1, 20  # of the search for images
STEP = 1e-6  # of numerical derivatives
SKETCH = 4096  # numbers that stand for an update
PASS = 256  # images at once
TRIES = 1000, 2  # steps and starts of the search for encodings
AT_ONCE = 10  # encodings of a reply that are inverted


@dataclass(frozen=True)
class Condition:
    """The attacker's view of one round."""

    about: str
    words: tuple[str, ...] = UPDATE
    images: int = 1  # of a client
    clients: int = 1  # of which only the sum is seen
    rounds: int = 0  # of training before


NOISE = "privacy.noise=4"
CONDITIONS = {
    "one": Condition("update, 1 image"),
    "trained": Condition("update, 1 image, round 100", rounds=100),
    "four": Condition("update, 4 images", images=4),
    "sum": Condition("update, 1 image, sum of 8", clients=8),
    "sixteen": Condition("update, 16 images", images=16),
    "noise": Condition("update, 1 image, noise", (*UPDATE, NOISE, "privacy.clip=1")),
    "moments-one": Condition("moments, 1 image", MOMENTS),
    "moments-trained": Condition("moments, 1 image, round 100", MOMENTS, rounds=100),
    "moments-four": Condition("moments, 4 images", MOMENTS, 4),
    "moments-sixteen": Condition("moments, 16 images", MOMENTS, 16),
    "moments-128": Condition("moments, 128 images", MOMENTS, 128),
    "moments-sum": Condition("moments, 1 image, sum of 8", MOMENTS, clients=8),
    "moments-noise": Condition("moments, 1 image, noise", (*MOMENTS, NOISE, "objective.bound=1")),
}


class Loss(nn.Module):
    """The loss of images' views, as a function of the network's parameters."""

    def __init__(self, session: Experiment) -> None:
        super().__init__()
        self.session, self.network = session, session.trainer.network

    def forward(self, *views: Tensor) -> Tensor:
        """Return the loss."""
        batch = EncodedBatch(self.session.trainer.encode(views))
        return self.session.algorithm.objective.loss(batch)


class Attack:
    """The clients of a condition, and an attacker who knows the server's model."""

    def __init__(self, condition: Condition, seed: int) -> None:
        samples = f"partition.samples={min(4, condition.images)}"  # only for rounds of training
        words = [*BASE, *condition.words, samples, f"seed={seed}"]
        self.config = config.resolve(config.read_recipe("default"), words)
        self.condition, self.session = condition, build_experiment(self.config)
        self.trainer, self.algorithm = self.session.trainer, self.session.algorithm
        for round in range(condition.rounds):
            cohort = self.session.engine.cohort(self.session.draw_cohort(round), round)
            self.algorithm.round(self.session.server, cohort)
        self.weights = self.session.server.weights.clone()
        self.images = self.trainer.images[0][:].double() / 255
        everything = np.random.default_rng(0).permutation(len(self.images))
        own, *victims = np.split(everything, (len(everything) // 2, len(everything) * 3 // 4))
        self.prior, self.weight, self.victims = Prior(self.images[own]), 0.0, victims[seed]
        self.error = float("nan")  # of the encodings, relative to their distance from the mean

    def run(self, members: Ints) -> tuple[Tensor, Ints]:
        """Return reconstructions of images, and which images they are compared with."""
        count = self.condition.images
        clients = [
            Client(self.trainer, each, np.array([k]), np.array([count]), 0, 0.1, {})
            for k, each in enumerate(np.split(members, list(range(count, len(members), count))))
        ]
        states = torch.cat([client.random_state(0, slice(None)) for client in clients])
        self.trainer.load(self.weights)
        if isinstance(self.algorithm, DCCO):
            return self._invert_moments(clients, members, states)
        seen = self._ask(cast(Any, self.algorithm).train, clients)["change"]
        self.trainer.load(self.weights)
        return self._invert_update(-seen, states), members

    def _ask(self, task: Callable[..., Any], clients: Sequence[Client], *payload: Any) -> Any:
        """Return the mean of replies. With noise, all others are known, which is the worst case."""
        average, name = self.session.engine.aggregator, task.__name__
        replies = ((c.samples, task(c, self.weights, *payload)) for c in clients)
        parts = (average.contribute(name, n, reply, "samples") for n, reply in replies)
        return average.combine(name, parts)

    def _augment(self, x: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        """Return both views of images."""
        return self.trainer.augmentation.each((x * 255, x * 255), states, x.dtype)

    def _invert_update(self, seen: Tensor, states: Tensor) -> Tensor:
        """Look for images whose gradient has the direction of one that was seen."""
        module, total, size = Loss(self.session), len(states), self.trainer.flat.parameter_count
        params: dict[str, Tensor] = dict(module.named_parameters())
        generator = torch.Generator().manual_seed(0)
        place = torch.randint(SKETCH, (size,), generator=generator)
        sign = torch.randint(2, (size,), generator=generator) * 2.0 - 1

        def value(params: dict[str, Tensor], *views: Tensor) -> Tensor:
            return cast(Tensor, torch.func.functional_call(module, params, views))

        def sketch(gradient: Tensor) -> Tensor:
            """Return random sums of the numbers, which keep distances."""
            sums = gradient.new_zeros(len(gradient), SKETCH).index_add_(1, place, gradient * sign)
            return sums / sums.norm(dim=1, keepdim=True)

        def direction(x: Tensor) -> Tensor:
            views = self._augment(x.flatten(0, 1), states.repeat(len(x)))
            parts = [view.unflatten(0, (-1, total)) for view in views]
            slopes = torch.func.vmap(torch.func.grad(value), (None, 0, 0))(params, *parts)
            return sketch(torch.cat([slope.flatten(1) for slope in slopes.values()], 1).detach())

        wanted = sketch(seen[None, :size])
        return self._search(1, total, lambda x: direction(x) - wanted)[0]

    def _invert_moments(
        self, clients: Sequence[Client], members: Ints, states: Tensor
    ) -> tuple[Tensor, Ints]:
        """Compute both views' encodings, then images that have them."""
        algorithm = cast(DCCO, self.algorithm)
        objective = cast(SecondMomentObjective, algorithm.objective)
        bounded, width = objective.bounded, objective.params.projector[-1]
        centre = {name: self.weights.new_zeros(width) for name in ("f", "g")}
        moments = self._ask(algorithm.encode, clients, centre)
        self.trainer.load(self.weights)

        def encode(x: Tensor, states: Tensor) -> Tensor:
            with torch.no_grad():
                return torch.cat(
                    list(map(bounded, self.trainer.encode(self._augment(x, states)))), 1
                )

        real = encode(self.images[members], states)
        found = torch.cat([moments["f"], moments["g"]])[None]
        if len(members) > 1:
            layer = last_layer(self.trainer.network)
            views = solve(doubled(moments), doubled(centre), len(members), layer, *TRIES)
            found = torch.cat(views, 1)
        apart = torch.cdist(real, found)
        spread = (real - real.mean(0)).norm(dim=1) if len(real) > 1 else real.norm(dim=1)
        self.error = float((apart.amin(1) / spread).median())
        # Those that are not attacked would be compared with images that nobody looked for.
        rows, columns = (each[:AT_ONCE] for each in linear_sum_assignment(apart.numpy()))
        wanted, states = found[columns], states[rows]

        def miss(x: Tensor) -> Tensor:
            copies = len(x) // len(wanted)
            missed = encode(x[:, 0], states.repeat_interleave(copies))
            return missed - wanted.repeat_interleave(copies, 0)

        return self._search(len(wanted), 1, miss)[:, 0], members[rows]

    def _search(self, problems: int, total: int, miss: Miss) -> Tensor:
        """Solve problems of ``total`` images each; return the best of several starts."""
        random, others = np.random.default_rng(0), self.prior.images

        def draw() -> tuple[Tensor, Tensor]:
            chosen = random.integers(len(others), size=(problems, total))
            return others[chosen], miss(others[chosen]).norm(dim=1)

        tried = [draw() for _ in range(DRAWS)]
        order = torch.stack([missed for _, missed in tried]).argsort(dim=0)[:STARTS]
        found = []
        for chosen in order:
            start = torch.stack([tried[int(k)][0][i] for i, k in enumerate(chosen)])
            found.append(descend(start, self.prior, self.weight, miss))
        best = torch.stack([missed for _, missed in found]).argmin(0)
        return torch.stack([found[int(k)][0][i] for i, k in enumerate(best)])


class Prior:
    """The attacker's own images, and the normal distribution that they suggest."""

    def __init__(self, images: Tensor) -> None:
        self.images, flat = images, images.flatten(1)
        self.mean = flat.mean(0)
        variance, axes = torch.linalg.eigh((flat - self.mean).T.cov())
        self.scale, self.axes = variance.clamp_min(1e-3).sqrt(), axes

    def encode(self, x: Tensor) -> Tensor:
        """Return numbers for each image that are normally distributed."""
        return (x.flatten(-3) - self.mean) @ self.axes / self.scale

    def decode(self, z: Tensor) -> Tensor:
        """Return the images of such numbers."""
        x = self.mean + z * self.scale @ self.axes.T
        return x.clamp(0, 1).unflatten(-1, self.images.shape[1:])


def descend(x: Tensor, prior: Prior, weight: float, miss: Miss) -> tuple[Tensor, Tensor]:
    """Minimize the squared misses of several problems, and how unlikely the images are.

    By Levenberg and Marquardt, with numerical derivatives.
    """
    z, scale = prior.encode(x), 1 / miss(x).norm(dim=1)
    shape, count = z.shape[1:], z[0].numel()

    def residuals(z: Tensor) -> Tensor:
        """Return what is to be small, for several copies of each problem."""
        missed = miss(prior.decode(z)) * scale.repeat_interleave(len(z) // len(scale))[:, None]
        return torch.cat((missed, z.flatten(1) * (weight / count**0.5)), 1)

    now, damping = residuals(z), torch.full_like(scale, 1e-2)
    moves = torch.eye(count, dtype=z.dtype).view(count, *shape) * STEP
    unit = torch.eye(count, dtype=z.dtype)
    for _ in range(STEPS):
        parts = [
            residuals((z[:, None] + part).flatten(0, 1)).view(len(z), len(part), -1)
            for part in moves.split(max(1, PASS // (len(z) * shape[0])))
        ]
        slopes = (torch.cat(parts, 1) - now[:, None]) / STEP
        square, slope = slopes @ slopes.mT, slopes @ now[..., None]
        size = square.diagonal(dim1=1, dim2=2).mean(1)
        for _ in range(5):  # until it is better
            change = torch.linalg.solve(square + (damping * size)[:, None, None] * unit, slope)
            moved = z - change.view(z.shape)
            then = residuals(moved)
            better = then.norm(dim=1) < now.norm(dim=1)
            damping = torch.where(better, damping / 5, damping * 5).clamp(1e-9, 1e9)
            z = torch.where(better.view(-1, 1, 1), moved, z)
            now = torch.where(better[:, None], then, now)
            if bool(better.any()):
                break
    return prior.decode(z), now.norm(dim=1)


@dataclass(frozen=True)
class Score:
    """How close reconstructions are."""

    ratio: float  # mean peak signal-to-noise ratio, in decibels
    correlation: float
    recognized: int  # reconstructions to which their own image is the nearest in the data set
    count: int

    def __str__(self) -> str:
        return (
            f"{self.ratio:4.1f} dB, correlation {self.correlation:.2f}, "
            f"{self.recognized} of {self.count} recognized"
        )


def match(found: Tensor, true: Tensor) -> Tensor:
    """Return reconstructions in the order of the true images that they are closest to."""
    rows, columns = linear_sum_assignment(torch.cdist(found.flatten(1), true.flatten(1)).numpy())
    return found[torch.from_numpy(rows[np.argsort(columns)])]


def score(found: Tensor, members: Ints, images: Tensor) -> Score:
    """Compare reconstructions with their images, and with all others."""
    x, true, everything = found.flatten(1), images[members].flatten(1), images.flatten(1)
    error = (x - true).square().mean(1).clamp_min(1e-6)
    a, b = (each - each.mean(1, keepdim=True) for each in (x, true))
    nearest = torch.cdist(x, everything).argmin(1).numpy()
    return Score(
        float((-10 * error.log10()).mean()),
        float(torch.cosine_similarity(a, b, dim=1).mean()),
        int((nearest == members).sum()),
        len(members),
    )


def attack(attacker: Attack, count: int, weight: float) -> tuple[Tensor, Ints]:
    """Attack at least so many images; return reconstructions, and the images' numbers."""
    order, attacker.weight = attacker.victims, weight
    together = attacker.condition.images * attacker.condition.clients
    found, members = list[Tensor](), list[Ints]()
    while sum(map(len, members)) < count:
        one, order = order[:together], order[together:]
        x, chosen = attacker.run(one)
        found.append(match(x, attacker.images[chosen]))
        members.append(chosen)
    return torch.cat(found), np.concatenate(members)


@functools.cache
def tune(words: tuple[str, ...]) -> float:
    """Choose the prior's weight for replies of one image, on other images and another network."""
    attacker = Attack(Condition("", words), 1)

    def rate(weight: float) -> float:
        return score(*attack(attacker, 3, weight), attacker.images).correlation

    return max(WEIGHTS, key=rate)


def guess(members: Ints, images: Tensor, together: int) -> Tensor:
    """Return random other images in the order that suits best: chance."""
    random, parts = np.random.default_rng(1), list(range(together, len(members), together))
    return torch.cat([
        match(images[random.permutation(len(images))[: len(part)]], images[part])
        for part in np.split(members, parts)
    ])  # fmt: skip


def draw(rows: Sequence[tuple[str, Tensor, Tensor]], path: Path, tile: int = 32) -> None:
    """Draw for each condition the images, and below them their reconstructions."""
    left, height = 230, 2 * tile + 10
    across = max(len(images) for _, images, _ in rows)
    sheet = Image.new("L", (left + across * (tile + 2), len(rows) * height), 255)
    pen = ImageDraw.Draw(sheet)
    for row, (label, *both) in enumerate(rows):
        pen.text((4, row * height + tile - 6), label, fill=0, font_size=14)
        for line, images in enumerate(both):
            for column, image in enumerate(images):
                gray = Image.fromarray((image.mean(0) * 255).byte().numpy())
                place = left + column * (tile + 2), row * height + line * (tile + 1)
                sheet.paste(gray.resize((tile, tile), Image.Resampling.NEAREST), place)
    sheet.save(path, optimize=True)


def main() -> None:
    """Print a line for each condition."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--victims", type=int, default=10, help="images to attack, at least")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CONDITIONS))
    o = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    rows: list[tuple[str, Tensor, Tensor]] = []
    for name in o.names or CONDITIONS:
        condition, started = CONDITIONS[name], time.process_time()
        weight, attacker = tune(condition.words), Attack(condition, 0)
        found, members = attack(attacker, o.victims, weight)
        images = attacker.images
        chance = guess(members, images, min(condition.images * condition.clients, len(members)))
        if not rows:
            mean = images.mean(0, keepdim=True).expand(len(members), -1, -1, -1)
            print(f"mean image: {score(mean, members, images)}")
        error = "" if np.isnan(attacker.error) else f"; encodings off by {attacker.error:.0e}"
        print(
            f"{name}: {condition.about}: {score(found, members, images)}{error}; "
            f"chance: {score(chance, members, images)}; prior {weight}, "
            f"{time.process_time() - started:.0f} s",
            flush=True,
        )
        rows.append((condition.about, images[members[:10]], found[:10]))
        if o.picture:
            draw(rows, o.picture)


if __name__ == "__main__":
    main()
