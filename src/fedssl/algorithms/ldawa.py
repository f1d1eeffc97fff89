"""Layer-wise divergence-aware weights (L-DAWA, Rehman et al. 2023)."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.federation.algorithm import Algorithm
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.task import Reply, client_task


class LDAWA(Algorithm):
    """Averaging in which each layer of a client's model is scaled by its agreement.

    The agreement δ is the cosine between the layer and the global model's layer. The new global
    layer is the mean of δ · layer over clients, all weighing the same. The paper's server computes
    δ; here the client does, so that a mean of the replies is all that the server needs. Running
    statistics of batch norm, and layers of zeros, are averaged without δ.
    """

    weight = "uniform"

    def round(self, server: Server, cohort: Cohort) -> None:
        """Send the model, and apply the mean of the clients' scaled models."""
        server.apply(cohort.mean(self.train, server.model))

    @client_task(seen="mean", reveals="update", stateless=True)
    def train(self, client: Client, model: Tensor) -> Reply:
        """The change from the global model to the client's scaled one."""
        start = client.full_weights(model)
        trained = client.train_from(start, client.state)
        scaled = torch.zeros_like(start)
        for span in client.trainer.flat.learned:
            place = slice(span.start, span.stop)
            before, after = start[place], trained.weights[place]
            if before.any() and after.any():
                scaled[place] = (F.cosine_similarity(before, after, dim=0) - 1) * after
        return client.reply(replace(trained, change=trained.change + scaled), model)
