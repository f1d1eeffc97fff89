"""The share of false negatives in CCL (Eq. 4 and 5), which only a simulation with labels knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedssl.data.random import choose, key
from fedssl.federation.server import Server


def count_banks(server: Server, clients: Iterable[str], features: int) -> None:
    """Count the classes in clients' new banks; a mixed image counts as the encrypted one."""
    census, counts = server.census, dict(server.state.get("classes", {}))
    assert census is not None
    for client in clients:
        members = census.groups[int(client)]
        state = key(server.config.seed, "share", server.round, int(client))
        counts[client] = census.count(members[choose(state, len(members), features)])
    server.state["classes"] = counts


def log_ratios(
    server: Server, queues: Mapping[int, Mapping[str, Tensor]], only_remote: bool
) -> None:
    """Log R_FN, the mean over a client's samples at the end of its round.

    ``queues``: how many keys of a client's queue are alike, and of how many. ``only_remote``: they
    count only while there are no remote features (Eq. 5).
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
        ratios[client] = {"false_negatives": alike / held}
    server.log_clients(ratios)
