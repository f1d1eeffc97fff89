"""Distance of a client's network from the global one, by which FedU and FedEMA decide."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedssl.config import AlgorithmParams, key
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.task import Reply, client_task
from fedssl.models.flat_weights import FlatWeights


@dataclass(frozen=True)
class DivergenceParams(AlgorithmParams):
    """Keys of algorithms that measure a client's divergence."""

    divergence: Literal["drift", "distance"] = key(
        "drift",
        help="Measure of divergence. `drift`: the change of the network by the client's last local "
        "training, as the mean over convolution layers of the L2 norm (the reference "
        "implementation); a network without convolutions is measured by its linear layers. "
        "`distance`: the L2 norm between the new global encoder and the client's last online "
        "encoder, projector included (Eq. 3 and appendix B.2).",
    )


class DivergenceAware(Algorithm):
    """Clients mix the global network with their own last one, by how far they diverge."""

    Params: ClassVar[type[AlgorithmParams]] = DivergenceParams
    params: DivergenceParams

    def round(self, server: Server, cohort: Cohort) -> None:
        """Average as in FedAvg, and log each client's measures."""
        server.apply(cohort.mean(self.train, server.model))
        server.log_clients(cohort.gather(self.report))

    @client_task(seen="mean", reveals="update")
    def train(self, client: Client, model: Tensor) -> Reply:
        """The change that local training makes, from the mixture that the client starts at."""
        trained = client.train_from(self.start(client, client.full_weights(model)), client.state)
        client.state["network"] = trained.weights  # the online network
        client.state["trained"] = torch.tensor(client.round)
        if self.params.divergence == "drift":
            change, flat = trained.weights - trained.start, client.trainer.flat
            linear = [span for span in flat.of(nn.Linear) if span.last == "weight"]
            layers = flat.of(nn.Conv2d) or linear
            if flat.constants():
                layers = flat.learned
            norms = [torch.linalg.vector_norm(change[s.start : s.stop]) for s in layers]
            client.state["drift"] = torch.stack(norms).mean()
        return client.reply(trained, model)

    @abstractmethod
    def start(self, client: Client, network: Tensor) -> Tensor:
        """Return the weights that a client's training starts from, given the global network."""

    @abstractmethod
    def report(self, client: Client) -> dict[str, Tensor]:
        """The client's measures. Subclasses declare this task with the names of their numbers."""

    def divergence(self, client: Client, network: Tensor) -> Tensor | None:
        """Measure client against global network; ``None`` before the client's first round."""
        if "network" not in client.state:
            return None
        if self.params.divergence == "drift":
            return client.state["drift"].cpu()
        n = count_tower_parameters(client.trainer.flat)
        return torch.linalg.vector_norm(network[:n] - client.state["network"][:n]).cpu()


def mix(client: Client, network: Tensor, encoder: float, predictor: float) -> Tensor:
    """Return μ · own + (1 − μ) · global, with a μ for each part; buffers are the global ones."""
    own, mixed, flat = client.state["network"], network.clone(), client.trainer.flat
    n = count_tower_parameters(flat)
    for part, mu in ((slice(n), encoder), (slice(n, flat.parameter_count), predictor)):
        mixed[part] = mu * own[part] + (1 - mu) * network[part]
    return mixed


def count_tower_parameters(flat: FlatWeights) -> int:
    """Count the parameters of encoders and projectors; the predictors' come after them."""
    predictors = flat.module.predictors
    assert isinstance(predictors, nn.ModuleList)
    return flat.parameter_count - sum(p.numel() for p in predictors.parameters())
