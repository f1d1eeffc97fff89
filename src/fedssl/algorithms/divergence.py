"""How far a client's network has gone its own way: what FedU and FedEMA decide by."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from fedssl.config import AlgorithmParams, key
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.client import Client, Trained
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.models.flat_weights import FlatWeights
from fedssl.util.trees import Tree


@dataclass(frozen=True)
class DivergenceParams(AlgorithmParams):
    """Keys of algorithms that measure a client's divergence."""

    divergence: Literal["drift", "distance"] = key(
        "drift",
        help="Measure of divergence. `drift`: the change of the network by the client's last local "
        "training, as the mean over convolution layers of the L2 norm (the reference "
        "implementation). `distance`: the L2 norm between the new global encoder and the client's "
        "last online encoder, projector included (Eq. 3 and appendix B.2).",
    )


class DivergenceAware(Algorithm):
    """Clients mix the global network with their own last one, by how far they diverge."""

    Params: ClassVar[type[AlgorithmParams]] = DivergenceParams
    params: DivergenceParams

    def round(self, server: Server, cohort: Cohort) -> None:
        """The model goes as in FedAvg; each client's own measures go beside it, for the log."""
        server.apply(cohort.mean("train", server.model))
        server.log_clients(cohort.gather("report", log=True))

    def train(self, client: Client, received: Tensor) -> dict[str, Tree]:
        """The change that local training makes, from the mixture that the client starts at."""
        trained = client.train_from(self.start(client, client.full_weights(received)), client.state)
        client.state["network"] = trained.weights
        client.state["trained"] = torch.tensor(client.round)
        if self.params.divergence == "drift":
            client.state["drift"] = drift(client.trainer.flat, trained)
        return client.reply(trained, received)

    @abstractmethod
    def start(self, client: Client, network: Tensor) -> Tensor:
        """Where a client starts, given the global network."""

    @abstractmethod
    def report(self, client: Client) -> dict[str, Tensor]:
        """Numbers for the log."""

    def divergence(self, client: Client, network: Tensor) -> Tensor | None:
        """Between the client and the global network; none before the client's first round."""
        if "network" not in client.state:
            return None
        if self.params.divergence == "drift":
            return cast(Tensor, client.state["drift"]).cpu()
        n = towers(client.trainer.flat)
        return torch.linalg.vector_norm(network[:n] - own(client)[:n]).cpu()


def own(client: Client) -> Tensor:
    """The client's online network after its last local training."""
    return cast(Tensor, client.state["network"])


def towers(flat: FlatWeights) -> int:
    """How many parameters the encoders and their projectors have; the predictors' come after."""
    predictors = flat.module.predictors
    assert isinstance(predictors, nn.ModuleList)
    return flat.parameter_count - sum(p.numel() for p in predictors.parameters())


def drift(flat: FlatWeights, trained: Trained) -> Tensor:
    """The mean over convolution layers of the L2 norm of what training changed."""
    change = trained.weights - trained.start
    norms = [torch.linalg.vector_norm(change[s.start : s.stop]) for s in flat.of(nn.Conv2d)]
    return torch.stack(norms).mean()
