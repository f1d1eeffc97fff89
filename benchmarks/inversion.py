"""How much of the images can be computed from what clients send: gradient inversion.

    python benchmarks/inversion.py [NAME ...] [--victims N] [--steps S] [--picture FILE] [key=value ...]

The attacker is the server, or whoever reads its messages. It knows the weights, the loss, the
learning rate and the number of images. From an update it looks for images whose update has the same
direction and that are smooth (Geiping et al. 2020). From DCCO's moments it computes the encodings
(benchmarks/moments.py), and then images that have these encodings.

Each setting prints how close the reconstructions are (the mean peak signal-to-noise ratio), and how
many of them have the true image as the nearest neighbor among all training images.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from moments import doubled, last_layer, solve
from PIL import Image, ImageDraw
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedssl import config
from fedssl.algorithms.dcco import DCCO
from fedssl.federation.client import Client
from fedssl.objectives.batch import EncodedBatch
from fedssl.runs.build import Experiment, build_experiment

BASE = (
    *("data.size=8", "encoder.norm=group", "algorithm.batch=null", "client.optimizer=sgd"),
    *("client.lr=0.1", "partition.name=samples", "partition.samples=4", "evaluate.baselines=[]"),
    *("evaluate.protocols=knn", "device=cpu", "engine.threads=1", "engine.merge=off"),
)
FEDAVG = (
    *("algorithm.name=fedavg", "objective.name=simsiam", "objective.projector=[64,64]"),
    *("objective.predictor=[64,64]", "algorithm.local_epochs=null", "augment.name=none"),
)
MOMENTS = ("algorithm.name=dcco", "objective.name=cco")
UPDATE = (*MOMENTS, "augment.name=none")
COHORT = 32  # clients whose moments DCCO's server has
SMOOTH = 0.03  # weight of the total variation
RATE = 0.05


@dataclass(frozen=True)
class Setting:
    """What the attacker sees."""

    about: str
    words: tuple[str, ...] = FEDAVG
    images: int = 1  # of a client
    clients: int = 1  # of which only the sum is seen
    steps: int = 1  # of local training
    rounds: int = 0  # of training before the attack

    @property
    def sees_moments(self) -> bool:
        """True if DCCO's moments are seen, and not the update."""
        return self.words[: len(MOMENTS)] == MOMENTS and "augment.name=none" not in self.words


SETTINGS = {
    "one": Setting("FedAvg, 1 image"),
    "four": Setting("FedAvg, 4 images", images=4),
    "sixteen": Setting("FedAvg, 16 images", images=16),
    "steps": Setting("FedAvg, 4 images, 4 local steps", images=4, steps=4),
    "views": Setting("FedAvg, 1 image, augmented", (*FEDAVG, "augment.name=digits")),
    "trained": Setting("FedAvg, 1 image, after 100 rounds", rounds=100),
    "sum": Setting("FedAvg, 1 image, secure sum of 8 clients", clients=8),
    "noise": Setting(
        "FedAvg, 1 image, noise on the sum of 8 clients",
        (*FEDAVG, "privacy.noise=1", "privacy.clip=0.1"),
        clients=8,
    ),
    "dcco": Setting("DCCO, 4 images, update", UPDATE, images=4),
    "moments": Setting("DCCO, 4 images, moments", MOMENTS, images=4),
    "moments-16": Setting("DCCO, 16 images, moments", MOMENTS, images=16),
    "moments-64": Setting("DCCO, 64 images, moments", MOMENTS, images=64),
    "moments-sum": Setting("DCCO, 2 images, moments, secure sum of 8 clients", MOMENTS, 2, 8),
    "moments-noise": Setting(
        "DCCO, 2 images, moments, noise on the sum of 8 clients",
        (*MOMENTS, "privacy.noise=1", "objective.bound=1"),
        images=2,
        clients=8,
    ),
}


