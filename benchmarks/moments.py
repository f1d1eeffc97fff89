"""How much DCCO's statistics of few images tell: compute the encodings from a client's reply.

    python benchmarks/moments.py IMAGES [--rounds R] [--tries N] [key=value ...]

The default recipe with clients of so many images (digits), after R rounds; keys change it. Printed
is how far the encodings that were found are from the real ones, in shares of these ones' distance
from their mean: the worst and the median.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedssl import config
from fedssl.engines.local import LocalEngine
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.moments import Centre, SecondMomentObjective
from fedssl.runs.build import Experiment, build_experiment
from fedssl.util.trees import Tree


def solve(
    moments: Mapping[str, Tensor],
    centre: Centre,
    images: int,
    layer: nn.Linear,
    steps: int = 2000,
    tries: int = 1,
) -> list[Tensor]:
    """Both views' encodings, from means, products and the last layer of a network.

    The products leave open a matrix of N − 1 rows. It is the one for which the layer's inputs are
    not negative, after a ReLU, and the spread of each number is as told.
    """
    means, rank = [moments["f"], moments["g"]], images - 1
    squares = [moments[n * 2] if n * 2 in moments else moments[n + "2"] for n in "fg"]
    spread = [
        (s.diagonal() if s.ndim > 1 else s) - m**2 for s, m in zip(squares, means, strict=True)
    ]
    left, size, right = torch.linalg.svd((moments["fg"] - torch.outer(*means)) * images)
    sides = [x[:, :rank] * size[:rank].sqrt() for x in (left, right.T)]
    plane = torch.linalg.svd(torch.eye(images).double() - 1 / images)[0][:, :rank]
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    inverse = torch.linalg.pinv(weight)
    about = [m + centre[name] for m, name in zip(means, "fg", strict=True)]

    def views(turn: Tensor) -> list[Tensor]:
        both = (turn, torch.linalg.inv(turn).T)
        return [m + plane @ t @ s.T for m, t, s in zip(about, both, sides, strict=True)]

    def missed(turn: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for view, own in zip(views(turn), spread, strict=True):
            total = total + ((view - bias) @ inverse.T).clamp_max(0).square().sum()
            away = view.var(0, correction=0) - own
            total = total + images * away.square().sum() / own.mean()
        return total

    turns = [descend(missed, rank, steps, seed) for seed in range(tries)]
    return views(min(turns, key=lambda turn: float(missed(turn))))


def descend(missed: Callable[[Tensor], Tensor], rank: int, steps: int, seed: int) -> Tensor:
    """From a random turn, or from a mirrored one, to where the least is missed."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(rank, rank, generator=generator, dtype=torch.float64)
    turn = torch.linalg.qr(start)[0].contiguous().requires_grad_()
    search = torch.optim.LBFGS(
        [turn],
        max_iter=steps,
        max_eval=2 * steps,
        history_size=30,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-13,
        tolerance_change=1e-16,
    )

    def step() -> Tensor:
        search.zero_grad()
        total = missed(turn)
        total.backward()
        assert turn.grad is not None
        turn.grad = turn.grad.contiguous()
        return total

    search.step(step)
    return turn.detach()


def last_layer(network: nn.Module) -> nn.Linear:
    """The projector's last."""
    return [module for module in network.modules() if isinstance(module, nn.Linear)][-1]


def answer(
    session: Experiment, client: int, round: int
) -> tuple[Tensor, dict[str, Tensor], Centre]:
    """A client's encodings of its first views, what the server gets, and the centre it sent."""
    objective, weights = session.algorithm.objective, session.server.weights
    engine = session.engine
    assert isinstance(objective, SecondMomentObjective) and isinstance(engine, LocalEngine)
    zero = {name: weights.new_zeros(objective.params.projector[-1]) for name in ("f", "g")}
    centre = cast(Centre, session.server.state.get("centre", zero))
    seen: list[Tensor] = []

    def moments(encoded: EncodedBatch) -> dict[str, Tree]:
        seen.append(objective.bounded(encoded.encodings[0]).detach())
        return dict(objective.moments(encoded, centre))

    reply = engine.client(np.array([client]), round, remember=False).mean(weights, moments)
    return torch.cat(seen).double(), doubled(reply), doubled(centre)


def doubled(tree: Any) -> dict[str, Tensor]:
    """In float64."""
    return {name: value.double() for name, value in tree.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("images", type=int)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--tries", type=int, default=1, help="random starts")
    parser.add_argument("words", nargs="*", metavar="key=value")
    o = parser.parse_intermixed_args()
    own = [
        f"partition.samples={o.images}",
        f"cohort.size={max(2, 128 // o.images)}",
        "device=cpu",
        "evaluate.baselines=[]",
    ]
    session = build_experiment(config.resolve(config.read_recipe("default"), [*own, *o.words]))
    for round in range(o.rounds):
        session.server.round = round
        session.algorithm.round(
            session.server, session.engine.cohort(session.draw_cohort(round), round)
        )
    real, moments, centre = answer(session, 0, o.rounds)
    session.trainer.load(session.server.weights)
    started = time.perf_counter()
    layer = last_layer(session.trainer.network)
    found = solve(moments, centre, len(real), layer, o.steps, o.tries)[0]
    seconds = time.perf_counter() - started
    away = torch.cdist(real, found).amin(1) / (real - real.mean(0)).norm(dim=1)
    rule = session.algorithm.tasks()["encode"].few_images(session.algorithm)
    print(
        f"{len(real)} images of the {rule} that the rule names, d = {real.shape[1]}: "
        f"off by {away.max():.2e} at worst, {away.median():.2e} in the median, {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
