"""What an algorithm works with: the server, and the cohort that it asks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.config import AlgorithmParams, Config, Optimizer
from fedssl.data.dataset import Census
from fedssl.data.partition import called
from fedssl.federation.client import Client
from fedssl.models.flat import Flat
from fedssl.objectives.base import Objective
from fedssl.training import optim
from fedssl.training.trainer import Trainer
from fedssl.util import plugins
from fedssl.util.errors import UserError
from fedssl.util.trees import NothingToAverage, Tree, add_up, count_bytes, leaves, scaled

T = TypeVar("T")
Weight = Literal["samples", "uniform"]
SCHEDULES = {"constant": optim.constant, "cosine": optim.cosine, "steps": optim.steps}


class TooFewReplies(Exception):
    """Fewer replies than ``cohort.minimum``: the round does not count, the model is unchanged."""


@dataclass(frozen=True)
class PerClient(Generic[T]):
    """A payload that is not the same for everyone."""

    values: Mapping[int, T]


def per_client(values: Mapping[int, T]) -> PerClient[T]:
    """Mark a payload as one value a client: ``cohort.gather("task", per_client({3: bank}))``."""
    return PerClient(values)


def learning_rates(config: Config, round: int) -> tuple[float, float]:
    """The server's and the clients' learning rate in a round.

    The schedule acts on the server's, unless the server only adds the clients' mean change (SGD
    with learning rate 1): then it acts on the clients'.
    """
    factor = SCHEDULES[config.schedule](round, config.rounds)
    rule = config.server
    adds_only = rule.optimizer == "sgd" and rule.lr == 1 and not rule.momentum
    if adds_only and not rule.weight_decay:
        return rule.lr, config.client.lr * factor
    return rule.lr * factor, config.client.lr


def apply(
    rule: Optimizer, state: optim.State, weights: Tensor, change: Tensor, lr: float, flat: Flat
) -> Tensor:
    """New weights from a mean change: its negative is the gradient, buffers take it as it is."""
    n = flat.parameters
    delta = optim.step(rule, state, weights[:n], -change[:n], lr, flat.layers)
    if len(weights) > n:
        delta = torch.cat((delta, change[n:]))
    return weights + delta


class Server:
    """The global model and the rule that turns a mean update into the next one."""

    def __init__(self, trainer: Trainer) -> None:
        self.config = trainer.config
        self.flat = trainer.flat
        self.shared = trainer.shared
        self.weights = trainer.flat.vector.clone()
        self.state: dict[str, Tree] = {}
        self.rule_state = optim.start(self.config.server, self.weights[: self.flat.parameters])
        self.round = 0
        self.drawn: tuple[int, NDArray[np.int64]] | None = None  # a round, and who takes part
        self.log: dict[str, Tensor] = {}
        self.clients: dict[str, dict[int, float | None]] = {}  # measures of each client, to log
        self.warnings: list[str] = []
        self.census: Census | None = None  # of a simulation, see there
        self._sent: tuple[Tensor, Tensor] | None = None

    @property
    def sent(self) -> Tensor:
        """What clients are sent of the global model: all, but layers that never leave a client."""
        if self.shared is None:
            return self.weights
        if self._sent is None or self._sent[0] is not self.weights:
            self._sent = (self.weights, self.weights[self.shared])
        return self._sent[1]

    def note(self, replies: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Log each client's own measures; one that is not defined yet is logged as none."""
        for client, measures in sorted(replies.items()):
            for name, value in measures.items():
                number = float(value)
                self.clients.setdefault(name, {})[client] = (
                    number if math.isfinite(number) else None
                )

    def apply(self, update: dict[str, Tree]) -> None:
        """Take the mean of the clients' changes (and note their mean loss, if it was told)."""
        change, loss = update["change"], update.get("loss")
        assert isinstance(change, Tensor)
        if isinstance(loss, Tensor):
            self.log["loss"] = loss
        self.weights = self.moved(self.weights, self.rule_state, change)

    def moved(self, weights: Tensor, state: optim.State, change: Tensor) -> Tensor:
        """Where clients' mean change takes a model by the server's rule."""
        if self.shared is not None:
            change = torch.zeros_like(weights).index_copy_(0, self.shared, change)
        rule, (lr, _) = self.config.server, learning_rates(self.config, self.round)
        return apply(rule, state, weights, change, lr, self.flat)


