"""Show what clients send: every task, how much of it the server sees, and its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fedssl.config import plugins
from fedssl.federation.algorithm import build_algorithm
from fedssl.federation.task import ClientTask
from fedssl.privacy.accountant import VACUOUS
from fedssl.privacy.checks import allows_secure_sums, survivors_needed
from fedssl.privacy.exchanges import (
    Visibility,
    describe_view,
    list_messages,
    shares_more_than_loss,
)
from fedssl.privacy.leakage import describe_leaks
from fedssl.report.history import History, Traffic
from fedssl.runs.metrics import is_number
from fedssl.runs.reader import RunReader

IMPORTANCE: tuple[Visibility, ...] = ("readable", "masked", "log")


@dataclass(frozen=True)
class Row:
    """One task of a run."""

    task: str
    content: str
    seen: str
    visibility: Visibility  # also the CSS class
    traffic: Traffic


class Sheet:
    """The table for a data-protection officer, and the sentences around it."""

    def __init__(self, run: RunReader, history: History) -> None:
        self.run, self.config, self.history = run, run.settings, history
        self.algorithm = build_algorithm(self.config)
        self.messages = [] if self.algorithm.pools_data else list_messages(self.config)
        tasks = self.algorithm.tasks()
        self.declared = {m.task.name: m.task for m in self.messages if m.task is not None}
        # Before the first round: the tasks that will be asked for.
        self.asked = {n: tasks[n] for n in history.tasks} if history.rounds else self.declared
        self.shares_model = shares_more_than_loss(self.config, self.algorithm)

    @property
    def rows(self) -> list[Row]:
        """The rows of the table; the replies that the server could read come first."""
        rows = [] if self.algorithm.pools_data else map(self._row, self.asked.values())
        return sorted(rows, key=lambda row: IMPORTANCE.index(row.visibility))

    def _row(self, task: ClientTask) -> Row:
        content = task.summary if self.shares_model else "Its loss, nothing else"
        visibility, seen = describe_view(self.config, self.algorithm, task)
        traffic = self.history.tasks.get(task.name, Traffic())
        return Row(task.name, content, seen, visibility, traffic)

    @property
    def verdict(self) -> str:
        """The sheet in one sentence, and a warning if replies could reveal single images."""
        if self.algorithm.pools_data:
            name = plugins.short_name(self.config.algorithm.name)
            return f"{name} has all data in one place: at real sites, every image leaves its site."
        names, sizes = ([client[key] for client in self.run.clients] for key in ("name", "samples"))
        leaks = describe_leaks(self.config, self.algorithm, sizes, names)
        return " ".join(filter(None, (f"{self._summarize()}.", leaks)))

    def _summarize(self) -> str:
        config, each = self.config, "the server sees each client's own reply to"
        if not self.shares_model:
            return (
                "No image and no model leaves a client: each trains alone and sends only its loss"
            )
        is_logged = any(task.seen == "log" for task in self.asked.values())
        logged = ", and single numbers of each client for its log" if is_logged else ""
        if gathered := self.algorithm.asked(config.privacy.secure, "each"):
            return f"No image leaves a client, but {each} {_quote(gathered)}{logged}"
        if config.cohort.average != "mean":
            means = self.algorithm.asked(False, "mean")
            shown = [task for task in self.asked.values() if task in means] or means
            return f"No image leaves a client; {each} {_quote(shown)} and compares them{logged}"
        text = "uses only means over the clients, but it could read each reply"
        if config.privacy.secure:
            text = "learns only sums over the clients"
        epsilon = self.history.last.get("epsilon")
        if is_number(epsilon):
            text += (
                f"; it adds noise before use, so the model is ({epsilon:.3g}, "
                f"{config.privacy.delta:g})-differentially private for all data of a client, "
                "provided that the server is trusted"
            )
        return f"No image leaves a client; the server {text}{logged}"

    @property
    def notes(self) -> Iterator[str]:
        """The messages that are not in the table, and what a reader may miss."""
        unasked = self.declared.keys() - self.history.tasks.keys()
        if unasked and self.history.rounds:
            shown = ", ".join(name for name in self.declared if name in unasked)
            yield f"Declared, but not asked for in this run: {shown}."
        for message in self.messages:
            if message.downwards:
                yield f"Besides the table, the server sends {message.content} {message.when}."
            elif message.task is None and self.config.engine.sites is not None:
                yield f"Besides the table, a site sends {message.when}: {message.content}."
        for task in self.declared.values():
            if task.reveals == "features":
                images = task.images(self.algorithm)
                yield f"The replies have one row for each image. {images}"

    @property
    def protection(self) -> dict[str, str]:
        """The protections that were on, and those that could have been."""
        protection = {"Secure sums": self._describe_sums(), "Differential privacy": "off"}
        if self.config.privacy.noise is not None:
            protection["Differential privacy"] = self._describe_noise()
            spent = {**self.history.last, **self.run.summary}
            if "epsilon" in spent:
                protection["(ε, δ) spent"] = f"({spent['epsilon']:.4g}, {spent['delta']:g})"
            if "epsilon_total" in spent:
                runs, total = spent["runs_counted"], spent["epsilon_total"]
                vacuous = ", which is vacuous" if total > VACUOUS else ""
                protection["ε of all runs on these images"] = f"{total:.4g}, {runs} runs{vacuous}"
            if self.config.privacy.budget is not None:
                protection["Budget of ε"] = f"{self.config.privacy.budget:g}"
        return protection

    def _describe_sums(self) -> str:
        config, clients = self.config, self.history.last.get("clients")
        if config.privacy.secure:
            least = f"{config.privacy.threshold:.0%} of a round's clients, and three,"
            if is_number(clients):
                needed = survivors_needed(config.privacy.threshold, int(clients))
                least = f"{needed} of the {clients} clients of a round"
            return f"on: the clients mask their replies, and at least {least} must answer"
        if not allows_secure_sums(config, self.algorithm, config.engine.sites):
            return "off, and not possible with these settings"
        if not self.shares_model:
            return "off"
        return "off: whoever runs the server can read each reply; privacy.secure=true changes that"

    def _describe_noise(self) -> str:
        """Describe the server's noise; moments have a norm and a noise of their own."""
        keys, clipped, moments = self.config.privacy, "replies", ""
        tasks = self.algorithm.asked(keys.secure, "mean")
        bounds = [b for task in tasks if (b := task.bound(self.algorithm)) is not None]
        if bounds:
            clipped = "model updates"
            noise = keys.moments_noise or keys.noise
            moments = f"; for moments {noise:g} times their norm, {bounds[0]:.4g}"
        more = ", all √2 larger for the weights of clients" if keys.most_samples > 1 else ""
        return (
            f"on: the server adds noise of {keys.noise:g} times the norm {keys.clip:g} to which "
            f"{clipped} are clipped{moments}{more}"
        )


def _quote(tasks: list[ClientTask]) -> str:
    return " and ".join(f"“{task.name}”" for task in tasks)
