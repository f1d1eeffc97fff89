"""Describe in words what leaves a client, and how it is protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedssl.config import Config, Privacy
from fedssl.federation.algorithm import Algorithm, build_algorithm
from fedssl.federation.task import ClientTask

# A client's own reply, its numbers for the log, a reply that a robust mean compares with others, a
# reply that the server averages but could read, a masked reply of which only the sum is readable.
Visibility = Literal["single", "log", "robust", "mean", "masked"]


@dataclass(frozen=True)
class Message:
    """One kind of message between a client and the server."""

    content: str
    when: str = "in a round"
    task: str | None = None  # None: outside the tasks, such as the greeting
    visibility: Visibility = "single"
    downwards: bool = False  # from the server to the client


def list_messages(config: Config) -> list[Message]:
    """List every kind of message that leaves a client, from the algorithm and ``privacy.*``."""
    algorithm, privacy = build_algorithm(config), config.privacy
    messages = [Message(_greeting(algorithm), "before training")]
    for task in algorithm.asked(privacy.secure, "mean"):
        visibility = visibility_of(config, task)
        messages.append(Message(task.summary, "in a round", task.name, visibility))
    if privacy.secure:
        keys = (
            "public keys, shares of the masks' secrets that only other sites can open, and what "
            "unmasks the sum"
        )
        messages.append(Message(keys, "for each of these sums"))
    for task in algorithm.asked(privacy.secure, "each"):
        messages.append(Message(task.summary, "in a round", task.name))
    messages.append(Message(_beside(privacy), "with each reply"))
    if not privacy.secure and privacy.noise is None:
        for task in algorithm.asked(privacy.secure, "log"):
            messages.append(Message(task.summary, "for the log", task.name, "log"))
    if public := getattr(config.algorithm, "public", 0):
        text = f"{public} public images"
        messages.append(Message(text, "in every round", downwards=True))
    failure = "one line that says what failed, and names no file of the site"
    return [*messages, Message(failure, "when something fails")]


def shares_more_than_loss(config: Config, algorithm: Algorithm) -> bool:
    """Return whether anything leaves a client that is computed from images or weights."""
    tasks = algorithm.asked(config.privacy.secure, "mean", "each")
    return any(task.reveals != "loss" for task in tasks)


def visibility_of(config: Config, task: ClientTask) -> Visibility:
    """Return how much of a task's replies the server sees."""
    if task.seen == "each":
        return "single"
    if task.is_logged:
        return "log"
    if config.cohort.average != "mean":
        return "robust"
    return "masked" if config.privacy.secure else "mean"


def list_exchanges(config: Config) -> str:
    """Format the messages as a Markdown list for the administrator of a site."""
    algorithm = build_algorithm(config)
    seen = {
        "mean": "the server computes the mean, and could see each site's own",
        "masked": "masked, so that the server learns only the sum over the sites",
        "robust": f"the server sees each site's own, and takes the {config.cohort.average}",
        "single": "the server sees each site's own",
        "log": "single numbers",
    }
    lines = []
    for message in list_messages(config):
        line = f"{message.when}: {message.content}"
        if message.downwards:
            line = f"(the other way, {message.when}: {message.content})"
        elif message.task is not None:
            clipped, privacy = "", config.privacy
            if message.visibility in ("mean", "masked") and privacy.noise is not None:
                bound = algorithm.tasks()[message.task].bound(algorithm)
                norm = privacy.clip if bound is None else bound
                clipped = f"; clipped at the site to norm {norm:.3g}, and the server adds noise to "
                clipped += "the sum"
            line = f"`{message.task}`, {line} ({seen[message.visibility]}{clipped})"
        lines.append(f"- {line}")
    return "\n".join(lines)


def _greeting(algorithm: Algorithm) -> str:
    text = (
        "again whenever site or server come back: the version of fedssl, the folder's name, how "
        "many images there are, their size, and a random number to know this site by"
    )
    return text + (", and the classes' names" if algorithm.objective.needs_labels else "")


def _beside(privacy: Privacy) -> str:
    """Describe what goes with every reply."""
    if privacy.noise is not None:
        return f"its weight in the mean (the images it is made of, {privacy.most_samples} at most)"
    return "its weight in the mean (the images it is made of, or 1), and with a change the loss"


def describe_mixing(config: Config) -> str:
    """Say whether images are mixed before they are encoded, where there is a choice of it."""
    mix = getattr(config.algorithm, "mix", 1)
    if mix == 1:
        return "The images are taken as they are."
    return (
        f"Before that, each image is mixed with {mix - 1} others and signs are flipped (InstaHide)."
        "\nThis is no proof of privacy: published attacks recover images from mixtures."
    )
