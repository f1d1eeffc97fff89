"""Feature alignment regularization and clustering (Dec-SSL, section 5, Algorithms 1 and 2)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.algorithms.fedca import in_batches, plain
from fedssl.config import AlgorithmParams, Config, key
from fedssl.data.dataset import split_for_encoding
from fedssl.data.random import key as random_key
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.models.flat_weights import FlatWeights
from fedssl.models.network import Network, Tower, initialize, load_encoders
from fedssl.objectives.base import Objective
from fedssl.objectives.batch import EncodedBatch, Steps
from fedssl.objectives.mae import MAE
from fedssl.training import optim
from fedssl.training.trainer import Trainer
from fedssl.util.errors import UserError
from fedssl.util.text import name_client
from fedssl.util.trees import Tree

SHOWN = 20  # clients that are named where clusters are shown
MOVES = 3  # the same, where they change


class FeatARC(Algorithm):
    """C models at the server; a client trains the one whose features are nearest to its own.

    Clients are not weighed by samples (Algorithm 1, line 18). An empty cluster keeps its model. A
    reply has a slot for each cluster, zeros in all but one, so that sums are all the server needs
    to learn; it costs C models' bytes each way. Of two towers or modalities the first is looked at.
    A client that changes its cluster leaves its target network and memory behind.

    A client is judged by its cluster's model (C.1). There is no global one: what is reported and
    exported as such is that of cluster 0.

    The paper does not say how the models start. From one network (``alike``) they differ by what
    their first members, i mod C, made of it, and clients go where theirs is like the others'. The
    reference program has one of its own for each (``apart``): features of such networks have no
    basis in common, so that a client stays nearest to the one that its own model began with.
    """

    compiles = "on"  # as CCL's: not by itself before it was seen at full size on a GPU
    judges = "personal"
    personal = ("cluster",)
    weight = "uniform"
    logs: ClassVar[Mapping[str, tuple[str, ...]]] = {"report": ("cluster",)}

    @dataclass(frozen=True)
    class Params(AlgorithmParams):
        """Keys of FeatARC."""

        clusters: int = key(2, ge=1, help="C, the number of clusters. 1: alignment only.")
        lambda_: float = key(1.0, ge=0, help="λ, the weight of alignment. 0: clustering only.")
        start: Literal["alike", "apart"] = key(
            "alike", help="Initial models of the clusters: equal, or each drawn at random."
        )

    params: Params

    def __init__(self, params: AlgorithmParams, objective: Objective) -> None:
        super().__init__(params, objective)
        if self.params.clusters > 1:
            self.model = "global: that of cluster 0"
        if self.params.lambda_ and isinstance(objective, MAE):
            raise UserError(
                f"algorithm.lambda={self.params.lambda_} with objective.name="
                f"{objective.params.name}: it has no projection of an image to align; set "
                "algorithm.lambda=0"
            )

    def found(self, clients: int, config: Config) -> None:
        """A client for each cluster, and a mean that slots of zeros do not mislead."""
        if self.params.clusters > clients:
            raise UserError(
                f"algorithm.clusters={self.params.clusters}: more than the {clients} clients; "
                f"take at most {clients}"
            )
        asked = [f"cohort.average={config.cohort.average}"] * (config.cohort.average != "mean")
        asked += [f"privacy.noise={config.privacy.noise}"] * (config.privacy.noise is not None)
        for words in asked:
            raise UserError(
                f"{words} with algorithm.name={self.params.name}: it needs exact sums, to divide "
                "each cluster's by its members; leave it out"
            )

    def round(self, server: Server, cohort: Cohort) -> None:
        """All models down, changes up, and a mean for each cluster (Algorithm 1)."""
        models, shared = self.models(server), server.shared
        sent = {str(j): m if shared is None else m[shared] for j, m in enumerate(models)}
        update = cohort.mean("train", sent, weight=self.weight)
        server.log["loss"] = update["loss"]
        answered = len(cohort.ids)
        for j, share in enumerate(update["members"].tolist()):
            members = round(share * answered)
            if members:
                self.move(server, j, update["change"][j] * (answered / members))
            else:
                self.tell(server, j)
        server.log_clients(cohort.gather("report", log=True))
        self.show(server)

    def models(self, server: Server) -> list[Tensor]:
        """The cluster models: the server's own is the first, the others are made before round 1."""
        if "clusters" not in server.state and self.params.clusters > 1:
            rule, n = server.config.server, server.flat.parameter_count
            apart = self.params.start == "apart"
            starts = {
                str(j): another_start(server, j) if apart else server.weights.clone()
                for j in range(1, self.params.clusters)
            }
            server.state["clusters"] = {
                j: {"weights": start, "rule": cast("dict[str, Tree]", optim.start(rule, start[:n]))}
                for j, start in starts.items()
            }
        return [self.numbered(server, j) for j in range(self.params.clusters)]

    def numbered(self, server: Server, number: int) -> Tensor:
        """The model of a cluster."""
        return cast(Tensor, _cluster(server, number)["weights"]) if number else server.weights

    def move(self, server: Server, number: int, change: Tensor) -> None:
        """By the server's rule, of which each cluster has its own state."""
        if number == 0:
            server.weights = server.step(server.weights, server.rule_state, change)
            return
        own = _cluster(server, number)
        rule = cast(optim.State, own.get("rule", {}))  # files keep no empty trees
        own["weights"] = server.step(cast(Tensor, own["weights"]), rule, change)

    def tell(self, server: Server, number: int) -> None:
        """Say once of each cluster what happens when nobody is in it."""
        told = cast("dict[str, Tree]", server.state.setdefault("empty", {}))
        if str(number) not in told:
            told[str(number)] = torch.tensor(float(server.round))
            server.warn(f"cluster {number} has no members: it keeps its model")

    def show(self, server: Server) -> None:
        """Say who is where after the first round, and later who went elsewhere."""
        if self.params.clusters == 1 or "cluster" not in server.client_log:
            return  # or nobody may know
        now = {k: int(c) for k, c in server.client_log["cluster"].items() if c is not None}
        known = cast("dict[str, Tree]", server.state.setdefault("assigned", {}))
        before = {int(k): int(cast(Tensor, c)) for k, c in known.items()}
        count, names = self.params.clusters, self.client_names
        if not before:
            server.warn(f"clusters: {_members(now, count, names)}")
        moved = {k: c for k, c in now.items() if before.get(k, c) != c}
        if moved:
            everyone = _members(before | now, count, names)
            server.warn(f"{_moves(moved, names)}; clusters: {everyone}")
        known |= {str(k): torch.tensor(c) for k, c in now.items()}

    def reply_like(self, task: str, trainer: Trainer) -> dict[str, Tree]:
        """A slot for each cluster, whose it is, and the loss."""
        plain, count = super().reply_like(task, trainer), self.params.clusters
        change = cast(Tensor, plain["change"])
        return {**plain, "change": change.expand(count, -1), "members": change.new_zeros(count)}

    def train(self, client: Client, models: Mapping[str, Tensor]) -> dict[str, Tree]:
        """The change of the model of the cluster that the client chose, in that cluster's slot."""
        chosen, frozen = self.assign(client, models)
        received = models[str(chosen)]
        if "cluster" in client.state and int(cast(Tensor, client.state["cluster"])) != chosen:
            for name in ("target", "memory"):  # they follow another model
                client.state.pop(name, None)
        client.state["cluster"] = torch.tensor(chosen)
        start = client.full_weights(received)
        loss = None if frozen is None else Aligned(self, client, start, frozen)
        trained = client.train_from(start, client.state, loss)
        if self.params.clusters > 1:
            client.state["network"] = trained.weights
        reply = client.reply(trained, received)
        change = cast(Tensor, reply["change"])
        slots = change.new_zeros(self.params.clusters, len(change))
        slots[chosen] = change
        members = change.new_zeros(self.params.clusters)
        members[chosen] = 1
        return {**reply, "change": slots, "members": members}

    def assign(self, client: Client, models: Mapping[str, Tensor]) -> tuple[int, Tensor | None]:
        """The cluster of a client (lines 6 to 14), and what its model makes of the client's images.

        The largest mean cosine with the features of the client's last local model; before it has
        one, its number modulo C.
        """
        last, count = cast("Tensor | None", client.state.get("network")), self.params.clusters
        chosen = client.id % count
        if count > 1 and last is not None:
            own = features(client, last)
            sent = (client.full_weights(models[str(j)]) for j in range(count))
            chosen = int(torch.stack([cosine(own, features(client, m)) for m in sent]).argmax())
        aligned = self.params.lambda_ > 0
        return chosen, goal(client, models[str(chosen)]) if aligned else None

    def loss(self, encoded: EncodedBatch, frozen: Tensor) -> Tensor:
        """The objective's loss and λ × alignment (Algorithm 2, line 10)."""
        own = self.objective.loss(encoded.encodings, encoded.labels, encoded.memory)
        return own + self.misaligned(encoded, frozen)

    def misaligned(self, encoded: EncodedBatch, frozen: Tensor) -> Tensor:
        """−λ × the mean cosine of each view's encoding with the frozen one of its image."""
        views = encoded.encodings[: self.objective.views]
        return -self.params.lambda_ * torch.stack([cosine(v, frozen) for v in views]).mean()

    def report(self, client: Client) -> dict[str, Tensor]:
        """The client's cluster."""
        return {"cluster": cast(Tensor, client.state["cluster"])}


