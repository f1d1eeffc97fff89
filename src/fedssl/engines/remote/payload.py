"""Name the tensors of a task's arguments, and find them again by their names.

A tensor is named ``position/path``, or ``position@client/path`` where each client gets its own. An
argument without tensors is named ``position/{}``, which tells it from one that is missing.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedssl.engines.remote.codec import WHOLE, MalformedError, Packed, build_tree, pack
from fedssl.federation.aggregate import Weight
from fedssl.federation.traffic import Argument
from fedssl.util.trees import Tree, flatten

EMPTY = "{}"


@dataclass
class Payload:
    """The arguments of one exchange, ready to be sent."""

    shared: dict[str, Packed] = field(default_factory=dict)
    own: dict[int, dict[str, Packed]] = field(default_factory=lambda: defaultdict(dict))
    # Tensors that clients have from an earlier exchange: its number, and the name there.
    known: dict[str, tuple[int, str]] = field(default_factory=dict)

    def of(self, clients: Iterable[int]) -> dict[str, Packed]:
        """Return the tensors that a node with these clients is sent."""
        own = {name: packed for k in clients for name, packed in self.own[k].items()}
        return {**self.shared, **own}


class PayloadWriter:
    """Packs the arguments of a round's exchanges; a tensor that clients have is sent once."""

    def __init__(self) -> None:
        self._sent: list[tuple[Tensor, tuple[int, str]]] = []

    def pack(self, arguments: tuple[Argument, ...], exchange: int) -> Payload:
        """Pack the arguments of one exchange."""
        payload = Payload()
        for position, argument in enumerate(arguments):
            for client, value in argument.value.items() if argument.differs else ():
                for path, packed in pack(value).items():
                    payload.own[client][f"{position}@{client}/{path}"] = packed
        for name, tensor in name_tensors(arguments).items():
            before = [where for sent, where in self._sent if sent is tensor]
            if before:
                payload.known[name] = before[0]
            else:
                payload.shared[name] = pack(tensor)[WHOLE]
                self._sent.append((tensor, (exchange, name)))
        return payload


def name_tensors(arguments: tuple[Argument, ...]) -> dict[str, Tensor]:
    """Return the tensors of the arguments that are the same for all clients, by their names."""
    return {
        f"{position}/{path or WHOLE}": tensor
        for position, argument in enumerate(arguments)
        if not argument.differs
        for path, tensor in (flatten(argument.value) or {EMPTY: torch.empty(0)}).items()
    }


def hash_arguments(tensors: Mapping[str, Tensor], count: int, weight: Weight | None) -> str:
    """Return the hash of all that a reply depends on, except the client's images and state."""
    digest = hashlib.sha256(json.dumps([count, weight]).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read_arguments(tensors: Mapping[str, Tensor], count: int, client: int) -> list[Tree]:
    """Return a client's ``count`` arguments, in order."""
    arguments: list[Tree] = []
    for position in range(count):
        parts = (f"{position}/", f"{position}@{client}/")
        flat = {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith(parts)}
        if not flat:
            raise MalformedError(f"argument {position} is missing")
        arguments.append({} if flat.keys() == {EMPTY} else build_tree(flat))
    return arguments
