"""The messages between server and clients: a request, a step of a secure sum, and a reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedssl.config import Config
from fedssl.engines.remote.codec import Packed
from fedssl.engines.remote.disk_states import History
from fedssl.federation.aggregate import Weight

if TYPE_CHECKING:
    from fedssl.privacy.secure import Message

CHANGE = "change"  # the leaf of a reply that holds the model's change
LONGEST_FAULT = 300  # characters of a fault that are kept


def half_precision_leaves(config: Config) -> tuple[str, ...]:
    """Return the leaves of a reply that travel as float16 (``engine.updates``)."""
    return (CHANGE,) if config.engine.updates == "fp16" else ()


def message_bytes(message: Message) -> int:
    """Count the bytes of a message of a secure sum."""
    lists = (values for values in message.values() if isinstance(values, list))
    return sum(len(v) if isinstance(v, bytes) else 8 for values in lists for v in values)


def sum_context(history: History, round: int, task: str) -> str:
    """Name a secure sum. A run keeps the name of its first attempt."""
    return f"{history.names[0]}/{round}/{task}"


@dataclass(frozen=True)
class SecureStep:
    """A step of a secure sum, with the step's messages by client."""

    step: str
    messages: Mapping[int, Message] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One exchange as a node receives it: the task, its clients and the payload.

    ``payload`` holds the arguments' tensors by name (see :mod:`fedssl.engines.remote.payload`).
    Those in ``known`` came with an earlier exchange of the round: its number, and the name there.
    """

    task: str
    clients: tuple[int, ...]
    round: int
    exchange: int  # its number within the round
    history: History
    weight: Weight | None = None  # how clients count in a mean; None for single replies
    arguments: int = 0
    payload: Mapping[str, Packed] = field(default_factory=dict)
    known: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    secure: SecureStep | None = None
    samples: Mapping[int, int] = field(default_factory=dict)  # images that each client started with

    @property
    def sum_context(self) -> str:
        """The name of a secure sum."""
        return sum_context(self.history, self.round, self.task)


@dataclass(frozen=True)
class Reply:
    """A client's reply: its share in a mean and its tensors, or why there are none.

    In a secure sum the reply holds the step's message. The masked vector is the only tensor, and
    there is no share.
    """

    share: float = 1.0
    tensors: Mapping[str, Packed] = field(default_factory=dict)
    fault: str | None = None
    message: Message = field(default_factory=dict)
