"""Distributed cross correlation optimization (DCCO paper, section 3.3 and Figure 2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedssl.config import AlgorithmParams, Config, Recipe, key
from fedssl.federation.algorithm import (
    Algorithm,
    Suits,
    is_one_plain_step,
    require_objective,
)
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.task import Reply, client_task, update_like
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.moments import Centre, MomentObjective, Moments
from fedssl.training.batches import Batches
from fedssl.training.trainer import Trainer
from fedssl.util.trees import Tree


def _centre_like(dcco: DCCO, trainer: Trainer) -> Reply:
    return dict(dcco.objective.centre(dcco.one_sample(trainer)))


def _moments_like(dcco: DCCO, trainer: Trainer) -> Reply:
    batch = dcco.one_sample(trainer)
    return dict(dcco.objective.moments(batch, dcco.objective.centre(batch)))


def _update_like(dcco: DCCO, trainer: Trainer) -> Reply:
    update = update_like(trainer)
    several = not trainer.batches.is_one_step
    return update | {"local_loss": update["loss"]} if several else update


def _few_images(dcco: DCCO) -> int:
    return dcco.objective.few_images


class DCCO(Algorithm):
    """Large-batch statistics from small clients.

    Clients send the moments of their encodings. The server returns the moments of the whole cohort.
    Each client then descends the large-batch loss through its own samples only. With one local
    step, a round equals a centralized step on the union of the cohort's samples (appendix A).
    With several, a client keeps its own share of the moments up to date (docs/papers/dcco.md).
    """

    @dataclass(frozen=True)
    class Params(AlgorithmParams):
        """Keys of DCCO, for several local steps."""

        recommended: ClassVar[Recipe] = {
            "objective": {"name": "cco"},
            "partition": {"name": "samples"},
            "algorithm": {"local_steps": 1},
            "rounds": 200,
        }

        fresh: bool = key(
            True,
            kw_only=True,
            help="With several local steps: update the client's own share of the moments after "
            "each step. `false`: keep the round's moments, as the paper's formula does; the "
            "change of the model can grow without bound.",
        )
        radius: float = key(
            1.0,
            gt=0,
            kw_only=True,
            help="With several local steps and `fresh`: how far a client's ⟨FG⟩ may move in a "
            "round, in units of the norm of the cohort's ⟨FG⟩ (with `sigreg`, its characteristic "
            "functions). A later step that exceeds this is undone and ends the client's round.",
        )

        def check(self, config: Config) -> None:
            """Refuse losses that clients cannot share."""
            problem = "dcco shares moments of encodings, and this loss is not a function of them"
            fix = "Use objective.name=cco, vicreg, sigreg or spectral, or algorithm.name=fedavg."
            require_objective(config, MomentObjective, problem, fix)

    params: Params
    objective: MomentObjective
    suits = Suits("for many sites, or few images at a site")
    minimum_images = 1  # statistics are over the whole cohort
    weight = "used"  # N_k of Eq. 3

    def round(self, server: Server, cohort: Cohort) -> None:
        """Exchange moments, then updates; the first round also finds the moments' centre."""
        if "centre" not in server.state:
            asks, origin = self.asks_for_centre(server.config.privacy.secure), _centre_like
            located = cohort.mean(self.locate, server.model) if asks else None
            server.state["centre"] = located or origin(self, server.trainer)
        centre = server.state["centre"]
        moments = cohort.mean(self.encode, server.model, centre)
        if self.params.fresh and not server.trainer.batches.is_one_step:
            moments["share"] = torch.tensor(1 / len(cohort.ids), dtype=torch.float64)
        update = cohort.mean(self.descend, server.model, centre, moments)
        server.apply(update)
        if self.objective.is_centred:
            server.state["centre"] = {name: centre[name] + moments[name] for name in centre}

    def asks_for_centre(self, secure: bool) -> bool:
        """Return whether the first round asks clients for their mean encodings.

        Secure sums start at the origin. Two sums of the same encodings would reveal those of a
        client that drops out in between.
        """
        return self.objective.is_centred and not secure

    @client_task(
        seen="mean",
        reveals="statistics",
        reply=_centre_like,
        few_images=_few_images,
        when=asks_for_centre,
        stateless=True,
    )
    def locate(self, client: Client, model: Tensor) -> Tree:
        """The client's mean encodings, in the first round."""
        return client.mean(model, self.objective.centre)

    @client_task(
        seen="mean",
        reveals="statistics",
        reply=_moments_like,
        bound=lambda dcco: dcco.objective.moments_bound,
        few_images=_few_images,
        stateless=True,
    )
    def encode(self, client: Client, model: Tensor, centre: Centre) -> Tree:
        """Means of the client's encodings and of their products, over its samples in the round.

        ⟨⟩_k of Eq. 3.
        """
        return client.mean(model, lambda batch: self.objective.moments(batch, centre))

    @client_task(seen="mean", reveals="update", reply=_update_like, stateless=True)
    def descend(self, client: Client, model: Tensor, centre: Centre, moments: Moments) -> Reply:
        """The change of the network's weights that local training makes.

        On ⟨⟩_C = ⟨⟩_k + sg(⟨⟩_A − ⟨⟩_k) at the first step; later, see ``docs/papers/dcco.md``.
        """
        share = moments.get("share")  # of the client in the cohort; None: moments stay ⟨⟩_A
        cohort = {name: moments[name] for name in moments if name != "share"}
        track = self.objective.track
        sent = [] if share is None else self._sent(client, model, centre)
        values: list[Tensor] = []

        def loss(batch: EncodedBatch) -> Tensor:
            local = self.objective.moments(batch, centre)
            here = {name: value.detach() for name, value in local.items()}
            value_of = cohort
            if share is not None and values:
                before = sent[len(values)]
                value_of = {n: cohort[n] + share * (here[n] - before[n]) for n in here}
            # Summed in this order the value is exactly ⟨⟩_A at the first step.
            combined = {n: value_of[n] + (local[n] - here[n]) for n in local}
            value = self.objective.loss_of(combined, centre) + self.objective.separate_loss(batch)
            values.append(value.detach())
            return value

        def is_near(step: int) -> bool:
            with torch.no_grad():
                now = track(self.objective.moments(client.encode_step(step), centre))
            moved = torch.linalg.vector_norm(now - track(sent[step]))
            if moved <= self.params.radius * torch.linalg.vector_norm(track(cohort)):
                return True
            values.pop()
            return False

        reply = client.train(model, loss, None if share is None else is_near)
        if client.trainer.batches.is_one_step:
            return reply
        return reply | {"loss": values[0], "local_loss": values[-1]}

    def _sent(self, client: Client, model: Tensor, centre: Centre) -> list[Moments]:
        """Return the moments of each step's batch with the weights that the server sent."""
        client.load(client.full_weights(model))
        with torch.no_grad():
            batches = (client.encode_step(step) for step in range(client.steps))
            return [self.objective.moments(batch, centre) for batch in batches]

    def validate(self, config: Config, clients: int) -> Iterable[str]:
        """Warn about stale moments."""
        one_step = Batches.from_config(config.algorithm, config.seed).is_one_step
        if not (one_step or self.params.fresh):
            yield (
                "algorithm.fresh=false: with several local steps, stale moments can let the loss "
                "diverge. Use algorithm.fresh=true or algorithm.local_steps=1."
            )

    def exact_on_union(self, trainer: Trainer) -> bool:
        """Return whether appendix A applies."""
        return is_one_plain_step(trainer)

    def one_sample(self, trainer: Trainer) -> EncodedBatch:
        """Return a batch of one sample, for the shape of what is computed from it."""
        views = self.objective.views + len(trainer.augmentation.small)
        encodings = trainer.initial.new_zeros(1, self.objective.params.projector[-1])
        return EncodedBatch((encodings,) * views)
