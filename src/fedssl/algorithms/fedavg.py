"""Federated averaging (McMahan et al. 2017) of a loss within each client."""

from __future__ import annotations

from torch import Tensor

from fedssl.algorithms.base import Algorithm, Cohort, Server, one_plain_step
from fedssl.client import Client, Workspace
from fedssl.trees import Tree


class FedAvg(Algorithm):
    """Each client trains on its own loss; the server applies the mean of the changes."""

    def round(self, server: Server, cohort: Cohort) -> None:
        """One exchange."""
        server.apply(cohort.mean("train", server.weights))

    def train(self, client: Client, weights: Tensor) -> dict[str, Tree]:
        """The change that local training makes."""
        return client.descend(weights, lambda encoded: encoded.within(self.objective.loss))

    def exact_on_union(self, work: Workspace) -> bool:
        """The passes are shared; the loss is taken client by client (``Encoded.within``)."""
        return one_plain_step(work)