class Attack:
    """One setting: its clients' replies, and images that are computed from them."""

    def __init__(self, setting: Setting, words: Sequence[str]) -> None:
        steps = f"algorithm.local_steps={setting.steps}"
        recipe = config.read_recipe("default")
        self.config = config.resolve(recipe, [*BASE, *setting.words, steps, *words])
        self.setting, self.session = setting, build_experiment(self.config)
        self.trainer, self.server = self.session.trainer, self.session.server
        self.train_first(setting.rounds)
        self.weights = self.server.weights.clone()
        self.error = float("nan")  # of the encodings, where these are computed first

    def train_first(self, rounds: int) -> None:
        """Train as a run does."""
        for round in range(rounds):
            cohort = self.session.engine.cohort(self.session.draw_cohort(round), round)
            self.session.algorithm.round(self.server, cohort)

    def clients(self, members: np.ndarray[Any, Any]) -> list[Client]:
        """Make clients that hold these images."""
        each = np.split(members, range(self.setting.images, len(members), self.setting.images))
        return [
            Client(self.trainer, m, np.array([k]), np.array([len(m)]), 0, self.config.client.lr, {})
            for k, m in enumerate(each)
        ]

    def ask(self, task: Callable[..., Any], clients: Sequence[Client], *payload: Any) -> Any:
        """Return the mean of the clients' replies, with noise if the setting has some."""
        average, name = self.session.engine.aggregator, task.__name__
        replies = ((c.samples, task(c, self.weights, *payload)) for c in clients)
        parts = (average.contribute(name, n, reply, "samples") for n, reply in replies)
        return average.combine(name, parts)

    def run(self, members: np.ndarray[Any, Any], steps: int) -> Tensor:
        """Return reconstructions of these images: of a sum, of all of its clients."""
        clients = self.clients(members)
        if self.setting.sees_moments:
            targets = self.compute_encodings(clients)
            return self.search(len(members), steps, lambda x: self.compare_encodings(x, targets))
        loss = self.session.algorithm.objective.loss
        algorithm = self.session.algorithm
        if isinstance(algorithm, DCCO):
            centre, moments = self.ask_for_moments(members, clients)
            change = self.ask(algorithm.descend, clients, centre, moments)["change"]
            loss = self.loss_beside(centre, moments)
        else:
            change = self.ask(cast(Any, algorithm).train, clients)["change"]
        seen = change[: self.trainer.flat.parameter_count]
        module = Loss(self.session, loss)
        copies = 1 if self.config.augment.name == "none" else 2

        def distance(x: Tensor) -> Tensor:
            views = x.chunk(copies) if copies > 1 else (x, x)
            found = module.train_on(cast("tuple[Tensor, Tensor]", views), self.setting.steps)
            return 1 - nn.functional.cosine_similarity(found, seen, dim=0)

        self.trainer.load(self.weights)
        return self.search(copies * len(members), steps, distance)[: len(members)]

    def ask_for_moments(self, members: np.ndarray[Any, Any], clients: Sequence[Client]) -> Any:
        """Return the centre and the moments of a cohort in which these clients are."""
        algorithm = cast(DCCO, self.session.algorithm)
        others = np.setdiff1d(np.arange(len(self.trainer.images[0])), members)
        rest = self.clients(others[: self.setting.images * (COHORT - len(clients))])
        centre = self.ask(algorithm.locate, [*clients, *rest])
        return centre, self.ask(algorithm.encode, [*clients, *rest], centre)

    def loss_beside(self, centre: Any, moments: Any) -> Callable[[EncodedBatch], Tensor]:
        """Return the loss whose gradient a client of DCCO takes, beside the cohort's moments."""
        objective = cast(DCCO, self.session.algorithm).objective

        def loss(batch: EncodedBatch) -> Tensor:
            own = objective.moments(batch.encodings, centre)
            together = {name: moments[name] + (own[name] - own[name].detach()) for name in own}
            return objective.loss_of(together, centre)

        return loss

    def compute_encodings(self, clients: Sequence[Client]) -> Tensor:
        """Compute the first views' encodings from moments, by the attack of another benchmark."""
        algorithm = cast(DCCO, self.session.algorithm)
        width = algorithm.objective.params.projector[-1]
        origin = {name: self.weights.new_zeros(width) for name in ("f", "g")}
        moments = self.ask(algorithm.encode, clients, origin)
        self.trainer.load(self.weights)
        with torch.no_grad():
            each = [algorithm.objective.bounded(c.encode_step(0).encodings[0]) for c in clients]
        real = torch.cat(each).double()
        layer = last_layer(self.trainer.network)
        found = solve(doubled(moments), doubled(origin), len(real), layer, 2000, 2)
        away = torch.cdist(real, found).amin(1) / (real - real.mean(0)).norm(dim=1)
        self.error = float(away.median())
        return found.float()

    def compare_encodings(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return how far the images' encodings are from the wanted ones."""
        encodings = self.trainer.encode((x, x))[0]
        return ((encodings - targets).square().sum(1) / targets.var(0).sum()).mean()

    def search(self, count: int, steps: int, distance: Callable[[Tensor], Tensor]) -> Tensor:
        """Look for images with a small distance, from noise; the best of two starts."""
        shape, found = (count, *self.trainer.images[0].shape[1:]), []
        for seed in range(2):
            x = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            rule = torch.optim.Adam([x], RATE)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rule, steps)
            for _ in range(steps):
                cost = distance(x)
                (x.grad,) = torch.autograd.grad(cost + SMOOTH * variation(x), [x])
                rule.step()
                schedule.step()
                with torch.no_grad():
                    x.clamp_(0, 1)
            found.append((float(distance(x)), x.detach()))
        return min(found, key=lambda each: each[0])[1]


