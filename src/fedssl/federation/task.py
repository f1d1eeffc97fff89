"""Declare what clients do for the server, and what the server may learn from their replies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from fedssl.config import plugins
from fedssl.training.trainer import Trainer
from fedssl.util.errors import UserError

Seen = Literal["mean", "each", "log", "simulation"]
Reveals = Literal["update", "statistics", "features", "loss", "numbers"]
Reply = dict[str, Any]  # a tree of tensors
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(kw_only=True, eq=False)
class ClientTask:
    """Declare a method as a task of clients; use it as the decorator ``@client_task(…)``.

    Args:
        seen: What the server sees. ``mean``: only the mean of the replies. ``each``: every client's
            reply. ``log``: single numbers of each client, for the log. ``simulation``: the same,
            but no real site is ever asked.
        reveals: What a reply is computed from. ``update``: a change of the model, with the loss.
            ``statistics``: means over images' encodings. ``features``: one row per image.
            ``loss``: the loss alone. ``numbers``: single numbers of the client's state.
        reply: The shape of a reply, as a function of the algorithm and its trainer, or the names of
            the numbers. An update and a loss need none.
        bound: The L2 norm that no reply exceeds. ``None``: only clipping bounds it.
        few_images: The number of images up to which statistics can reveal each image's encoding.
        images: A sentence on the images that features are computed from.
        when: Whether rounds ask for the task, given the algorithm and whether sums are secure.
        sums_hide: Whether a sum over clients hides each of them.
        trains: How often the task trains on the client's images. ``None``: once for an update or a
            loss, else not at all.
        stateless: Whether the reply is independent of ``client.state``. Privacy accounting then
            counts every round as a fresh draw of clients.
    """

    seen: Seen
    reveals: Reveals
    reply: Callable[[Any, Trainer], Reply] | tuple[str, ...] | None = None
    bound: Callable[[Any], float | None] = lambda algorithm: None
    few_images: Callable[[Any], int] = lambda algorithm: 2
    images: Callable[[Any], str] = lambda algorithm: "The images are taken as they are."
    when: Callable[[Any, bool], bool] = lambda algorithm, secure: True
    sums_hide: Callable[[Any], bool] = lambda algorithm: True
    trains: int | None = None
    stateless: bool = False
    name: str = field(init=False)  # of the method, and on the wire
    summary: str = field(init=False)

    def __post_init__(self) -> None:
        trains = self.reveals in ("update", "loss")
        if self.trains is None:
            self.trains = int(trains)
        if self.reply is None and not trains:
            raise UserError(
                f"a task that reveals {self.reveals} must say what a reply looks like",
                fix="Give @client_task(reply=…).",
            )

    def __call__(self, method: Method) -> Method:
        """Declare a method."""
        task = copy.copy(self)
        task.name = method.__name__
        task.summary = (method.__doc__ or method.__name__).strip().splitlines()[0].rstrip(".")
        method.client_task = task  # type: ignore[attr-defined]
        return method

    @property
    def is_logged(self) -> bool:
        """True if replies are single numbers that only the log needs."""
        return self.seen in ("log", "simulation")

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of the numbers in a reply for the log."""
        return self.reply if isinstance(self.reply, tuple) else ()

    def expected_reply(self, algorithm: object, trainer: Trainer) -> Reply:
        """Return a tree with the names, shapes and types of a reply; its values mean nothing."""
        if callable(self.reply):
            return self.reply(algorithm, trainer)
        if self.reveals == "numbers":
            return {name: trainer.initial.new_zeros(()) for name in self.measures}
        update = update_like(trainer)
        return {"loss": update["loss"]} if self.reveals == "loss" else update


client_task = ClientTask


def update_like(trainer: Trainer) -> Reply:
    """Return the shapes of an update: the change of what clients receive, and the mean loss."""
    sent = trainer.initial if trainer.shared is None else trainer.initial[trainer.shared]
    return {"change": sent, "loss": trainer.initial.new_zeros(())}


def get_task(
    method: object, verb: Literal["mean", "gather"], payload: tuple[Any, ...]
) -> ClientTask:
    """Return the declaration of a task that a round asks for, or refuse what is not declared."""
    task = getattr(method, "client_task", None)
    name = getattr(method, "__name__", str(method))
    if not isinstance(task, ClientTask):
        raise _misuse(method, f"{name} is not a task of clients", "Declare it with @client_task.")
    if (task.seen == "mean") != (verb == "mean"):
        fitting = "mean" if task.seen == "mean" else "gather"
        problem = f"cohort.{verb} asks for {name}, which is declared with seen={task.seen}"
        raise _misuse(method, problem, f"Use cohort.{fitting}, or change the declaration.")
    reason = plugins.find_call_error(method, None, *payload)
    if reason is not None:
        problem = f"{name} does not take the client and {len(payload)} arguments ({reason})"
        raise _misuse(method, problem, f"Change its arguments, or those of cohort.{verb}.")
    return task


def _misuse(method: object, problem: str, fix: str) -> UserError:
    params = getattr(getattr(method, "__self__", None), "params", None)
    value = {} if params is None else {"value": params.name}
    return UserError(problem, key="algorithm.name", fix=fix, **value)