class Aligned(Steps):
    """A client's steps: what the cluster model as received makes of the images of each."""

    def __init__(self, featarc: FeatARC, client: Client, start: Tensor, frozen: Tensor) -> None:
        self.client, self.frozen, self.number = client, frozen, 0
        self.function = featarc.loss
        beyond = client.trainer.objective.round_loss(client, start)
        if beyond is not None:  # a loss that looks beyond the batch is not compiled
            self.function = lambda e, frozen: beyond(e) + featarc.misaligned(e, frozen)

    def inputs(self) -> tuple[Tensor, ...]:
        """The frozen features of the next step's images."""
        client = self.client
        _, chosen = client.positions(self.number)
        return (self.frozen[chosen],)

    def done(self, encodings: tuple[Tensor, ...]) -> None:
        """The next step."""
        self.number += 1


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """The mean cosine between rows."""
    return F.cosine_similarity(a, b, dim=1).mean()


def features(client: Client, weights: Tensor) -> Tensor:
    """The backbone's features of a client's images without augmentation, as an encoder is judged.

    So batch norm goes by its running statistics, where it has any: with those of the client's
    images, models that learned from unlike data look alike.
    """
    network = client.trainer.network
    network.train(client.trainer.config.algorithm.norm_policy == "reset")
    found = _pass(client, weights, False)[0]
    network.train()
    return found


