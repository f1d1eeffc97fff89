"""SimCLR whose clients share projections of their images, as negatives for all others."""

import torch
from torch import Tensor, nn

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
        old, like = server.state.get("shared", {}), server.weights
        others = {k: join_features(old, WIDTH, like, without=k) for k in cohort.ids}
        server.apply(cohort.mean(self.train, server.model, per_client(others, "share")))
        server.state["shared"] = {**old, **accept_features(server, cohort.gather(self.share))}

    @client_task(seen="mean", reveals="update")
    def train(self, client: Client, model: Tensor, others: Tensor) -> dict[str, Tensor]:
        """The change that training makes with these negatives."""
        update = client.train(model, lambda b: self.objective.contrast(b.encodings, others))
        with torch.no_grad():  # by the weights that training ends with
            images = scale_pixels(client.trainer, client.trainer.images[0][client.members[:MOST]])
            client.state["features"] = nn.functional.normalize(client.trainer.encode((images,))[0])
        return update

    @client_task(seen="each", reveals="features", reply=lambda self, trainer: {
        "features": trainer.initial.new_empty(MOST, WIDTH)})  # fmt: skip
    def share(self, client: Client) -> dict[str, Tensor]:
        """Projections of single images, for all other clients too."""
        return {"features": client.state["features"]}
