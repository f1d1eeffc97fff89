"""False negatives and neighbours in CCL, whose classes only a simulation with labels knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data.dataset import Census, Ints
from fedssl.data.random import choose, key
from fedssl.federation.server import Server
from fedssl.federation.traffic import UNCOUNTED, Argument, per_client

NEIGHBOURS = ("neighbour_purity", "remote_purity", "remote_neighbours")


def list_origins(server: Server, clients: NDArray[np.int64]) -> list[Argument]:
    """Return for each client whose banks it receives and from which rounds, if labels are known."""
    rounds = server.state.get("rounds", {})
    if server.census is None or not rounds:
        return []
    held = sorted((int(client), int(round)) for client, round in rounds.items())
    others = {int(k): [each for each in held if each[0] != k] for k in clients}
    pairs = {client: torch.tensor(banks).view(-1, 2) for client, banks in others.items()}
    return [per_client(pairs, UNCOUNTED)]


def find_origins(census: Census, banks: Tensor, seed: int, features: int) -> Tensor:
    """Return the images that features in banks are of, in their order."""
    rows = [_draw(census, seed, round, client, features) for client, round in banks.tolist()]
    return torch.from_numpy(np.concatenate(rows))


def _draw(census: Census, seed: int, round: int, client: int, features: int) -> Ints:
    """Return the images whose features a client shared in a round."""
    members = census.groups[client]
    return members[choose(key(seed, "share", round, client), len(members), features)]


def count_banks(server: Server, clients: Iterable[str], features: int) -> None:
    """Count the classes in clients' new banks; a mixed image counts as the encrypted one."""
    census, counts = server.census, dict(server.state.get("classes", {}))
    assert census is not None
    rounds = dict(server.state.get("rounds", {}))
    for client in clients:
        shared = _draw(census, server.config.seed, server.round, int(client), features)
        counts[client] = census.count(shared)
        rounds[client] = torch.tensor(server.round)
    server.state |= {"classes": counts, "rounds": rounds}


def log_ratios(
    server: Server, queues: Mapping[int, Mapping[str, Tensor]], only_remote: bool
) -> None:
    """Log R_FN, the mean over a client's samples at the end of its round, and its neighbours.

    ``queues``: how many keys of a client's queue are alike, and of how many, and what its
    neighbours are. ``only_remote``: keys count only while there are no remote features (Eq. 5).
    """
    census, banks = server.census, server.state.get("classes", {})
    assert census is not None
    ratios: dict[int, dict[str, Tensor]] = {}
    for client, local in queues.items():
        counts = census.count(census.groups[client])
        others = sum((n for k, n in banks.items() if int(k) != client), torch.zeros_like(counts))
        alike, held = counts @ others / counts.sum(), others.sum()
        if not only_remote or not held:
            alike, held = alike + local["alike"].to(counts), held + local["held"].to(counts)
        near = {name: local[name] for name in NEIGHBOURS} if banks else {}
        ratios[client] = {"false_negatives": alike / held, **near}
    server.log_clients(ratios)
