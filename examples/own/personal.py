"""FedAvg in which every client keeps a model of its own between rounds."""

from torch import Tensor

from fedssl.federation.algorithm import Algorithm, Result
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.task import client_task

SHARE = 0.5  # of the client's last model, where a round starts


class Mixture(Algorithm):
    """Clients start a round between their last model and the global one."""

    result = Result("personal")  # evaluate the clients' models, and the global one beside them

    def round(self, server: Server, cohort: Cohort) -> None:
        """Average the clients' changes."""
        server.apply(cohort.mean(self.train, server.model))

    @client_task(seen="mean", reveals="update")
    def train(self, client: Client, model: Tensor) -> dict[str, Tensor]:
        """The change from the global model; the client keeps the model that it trains."""
        received = client.full_weights(model)
        start = SHARE * client.state.get("personal", received) + (1 - SHARE) * received
        trained = client.train_from(start, client.state)
        client.state["personal"] = trained.weights
        return client.reply(trained, model)

    def personal_weights(self, server: Server, state: dict[str, Tensor]) -> Tensor | None:
        """Return the client's model, for evaluation and export."""
        return state.get("personal")
