"""Feature alignment regularization and clustering (Dec-SSL, section 5, Algorithms 1 and 2)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.config import AlgorithmParams, Config, key
from fedssl.data.dataset import split_for_encoding
from fedssl.data.random import key as random_key
from fedssl.federation.algorithm import Algorithm, Result
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.features import scale_pixels, split_batches
from fedssl.federation.server import Server
from fedssl.federation.task import Reply, client_task, update_like
from fedssl.models.flat_weights import FlatWeights
from fedssl.models.network import Network, Tower, initialize, load_encoders
from fedssl.objectives.batch import EncodedBatch, Steps
from fedssl.objectives.mae import MAE
from fedssl.training import optim
from fedssl.training.trainer import State, Trainer
from fedssl.util.errors import refuse

SHOWN = 20  # clients named when clusters are shown


def _update_like(featarc: FeatARC, trainer: Trainer) -> Reply:
    """Return a slot for each cluster, the slot in use, and the loss."""
    update, count = update_like(trainer), featarc.params.clusters
    change = update["change"]
    return {**update, "change": change.expand(count, -1), "members": change.new_zeros(count)}


class FeatARC(Algorithm):
    """C cluster models; each client trains the one whose features are nearest to its own.

    All clients of a cluster weigh the same (Algorithm 1, line 18). An empty cluster keeps its
    model. A reply has a slot for each cluster, with zeros in all but one, so that the server needs
    only sums; messages have the size of C models. Features are those of the first tower or
    modality. A client that changes its cluster drops its target network and memory.

    A client is evaluated with its cluster's model (C.1). There is no global model: the model of
    cluster 0 is reported and exported in its place.

    The paper does not say how the models start. With ``alike``, they start from one network. They
    differ after the first members of each, the clients i mod C, have trained them, and clients then
    move to the cluster with similar features. With ``apart``, as in the reference program, each
    model has its own start. Features of such networks have no common basis, so a client stays with
    the model from which its own began.

    The paper compares a client's model with a mean that contains it, so a cluster looks nearer to
    its members than to others. With n members and local models that scatter by σ, the squared
    distance is σ² + σ²/n to another cluster's mean and σ² − σ²/n to its own. With ``leave_out``,
    a client takes its part out of its cluster's mean first.

    With the paper's optimizer and batches, groups of clients are found if clients have enough
    images and the groups differ enough (docs/papers/decssl.md). If every cluster starts with the
    same share of each group, the models differ by chance alone, and nothing tells a client where
    its group is.
    """

    result = Result("personal", description="global: that of cluster 0")
    weight = "uniform"

    @dataclass(frozen=True)
    class Params(AlgorithmParams):
        """Keys of FeatARC."""

        clusters: int = key(2, ge=1, help="C, the number of clusters. 1: alignment only.")
        lambda_: float = key(1.0, ge=0, help="λ, the weight of alignment. 0: clustering only.")
        start: Literal["alike", "apart"] = key(
            "alike", help="Initial models of the clusters: equal, or each drawn at random."
        )
        leave_out: bool = key(
            False,
            help="Compare a client's model with its cluster's without the client's own part.",
        )

    params: Params

    def validate(self, config: Config, clients: int) -> Iterable[str]:
        """Refuse more clusters than clients, and robust means, which zeros would mislead."""
        problem = "featarc needs exact sums, to divide each cluster's by its members"
        many, robust = self.params.clusters > clients, config.cohort.average != "mean"
        noisy, other = config.privacy.noise is not None, "or use another algorithm."
        rule = config.server
        plain = (rule.optimizer, rule.lr, rule.momentum, rule.weight_decay) == ("sgd", 1, 0, 0)
        unknown = self.params.leave_out and not plain
        few = f"there are only {clients} clients"
        refuse(
            config,
            (many, "algorithm.clusters", few, f"Take at most {clients}."),
            (robust, "cohort.average", problem, f"Set cohort.average=mean, {other}"),
            (noisy, "privacy.noise", problem, f"Set privacy.noise=null, {other}"),
            (
                unknown,
                "algorithm.leave_out",
                "only of a plain mean a client can take its own part",
                "Use server.optimizer=sgd server.lr=1 server.momentum=0 server.weight_decay=0.",
            ),
        )
        return ()

    def round(self, server: Server, cohort: Cohort) -> None:
        """Send all models, and average the changes of each cluster (Algorithm 1)."""
        models, shared = self.models(server), server.shared
        sent = {str(j): m if shared is None else m[shared] for j, m in enumerate(models)}
        if self.params.leave_out:
            sent |= self.latest(server)
        update = cohort.mean(self.train, sent)
        server.log["loss"] = update["loss"]
        answered = len(cohort.ids)
        members = (update["members"] * answered).round()
        for j, count in enumerate(members.tolist()):
            if count:
                self.step(server, j, update["change"][j] * (answered / count))
        self.log_members(server, members)
        server.log_clients(cohort.gather(self.report))
        self.show_clusters(server)

    def latest(self, server: Server) -> dict[str, Tensor]:
        """Return the members of each cluster in its latest step, and the round of that step."""
        if "latest" not in server.state:
            nothing = server.weights.new_zeros(self.params.clusters)
            server.state["latest"] = {"members": nothing, "updated": nothing - 1}
        return dict(server.state["latest"])

    def log_members(self, server: Server, members: Tensor) -> None:
        """Log the clients that trained each cluster's model in this round."""
        if self.params.clusters == 1:
            return
        server.log |= {f"members_{j}": count for j, count in enumerate(members)}
        if self.params.leave_out:
            latest, now = self.latest(server), torch.full_like(members, server.round)
            server.state["latest"] = {
                "members": torch.where(members > 0, members, latest["members"]),
                "updated": torch.where(members > 0, now, latest["updated"]),
            }

    def models(self, server: Server) -> list[Tensor]:
        """Return the cluster models; create all but the server's own before round 1."""
        if "clusters" not in server.state and self.params.clusters > 1:
            rule, n = server.config.server, server.flat.parameter_count
            clusters = server.state["clusters"] = {}
            for j in range(1, self.params.clusters):
                apart = self.params.start == "apart"
                start = another_start(server, j) if apart else server.weights.clone()
                clusters[str(j)] = {"weights": start, "rule": optim.start(rule, start[:n])}
        return [cluster_model(server, j) for j in range(self.params.clusters)]

    def server_model(self, server: Server, state: State) -> Tensor:
        """Return the model of the client's cluster."""
        return cluster_model(server, int(state.get("cluster", 0)))

    def step(self, server: Server, cluster: int, change: Tensor) -> None:
        """Update a cluster's model by the server's rule, with the cluster's optimizer state."""
        if cluster == 0:
            server.weights = server.step(server.weights, server.rule_state, change)
            return
        model = server.state["clusters"][str(cluster)]
        rule = model.get("rule", {})  # files keep no empty trees
        model["weights"] = server.step(model["weights"], rule, change)

    def show_clusters(self, server: Server) -> None:
        """Log how many clients moved; show clusters after round 1, and when a client moves."""
        if self.params.clusters == 1 or "cluster" not in server.client_log:
            return  # or the server may not know them
        now = {k: int(c) for k, c in server.client_log["cluster"].items() if c is not None}
        assigned = server.state.setdefault("assigned", {})
        before = {int(k): int(c) for k, c in assigned.items()}
        assigned |= {str(k): torch.tensor(c) for k, c in now.items()}
        moves = sum(before.get(k, c) != c for k, c in now.items())
        server.log["moves"] = torch.tensor(float(moves))
        if before and not moves:
            return
        clusters: list[list[str]] = [[] for _ in range(self.params.clusters)]
        for client, cluster in sorted((before | now).items()):
            names = server.client_names
            clusters[cluster].append(names[client] if names else str(client))
        named = len(assigned) <= SHOWN
        members = (" ".join(each) or "none" if named else str(len(each)) for each in clusters)
        server.warn("clusters: " + ", ".join(f"{j} has {each}" for j, each in enumerate(members)))

    @client_task(
        seen="mean",
        reveals="update",
        reply=_update_like,
        # The sum of a cluster with one client is that client's change.
        sums_hide=lambda featarc: featarc.params.clusters == 1,
    )
    def train(self, client: Client, models: Mapping[str, Tensor]) -> Reply:
        """The change of the model of the cluster that the client chose, in that cluster's slot."""
        chosen, frozen = self.assign(client, models)
        model = models[str(chosen)]
        if "cluster" in client.state and int(client.state["cluster"]) != chosen:
            for name in ("target", "memory"):  # they follow another model
                client.state.pop(name, None)
        client.state["cluster"] = torch.tensor(chosen)
        start = client.full_weights(model)
        loss = None if frozen is None else Aligned(self, client, start, frozen)
        trained = client.train_from(start, client.state, loss)
        if self.params.clusters > 1:
            client.state["network"] = trained.weights
        if self.params.leave_out:
            client.state["round"] = torch.tensor(client.round)
        update = client.reply(trained, model)
        change = update["change"]
        slots = change.new_zeros(self.params.clusters, len(change))
        slots[chosen] = change
        members = change.new_zeros(self.params.clusters)
        members[chosen] = 1
        return {**update, "change": slots, "members": members}

    def assign(self, client: Client, models: Mapping[str, Tensor]) -> tuple[int, Tensor | None]:
        """Choose the client's cluster (lines 6 to 14), and the targets of its alignment.

        The largest mean cosine with the features of the client's last local model; before it has
        one, its number modulo C.
        """
        last, count = client.state.get("network"), self.params.clusters
        chosen = client.id % count
        if count > 1 and last is not None:
            mine = compute_features(client, last)
            received = (client.full_weights(self.others(client, models, j)) for j in range(count))
            cosines = [mean_cosine(mine, compute_features(client, model)) for model in received]
            chosen = int(torch.stack(cosines).argmax())
        aligned = self.params.lambda_ > 0
        return chosen, compute_targets(client, models[str(chosen)]) if aligned else None

    def others(self, client: Client, models: Mapping[str, Tensor], cluster: int) -> Tensor:
        """Return a cluster's model; with ``leave_out``, without the client's part in its last step.

        The model is the mean of its n members' models, so that of the others is (n × mean − own) /
        (n − 1). A client that was alone in its cluster keeps the model as it is.
        """
        model, state = models[str(cluster)], client.state
        if not self.params.leave_out or int(state["cluster"]) != cluster:
            return model
        count = float(models["members"][cluster])
        if count < 2 or int(state["round"]) != int(models["updated"][cluster]):
            return model
        own, shared = state["network"], client.trainer.shared
        return (count * model - (own if shared is None else own[shared])) / (count - 1)

    def loss(self, encoded: EncodedBatch, frozen: Tensor) -> Tensor:
        """Add λ × alignment to the objective's loss (Algorithm 2, line 10)."""
        loss = self.objective.loss(encoded)
        return loss + self.misalignment(encoded, frozen)

    def misalignment(self, encoded: EncodedBatch, frozen: Tensor) -> Tensor:
        """Compute −λ × the mean cosine of each view's encoding with the frozen one of its image."""
        views = encoded.encodings[: self.objective.views]
        return -self.params.lambda_ * torch.stack([mean_cosine(v, frozen) for v in views]).mean()

    @client_task(seen="log", reveals="numbers", reply=("cluster",))
    def report(self, client: Client) -> dict[str, Tensor]:
        """The client's cluster."""
        return client.numbers("cluster")


