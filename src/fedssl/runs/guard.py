"""Compare the encoder during training with the one that it started as, and keep the best."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedssl.data.random import choose, key
from fedssl.evaluate import knn
from fedssl.evaluate.features import encode
from fedssl.evaluate.unlabeled import BATCH, SAMPLES, views_matched
from fedssl.runs.split import held_out_images
from fedssl.util.errors import UserError
from fedssl.util.status import say

if TYPE_CHECKING:
    from fedssl.runs.build import Experiment

DEVIATIONS = 2.5  # standard deviations from which a difference is not taken for chance


@dataclass
class Guard:
    """Measures on held-out images, which no client has and which are no test images.

    Ties go to the earlier model, so that a run which brings nothing keeps its start.
    """

    experiment: Experiment
    state: dict[str, Tensor] = field(default_factory=dict)
    """The start's measure, the best one's with its round and weights, and the last one's."""

    @property
    def is_active(self) -> bool:
        """True if ``evaluate.guard`` asks for one."""
        return self.experiment.config.evaluate.guard is not None

    @cached_property
    def images(self) -> Tensor:
        """The numbers of the held-out images; for views at most ``SAMPLES``."""
        config = self.experiment.config
        held_out = torch.as_tensor(held_out_images(config, self.experiment.dataset))
        if config.evaluate.guard == "knn":
            return held_out
        return held_out[torch.as_tensor(choose(key(config.seed, "guard"), len(held_out), SAMPLES))]

    def after_round(self, line: dict[str, Any]) -> None:
        """Measure the encoder if it is time, and remember the best."""
        config, done = self.experiment.config, int(line["round"])
        if not self.is_active or (done % config.evaluate.every and done != config.rounds):
            return
        if not self.state:
            start = self.measure(self.experiment.trainer.initial)
            self._take(start, 0, self.experiment.trainer.initial)
            self.state["start"] = torch.tensor(start)
        now = self.measure(self.experiment.server.weights)
        if now > float(self.state["best"]):
            self._take(now, done, self.experiment.server.weights)
        self.state["last"] = torch.tensor(now)
        line |= {"guard": now, "guard_start": float(self.state["start"])}
        if self._is_below_start(now):
            say(
                f"round {done}: {now:.1f} on held-out images (evaluate.guard), against "
                f"{float(self.state['start']):.1f} of the starting encoder: continuing hurts"
            )

    def _take(self, measure: float, round: int, weights: Tensor) -> None:
        best = {"best": torch.tensor(measure), "round": torch.tensor(round)}
        self.state |= best | {"weights": weights.clone()}

    def _is_below_start(self, now: float) -> bool:
        """Return whether a measure is below the start's by more than chance."""
        before = float(self.state["start"])
        mean = min(max((now + before) / 200, 0.01), 0.99)
        deviation = 100 * math.sqrt(2 * mean * (1 - mean) / max(1, len(self.images)))
        return before - now > DEVIATIONS * deviation

    def measure(self, weights: Tensor) -> float:
        """Return the share of held-out images that kNN, or the nearest view, gets right."""
        evaluator, config = self.experiment.evaluator, self.experiment.config
        model = evaluator.load(weights)
        if config.evaluate.guard == "unlabeled":
            parts = self.images.to(self.experiment.trainer.device).split(BATCH)
            first, second = (
                encode(model.encoder, (model.views(p, view) for p in parts), len(self.images))
                for view in (0, 1)
            )
            return views_matched(first, second)
        features, labels = model.features_of(evaluator.data.train.select(self.images)).pooled
        half = torch.zeros_like(labels, dtype=torch.bool)
        half[torch.sort(labels, stable=True).indices[::2]] = True
        keys = evaluator.data.classes, config.evaluate.k, config.evaluate.temperature
        scores = [
            knn.accuracy(features[a], labels[a], features[b], labels[b], *keys)
            for a, b in ((half, ~half), (~half, half))
        ]
        return sum(scores) / 2

    @property
    def best(self) -> Tensor | None:
        """The weights to keep; ``None`` for those of the last round."""
        is_other = bool(self.state) and int(self.state["round"]) < self.experiment.server.round
        return self.state["weights"] if is_other else None

    def summarize(self) -> dict[str, Any]:
        """Return the measures, for the summary, and say which encoder is kept."""
        if not self.state:
            return {}
        start, best, last = (float(self.state[name]) for name in ("start", "best", "last"))
        kept = int(self.state["round"])
        name = f"round {kept}" if kept else "the starting encoder"
        text = f"evaluate.guard={self.experiment.config.evaluate.guard}: {name} is kept"
        text += f", with {best:.1f} on held-out images"
        if kept:
            text += f" (starting encoder: {start:.1f})"
        else:
            text += f": no later one is better (the last: {last:.1f}). Continuing does not help"
        say(f"{text}.")
        return {"guard": {"start": start, "best": best, "last": last, "round": kept}}


def check_guard(experiment: Experiment) -> None:
    """Check that there are held-out images, and a global model, for a guard."""
    config = experiment.config
    if (kind := config.evaluate.guard) is None:
        return
    train = experiment.dataset.train
    problem, fix = "", ""
    if experiment.of_sites or experiment.models.result != "global":
        problem, fix = "there is no global model and images beside it to compare", "Leave it out."
    elif not config.evaluate.every:
        problem, fix = "nothing is evaluated during training", "Set evaluate.every=5, for example."
    elif not config.data.holdout:
        problem, fix = "no images are held out of training", "Set data.holdout=0.1, for example."
    elif kind == "knn" and not bool((train.full_labels >= 0).any()):
        problem, fix = "the training images have no labels", "Use evaluate.guard=unlabeled."
    if problem:
        raise UserError(problem, key="evaluate.guard", value=kind, fix=fix)
