"""DeepCluster-v2 (Caron et al. 2020, appendix): predict a sample's cluster from each view."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.config import key
from fedssl.data.random import choose, permutation
from fedssl.data.random import key as random_key
from fedssl.objectives.base import LocalClient, ProjectorObjective, ProjectorParams, projector_key
from fedssl.objectives.batch import EncodedBatch
from fedssl.util.device import to_device

ITERATIONS = 10  # of k-means


class DeepCluster(ProjectorObjective):
    """Classify each sample's views by the cluster that k-means gave it, epoch by epoch.

    Our reading of it in a federation: every client clusters its own samples only, with centroids
    that never leave it. Averaging has changed the model, so the bank is filled anew at the start of
    every round, by one pass over all samples, and nothing is kept between rounds: a round should
    have whole epochs. Later epochs of a round cluster what training itself wrote, as in v2. A
    client with fewer samples than clusters has as many clusters as samples. Both views are one
    batch to batch norm, as in SwAV.
    """

    min_samples = 2
    joint = True

    @dataclass(frozen=True)
    class Params(ProjectorParams):
        """Keys of DeepCluster-v2. The temperature is SwAV's, and so is our reading of k."""

        projector: tuple[int, ...] = projector_key(512, 128)
        clusters: tuple[int, ...] = key(
            (300, 300, 300),
            ge=2,
            le=1_000_000,
            nonempty=True,
            help="k, the number of clusters of each set. Set j clusters the projections of view "
            "j mod 2.",
        )
        temperature: float = key(0.1, gt=0, help="Temperature of the softmax over clusters.")

    params: Params

    def round_loss(self, client: LocalClient, start: Tensor) -> RoundLoss:
        """Return the loss of a client's round, with a bank of its samples' projections."""
        return RoundLoss(self.params, client, fill_bank(client, start))

    def loss(self, batch: EncodedBatch) -> Tensor:
        """Fail: clusters need all samples of a client (``round_loss``)."""
        raise NotImplementedError


class RoundLoss:
    """The loss of a client's steps in one round.

    ``bank``: ``[views, samples, d]``, the latest projection of each sample, of length 1.
    """

    def __init__(self, params: DeepCluster.Params, client: LocalClient, bank: Tensor) -> None:
        self.params, self.client, self.bank = params, client, bank
        self.step = 0
        self.sets: list[tuple[Tensor, Tensor]] = []  # centroids, and each sample's cluster

    def __call__(self, batch: EncodedBatch) -> Tensor:
        """Return the mean over sets and views of the cross-entropy with the samples' clusters."""
        epoch, place = divmod(self.step, self.client.batches_per_epoch)
        if place == 0:
            self.sets = [self.cluster(epoch, j) for j in range(len(self.params.clusters))]
        _, chosen = self.client.positions(self.step)
        views = F.normalize(torch.stack(batch.encodings), dim=2)
        self.bank[:, chosen] = views.detach()
        self.step += 1
        losses = [
            F.cross_entropy(view @ centroids.T / self.params.temperature, clusters[chosen])
            for centroids, clusters in self.sets
            for view in views
        ]
        return torch.stack(losses).mean()

    def cluster(self, epoch: int, j: int) -> tuple[Tensor, Tensor]:
        """Cluster set j for an epoch of the round, from samples drawn as first centroids."""
        client, rows = self.client, self.bank[j % len(self.bank)]
        drawn = random_key(client.seed, "clusters", client.round, client.id, epoch, j)
        first = choose(drawn, client.samples, self.params.clusters[j])
        return kmeans(rows, rows[to_device(first, rows.device)])


@torch.no_grad()
def fill_bank(client: LocalClient, start: Tensor) -> Tensor:
    """Project all samples with the weights ``start``, from views of the epoch before, as in v2.

    In shuffled batches as in training, since batch norm depends on them; none is left out.
    """
    client.load(start)
    epoch, _ = client.positions(0)
    order = permutation(random_key(client.seed, "bank", client.round, client.id), client.samples)
    parts = []
    for rows in np.array_split(order, client.batches_per_epoch):
        batch = client.encode(epoch - 1, to_device(rows, start.device))
        parts.append(F.normalize(torch.stack(batch.encodings), dim=2))
    return torch.cat(parts, dim=1)[:, to_device(np.argsort(order), start.device)]


@torch.no_grad()
def kmeans(rows: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centroids of spherical k-means of rows of length 1, and each row's cluster.

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
