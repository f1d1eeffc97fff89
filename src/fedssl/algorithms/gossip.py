"""Peer to peer: local training, then a mean with the neighbours (Dec-SSL, 6.1 and B.5)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.config import AlgorithmParams, Config, key
from fedssl.data.random import key as random_key
from fedssl.federation.algorithm import Algorithm, Result
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.task import Reply, client_task
from fedssl.federation.traffic import per_client
from fedssl.util.errors import UserError, refuse

Graph: TypeAlias = Any  # networkx has no types
TOPOLOGIES = ("star", "cycle", "tree", "random", "complete")


class Gossip(Algorithm):
    """Every client trains its own model and then mixes: x_i ← Σ_j W_ij x_j (section 6.1).

    W has Metropolis weights: 1 / (1 + the larger degree) for an edge, the rest on the diagonal. A
    client that is not asked, or does not answer, neither trains nor mixes: the weight of its edges
    goes to the diagonal.

    The mean of all models is evaluated as the global model. Mixing does not change it, so it shows
    nothing of the graph within a round. Every peer's model is evaluated beside it: ``peers_…`` are
    their mean and their worst accuracy.

    The exchange is routed through the server, under either engine: it keeps every client's model,
    mixes them, and sees each. A client sends and receives one model; real peers would send one to
    each neighbour. With ``norm_policy=local`` normalization layers do not travel or mix.
    """

    result = Result(
        description="global: the mean of all peers",
        peers=lambda server: server.state.get("models", ()),  # none before round 1
    )
    weight = "uniform"

    @dataclass(frozen=True)
    class Params(AlgorithmParams):
        """Keys of gossip."""

        topology: str = key(
            "cycle",
            help="Graph of clients: `star` (client 0 is the hub), `cycle`, `tree` (binary), "
            "`random`, `complete`, or a file with an edge a line: the numbers of two clients.",
        )
        edge_probability: float = key(
            0.7,
            gt=0,
            le=1,
            needs="topology=random",
            help="Probability of an edge of a random graph (B.5).",
        )

        def check(self, config: Config) -> None:
            """Refuse rules of the server, which have no effect."""
            plain: dict[str, Any] = {"optimizer": "sgd", "lr": 1, "momentum": 0, "weight_decay": 0}
            problem = f"algorithm.name={self.name} has no server's model to update"
            fix = "Use server.optimizer=sgd server.lr=1 server.momentum=0 server.weight_decay=0."
            rules = vars(config.server)
            mixed = f"with algorithm.name={self.name} neighbours mix by the graph's weights"
            refuse(
                config,
                *(
                    (rules[key] != value, f"server.{key}", problem, fix)
                    for key, value in plain.items()
                ),
                (
                    config.cohort.average != "mean",
                    "cohort.average",
                    mixed,
                    "Use cohort.average=mean.",
                ),
            )

    params: Params
    weights: NDArray[np.float64]  # W, known when the number of clients is

    def validate(self, config: Config, clients: int) -> Iterable[str]:
        """Draw the graph; refuse one that is not connected."""
        import networkx as nx

        kind = self.params.topology
        graph = self.graph(clients, config.seed)
        parts = nx.number_connected_components(graph)
        draw = "Raise algorithm.edge_probability, or change seed."
        fix = draw if kind == "random" else "Add edges that connect them."
        problem = f"the graph has {parts} parts that never meet"
        refuse(config, (parts > 1, "algorithm.topology", problem, fix))
        self.weights = metropolis(graph)
        return ["gossip: models go through the server, which does the mixing; peers do not connect"]

    def graph(self, clients: int, seed: int) -> Graph:
        """Build the graph of clients and their neighbours."""
        import networkx as nx

        match self.params.topology:
            case "star":
                graph = nx.star_graph(clients - 1)
            case "cycle":
                graph = nx.cycle_graph(clients)
            case "tree":
                graph = nx.full_rary_tree(2, clients)
            case "random":
                state = random_key(seed, "topology") % 2**32
                graph = nx.gnp_random_graph(clients, self.params.edge_probability, seed=state)
            case "complete":
                graph = nx.complete_graph(clients)
            case path:
                graph = read_graph(Path(path), clients)
        graph.remove_edges_from(list(nx.selfloop_edges(graph)))  # a cycle of one has one
        return graph

    def round(self, server: Server, cohort: Cohort) -> None:
        """Train each client's model; then the clients that answered mix."""
        everyone = len(self.weights)
        before = server.state.get("models", server.model.expand(everyone, -1))
        sent = {int(k): before[int(k)] for k in cohort.ids}
        replies: dict[int, Any] = cohort.gather(self.train, per_client(sent))
        ids = sorted(replies)
        trained = torch.stack([sent[k] + replies[k]["change"] for k in ids])
        models = before.clone()
        models[ids] = torch.from_numpy(among(self.weights, ids)).to(trained) @ trained
        mean = models.mean(0)
        server.state["models"] = models
        if server.shared is None:
            server.weights = mean
        else:
            server.weights = server.weights.index_copy(0, server.shared, mean)
        server.log["loss"] = torch.stack([replies[k]["loss"] for k in ids]).mean()
        server.log["consensus"] = (models - mean).norm(dim=1).mean()

    @client_task(seen="each", reveals="update")
    def train(self, client: Client, model: Tensor) -> Reply:
        """The change that local training makes to the client's own model."""
        return client.train(model)


def metropolis(graph: Graph) -> NDArray[np.float64]:
    """Compute Metropolis weights: symmetric, and every row adds up to 1."""
    weights = np.zeros((len(graph), len(graph)))
    for i, j in graph.edges:
        weights[i, j] = weights[j, i] = 1 / (1 + max(graph.degree[i], graph.degree[j]))
    return among(weights, list(range(len(graph))))


def among(weights: NDArray[np.float64], ids: list[int]) -> NDArray[np.float64]:
    """Select the weights of some clients; those of edges to others go to the diagonal."""
    part = weights[np.ix_(ids, ids)]
    np.fill_diagonal(part, 0.0)
    np.fill_diagonal(part, 1 - part.sum(1))
    return part


def read_graph(path: Path, clients: int) -> Graph:
    """Read a graph from a file with one edge per line, as in ``0 1``; # starts a comment."""
    import networkx as nx

    def error(problem: str, fix: str) -> UserError:
        return UserError(problem, key="algorithm.topology", value=path, fix=fix)

    if not path.is_file():
        raise error("no such file", f"Use a file with an edge a line, or {', '.join(TOPOLOGIES)}.")
    graph = nx.empty_graph(clients)
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isdecimal() for word in words):
            raise error(f"line {number} is not an edge", "Write two clients' numbers, as in 0 1.")
        if max(map(int, words)) >= clients:
            problem = f"line {number} names client {max(map(int, words))}"
            raise error(problem, f"Use the numbers from 0 to {clients - 1}.")
        graph.add_edge(*map(int, words))
    return graph
