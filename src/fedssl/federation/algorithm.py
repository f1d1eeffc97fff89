"""The contract of an algorithm: the server's round, and the tasks of its clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedssl.config import AlgorithmParams, Config, plugins
from fedssl.federation.aggregate import Weight
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.objectives.base import Objective
from fedssl.training.trainer import Trainer
from fedssl.util.errors import UserError
from fedssl.util.text import name_client
from fedssl.util.trees import Tree, find_unsavable


class Algorithm(ABC):
    """Both halves of a method: :meth:`round` runs on the server, the other tasks on clients."""

    Params: ClassVar[type[AlgorithmParams]] = AlgorithmParams
    pools_data: ClassVar[bool] = False  # all data at the server: nothing is federated
    judges: ClassVar[Literal["global", "personal"]] = "global"  # which model is the result
    passes: ClassVar[int] = 1  # how often a round trains on a client's images
    # Whether a client's steps can be compiled, and whether they are without being asked.
    compiles: ClassVar[Literal["auto", "on", "off"]] = "auto"
    has_global: ClassVar[bool] = True  # whether there is a global model at all
    weight: Weight = "samples"  # how clients count in the mean of models, and of kept layers
    model: str = "global"  # which model the exported encoder is
    # The tasks that a client answers: those that the server learns only the mean of, those that it
    # sees each reply of, and those of single numbers for the log.
    means: ClassVar[tuple[str, ...]] = ("train",)
    gathers: tuple[str, ...] = ()
    logs: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # with the names of the numbers
    # Of the means, those whose replies are statistics of the client's images, not of its weights.
    statistics: ClassVar[tuple[str, ...]] = ()
    simulated: ClassVar[tuple[str, ...]] = ()  # tasks of the log that no deployment asks for
    # Those whose replies have a row for each of the client's own things: as many as reply_like has,
    # or fewer.
    varying: ClassVar[tuple[str, ...]] = ()
    # Where in a client's state its personal model is, or the number of that of the server's models
    # which is its (:meth:`numbered`); none: clients have none.
    personal: ClassVar[tuple[str, ...] | None] = None
    client_names: Sequence[str] = ()  # by number, where clients are known by name
    note: str | None = None  # what a user should know before the first round

    def __init__(self, params: AlgorithmParams, objective: Objective) -> None:
        self.params = params
        self.objective = objective

    def found(self, clients: int, config: Config) -> None:
        """Refuse what so many clients cannot do, or what other keys of the run make impossible.

        A site, which knows its own data alone, is not asked.
        """
        return

    def numbered(self, server: Server, number: int) -> Tensor:
        """The server's model of this number, where it has several."""
        return server.weights

    def prepare(self, server: Server, public: Client | None) -> None:
        """Before the first round, with the images that the server itself has, as a client's."""
        return

    def prepared_like(self, trainer: Trainer) -> dict[str, Tree]:
        """What ``prepare`` leaves in the server's state: names, shapes and types, no values."""
        return {}

    @abstractmethod
    def round(self, server: Server, cohort: Cohort) -> None:
        """One round, as the paper has it."""

    def reply_like(self, task: str, trainer: Trainer) -> dict[str, Tree]:
        """Names, shapes and types of a reply (values mean nothing): any other is refused."""
        sent = trainer.initial if trainer.shared is None else trainer.initial[trainer.shared]
        return {"change": sent, "loss": trainer.initial.new_zeros(())}

    def check_asked(
        self,
        task: str,
        way: Literal["means", "gathers", "logs"],
        payload: tuple[Any, ...],
    ) -> None:
        """Refuse what is not declared: what is private, and the report, go by the declaration.

        And what does not take the ``payload`` that clients are asked with.
        """
        where = f"algorithm.name={self.params.name}: round asks clients to {task}"
        if not callable(getattr(self, task, None)):
            raise UserError(f"{where}, and it has no method of that name; name one that it has")
        if task not in getattr(self, way):
            learned = {
                "means": "for the mean of the replies",
                "gathers": "for each client's own reply",
                "logs": "for numbers of each client",
            }[way]
            raise UserError(f"{where} {learned}, and does not declare it; add {task} to its {way}")
        why = plugins.find_call_error(getattr(self, task), None, *payload)
        if why is not None:
            sent = f"the client and {len(payload)} more"
            raise UserError(f"{where}, which cannot be called with {sent} ({why})")

    def asked(self, secure: bool) -> tuple[str, ...]:
        """The means that rounds ask for, in secure sums or in the open; a site gives no others."""
        return self.means

    def bound(self, task: str) -> float | None:
        """The L2 norm that no reply to ``task`` exceeds; none: only clipping bounds it."""
        return None

    def smallest_client(self) -> int:
        """Samples that a client needs: those of the loss within one client, unless overridden."""
        return self.objective.min_samples

    def check_clients(self, sizes: NDArray[np.int64]) -> None:
        """Refuse clients too small for the loss (the dashes in the DCCO paper's Table 1)."""
        need = self.smallest_client()
        batch = self.params.batch
        if batch is not None and batch < need:
            raise UserError(f"algorithm.batch={batch}: {self.objective.params.name} needs {need}")
        small = int(np.argmin(sizes))
        if sizes[small] < need:
            who = name_client(self.client_names, small)
            raise UserError(
                f"algorithm.name={self.params.name} with objective.name="
                f"{self.objective.params.name}: {who} holds {sizes[small]} sample(s), and the "
                f"loss within one client compares at least {need}; use algorithm.name=dcco with "
                "objective.name=cco, or a partition with larger clients"
            )

    def check_state(self, owner: str, state: object) -> None:
        """Refuse a state that checkpoints could not hold; ``owner`` is ``server`` or ``client``."""
        for problem in find_unsavable(state, f"{owner}.state"):
            name = self.params.name
            raise UserError(problem, key="algorithm.name", value=name, can_resume=True)

    def exact_on_union(self, trainer: Trainer) -> bool:
        """Whether a merged cohort gives exactly the clients' mean; a test proves each claim."""
        return False


def one_plain_step(trainer: Trainer) -> bool:
    """One full-batch SGD step in a network where samples do not see each other, no state kept.

    The change is then minus the learning rate times a gradient, and gradients of the union's
    passes are sums over its samples (DCCO paper, appendix A).
    """
    mixes_samples = trainer.network.has_batch_norm or not trainer.objective.needs_batch_only
    one_step = trainer.batches.is_one_full_step and trainer.config.client.optimizer == "sgd"
    return one_step and not mixes_samples and not trainer.keeps_state
