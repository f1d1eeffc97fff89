"""The contract of an algorithm: the server's round, and the tasks of its clients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedssl import config as configuration
from fedssl.config import AlgorithmParams, Config
from fedssl.federation.aggregate import Weight
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.task import ClientTask, Seen
from fedssl.objectives.base import Objective
from fedssl.training.trainer import State, Trainer
from fedssl.util.errors import UserError
from fedssl.util.trees import find_unsavable


@dataclass(frozen=True)
class Result:
    """The models that a run ends with: the global one, one for each client, or both."""

    evaluated: Literal["global", "personal"] = "global"
    has_global: bool = True
    uses_initial: bool = False  # clients start their own models from the initial weights
    description: str = "global"  # of the exported encoder, in encoder.json
    further: Callable[[Any, State], Mapping[str, Tensor]] = lambda algorithm, state: {}
    """Other models in a client's state, by name, which the protocol per-client evaluates too."""
    peers: Callable[[Server], Iterable[Tensor]] = lambda server: ()
    """The models that clients train, by client, where the server knows them all."""


@dataclass(frozen=True)
class Suits:
    """The sites that an algorithm is made for: rules of thumb, for the recipe ``sites``."""

    reason: str
    most_sites: float = math.inf
    fewest_images: int = 1  # of each site

    def includes(self, sizes: Sequence[int]) -> bool:
        """Return whether sites with so many images each are meant."""
        return len(sizes) <= self.most_sites and min(sizes) >= self.fewest_images


class Algorithm(ABC):
    """Both halves of a method: :meth:`round` runs at the server, its tasks run at clients.

    A task is a method with the decorator :func:`~fedssl.federation.task.client_task`. Subclasses
    may also set ``Params``, ``result``, ``weight``, ``pools_data`` and ``suits``, and override
    :meth:`validate`, :attr:`minimum_images`, :meth:`exact_on_union`, :meth:`server_model` and
    :meth:`personal_weights`.
    """

    Params: ClassVar[type[AlgorithmParams]] = AlgorithmParams
    result: ClassVar[Result] = Result()
    weight: Weight = "samples"  # how clients count in every mean
    pools_data: ClassVar[bool] = False  # the server has all data: nothing is federated
    suits: ClassVar[Suits | None] = None  # None: the recipe ``sites`` does not choose it

    def __init__(self, params: AlgorithmParams, objective: Objective) -> None:
        self.params = params
        self.objective = objective
        inherited = {name for base in type(self).__mro__[1:] for name in declared_tasks(base)}
        for name in sorted(inherited - self.tasks().keys()):
            raise UserError(
                f"{type(self).__name__}.{name} overrides a task of clients without declaring it",
                key="algorithm.name",
                value=params.name,
                fix="Add @client_task(seen=…, reveals=…) to it.",
            )

    @abstractmethod
    def round(self, server: Server, cohort: Cohort) -> None:
        """Run one round, as the paper describes it."""

    def validate(self, config: Config, clients: int) -> Iterable[str]:
        """Refuse a configuration that cannot work with so many clients, before any training.

        Only the server calls this. Returns what a user should know before the first round.
        """
        return ()

    @property
    def minimum_images(self) -> int:
        """The images that every client needs: those that the loss within one client compares."""
        return self.objective.min_samples

    def exact_on_union(self, trainer: Trainer) -> bool:
        """Return whether a merged cohort gives exactly the clients' mean. Tests prove each case."""
        return False

    def server_model(self, server: Server, state: State) -> Tensor:
        """Return the server's model that the client with this state trains."""
        return server.weights

    def personal_weights(self, server: Server, state: State) -> Tensor | None:
        """Return the model of the client with this state, ``None`` if it has none of its own.

        Unless overridden, that is the server's model with the layers that the client keeps.
        """
        model, kept = self.server_model(server, state), server.trainer.kept
        if kept is None:
            return model if self.result.evaluated == "personal" else None
        norm = state.get("norm")
        return None if norm is None else model.index_copy(0, kept, norm.to(model))

    @classmethod
    def tasks(cls) -> dict[str, ClientTask]:
        """Return all declared tasks by name, those of base classes first."""
        names = [name for owner in reversed(cls.__mro__) for name in declared_tasks(owner)]
        tasks = {name: getattr(getattr(cls, name), "client_task", None) for name in names}
        return {name: task for name, task in tasks.items() if task is not None}

    def asked(self, secure: bool = False, *seen: Seen) -> list[ClientTask]:
        """Return the tasks that rounds ask for with these parameters, or those ``seen`` so."""
        tasks = [task for task in self.tasks().values() if task.when(self, secure)]
        return [task for task in tasks if not seen or task.seen in seen]

    def check_state(self, owner: str, state: object) -> None:
        """Refuse a state that checkpoints could not hold; ``owner`` is ``server`` or ``client``."""
        for problem in find_unsavable(state, f"{owner}.state"):
            name = self.params.name
            raise UserError(problem, key="algorithm.name", value=name, can_resume=True)


def declared_tasks(owner: type) -> list[str]:
    """List the tasks that a class declares itself."""
    return [name for name, member in vars(owner).items() if hasattr(member, "client_task")]


def is_one_plain_step(trainer: Trainer) -> bool:
    """Return whether a round is one full-batch SGD step that keeps no state.

    No layer looks at several samples. So the change is minus the learning rate times a gradient,
    and the gradient on a union is a sum over its samples (DCCO paper, appendix A).
    """
    mixes_samples = trainer.network.has_batch_norm or not trainer.objective.needs_batch_only
    rule = trainer.config.client  # whose clipping is of each client's own gradient
    is_linear = rule.optimizer == "sgd" and rule.clip_norm is None
    one_step = trainer.batches.is_one_full_step and is_linear
    return one_step and not mixes_samples and not trainer.keeps_state


def require_objective(config: Config, kind: type, problem: str, fix: str) -> None:
    """Refuse an objective that is not of a kind that an algorithm works with."""
    name, key = config.objective.name, "objective.name"
    if not issubclass(configuration.variant("objective", name), kind):
        raise UserError(problem, key=key, value=name, fix=fix, against="algorithm.name")


def build_algorithm(config: Config) -> Algorithm:
    """Build the algorithm of a configuration, with the objective that it trains."""
    objective = configuration.variant("objective", config.objective.name)(config.objective)
    return configuration.variant("algorithm", config.algorithm.name)(config.algorithm, objective)
