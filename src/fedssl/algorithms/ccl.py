"""Collaborative contrastive learning: feature fusion and neighbourhood matching (CCL paper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedssl.algorithms.instahide import Key, encrypt
from fedssl.config import AlgorithmParams, key
from fedssl.data.random import choose
from fedssl.data.random import key as random_key
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.traffic import per_client
from fedssl.objectives.base import Objective
from fedssl.objectives.batch import EncodedBatch, Steps
from fedssl.objectives.memory import Tensors
from fedssl.objectives.moco import MoCo
from fedssl.privacy.noise import from_the_system
from fedssl.training.trainer import Trainer
from fedssl.util.device import to_device
from fedssl.util.errors import UserError
from fedssl.util.text import name_client
from fedssl.util.trees import Tree


class CCL(Algorithm):
    """MoCo on each client, with the other clients' features as negatives and as neighbours.

    A round has the steps of section 3: the main and the momentum model and all banks but a client's
    own go to it; it trains on Eq. 12; both models are averaged by samples; and each client's
    new bank comes back. The server and all other clients see these features one by one. Our
    reading: banks are made once a round, by the momentum model that training ends with, from images
    without augmentation (of two modalities, the first). A client that is not asked, or whose bank
    is refused, keeps its last one.

    A simulation whose images have labels also measures the false negatives of Eq. 4 and 5. Labels
    are in no exchange, and no deployment does this.
    """

    compiles = "on"  # not by itself before it was seen at full size on a GPU
    gathers: tuple[str, ...] = ("share",)
    varying = ("share",)
    logs: ClassVar[Mapping[str, tuple[str, ...]]] = {"census": ("alike", "held")}
    simulated = ("census",)

    @dataclass(frozen=True)
    class Params(AlgorithmParams):
        """Keys of CCL. The paper leaves λ, N, τ_nm and K open; the defaults are our reading."""

        remote: Literal["both", "only", "off"] = key(
            "both",
            help="Negatives. `both`: the features of the client and of other clients (Eq. 3). "
            "`only`: those of other clients (Eq. 5), once there are any. `off`: those of the "
            "client; it shares no features.",
        )
        lambda_: float = key(0.1, ge=0, help="λ, the weight of the matching. 0: no matching.")
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
            if self.remote != "off" and self.share_plain != (self.mix == 1):
                raise UserError(
                    f"contradicts algorithm.share_plain={str(self.share_plain).lower()}",
                    key="algorithm.mix",
                    value=self.mix,
                    fix="To share features of images without InstaHide, set algorithm.mix=1 and "
                    "algorithm.share_plain=true. Else set neither.",
                )

    params: Params

    def __init__(self, params: AlgorithmParams, objective: Objective) -> None:
        super().__init__(params, objective)
        if not isinstance(objective, MoCo):
            raise UserError(
                f"algorithm.name=ccl with objective.name={objective.params.name}: it is made of "
                "MoCo's queue and momentum model; use objective.name=moco"
            )
        self.moco = objective
        if self.params.remote == "off":
            self.gathers = ()
        given = self.params.features
        self.features = objective.params.queue if given is None else given
        self.width = objective.params.projector[-1]
        if self.features < 2:
            raise UserError(
                f"algorithm.features={self.features}: must be at least 2; a bank's images are "
                "encoded together"
            )
        if self.params.lambda_ and self.params.neighbours >= self.features:
            raise UserError(
                f"algorithm.neighbours={self.params.neighbours}: must be below the "
                f"{self.features} candidates (algorithm.features, else objective.queue)"
            )

    def check_clients(self, sizes: NDArray[np.int64]) -> None:
        """InstaHide mixes different images of one client."""
        super().check_clients(sizes)
        small = int(np.argmin(sizes))
        if self.params.remote != "off" and len(sizes) == 1:
            self.note = "ccl with one client: there are no remote features, so it is MoCo alone"
        if self.params.remote != "off" and sizes[small] < self.params.mix:
            who = name_client(self.client_names, small)
            raise UserError(
                f"algorithm.mix={self.params.mix}: {who} holds {sizes[small]} image(s) to mix; "
                "lower algorithm.mix, or use a partition with larger clients"
            )

    def round(self, server: Server, cohort: Cohort) -> None:
        """Models and banks down, models up and averaged, banks up (section 3)."""
        # A momentum model starts as the main one; it has parameters only.
        start = server.model[: server.flat.parameter_count]
        momentum = cast(Tensor, server.state.get("momentum", start))
        banks = cast("dict[str, Tensor]", server.state.get("banks", {}))
        classes = cast("dict[str, Tensor]", server.state.get("classes", {}))
        remote = {int(k): self.others(banks, int(k), server.weights) for k in cohort.ids}
        update = cohort.mean("train", server.model, momentum, per_client(remote, "share"))
        server.apply(update)
        server.state["momentum"] = momentum + update["momentum"]
        if server.census is not None:
            self.note_false_negatives(server, cohort, classes)
        if self.params.remote == "off":
            return
        cohort.minimum = 0  # the round counts: a bank that does not come is only not renewed
        new = finite(cohort.gather("share"), server, self.client_names)
        server.state["banks"] = {**banks, **new}
        if server.census is not None:
            server.state["classes"] = {**classes, **{k: self.classes(server, int(k)) for k in new}}

    def others(self, banks: Mapping[str, Tensor], client: int, like: Tensor) -> Tensor:
        """Q_s,c = {Q̄_l,i | i ≠ c} (Eq. 2), in the order of the clients."""
        ids = sorted((k for k in banks if int(k) != client), key=int)
        return torch.cat([like.new_empty(0, self.width), *(banks[k] for k in ids)])

    def classes(self, server: Server, client: int) -> Tensor:
        """How many features of a client's new bank are of each class.

        A mixed image counts as the one that was encrypted.
        """
        assert server.census is not None
        members = server.census.groups[client]
        state = random_key(server.config.seed, "share", server.round, client)
        return server.census.count(members[choose(state, len(members), self.features)])

    def note_false_negatives(
        self, server: Server, cohort: Cohort, classes: Mapping[str, Tensor]
    ) -> None:
        """R_FN (Eq. 4, or Eq. 5), the mean over a client's samples at the end of its round."""
        census, traffic = server.census, cohort.traffic
        assert census is not None
        ratios: dict[int, dict[str, Tensor]] = {}
        for client, local in cohort.gather("census", log=True).items():
            own = census.count(census.groups[client])
            others = sum((n for k, n in classes.items() if int(k) != client), torch.zeros_like(own))
            alike, held = own @ others / own.sum(), others.sum()
            if self.params.remote != "only" or not held:
                alike, held = alike + local["alike"].to(own), held + local["held"].to(own)
            ratios[client] = {"false_negatives": alike / held}
        server.log_clients(ratios)
        for bytes_of in (traffic.up, traffic.down):
            bytes_of.pop("census", None)  # only a simulation asks for it

    def reply_like(self, task: str, trainer: Trainer) -> dict[str, Tree]:
        """Two models' changes and the loss; or at most K features."""
        if task == "share":
            return {"features": trainer.initial.new_empty(self.features, self.width)}
        reply = super().reply_like(task, trainer)
        return {**reply, "momentum": trainer.initial[momentum_places(trainer)]}

    def train(
        self, client: Client, received: Tensor, momentum: Tensor, remote: Tensor
    ) -> dict[str, Tree]:
        """The changes that local training makes to the main and to the momentum model."""
        places = momentum_places(client.trainer)
        own = client.state.get(
            "target", client.full_weights(received)[: client.trainer.flat.parameter_count]
        )
        client.state["target"] = cast(Tensor, own).index_copy(0, places, momentum)
        step = Step(self, client, remote)
        reply = client.train(received, step)
        client.state |= step.counted()
        return {**reply, "momentum": cast(Tensor, client.state["target"])[places] - momentum}

    def loss(self, encoded: EncodedBatch, remote: Tensor, chosen: Tensor) -> Tensor:
        """L_contrast + λ L_neigh (Eq. 12), in both directions as MoCo's."""
        params, memory = self.params, encoded.memory
        loss = self.moco.contrast(encoded.encodings, *self.negatives(memory, remote))
        if params.lambda_:
            candidates = torch.cat((remote, memory["queue"]))[chosen]
            for encoding in encoded.encodings[:2]:
                query = F.normalize(encoding, dim=1)
                near = matching(query, candidates, params.neighbours, params.temperature)
                loss = loss + params.lambda_ * near
        return loss

    def negatives(self, memory: Tensors, remote: Tensor) -> tuple[Tensor, Tensor]:
        """Q_l ∪ Q_s (Eq. 3), or Q_s alone (Eq. 5), and which of them are not there."""
        empty = self.moco.memory.free_places(memory)
        there = empty.new_zeros(len(remote))
        if self.params.remote == "only" and len(remote):
            return remote, there
        return torch.cat((memory["queue"], remote)), torch.cat((empty, there))

    def census(self, client: Client) -> dict[str, Tree]:
        """For the log of a simulation: how many features of its queue a sample is alike, of all."""
        return {name: client.state.get(name, torch.tensor(torch.nan)) for name in ("alike", "held")}

    def share(self, client: Client) -> dict[str, Tree]:
        """Features of single images (by InstaHide, if mix is above 1), for all other clients too.

        Q̄_l,c of Eq. 2, one row an image, at most K.
        """
        if self.params.remote == "off":
            raise UserError("algorithm.remote=off: no feature leaves this client")
        trainer, seed = client.trainer, client.trainer.config.seed
        assert trainer.target is not None
        trainer.target.params.copy_(cast(Tensor, client.state["target"]))
        chosen = choose(
            random_key(seed, "share", client.round, client.id), client.samples, self.features
        )
        # Batch norm looks at them together. With no backward pass there is room for more at once.
        batches = np.array_split(chosen, max(1, trainer.batches.per_epoch(len(chosen)) // 4))
        images, secret = trainer.images[0][client.members], self.secret(client)
        return {"features": torch.cat([self.look(trainer, images, b, secret) for b in batches])}

    def secret(self, client: Client) -> np.random.Generator:
        """Where InstaHide's keys come from, new in every round: never ``config.seed``."""
        return from_the_system()

    @torch.no_grad()
    def look(
        self, trainer: Trainer, images: Tensor, own: NDArray[np.int64], secret: np.random.Generator
    ) -> Tensor:
        """Features of some images; what the network sees is between 0 and 1 in any case."""
        assert trainer.target is not None
        if self.params.mix == 1:
            inputs = images[to_device(own, trainer.device)].to(trainer.dtype) / 255
        else:
            drawn = Key.draw(own, len(images), self.params.mix, images.shape[1:], secret)
            inputs = (encrypt(images, drawn, trainer.dtype) + 1) / 2
        with trainer.autocast():
            (features,) = trainer.target.module((inputs,))
        return F.normalize(features.to(trainer.dtype), dim=1)


class Step(Steps):
    """A client's steps: which remote features there are, and the candidates drawn for each step."""

    def __init__(self, ccl: CCL, client: Client, remote: Tensor) -> None:
        self.ccl, self.client, self.remote = ccl, client, remote
        self.function = ccl.loss
        self.recurs = len(remote) > 0 or ccl.params.remote == "off"  # none only in round 1
        self.number = 0
        memory: Any = client.state.get("memory", {"seen": 0})
        self.seen = int(memory["seen"])  # counted here: reading the device's would wait for it
        # Which images the queue's keys are of.
        none = torch.zeros(ccl.moco.params.queue, dtype=torch.int64, device=client.trainer.device)
        self.origins = cast(Tensor, client.state.get("origins", none)).clone()

    def inputs(self) -> tuple[Tensor, ...]:
        """Q_s, and which of Q_s ∪ Q_l are candidates (Eq. 7): K drawn evenly, or all if fewer."""
        client, there = self.client, len(self.remote) + min(self.seen, len(self.origins))
        drawn = random_key(
            client.trainer.config.seed, "neighbours", client.round, client.id, self.number
        )
        most = self.ccl.features if self.ccl.params.lambda_ else 0
        return self.remote, to_device(choose(drawn, there, most), self.remote.device)

    def done(self, encodings: tuple[Tensor, ...]) -> None:
        """The keys of both views are in the queue."""
        if self.client.trainer.census is not None:
            self.follow()
        self.number += 1
        self.seen += sum(map(len, encodings[2:]))

    def follow(self) -> None:
        """Which images' keys enter the queue: both views', as MoCo's ``remember`` has it."""
        client, size = self.client, len(self.origins)
        _, chosen = client.positions(self.number)
        entering = client.members[chosen].repeat(2)
        skipped = max(0, len(entering) - size)
        arrival = torch.arange(skipped, len(entering), device=entering.device) + self.seen
        self.origins.index_copy_(0, arrival % size, entering[skipped:])

    def counted(self) -> dict[str, Tree]:
        """How many of the queue's keys a sample of the client is alike on average, and of all."""
        census, client = self.client.trainer.census, self.client
        if census is None:
            return {}
        held = min(self.seen, len(self.origins))
        own, queue = census.count(client.members), census.count(self.origins[:held])
        alike = own @ queue / own.sum()
        return {"origins": self.origins, "alike": alike, "held": torch.tensor(float(held))}


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
    """Where in the momentum model the numbers are that travel: not those of kept layers (FedBN)."""
    every = torch.arange(len(trainer.initial), device=trainer.device)
    sent = every if trainer.shared is None else trainer.shared
    return sent[sent < trainer.flat.parameter_count]


def finite(
    replies: Mapping[int, Mapping[str, Tensor]], server: Server, names: Sequence[str]
) -> dict[str, Tensor]:
    """The new banks, by client; one with a feature that is no number, or too long, is dropped.

    Features have length 1: a longer one would outweigh those of all other clients.
    """
    banks: dict[str, Tensor] = {}
    for client, reply in replies.items():
        lengths = torch.linalg.vector_norm(reply["features"], dim=1)
        if bool((lengths < 1.01).all()):  # a number that is none is not below
            banks[str(client)] = reply["features"]
            continue
        what = "longer than 1" if bool(torch.isfinite(lengths).all()) else "not finite"
        server.warn(
            f"{name_client(names, client)} shared features that are {what}: its last bank stays"
        )
    return banks
