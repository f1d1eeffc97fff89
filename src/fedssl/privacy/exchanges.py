"""Describe in words what leaves a client, and how it is protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedssl.config import Config, Privacy
from fedssl.federation.algorithm import Algorithm, build_algorithm
from fedssl.federation.task import ClientTask

# Whether the server can read a reply. Numbers for the log, which reveal little, are apart.
Visibility = Literal["readable", "masked", "log"]


@dataclass(frozen=True)
class Message:
    """One kind of message between a client and the server."""

    content: str
    when: str = "in a round"
    task: ClientTask | None = None  # None: outside the tasks, such as the greeting
    downwards: bool = False  # from the server to the client


def list_messages(config: Config) -> list[Message]:
    """List every kind of message that leaves a client, from the algorithm and ``privacy.*``."""
    algorithm, privacy = build_algorithm(config), config.privacy
    messages = [Message(_greeting(algorithm), "before training")]
    messages += [Message(t.summary, task=t) for t in algorithm.asked(privacy.secure, "mean")]
    if privacy.secure:
        keys = (
            "signed public keys, shares of the masks' secrets that only other sites can open, a "
            "signature under the list of clients in the sum, and what unmasks the sum"
        )
        messages.append(Message(keys, "for each of these sums"))
    messages += [Message(t.summary, task=t) for t in algorithm.asked(privacy.secure, "each")]
    messages.append(Message(_beside(privacy), "with each reply"))
    if not privacy.secure and privacy.noise is None:
        messages += [Message(t.summary, "for the log", t) for t in algorithm.asked(False, "log")]
    if public := getattr(config.algorithm, "public", 0):
        messages.append(Message(f"{public} public images", "in every round", downwards=True))
    failure = "one line that says what failed, and names no file of the site"
    return [*messages, Message(failure, "when something fails")]


def shares_more_than_loss(config: Config, algorithm: Algorithm) -> bool:
    """Return whether anything leaves a client that is computed from images or weights."""
    tasks = algorithm.asked(config.privacy.secure, "mean", "each")
    return any(task.reveals != "loss" for task in tasks)


def describe_view(config: Config, algorithm: Algorithm, task: ClientTask) -> tuple[Visibility, str]:
    """Return how much the server sees of a task's replies, in one word and in a sentence."""
    average, privacy, noise = config.cohort.average, config.privacy, ""
    if task.seen == "each":
        return "readable", "the server sees each client's own reply"
    if task.is_logged:
        return "log", "single numbers of each client, for the log"
    if average != "mean":
        return "readable", f"the server sees each client's own reply, and uses their {average}"
    if privacy.noise is not None:
        bound = task.bound(algorithm)
        norm = privacy.clip if bound is None else bound
        noise = f"; clipped at the client to norm {norm:.3g}, and the server adds noise to the sum"
    if privacy.secure:
        return "masked", f"masked: the server learns only the sum over the clients{noise}"
    text = "unmasked: the server uses only the mean, and could see each client's own reply"
    return "log" if task.reveals == "loss" else "readable", text + noise


def list_exchanges(config: Config) -> str:
    """Format the messages as a Markdown list for the administrator of a site."""
    algorithm = build_algorithm(config)
    lines = []
    for message in list_messages(config):
        line = f"{message.when}: {message.content}"
        if message.downwards:
            line = f"(the other way, {line})"
        elif message.task is not None:
            _, seen = describe_view(config, algorithm, message.task)
            line = f"`{message.task.name}`, {line} ({seen})"
        lines.append(f"- {line}")
    return "\n".join(lines)


def _greeting(algorithm: Algorithm) -> str:
    text = (
        "again whenever site or server come back: the version of fedssl, the folder's name, how "
        "many images there are, their size, a random number to know this site by, and a digest of "
        "weights that do not train"
    )
    return text + (", and the classes' names" if algorithm.objective.needs_labels else "")


def _beside(privacy: Privacy) -> str:
    """Describe what goes with every reply."""
    if privacy.noise is not None:
        return f"its weight in the mean (the images it is made of, {privacy.most_samples} at most)"
    return "its weight in the mean (the images it is made of, or 1), and with a change the loss"
