"""Federated contrastive averaging with dictionary and alignment (FedCA, Zhang et al. 2020)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedssl.config import AlgorithmParams, Config, Recipe, key
from fedssl.data.random import choose
from fedssl.data.random import key as random_key
from fedssl.federation.algorithm import Algorithm, require_objective
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.features import (
    accept_features,
    join_features,
    scale_pixels,
    split_batches,
)
from fedssl.federation.server import Server
from fedssl.federation.task import Reply, client_task
from fedssl.federation.traffic import count_as
from fedssl.models.network import Tower
from fedssl.objectives.base import Objective
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.simclr import SimCLR
from fedssl.training.trainer import Trainer
from fedssl.util.device import to_device
from fedssl.util.errors import UserError

PUBLIC = 1000


class FedCA(Algorithm):
    """SimCLR with all clients' projections as negatives, aligned to a base model (Zhang et al.).

    As in the paper, all clients share a dictionary of all clients' projections. A base model is
    trained on public images, and each client's representations of these are pulled towards it.

    The rest is our reading:

    - A client projects its images once per round, with the model after training, without
      augmentation (the first of two modalities). Its own rows are in the dictionary too. If a
      client is not asked, or its projections are refused, its last ones stay.
    - The base model is trained with SimCLR and the clients' optimizer, from the run's own start.
    - The alignment is the mean of ‖h − h_base‖² over a batch of public images, with features of
      length 1. Batch norm sees that batch alone, which does not change its running statistics.
    """

    @dataclass(frozen=True)
    class Params(AlgorithmParams):
        """Keys of FedCA. All defaults are our reading."""

        recommended: ClassVar[Recipe] = {
            **AlgorithmParams.recommended,
            "data.name=digits": {"algorithm": {"public": 200, "base_epochs": 20}},  # of 1,437
        }

        align: float = key(0.1, ge=0, help="β, the weight of the alignment. 0: no alignment.")
        public: int | None = key(
            None,
            ge=0,
            help="Number of public training images, which belong to no client. In a deployment "
            "they come from the server's images. `null`: 1000, or none without alignment.",
        )
        base_epochs: int = key(
            100,
            ge=1,
            needs="align",
            help="Epochs of the base model on the public images. `fedssl reproduce --scale` takes "
            "the same share of them as of the rounds.",
        )
        dictionary: int = key(
            1024,
            ge=0,
            help="Largest number of projections that a client shares in a round. 0: none.",
        )

        def __post_init__(self) -> None:
            public = (PUBLIC if self.align else 0) if self.public is None else self.public
            object.__setattr__(self, "public", public)
            if self.align and public < 2:
                raise UserError(
                    "too few images: the base model compares at least 2",
                    key="algorithm.public",
                    value=public,
                    fix="Give more images, or set algorithm.align=0.",
                )
            if self.dictionary == 1:
                raise UserError(
                    "too few projections: batch normalization needs at least 2",
                    key="algorithm.dictionary",
                    value=self.dictionary,
                    fix="Use at least 2, or 0 to share no projections.",
                )

        def check(self, config: Config) -> None:
            """Refuse an objective without negatives that a dictionary can add to."""
            problem = "fedca's dictionary adds to SimCLR's negatives"
            require_objective(config, SimCLR, problem, "Use objective.name=simclr.")

        def scaled(self, share: float) -> Self:
            """Return the keys with a share of the base model's epochs, at least one."""
            if not self.align:
                return self
            return dataclasses.replace(self, base_epochs=max(1, round(self.base_epochs * share)))

    params: Params
    objective: SimCLR

    def __init__(self, params: AlgorithmParams, objective: Objective) -> None:
        super().__init__(params, objective)
        self.width = self.objective.params.projector[-1]

    def validate(self, config: Config, clients: int) -> Iterable[str]:
        """Warn that a base model is trained first."""
        if not self.params.align:
            return ()
        return [
            f"fedca: in the first round a base model trains on {self.params.public} public images, "
            f"for {self.params.base_epochs} epochs"
        ]

    def round(self, server: Server, cohort: Cohort) -> None:
        """Send model and dictionary, average the models, and collect new projections."""
        if self.params.align and "base" not in server.state:
            with server.preparing():  # this may take longer than a round
                server.state |= self.train_base(server)
        banks = server.state.get("banks", {})
        # The dictionary travels with the model, and counts as shared.
        dictionary = count_as("share", join_features(banks, self.width, server.weights))
        shown = [server.state[name] for name in ("public", "base") if self.params.align]
        server.apply(cohort.mean(self.train, server.model, dictionary, *shown))
        if not self.params.dictionary:
            return
        cohort.minimum = 0  # the round counts; a missing bank is not renewed
        server.state["banks"] = {**banks, **accept_features(server, cohort.gather(self.share))}

    def train_base(self, server: Server) -> Reply:
        """Train the base model on the public images; return the images and their features."""
        public, trainer = server.public, server.trainer
        if public is None:  # an estimate of traffic, for which only shapes count
            count, image = self.params.public or 0, trainer.images[0]
            shape = (count, image.shape[1], *trainer.augmentation.size)
            width = cast(Tower, trainer.network.towers[0]).encoder.features
            base = trainer.initial.new_zeros(()).expand(count, cast(int, width))
            images = torch.zeros((), dtype=torch.uint8, device=trainer.device)
            return {"public": images.expand(shape), "base": base}
        images, batches = trainer.plain_images(public.members), trainer.batches
        trainer.batches = dataclasses.replace(batches, steps=None, epochs=self.params.base_epochs)
        try:
            public.train_from(trainer.initial, {})
        finally:
            trainer.batches = batches
        with torch.no_grad():
            parts = [encode(trainer, part) for part in split_batches(trainer, images)]
        return {"public": images, "base": torch.cat(parts)}

    @client_task(seen="mean", reveals="update")
    def train(
        self,
        client: Client,
        model: Tensor,
        dictionary: Tensor,
        public: Tensor | None = None,
        base: Tensor | None = None,
    ) -> Reply:
        """The change that local training makes; the client's projections stay until asked for."""
        steps, trainer = itertools.count(), client.trainer

        def loss(encoded: EncodedBatch) -> Tensor:
            """L_contrast + β L_align."""
            loss = self.objective.contrast(encoded.encodings, dictionary)
            if public is None or base is None:
                return loss
            state = random_key(client.seed, "public", client.round, client.id, next(steps))
            chosen = choose(state, len(public), len(encoded.encodings[0]))
            places = to_device(chosen, public.device)
            return loss + self.params.align * misalignment(trainer, public[places], base[places])

        update = client.train(model, loss)
        if self.params.dictionary:
            client.state["bank"] = self.project(client)
        return update

    @torch.no_grad()
    def project(self, client: Client) -> Tensor:
        """Project some of the client's images to length 1, by the weights in the network."""
        trainer = client.trainer
        state = random_key(client.seed, "share", client.round, client.id)
        chosen = to_device(choose(state, client.samples, self.params.dictionary), trainer.device)
        images = trainer.plain_images(client.members[chosen])
        parts = (
            trainer.encode((scale_pixels(trainer, part),))[0]
            for part in split_batches(trainer, images)
        )
        return F.normalize(torch.cat(list(parts)), dim=1)

    @client_task(
        seen="each",
        reveals="features",
        reply=lambda fedca, trainer: {
            "features": trainer.initial.new_empty(fedca.params.dictionary, fedca.width)
        },
        when=lambda fedca, secure: fedca.params.dictionary > 0,
    )
    def share(self, client: Client) -> Reply:
        """Projections of single images, as they are, for all other clients too."""
        return {"features": client.state["bank"]}


def misalignment(trainer: Trainer, images: Tensor, base: Tensor) -> Tensor:
    """Compute the mean squared distance of images' features to those of the base model."""
    return (encode(trainer, images) - base).square().sum(1).mean()


def encode(trainer: Trainer, images: Tensor) -> Tensor:
    """Compute the first encoder's features of plain images, of length 1."""
    encoder = cast(Tower, trainer.network.towers[0]).encoder
    with trainer.autocast(), unseen(encoder):
        features = encoder(scale_pixels(trainer, images))
    return F.normalize(features.to(trainer.dtype), dim=1)


@contextlib.contextmanager
def unseen(module: nn.Module) -> Iterator[None]:
    """Batches that leave batch norm's running statistics as they are."""
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
