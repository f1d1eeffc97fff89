"""DeepCluster-v2 (Caron et al. 2020, appendix): a sample's cluster is told from either view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.config import key
from fedssl.data.random import choose, permutation
from fedssl.data.random import key as random_key
from fedssl.objectives.base import Dual, ProjectorParams
from fedssl.objectives.batch import Memory
from fedssl.util.device import to_device

if TYPE_CHECKING:
    from fedssl.federation.client import Client
    from fedssl.objectives.batch import EncodedBatch

ITERATIONS = 10  # of k-means


class DeepCluster(Dual):
    """Classify each sample's views by the cluster that k-means gave it, epoch by epoch.

    Our reading of it in a federation: every client clusters its own samples only, with centroids
    that never leave it. Averaging has changed the model, so the bank is filled anew at the start of
    every round, by one pass over all samples, and nothing is kept between rounds: a round should
    have whole epochs. Later epochs of a round cluster what training itself wrote, as in v2. A
    client with fewer samples than clusters has as many clusters as samples. Both views are one
    batch to batch norm, as in SwAV.
    """

    minimum = 2
    joint = True
    of_batches = False

    @dataclass(frozen=True)
    class Params(ProjectorParams):
        """Keys of DeepCluster-v2. The temperature is SwAV's, and so is our reading of k."""

        projector: tuple[int, ...] = key(
            (512, 128), ge=1, nonempty=True, help="Widths of the projector's layers."
        )
        clusters: tuple[int, ...] = key(
            (300, 300, 300),
            ge=2,
            nonempty=True,
            help="k, the number of clusters of each set. Set j clusters the projections of view "
            "j mod 2.",
        )
        temperature: float = key(0.1, gt=0, help="Temperature.")

    params: Params

    def local(self, client: Client, start: Tensor) -> Step:
        """The loss of a round that starts from these weights."""
        return Step(self.params, client, fill(client, start))

    def loss(
        self, encodings: tuple[Tensor, ...], labels: Tensor | None, memory: Memory | None = None
    ) -> Tensor:
        """There is none of a batch alone."""
        raise NotImplementedError("deepcluster: a loss of a client's round, see local()")


class Step:
    """The loss of a client's steps, one after another.

    ``bank``: ``[views, samples, d]``, the latest projection of each sample, of length 1.
    """

    def __init__(self, params: DeepCluster.Params, client: Client, bank: Tensor) -> None:
        self.params, self.client, self.bank = params, client, bank
        self.number = 0
        self.sets: list[tuple[Tensor, Tensor]] = []  # centroids, and each sample's cluster

    def __call__(self, encoded: EncodedBatch) -> Tensor:
        """The mean over sets and views of the cross-entropy with the samples' clusters."""
        client, batches = self.client, self.client.trainer.batches
        epoch, place = divmod(self.number, batches.per_epoch(client.samples))
        if place == 0:
            self.sets = [self.cluster(epoch, j) for j in range(len(self.params.clusters))]
        _, chosen = client.positions(self.number)
        views = F.normalize(torch.stack(encoded.encodings), dim=2)
        self.bank[:, chosen] = views.detach()
        self.number += 1
        losses = [
            F.cross_entropy(view @ centroids.T / self.params.temperature, clusters[chosen])
            for centroids, clusters in self.sets
            for view in views
        ]
        return torch.stack(losses).mean()

    def cluster(self, epoch: int, j: int) -> tuple[Tensor, Tensor]:
        """Set j's clusters for an epoch of the round, from samples drawn as first centroids."""
        client, rows = self.client, self.bank[j % len(self.bank)]
        drawn = random_key(
            client.trainer.config.seed, "clusters", client.round, client.id, epoch, j
        )
        first = choose(drawn, client.samples, self.params.clusters[j])
        return kmeans(rows, rows[to_device(first, rows.device)])


@torch.no_grad()
def fill(client: Client, start: Tensor) -> Tensor:
    """The bank under the weights ``start``, from views of the epoch before, as v2's would be.

    In shuffled batches as in training, since batch norm looks at them; none is left out.
    """
    trainer, samples = client.trainer, client.samples
    trainer.load(start)
    epoch, _ = client.positions(0)
    order = permutation(random_key(trainer.config.seed, "bank", client.round, client.id), samples)
    parts = []
    for batch in np.array_split(order, trainer.batches.per_epoch(samples)):
        chosen = to_device(batch, trainer.device)
        seen = trainer.encode_batch(client.members[chosen], client.random_state(epoch - 1, chosen))
        parts.append(F.normalize(torch.stack(seen.encodings), dim=2))
    return torch.cat(parts, dim=1)[:, to_device(np.argsort(order), trainer.device)]


@torch.no_grad()
def kmeans(rows: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Spherical k-means of rows of length 1: centroids and each row's own.

    A cluster that loses all its rows keeps its centroid.
    """
    numbers = torch.arange(len(centroids), device=rows.device)
    nearest = (rows @ centroids.T).argmax(1)
    for _ in range(ITERATIONS):
        members = (nearest == numbers[:, None]).to(rows.dtype)
        # A product and not index_add, whose order of additions a GPU changes.
        means = F.normalize(members @ rows, dim=1)
        centroids = torch.where(members.any(1, keepdim=True), means, centroids)
        nearest = (rows @ centroids.T).argmax(1)
    return centroids, nearest