class Aligned(Steps):
    """The loss of a client's steps, aligned with the cluster model as the client received it."""

    def __init__(self, featarc: FeatARC, client: Client, start: Tensor, frozen: Tensor) -> None:
        self.client, self.frozen, self.number = client, frozen, 0
        self.function = featarc.loss
        beyond = client.trainer.objective.round_loss(client, start)
        if beyond is not None:  # a loss that looks beyond the batch is not compiled
            self.function = lambda e, frozen: beyond(e) + featarc.misalignment(e, frozen)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the frozen features of the next step's images."""
        client = self.client
        _, chosen = client.positions(self.number)
        return (self.frozen[chosen],)

    def done(self, encodings: tuple[Tensor, ...]) -> None:
        """Go to the next step."""
        self.number += 1


def mean_cosine(a: Tensor, b: Tensor) -> Tensor:
    """Average the cosine between matching rows."""
    return F.cosine_similarity(a, b, dim=1).mean()


def compute_features(client: Client, weights: Tensor) -> Tensor:
    """Encode a client's images without augmentation, as evaluation does.

    Batch norm uses its running statistics, if it has any. With the statistics of the client's
    images, models that were trained on different data would look alike.
    """
    network = client.trainer.network
    network.train(client.trainer.config.algorithm.norm_policy == "reset")
    features = _encode(client, weights, False)[0]
    network.train()
    return features


