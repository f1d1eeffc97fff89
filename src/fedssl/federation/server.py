"""The server's half of a round: the global model, and the rule that updates it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedssl.config import Config, Optimizer
from fedssl.data.dataset import Census
from fedssl.federation.client import Client
from fedssl.federation.task import Reply
from fedssl.models.flat_weights import FlatWeights
from fedssl.training import optim
from fedssl.training.trainer import State, Trainer
from fedssl.util.text import name_client

SCHEDULES = {"constant": optim.constant, "cosine": optim.cosine, "steps": optim.steps}


def learning_rates(config: Config, round: int) -> tuple[float, float]:
    """Return the server's and the clients' learning rate in a round.

    The schedule acts on the server's rate. If the server only adds the clients' mean update (SGD
    with learning rate 1), the schedule acts on the clients' rate. Both begin with their warm-up.
    """
    rule = config.server
    adds_only = rule.optimizer == "sgd" and rule.lr == 1 and not rule.momentum
    on_clients = adds_only and not rule.weight_decay
    server = _rate(config, rule, round, not on_clients)
    return server, _rate(config, config.client, round, on_clients)


def _rate(config: Config, rule: Optimizer, round: int, is_scheduled: bool) -> float:
    """Return an optimizer's rate in a round: after the warm-up the schedule's, or constant."""
    if round < rule.warmup:
        return rule.lr * (round + 1) / rule.warmup
    rest = SCHEDULES[config.schedule](round - rule.warmup, max(1, config.rounds - rule.warmup))
    return rule.lr * rest if is_scheduled else rule.lr


def apply_update(
    rule: Optimizer,
    state: optim.State,
    weights: Tensor,
    change: Tensor,
    lr: float,
    flat: FlatWeights,
) -> Tensor:
    """Step along a mean update: its negative is the gradient; buffers are added unchanged."""
    n = flat.parameter_count
    delta = optim.step(rule, state, weights[:n], -change[:n], lr, flat.layers, flat.depths)
    if len(weights) > n:
        delta = torch.cat((delta, change[n:]))
    return weights + delta


class Server:
    """The global model, the optimizer that updates it, and the algorithm's own state."""

    def __init__(self, trainer: Trainer, client_names: Sequence[str] = ()) -> None:
        self.trainer = trainer
        self.config = trainer.config
        self.flat = trainer.flat
        self.shared = trainer.shared
        self.weights = trainer.flat.vector.clone()
        self.state: State = {}  # the algorithm's: tensors by name, kept in checkpoints
        self.rule_state = optim.start(self.config.server, self.weights[: self.flat.parameter_count])
        self.round = 0
        self.client_names = client_names
        self.public: Client | None = None  # images of its own, which all clients may see
        self.census: Census | None = None  # labels of all clients' images, in a simulation
        self.log: dict[str, Tensor] = {}  # one number per name, for this round's metrics
        self.client_log: dict[str, dict[int, float | None]] = {}  # by measure, then by client
        self.warnings: list[str] = []
        self.is_preparing = False
        self._model: tuple[Tensor, Tensor] | None = None

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Let Ctrl-C stop at once: the work in this context is done again after a resumption."""
        self.is_preparing = True
        try:
            yield
        finally:
            self.is_preparing = False

    @property
    def model(self) -> Tensor:
        """The weights that clients receive: all but the layers that stay with each client."""
        if self.shared is None:
            return self.weights
        if self._model is None or self._model[0] is not self.weights:
            self._model = (self.weights, self.weights[self.shared])
        return self._model[1]

    def clear_log(self) -> None:
        """Forget the measures and warnings of the last round."""
        self.log.clear()
        self.client_log.clear()
        self.warnings.clear()

    def log_clients(self, replies: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Log each client's numbers; one that is not finite is logged as ``None``."""
        for client, measures in sorted(replies.items()):
            for name, value in measures.items():
                number = float(value)
                self.client_log.setdefault(name, {})[client] = (
                    number if math.isfinite(number) else None
                )

    def warn(self, text: str) -> None:
        """Show a warning with this round's number."""
        self.warnings.append(text)

    def name_client(self, client: int) -> str:
        """Return the words for a client in a message: ``client 3``, or the name of its folder."""
        return name_client(self.client_names, client)

    def apply(self, update: Reply) -> None:
        """Update the model by the clients' mean change, and log the mean losses that they sent."""
        self.log |= {name: value for name, value in update.items() if name.endswith("loss")}
        self.weights = self.step(self.weights, self.rule_state, update["change"])

    def step(self, weights: Tensor, state: optim.State, change: Tensor) -> Tensor:
        """Return a model after one step of the server's optimizer along a mean change."""
        if self.shared is not None:
            change = torch.zeros_like(weights).index_copy_(0, self.shared, change)
        rule, (lr, _) = self.config.server, learning_rates(self.config, self.round)
        return apply_update(rule, state, weights, change, lr, self.flat)
