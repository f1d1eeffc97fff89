"""Collaborative contrastive learning: feature fusion and neighbourhood matching (CCL paper)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedssl.algorithms.false_negatives import (
    NEIGHBOURS,
    count_banks,
    find_origins,
    list_origins,
    log_ratios,
)
from fedssl.algorithms.instahide import Key, encrypt, load_public_images, mixture
from fedssl.config import AlgorithmParams, Config, Recipe, key
from fedssl.data.random import choose
from fedssl.data.random import key as random_key
from fedssl.federation.algorithm import Algorithm, require_objective
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.features import accept_features, join_features, scale_pixels
from fedssl.federation.server import Server
from fedssl.federation.task import Reply, client_task, update_like
from fedssl.federation.traffic import per_client
from fedssl.objectives.base import Objective
from fedssl.objectives.batch import EncodedBatch, Steps
from fedssl.objectives.memory import Tensors
from fedssl.objectives.moco import MoCo
from fedssl.training.trainer import Trainer
from fedssl.util.device import to_device
from fedssl.util.errors import UserError
from fedssl.util.secrets import system_generator


def _update_like(ccl: CCL, trainer: Trainer) -> Reply:
    return {**update_like(trainer), "momentum": trainer.initial[momentum_places(trainer)]}


def _describe_images(ccl: CCL) -> str:
    """Say how images are changed before a site encodes them."""
    mix, signs = ccl.params.mix, " and signs are flipped (InstaHide)" * ccl.params.is_hidden
    if mix == 1:
        return "The images are taken as they are."
    return (
        f"Before that, each image is mixed with {mix - 1} others{signs}.\n"
        "This is no proof of privacy: published attacks recover images from mixtures."
    )


class CCL(Algorithm):
    """MoCo on each client, with the other clients' features as negatives and as neighbours.

    A round has the steps of section 3. A client receives the main model, the momentum model and the
    banks of all other clients. It trains on Eq. 12 and returns both models, which are averaged by
    samples, and its new bank. The server and all other clients see the features in the bank.

    Our reading: banks are computed once per round, with the momentum model after training, from
    images without augmentation (the first of two modalities). If a client is not asked, or its bank
    is refused, its last bank stays.

    A simulation with labels also measures, at the end of each client's round, the false negatives
    of Eq. 4 and 5, the share of neighbours that are of the sample's class (``neighbour_purity``),
    the same for the nearest of the remote features (``remote_purity``), and the share of neighbours
    that are remote (``remote_neighbours``). Labels are never sent, and deployments do not measure
    this.
    """

    @dataclass(frozen=True)
    class Params(AlgorithmParams):
        """Keys of CCL. The paper leaves λ, N, τ_nm and K open; the defaults are our reading."""

        recommended: ClassVar[Recipe] = {
            **AlgorithmParams.recommended,
            "objective": {"name": "moco"},
        }

        remote: Literal["both", "only", "off"] = key(
            "both",
            help="Negatives. `both`: the features of the client and of other clients (Eq. 3). "
            "`only`: those of other clients (Eq. 5), once there are any. `off`: those of the "
            "client; it shares no features.",
        )
        lambda_: float = key(0.1, ge=0, help="λ, the weight of neighbourhood matching. 0: none.")
        neighbours: int = key(
            5, ge=1, needs="lambda", help="N, the number of neighbours in the matching."
        )
        temperature: float = key(
            0.1, gt=0, needs="lambda", help="τ_nm, the temperature of the matching."
        )
        features: int | None = key(
            None,
            needs="remote=both|only",
            help="K, the number of features that a client shares, and of candidates for "
            "neighbours. `null`: `objective.queue`.",
        )
        mix: int = key(
            4,
            ge=1,
            needs="remote=both|only",
            help="k, the number of images that InstaHide mixes. 1: no InstaHide, which also needs "
            "`algorithm.share_plain=true`.",
        )
        mix_root: str | None = key(
            None,
            path=True,
            needs="remote=both|only",
            help="Folder with public images of another data set, at each site. Half of the mixed "
            "images are from there, as InstaHide's authors recommend. `null`: all are the "
            "client's own.",
        )
        mask: bool = key(
            True,
            needs="remote=both|only",
            help="Flip the signs of mixed images' pixels at random, as InstaHide does. `false`: "
            "images are only mixed, which also needs `algorithm.share_plain=true`.",
        )
        share_plain: bool = key(
            False,
            needs="remote=both|only",
            help="Allow clients to share features of images without InstaHide.",
        )

        def __post_init__(self) -> None:
            if self.remote == "off" and self.lambda_:
                raise UserError(
                    "with algorithm.remote=off there are no remote features to match",
                    key="algorithm.lambda",
                    value=self.lambda_,
                    fix="Set algorithm.lambda=0.",
                )
            if self.remote != "off" and self.share_plain == self.is_hidden:
                raise UserError(
                    f"contradicts algorithm.share_plain={str(self.share_plain).lower()}",
                    key="algorithm.mix" if self.mask else "algorithm.mask",
                    value=self.mix if self.mask else self.mask,
                    fix="To share features of images without InstaHide, set algorithm.mix=1 or "
                    "algorithm.mask=false, and algorithm.share_plain=true. Else set none of them.",
                )

        def check(self, config: Config) -> None:
            """Refuse an objective without a queue."""
            problem, fix = "ccl needs MoCo's queue and momentum model", "Use objective.name=moco."
            require_objective(config, MoCo, problem, fix)

        @property
        def is_hidden(self) -> bool:
            """True if images are mixed and masked, as InstaHide does."""
            return self.mix > 1 and self.mask

    params: Params
    objective: MoCo

    def __init__(self, params: AlgorithmParams, objective: Objective) -> None:
        super().__init__(params, objective)
        given = self.params.features
        self.features = self.objective.params.queue if given is None else given
        self.width = self.objective.params.projector[-1]
        if self.features < 2:
            raise UserError(
                "too few: the images of a bank are encoded together",
                key="algorithm.features",
                value=self.features,
                fix="Use at least 2.",
            )
        if self.params.lambda_ and self.params.neighbours >= self.features:
            raise UserError(
                f"there are only {self.features} candidates",
                key="algorithm.neighbours",
                value=self.params.neighbours,
                fix=f"Use at most {self.features - 1}, or raise algorithm.features.",
            )

    def validate(self, config: Config, clients: int) -> Iterable[str]:
        """Warn if a single client has no remote features; read the public images once."""
        if config.engine.sites is None and self.params.mix_root is not None:
            side = config.data.size or 32
            shape, least = (1, side, side), self.params.mix // 2
            load_public_images(self.params.mix_root, config.data, shape, least)
        if self.shares and clients == 1:
            return ["ccl with one client: there are no remote features, so it is MoCo alone"]
        return ()

    @property
    def minimum_images(self) -> int:
        """The images of a client that the loss compares, or that InstaHide mixes."""
        mixed = self.params.mix - (self.params.mix // 2 if self.params.mix_root else 0)
        return max(self.objective.min_samples, mixed if self.shares else 1)

    @property
    def shares(self) -> bool:
        """True if features leave the clients."""
        return self.params.remote != "off"

    def round(self, server: Server, cohort: Cohort) -> None:
        """Send models and banks, average the models, and collect the new banks (section 3)."""
        # A momentum model starts as the main one; it has parameters only.
        start = server.model[: server.flat.parameter_count]
        momentum = server.state.get("momentum", start)
        banks = server.state.get("banks", {})
        # Q_s,c = {Q̄_l,i | i ≠ c} (Eq. 2). Banks travel with the models, and count as shared.
        remote = {
            int(k): join_features(banks, self.width, server.weights, without=int(k))
            for k in cohort.ids
        }
        origins = list_origins(server, cohort.ids)  # in a simulation with labels only
        shown = (server.model, momentum, per_client(remote, "share"), *origins)
        update = cohort.mean(self.train, *shown)
        server.apply(update)
        server.state["momentum"] = momentum + update["momentum"]
        if server.census is not None:
            log_ratios(server, cohort.gather(self.census), self.params.remote == "only")
        if not self.shares:
            return
        cohort.minimum = 0  # the round counts; a missing bank is not renewed
        new = accept_features(server, cohort.gather(self.share))
        server.state["banks"] = {**banks, **new}
        if server.census is not None:
            count_banks(server, new, self.features)

    @client_task(seen="mean", reveals="update", reply=_update_like)
    def train(
        self,
        client: Client,
        model: Tensor,
        momentum: Tensor,
        remote: Tensor,
        origins: Tensor | None = None,
    ) -> Reply:
        """The changes that local training makes to the main and to the momentum model."""
        places = momentum_places(client.trainer)
        start = client.full_weights(model)[: client.trainer.flat.parameter_count]
        target = client.state.get("target", start)
        client.state["target"] = target.index_copy(0, places, momentum)
        step = Step(self, client, remote)
        update = client.train(model, step)
        client.state |= step.count_false_negatives()
        if origins is not None:
            client.state |= step.judge_neighbours(origins)
        return {**update, "momentum": client.state["target"][places] - momentum}

    @client_task(seen="simulation", reveals="numbers", reply=("alike", "held", *NEIGHBOURS))
    def census(self, client: Client) -> dict[str, Tensor]:
        """For the log of a simulation: its queue's keys that are alike, and what neighbours are."""
        return client.numbers("alike", "held", *NEIGHBOURS)

    @client_task(
        seen="each",
        reveals="features",
        reply=lambda ccl, t: {"features": t.initial.new_empty(ccl.features, ccl.width)},
        when=lambda ccl, secure: ccl.shares,
        images=_describe_images,
    )
    def share(self, client: Client) -> Reply:
        """Features of single images (by InstaHide, unless share_plain), for all other clients too.

        Q̄_l,c of Eq. 2, one row per image, at most K.
        """
        trainer = client.trainer
        assert trainer.target is not None
        trainer.target.params.copy_(client.state["target"])
        state = random_key(client.seed, "share", client.round, client.id)
        chosen = choose(state, client.samples, self.features)
        # Batch norm looks at them together. With no backward pass there is room for more at once.
        batches = np.array_split(chosen, max(1, trainer.batches.per_epoch(len(chosen)) // 4))
        images, secret = trainer.plain_images(client.members), self.secret(client)
        public = self.public_images(trainer, images)
        pool = torch.cat((images, public)) if len(public) else images
        features = [self.encode(trainer, pool, batch, secret, len(public)) for batch in batches]
        return {"features": torch.cat(features)}

    def secret(self, client: Client) -> np.random.Generator:
        """Return the generator of InstaHide's keys, new in every round: never ``config.seed``."""
        return system_generator()

    @torch.no_grad()
    def encode(
        self,
        trainer: Trainer,
        images: Tensor,
        chosen: NDArray[np.int64],
        secret: np.random.Generator,
        public: int,
    ) -> Tensor:
        """Compute features of some images by the momentum model; its inputs are between 0 and 1.

        The last ``public`` of the images are public ones.
        """
        assert trainer.target is not None
        if self.params.mix == 1:
            inputs = scale_pixels(trainer, images[to_device(chosen, trainer.device)])
        else:
            count, shape = len(images) - public, images.shape[1:]
            drawn = Key.draw(chosen, count, self.params.mix, shape, secret, public)
            blend = encrypt if self.params.mask else mixture
            inputs = (blend(images, drawn, trainer.dtype) + 1) / 2
        with trainer.autocast():
            (features,) = trainer.target.module((inputs,))
        return F.normalize(features.to(trainer.dtype), dim=1)

    def public_images(self, trainer: Trainer, images: Tensor) -> Tensor:
        """Return the images of another data set to mix with; none without ``mix_root``."""
        root, shape = self.params.mix_root, cast(tuple[int, int, int], tuple(images.shape[1:]))
        if root is None:
            return images[:0]
        data, least = trainer.config.data, self.params.mix // 2
        return load_public_images(root, data, shape, least).to(images.device)

    def loss(self, encoded: EncodedBatch, remote: Tensor, chosen: Tensor) -> Tensor:
        """L_contrast + λ L_neigh (Eq. 12), in both directions as MoCo's."""
        params, memory = self.params, encoded.memory
        loss = self.objective.contrast(encoded.encodings, *self.negatives(memory, remote))
        if params.lambda_:
            candidates = torch.cat((remote, memory["queue"]))[chosen]
            for encoding in encoded.encodings[:2]:
                query = F.normalize(encoding, dim=1)
                near = matching(query, candidates, params.neighbours, params.temperature)
                loss = loss + params.lambda_ * near
        return loss

    def negatives(self, memory: Tensors, remote: Tensor) -> tuple[Tensor, Tensor]:
        """Q_l ∪ Q_s (Eq. 3), or Q_s alone (Eq. 5), and which of them are not there."""
        empty = self.objective.memory.free_places(memory)
        there = empty.new_zeros(len(remote))
        if self.params.remote == "only" and len(remote):
            return remote, there
        return torch.cat((memory["queue"], remote)), torch.cat((empty, there))


class Step(Steps):
    """The loss of a client's steps, with remote features and the candidates drawn for each step."""

    def __init__(self, ccl: CCL, client: Client, remote: Tensor) -> None:
        self.ccl, self.client, self.remote = ccl, client, remote
        self.function = ccl.loss
        self.recurs = len(remote) > 0 or ccl.params.remote == "off"  # none only in round 1
        self.number = 0
        self.places = ccl.objective.params.queue
        # Read once: reading from the device in every step would wait.
        self.seen = int(client.state.get("memory", {"seen": 0})["seen"])
        # The images that the queue's keys are of.
        self.origins = client.state.get("origins", client.members[:0])

    def inputs(self) -> tuple[Tensor, ...]:
        """Q_s, and which of Q_s ∪ Q_l are candidates (Eq. 7): K drawn evenly, or all if fewer."""
        chosen = self.candidates(self.ccl.features if self.ccl.params.lambda_ else 0)
        return self.remote, chosen

    def candidates(self, most: int) -> Tensor:
        """Draw the candidates of the next step, at most so many."""
        client, there = self.client, len(self.remote) + min(self.seen, self.places)
        drawn = random_key(client.seed, "neighbours", client.round, client.id, self.number)
        return to_device(choose(drawn, there, most), self.remote.device)

    def done(self, encodings: tuple[Tensor, ...]) -> None:
        """Note that the keys of both views enter the queue."""
        client = self.client
        if client.trainer.census is not None:
            _, chosen = client.positions(self.number)
            entering = client.members[chosen].repeat(2)
            self.origins = torch.cat((self.origins, entering))[-self.places :]
        self.number += 1
        self.seen += sum(map(len, encodings[2:]))

    def count_false_negatives(self) -> Reply:
        """Count the queue's keys: all, and those of a sample's class, on average over samples."""
        census = self.client.trainer.census
        if census is None:
            return {}
        classes, queue = census.count(self.client.members), census.count(self.origins)
        alike, held = classes @ queue / classes.sum(), torch.tensor(float(len(self.origins)))
        return {"origins": self.origins, "alike": alike, "held": held}

    def judge_neighbours(self, banks: Tensor) -> Reply:
        """Compare the classes of the next step's samples with those of their neighbours.

        ``banks``: which clients the remote features are of, and the rounds that they are from.
        """
        client, trainer, ccl = self.client, self.client.trainer, self.ccl
        census, chosen = trainer.census, self.candidates(ccl.features)
        if census is None or not len(self.remote) or len(chosen) < ccl.params.neighbours:
            return {name: torch.tensor(torch.nan) for name in NEIGHBOURS}
        epoch, drawn = client.positions(self.number)
        members = client.members[drawn]
        with trainer.restored(), torch.no_grad():
            state, streamed = client.random_state(epoch, drawn), trainer.feed.send(members)
            query = trainer.encode_samples(members, state, *streamed)[0]
        # The queue is a ring: its oldest key stands where the next one comes.
        queue = torch.empty(self.places, dtype=self.origins.dtype, device=self.origins.device)
        count = len(self.origins)
        places = (self.seen - count + torch.arange(count, device=queue.device)) % self.places
        queue[places] = self.origins
        remote = find_origins(census, banks, client.seed, ccl.features).to(queue)
        alike = census.labels[torch.cat((remote, queue))[chosen]] == census.labels[members][:, None]
        candidates = torch.cat((self.remote, trainer.memory["queue"]))[chosen]
        scores, is_remote = F.normalize(query, dim=1) @ candidates.T, chosen < len(remote)
        near = scores.topk(ccl.params.neighbours, dim=1).indices
        most = min(ccl.params.neighbours, int(is_remote.sum()))
        far = scores.masked_fill(~is_remote, -torch.inf).topk(most, dim=1).indices
        found = (alike.gather(1, near), alike.gather(1, far), is_remote[near])
        shares = (each.double().mean() for each in found)
        return dict(zip(NEIGHBOURS, shares, strict=True))


def matching(query: Tensor, candidates: Tensor, neighbours: int, temperature: float) -> Tensor:
    """−1/|B| Σ_i 1/N Σ_j Σ_a p_ija log p_ija (Eq. 8 to 11); 0 where all candidates are neighbours.

    Queries and candidates have length 1. A sample falls to its neighbour n_j with p, else to one
    of the rest, which all L_j share. So the entropy is −p log p − (1 − p) log(1 − p) + (1 − p) ·
    (the entropy among the rest).
    """
    if len(candidates) <= neighbours:
        return query.new_zeros(())
    scores = query @ candidates.T / temperature
    near, places = scores.topk(neighbours, dim=1)
    others = scores.scatter(1, places, -torch.inf)
    rest = torch.logsumexp(others, dim=1, keepdim=True)
    # Not `others` in the product: at the neighbours' places it would be 0 · −∞.
    among_rest = rest - ((others - rest).exp() * scores).sum(1, keepdim=True)
    either = torch.logaddexp(near, rest)
    log_p, log_not = near - either, rest - either
    return (-log_p.exp() * log_p + log_not.exp() * (among_rest - log_not)).mean()


def momentum_places(trainer: Trainer) -> Tensor:
    """Return the places of the momentum model that travel: not those of kept layers (FedBN)."""
    every = torch.arange(len(trainer.initial), device=trainer.device)
    sent = every if trainer.shared is None else trainer.shared
    return sent[sent < trainer.flat.parameter_count]