def compute_targets(client: Client, model: Tensor) -> Tensor:
    """Compute the alignment's targets: features if encodings are as wide, else encodings.

    Batch norm uses the statistics of the client's images, as in training. A masked autoencoder has
    no encoding of a whole image, and its features are aligned.
    """
    project = not isinstance(client.trainer.objective, MAE)
    features, encodings = _encode(client, client.full_weights(model), project)
    return features if features.shape == encodings.shape else encodings


@torch.no_grad()
def _encode(client: Client, weights: Tensor, project: bool) -> tuple[Tensor, Tensor]:
    """Return features, and encodings too if ``project`` is set.

    Changed running statistics are dropped, because training loads its start again.
    """
    trainer = client.trainer
    trainer.load(weights)
    network, tower = trainer.network, cast(Tower, trainer.network.towers[0])
    images = trainer.plain_images(client.members)
    parts: Iterable[Tensor] = split_batches(trainer, images)
    if not network.training:  # each image by itself: few large passes keep a GPU busy
        parts = split_for_encoding(images)
    features, encodings = [], []
    with trainer.autocast():
        for part in parts:
            features.append(tower.encoder(scale_pixels(trainer, part)))
            if project:
                encodings.append(network.predict((tower.head(features[-1]),))[0])
    joined = torch.cat(features).to(trainer.dtype)
    return joined, torch.cat(encodings).to(trainer.dtype) if project else joined


def another_start(server: Server, cluster: int) -> Tensor:
    """Initialize the run's network anew, on the host: the same on every device."""
    config = server.config
    network = cast(Network, copy.deepcopy(server.flat.module).cpu().float())
    flat = FlatWeights(network)
    flat.vector.copy_(server.weights)
    seed = random_key(config.seed, "cluster", cluster) % 2**63
    initialize(network, seed, config.encoder.initializer)
    load_encoders(network, config.encoder)
    return flat.vector.to(server.weights)


def cluster_model(server: Server, cluster: int) -> Tensor:
    """Return the model of a cluster; that of cluster 0 is the global one."""
    return server.state["clusters"][str(cluster)]["weights"] if cluster else server.weights
