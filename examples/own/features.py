"""SimCLR whose clients share projections of their images, as negatives for all others."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedssl.federation.algorithm import Algorithm
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.features import accept_features, join_features, scale_pixels
from fedssl.federation.server import Server
from fedssl.federation.task import client_task
from fedssl.federation.traffic import per_client

MOST, WIDTH = 64, 128  # projections that a client shares in a round; objective.projector ends so


class Shared(Algorithm):
    """The server passes projections on, so it sees those of each client."""

    def round(self, server: Server, cohort: Cohort) -> None:
        """Send the model with the others' projections; average; collect new projections."""
        shared = server.state.get("shared", {})
        others = {k: join_features(shared, WIDTH, server.weights, without=k) for k in cohort.ids}
        server.apply(cohort.mean(self.train, server.model, per_client(others, "share")))
        server.state["shared"] = {**shared, **accept_features(server, cohort.gather(self.share))}

    @client_task(seen="mean", reveals="update")
    def train(self, client: Client, model: Tensor, others: Tensor) -> dict[str, Tensor]:
        """The change that training makes with these negatives."""
        return client.train(model, lambda b: self.objective.contrast(b.encodings, others))

    @client_task(seen="each", reveals="features", reply=lambda self, trainer: {
        "features": trainer.initial.new_empty(MOST, WIDTH)})  # fmt: skip
    def share(self, client: Client) -> dict[str, Tensor]:
        """Projections of single images, for all other clients too."""
        images = client.trainer.images[0][client.members[:MOST]]
        with torch.no_grad():
            (encodings,) = client.trainer.encode((scale_pixels(client.trainer, images),))
        return {"features": normalize(encodings, dim=1)}