class Loss(nn.Module):
    """The loss that a client descends, as a function of views and of the network's parameters."""

    def __init__(self, session: Experiment, loss: Callable[[EncodedBatch], Tensor]) -> None:
        super().__init__()
        self.session, self.loss = session, loss
        self.network = session.trainer.network  # its parameters are those of this module

    def forward(self, views: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss."""
        return self.loss(EncodedBatch(self.session.trainer.encode(views)))

    def train_on(self, views: tuple[Tensor, Tensor], steps: int) -> Tensor:
        """Return the change of the parameters by steps of plain SGD, as a function of the views."""
        start = {name: p.detach().requires_grad_() for name, p in self.named_parameters()}
        params: dict[str, Tensor] = dict(start)
        for _ in range(steps):
            value = torch.func.functional_call(self, params, (views,))
            slopes = torch.autograd.grad(value, list(params.values()), create_graph=True)
            lr = self.session.config.client.lr
            params = {n: p - lr * g for (n, p), g in zip(params.items(), slopes, strict=True)}
        return torch.cat([(params[name] - start[name]).reshape(-1) for name in start])


def variation(x: Tensor) -> Tensor:
    """Return the total variation of images."""
    right, below = x[..., 1:] - x[..., :-1], x[..., 1:, :] - x[..., :-1, :]
    return right.abs().mean() + below.abs().mean()


def match(found: Tensor, true: Tensor) -> Tensor:
    """Return the reconstructions in the order of the true images that they are closest to."""
    apart = torch.cdist(found.flatten(1), true.flatten(1))
    rows, columns = linear_sum_assignment(apart.numpy())
    return found[torch.from_numpy(rows[np.argsort(columns)])]


def score(found: Tensor, members: np.ndarray[Any, Any], images: Tensor) -> tuple[float, int]:
    """Return the mean signal-to-noise ratio in decibels, and the number of images recognized."""
    error = (found - images[members]).flatten(1).square().mean(1)
    nearest = torch.cdist(found.flatten(1), images.flatten(1)).argmin(1)
    recognized = int((nearest == torch.from_numpy(members)).sum())
    return float((-10 * error.clamp_min(1e-10).log10()).mean()), recognized


def draw(rows: Sequence[tuple[str, Tensor]], path: Path, tile: int = 40, left: int = 330) -> None:
    """Draw a row of grey images for each setting."""
    across = max(len(images) for _, images in rows)
    sheet = Image.new("L", (left + across * (tile + 2), len(rows) * (tile + 2)), 255)
    pen = ImageDraw.Draw(sheet)
    for row, (label, images) in enumerate(rows):
        pen.text((4, row * (tile + 2) + tile // 2 - 6), label, fill=0, font_size=13)
        for column, image in enumerate(images):
            grey = Image.fromarray((image.mean(0) * 255).byte().numpy())
            place = left + column * (tile + 2), row * (tile + 2)
            sheet.paste(grey.resize((tile, tile), Image.Resampling.NEAREST), place)
    sheet.save(path, optimize=True)


def main() -> None:
    """Print a line for each setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--victims", type=int, default=8, help="images to attack, at least")
    parser.add_argument("--steps", type=int, default=600, help="of the search for images")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("words", nargs="*", metavar="NAME or key=value")
    o = parser.parse_intermixed_args()
    keys = [word for word in o.words if "=" in word]
    names = [word for word in o.words if "=" not in word] or list(SETTINGS)
    rows: list[tuple[str, Tensor]] = []
    for name in names:
        setting, started = SETTINGS[name], time.perf_counter()
        attack = Attack(setting, keys)
        images = attack.trainer.images[0].float() / 255
        together = setting.images * setting.clients
        count = -(-o.victims // together) * together
        chosen = np.random.default_rng(0).permutation(len(images))[:count]
        if not rows:
            mean = images.mean(0, keepdim=True).expand(count, -1, -1, -1)
            ratio, _ = score(mean, chosen, images)
            print(f"the mean of all images: {ratio:.1f} dB, nobody is recognized")
            rows.append(("the images", images[chosen[: o.victims]]))
        found = torch.cat([
            match(attack.run(part, o.steps), images[part])
            for part in np.split(chosen, range(together, count, together))
        ])  # fmt: skip
        ratio, recognized = score(found, chosen, images)
        first = "" if np.isnan(attack.error) else f", encodings off by {attack.error:.1e}"
        seconds = time.perf_counter() - started
        print(
            f"{name}: {setting.about}: {ratio:.1f} dB, {recognized} of {count} recognized among "
            f"{len(images):,}{first}, {seconds:.0f} s",
            flush=True,
        )
        rows.append((setting.about, found[: o.victims]))
    if o.picture:
        draw(rows, o.picture)


if __name__ == "__main__":
    main()
