"""Show what clients sent: every task, how much of it the server saw, and its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedssl.config import Config, plugins
from fedssl.federation.algorithm import Algorithm, build_algorithm
from fedssl.privacy.checks import allows_secure_sums, survivors_needed
from fedssl.privacy.exchanges import (
    describe_mixing,
    list_messages,
    shares_more_than_loss,
    visibility_of,
)
from fedssl.privacy.leakage import describe_leaks
from fedssl.report.history import History, Traffic
from fedssl.runs.metrics import is_number
from fedssl.runs.reader import RunReader

SIMULATED = {
    "local": (
        "This run was a simulation in one process: nothing left any machine. The table shows what "
        "the same recipe sends between sites and server."
    ),
    "flower": (
        "This run was a simulation in Flower's worker processes, on one machine unless RAY_ADDRESS "
        "named a cluster. Each worker could read all images. The table shows what the workers and "
        "the server sent, which is what the same recipe sends between sites and server."
    ),
}
PUBLISHED = (
    "(ε, δ) covers the model only. It does not cover this page and metrics.jsonl: numbers of "
    "images, bytes and missing replies are exact, and may reveal who took part in which round. Do "
    "not publish them."
)
GLOSSARY = {
    "moments": "means over a client's images, of encodings and of their products",
    "encodings": "the numbers that the network computes from an image",
    "unmasked": "the server could read each client's own reply",
}
Color = Literal["single", "mean", "masked"]  # CSS classes


@dataclass(frozen=True)
class Row:
    """One task of a run."""

    task: str
    content: str
    seen: str
    visibility: Color
    traffic: Traffic


@dataclass(frozen=True)
class Sheet:
    """The table for a data-protection officer, and the sentences around it."""

    verdict: str
    rows: Sequence[Row] = ()
    notes: Sequence[str] = ()
    protection: Sequence[tuple[str, str]] = ()

    @property
    def protection_line(self) -> str:
        """The protection in one line."""
        return ", ".join(f"{name}: {text}" for name, text in self.protection)

    @property
    def glossary(self) -> list[tuple[str, str]]:
        """Explain the sheet's words that only people who train networks know."""
        text = " ".join([*(f"{row.content} {row.seen}" for row in self.rows), *self.notes]).lower()
        return [(word, meaning) for word, meaning in GLOSSARY.items() if word in text]


def build_sheet(run: RunReader, history: History) -> Sheet:
    """Build the sheet of a run."""
    config = run.settings
    algorithm = build_algorithm(config)
    protection = list(_protection(config, algorithm, history, run.summary))
    if algorithm.pools_data:
        name = plugins.short_name(config.algorithm.name)
        verdict = f"{name} has all data in one place: in practice, every image leaves its site."
        return Sheet(verdict, protection=protection)
    tasks = _asked_tasks(config, algorithm, history)
    rows = [_row(task, config, algorithm, history) for task in tasks]
    verdict = f"{_verdict(config, algorithm, tasks, history)}."
    names, sizes = ([client[key] for client in run.clients] for key in ("name", "samples"))
    if leaks := describe_leaks(config, algorithm, sizes, names):
        verdict += f" {leaks}"
    return Sheet(verdict, rows, list(_notes(config, algorithm, history)), protection)


def _declared_tasks(config: Config, algorithm: Algorithm) -> list[str]:
    messages = list_messages(config)
    tasks = [message.task for message in messages if message.task is not None]
    return list(dict.fromkeys(tasks))


def _asked_tasks(config: Config, algorithm: Algorithm, history: History) -> list[str]:
    """List the tasks of the finished rounds; before the first round, those that will be asked."""
    return list(history.tasks) if history.rounds else _declared_tasks(config, algorithm)


def _row(task: str, config: Config, algorithm: Algorithm, history: History) -> Row:
    content = algorithm.tasks()[task].summary
    if not shares_more_than_loss(config, algorithm):
        content = "Its loss, nothing else"
    seen, color = _seen(config, algorithm, task)
    return Row(task, content, seen, color, history.tasks.get(task, Traffic()))


def _seen(config: Config, algorithm: Algorithm, task: str) -> tuple[str, Color]:
    noise = "" if config.privacy.noise is None else ", to which it adds noise before use"
    seen: dict[str, tuple[str, Color]] = {
        "single": ("each client's own reply", "single"),
        "log": ("single numbers of each client, for the log", "single"),
        "robust": (f"each client's own reply; it uses their {config.cohort.average}", "single"),
        "masked": (f"only the sum over the clients, because replies are masked{noise}", "masked"),
        "mean": (f"unmasked replies; it uses only their mean{noise}", "mean"),
    }
    return seen[visibility_of(config, algorithm.tasks()[task])]