def goal(client: Client, received: Tensor) -> Tensor:
    """What encodings are aligned with; batch norm goes by the client's images, as in training.

    The backbone's features if encodings are as wide, else the model's own encodings.
    """
    found, encodings = _pass(client, client.full_weights(received), True)
    return found if found.shape == encodings.shape else encodings


@torch.no_grad()
def _pass(client: Client, weights: Tensor, encode: bool) -> tuple[Tensor, Tensor]:
    """Features, and encodings where they are needed.

    Running statistics that this changes are not kept: training loads its start anew.
    """
    trainer = client.trainer
    trainer.load(weights)
    network, tower = trainer.network, cast(Tower, trainer.network.towers[0])
    images, found = trainer.images[0][client.members], []
    parts = in_batches(trainer, images)
    if not network.training:  # each image by itself: few large passes keep a GPU busy
        parts = split_for_encoding(images)
    with trainer.autocast():
        for part in parts:
            one = tower.encoder(plain(trainer, part))
            found.append((one, network.predict((tower.head(one),))[0] if encode else one))
    first, second = (torch.cat(parts).to(trainer.dtype) for parts in zip(*found, strict=True))
    return first, second


def another_start(server: Server, cluster: int) -> Tensor:
    """The run's network initialized anew, on the host: the same on every device."""
    config = server.config
    network = cast(Network, copy.deepcopy(server.flat.module).cpu().float())
    flat = FlatWeights(network)
    flat.vector.copy_(server.weights)
    seed = random_key(config.seed, "cluster", cluster) % 2**63
    initialize(network, seed, config.encoder.initializer)
    if config.encoder.init is not None:
        load_encoders(network, config.encoder.init)
    return flat.vector.to(server.weights)


def _cluster(server: Server, number: int) -> dict[str, Tree]:
    clusters = cast("dict[str, dict[str, Tree]]", server.state["clusters"])
    return clusters[str(number)]


def _members(assigned: Mapping[int, int], clusters: int, names: Sequence[str]) -> str:
    """Who is in each cluster; of many only how many."""
    known = [(names[k] if names else str(k), own) for k, own in sorted(assigned.items())]
    held = [[name for name, own in known if own == j] for j in range(clusters)]
    if len(assigned) > SHOWN:
        return ", ".join(f"{j} has {len(each)}" for j, each in enumerate(held))
    return ", ".join(f"{j} has {' '.join(each) or 'none'}" for j, each in enumerate(held))


def _moves(moved: Mapping[int, int], names: Sequence[str]) -> str:
    if len(moved) > MOVES:
        return f"{len(moved)} clients change their cluster"
    return ", ".join(
        f"{name_client(names, k)} goes to cluster {c}" for k, c in sorted(moved.items())
    )