@dataclass
class Traffic:
    """What one round moved, in bytes over all clients, by exchange."""

    up: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    down: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    replied: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # whose up is
    reached: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # and down
    missing: int = 0
    faults: dict[int, str] = field(default_factory=dict)  # why a client's reply did not count


class Average:
    """How the clients' replies become their mean: as it is, unless the configuration asks for more.

    ``contribute`` runs where the client is, before anything leaves it; ``combine`` on the server,
    or only its last step, ``release``, where the server sees nothing but sums.
    """

    exact: ClassVar[bool] = True  # whether a merged cohort's reply may stand for its clients'
    logs: ClassVar[bool] = True  # whether single numbers of a client may go to the log

    def contribute(
        self, task: str, samples: int, reply: Tree, weight: Weight
    ) -> tuple[float, Tree]:
        """A client's weight and what it puts in."""
        return (samples if weight == "samples" else 1), reply

    def combine(self, task: str, contributions: Iterator[tuple[float, Tree]]) -> Tree:
        """The mean; :class:`NothingToAverage` if there are no contributions."""
        return self.release(task, *add_up(contributions))

    def release(self, task: str, total: Tree, weight: float, replies: int) -> Tree:
        """The mean from Σ weight · reply and Σ weight of so many replies."""
        return scaled(total, 1 / weight)

    def spent(self) -> dict[str, float]:
        """What the means so far have told about any client, for metrics and summary."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What a resumed run must know."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`state`."""


