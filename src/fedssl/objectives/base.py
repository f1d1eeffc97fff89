"""The contract of an objective: what a network learns from a batch of images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from fedssl.config import ObjectiveParams, key
from fedssl.models.network import Backbone, Heads, Network, mlp
from fedssl.models.norms import Norm
from fedssl.objectives.batch import EncodedBatch, Loss
from fedssl.objectives.memory import Memory, Tensors

WIDEST = 65_536  # numbers that a layer of a head may have

Encodings = tuple[Tensor, ...]


@dataclass(frozen=True)
class Networks:
    """The networks that encode a batch, and the memory of its client."""

    online: Network  # it learns
    target: Callable[[tuple[Tensor, ...]], Encodings] | None  # see ``Memory.target``
    memory: Tensors


class LocalClient(Protocol):
    """The part of a client that the loss of its round may use."""

    id: int
    round: int

    @property
    def samples(self) -> int:
        """How many samples the client holds."""

    @property
    def seed(self) -> int:
        """The run's seed."""

    @property
    def batches_per_epoch(self) -> int:
        """How many batches one epoch of its samples has."""

    def positions(self, step: int) -> tuple[int, slice | Tensor]:
        """Return a step's epoch, and the positions of its samples within the client."""

    def load(self, weights: Tensor) -> None:
        """Put weights into the network."""

    def encode(self, epoch: int, chosen: slice | Tensor) -> EncodedBatch:
        """Encode some samples' views of an epoch with the network as it is."""


class Objective(ABC):
    """A loss of the encodings of one client's batch.

    A subclass needs :meth:`heads` and :meth:`loss`; the other members have defaults.
    :class:`ProjectorObjective` has the first.
    """

    Params: ClassVar[type[ObjectiveParams]] = ObjectiveParams
    views: ClassVar[int] = 2  # of an image, each augmented anew (or its modalities)
    joint: bool = False  # batch norm sees all views as one batch
    takes_small: ClassVar[bool] = False  # also views of another size (augment.small), at the end
    min_samples: ClassVar[int] = 1  # the smallest batch that the loss is defined for
    needs_labels: ClassVar[bool] = False
    draws: ClassVar[bool] = False  # the loss draws random numbers, for which a batch has a state

    def __init__(self, params: ObjectiveParams) -> None:
        self.params = params

    @property
    def memory(self) -> Memory:
        """The target network and the tensors that a client keeps between steps and rounds."""
        return Memory()

    @abstractmethod
    def heads(self, encoder: Backbone, norm: Norm, classes: int) -> Heads:
        """Return the layers between an encoder and the loss."""

    def encode(
        self, networks: Networks, views: tuple[Tensor, ...], state: Tensor | None
    ) -> Encodings:
        """Return the encodings of a batch's views, which the loss gets: first one of each view.

        ``state`` has a random state for each sample (see ``data.random``).
        """
        return networks.online.predict(networks.online(views))

    @abstractmethod
    def loss(self, batch: EncodedBatch) -> Tensor:
        """Return the loss of one client's batch, a pure function of it."""

    def round_loss(self, client: LocalClient, start: Tensor) -> Loss | None:
        """Return the loss of a client's round from the weights ``start``, if a batch is too little.

        It may use the network before the first step; training loads ``start`` afterwards.
        """
        return None

    @property
    def needs_batch_only(self) -> bool:
        """True if the loss needs only a batch, so that it can be merged and compiled."""
        return type(self).round_loss is Objective.round_loss


def projector_key(*default: int) -> tuple[int, ...]:
    """Return the key of a projector with these default widths."""
    help = "Widths of the projector's layers."
    return key(default, ge=1, le=WIDEST, nonempty=True, help=help)


@dataclass(frozen=True)
class ProjectorParams(ObjectiveParams):
    """Keys of objectives with a projector."""

    projector: tuple[int, ...] = projector_key(1024, 1024, 1024)


class ProjectorObjective(Objective):
    """An objective of two views' encodings behind a projector."""

    Params: ClassVar[type[ObjectiveParams]] = ProjectorParams
    params: ProjectorParams

    def heads(self, encoder: Backbone, norm: Norm, classes: int) -> Heads:
        """Return the projector (DCCO paper, section 4.2)."""
        return Heads(mlp(encoder.features, self.params.projector, norm))