def _verdict(config: Config, algorithm: Algorithm, tasks: Sequence[str], history: History) -> str:
    """Sum up the sheet in one sentence."""
    if not shares_more_than_loss(config, algorithm):
        return "No image and no model left a client: each trained alone and sent only its loss"
    declared = algorithm.tasks()
    is_logged = any(declared[task].seen == "log" for task in tasks)
    logged = ", and single numbers of each client for its log" if is_logged else ""
    if gathered := algorithm.asked(config.privacy.secure, "each"):
        shown = _quote([task.name for task in gathered])
        return (
            f"No image left a client, but the server saw each client's own reply to {shown}{logged}"
        )
    if config.cohort.average != "mean":
        means = [task.name for task in algorithm.asked(False, "mean")]
        shown = _quote([task for task in tasks if task in means] or means)
        text = f"No image left a client; the server saw each client's own reply to {shown}"
        return f"{text} and compared them{logged}"
    text = (
        "No image left a client; the server used only means over the clients, but it could have "
        "read each reply"
    )
    if config.privacy.secure:
        text = "No image left a client; the server learned only sums over the clients"
    epsilon = history.last.get("epsilon")
    if is_number(epsilon):
        text += (
            f"; it added noise before use, so the model is ({epsilon:.3g}, "
            f"{config.privacy.delta:g})-differentially private for all data of a client, provided "
            "that the server is trusted"
        )
    return text + logged


def _quote(tasks: Sequence[str]) -> str:
    return " and ".join(f"“{task}”" for task in tasks)


def _notes(config: Config, algorithm: Algorithm, history: History) -> Iterator[str]:
    is_deployed = config.engine.sites is not None
    if not is_deployed:
        yield SIMULATED[config.engine.name]
    unasked = [t for t in _declared_tasks(config, algorithm) if t not in history.tasks]
    if unasked and history.rounds:
        yield f"Declared, but not asked for in this run: {', '.join(unasked)}."
    for message in list_messages(config):
        if message.downwards:
            yield f"Besides the table, the server sends {message.content} {message.when}."
        elif message.task is None and is_deployed:
            yield f"Besides the table, a site sends {message.when}: {message.content}."
    if any(task.reveals == "features" for task in algorithm.asked(config.privacy.secure)):
        yield f"The replies have one row for each image. {describe_mixing(config)}"
    if config.privacy.noise is not None:
        yield PUBLISHED


def _protection(
    config: Config, algorithm: Algorithm, history: History, summary: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Name the protections that were on, and say which could have been."""
    keys, clients = config.privacy, history.last.get("clients")
    secure = "off"
    if keys.secure:
        least = f"{keys.threshold:.0%} of a round's clients, and three,"
        if is_number(clients):
            needed = survivors_needed(keys.threshold, int(clients))
            least = f"{needed} of the {clients} clients of a round"
        secure = f"on: the clients mask their replies, and at least {least} must answer"
    elif not allows_secure_sums(config, algorithm, config.engine.sites):
        secure = "off, and not possible with these settings"
    elif shares_more_than_loss(config, algorithm):
        secure = (
            "off: whoever runs the server can read each reply; privacy.secure=true changes that"
        )
    yield "Secure sums", secure
    if keys.noise is None:
        yield "Differential privacy", "off"
        return
    yield "Differential privacy", _describe_noise(config, algorithm)
    spent = {**history.last, **summary}
    if "epsilon" in spent:
        yield "(ε, δ) spent", f"({spent['epsilon']:.4g}, {spent['delta']:g})"


def _describe_noise(config: Config, algorithm: Algorithm) -> str:
    """Describe the noise that the server added; moments have a norm and a noise of their own."""
    keys = config.privacy
    clipped, moments = "replies", ""
    bounds = [task.bound(algorithm) for task in algorithm.asked(keys.secure, "mean")]
    bound = next((b for b in bounds if b is not None), None)
    if bound is not None:
        clipped = "model updates"
        noise = keys.moments_noise or keys.noise
        moments = f"; for moments {noise:g} times their norm, {bound:.4g}"
    more = ", all √2 larger for the weights of clients" if keys.most_samples > 1 else ""
    return (
        f"on: the server adds noise of {keys.noise:g} times the norm {keys.clip:g} to which "
        f"{clipped} are clipped{moments}{more}"
    )