class Cohort(ABC):
    """The clients of one round. An engine says how they are asked; the rules are the same on all.

    A reply that does not come is not in the mean; a client that did not answer one exchange is not
    asked in the next; fewer than ``minimum`` replies and the round is skipped.
    """

    def __init__(
        self,
        ids: NDArray[np.int64],
        algorithm: Algorithm,
        minimum: int,
        counts_traffic: bool = True,
        average: Average | None = None,
    ) -> None:
        self.ids = np.sort(ids)
        self.algorithm = algorithm
        self.minimum = minimum
        self.average = average or Average()
        self.traffic = Traffic()
        self._counts = counts_traffic
        self._sent: list[Tensor] = []

    @abstractmethod
    def ask(
        self, task: str, payload: tuple[Any, ...], weight: Weight | None
    ) -> Iterator[tuple[NDArray[np.int64], float, Any]]:
        """Run ``task`` on the clients in ``self.ids``, in ascending order.

        Yields clients, their weight, and their contribution to a mean (without a ``weight``: their
        reply as it is); clients without a reply are not yielded. In a mean by samples the engine
        may answer for several clients at once with their mean reply, where that is ``exact``.
        """

    def ask_log(self, task: str) -> Iterator[tuple[NDArray[np.int64], float, Any]]:
        """As :meth:`ask`, for numbers of the clients' states that only the log needs."""
        return self.ask(task, (), None)

    def mean(self, task: str, *payload: Any, weight: Weight = "samples") -> Any:
        """The mean of the clients' replies (by samples, or uniform), and nothing else."""
        self.algorithm.check_asked(task, "means", payload)
        answered: list[NDArray[np.int64]] = []

        def weighted() -> Iterator[tuple[float, Tree]]:
            for ids, share, reply in self.ask(task, payload, weight):
                answered.append(ids)
                self._count_up(task, reply, len(ids))
                yield share, reply

        result: Tree | None = None
        lost: TooFewReplies | None = None
        try:
            result = self.average.combine(task, weighted())
        except NothingToAverage:
            pass
        except TooFewReplies as error:
            lost = error
        self._close(task, payload, np.concatenate(answered) if answered else self.ids[:0], lost)
        return result

    def gather(self, task: str, *payload: Any, log: bool = False) -> dict[int, Any]:
        """Each client's own reply: for algorithms that route things between clients.

        With ``log`` it is declared to be for the log only: the task reads single numbers of the
        client's state and changes nothing. Where clients are to be seen only in sums, nobody is
        asked.
        """
        self.algorithm.check_asked(task, "logs" if log else "gathers", () if log else payload)
        replies: dict[int, Any] = {}
        if log and not self.average.logs:
            return replies
        asked = self.ask_log(task) if log else self.ask(task, payload, None)
        for ids, _, reply in asked:
            replies[int(ids[0])] = reply
            self._count_up(task, reply, 1)
        answered = np.array(sorted(replies), dtype=np.int64)
        if log:  # a line that does not come takes nobody out of the round
            self._count(task, payload, answered)
        else:
            self._close(task, payload, answered)
        return replies

    def _close(
        self,
        task: str,
        payload: tuple[Any, ...],
        answered: NDArray[np.int64],
        lost: TooFewReplies | None = None,
    ) -> None:
        """Count what was sent, drop who did not answer, and stop if too few are left.

        Where the replies gave no mean, the reason is that of ``lost``.
        """
        self._count(task, payload, answered)
        self.traffic.missing += len(self.ids) - len(answered)
        self.ids = answered
        if lost is not None:
            raise lost
        if len(answered) < self.minimum:
            raise TooFewReplies(
                f"{len(answered)} replies to {task}, fewer than cohort.minimum={self.minimum}"
            )

    def _reached(self) -> NDArray[np.int64]:
        """Who got what was asked last: all, unless messages can be lost."""
        return self.ids

    def _count(self, task: str, payload: tuple[Any, ...], answered: NDArray[np.int64]) -> None:
        if self._counts:
            self.traffic.down[task] += self._payload_bytes(payload)
            self.traffic.replied[task].update(answered.tolist())
            self.traffic.reached[task].update(self._reached().tolist())

    def _count_up(self, task: str, reply: Tree, clients: int) -> None:
        if self._counts:
            self.traffic.up[task] += count_bytes(reply) * clients

    def _payload_bytes(self, payload: tuple[Any, ...]) -> int:
        """What goes down; a tensor that clients already have from this round is not sent again."""
        total, reached = 0, self._reached()
        for item in payload:
            if isinstance(item, PerClient):
                total += sum(count_bytes(item.values[int(i)]) for i in reached)
                continue
            for leaf in leaves(item):
                if not any(leaf is sent for sent in self._sent):
                    self._sent.append(leaf)
                    total += count_bytes(leaf) * len(reached)
        return total


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
        why = plugins.misfit(getattr(self, task), None, *payload)
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
        return self.objective.minimum

    def check_clients(self, sizes: NDArray[np.int64]) -> None:
        """Refuse clients too small for the loss (the dashes in the DCCO paper's Table 1)."""
        need = self.smallest_client()
        batch = self.params.batch
        if batch is not None and batch < need:
            raise UserError(f"algorithm.batch={batch}: {self.objective.params.name} needs {need}")
        small = int(np.argmin(sizes))
        if sizes[small] < need:
            who = called(self.client_names, small)
            raise UserError(
                f"algorithm.name={self.params.name} with objective.name="
                f"{self.objective.params.name}: {who} holds {sizes[small]} sample(s), and the "
                f"loss within one client compares at least {need}; use algorithm.name=dcco with "
                "objective.name=cco, or a partition with larger clients"
            )

    def exact_on_union(self, trainer: Trainer) -> bool:
        """Whether a merged cohort gives exactly the clients' mean; a test proves each claim."""
        return False


def one_plain_step(trainer: Trainer) -> bool:
    """One full-batch SGD step in a network where samples do not see each other, no state kept.

    The change is then minus the learning rate times a gradient, and gradients of the union's
    passes are sums over its samples (DCCO paper, appendix A).
    """
    if trainer.stateful or trainer.network.has_batch_norm or not trainer.objective.of_batches:
        return False
    return trainer.plan.one_full_step and trainer.config.client.optimizer == "sgd"
