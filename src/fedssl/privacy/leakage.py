"""Find replies from which a server could recover something of single images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedssl.config import Config
from fedssl.federation.algorithm import Algorithm
from fedssl.privacy.checks import smallest_sum
from fedssl.training.batches import Batches
from fedssl.util.text import shorten_list

NAMED = 5  # clients that are named


@dataclass(frozen=True)
class Risk:
    """Tasks whose replies, if computed from few images, reveal something of each image."""

    tasks: tuple[str, ...]
    few_images: int
    reveals: Literal["encoding", "image"]


# A risk that is real for some clients, and the images that each one's replies are computed from.
Leak: TypeAlias = tuple[Risk, dict[int, int]]


def list_risks(config: Config, algorithm: Algorithm) -> list[Risk]:
    """List what replies of this configuration could reveal of single images, given few images.

    Statistics of few images reveal each image's encoding. An update by one image may reveal the
    image, by published attacks; several steps on it count as one, since nothing else is in the
    change. An update by more images is harder to read, but no proof protects it.
    """
    if algorithm.pools_data:
        return []
    asked = algorithm.asked(config.privacy.secure, "mean", "each")
    statistics = [task for task in asked if task.reveals == "statistics"]
    updates = tuple(task.name for task in asked if task.reveals == "update")
    risks = []
    if statistics:
        most = max(task.few_images(algorithm) for task in statistics)
        risks.append(Risk(tuple(task.name for task in statistics), most, "encoding"))
    if updates:
        risks.append(Risk(updates, 1, "image"))
    return risks


def find_leaks(config: Config, algorithm: Algorithm, sizes: Sequence[int]) -> list[Leak]:
    """Find the clients, with so many images each, whose replies reveal something of single images.

    Noise does not help: the server adds it. Under secure sums nobody sees a client's part, so the
    leak is of the smallest sum that there may be.
    """
    batches = Batches.from_config(config.algorithm, config.seed)
    risks = list_risks(config, algorithm)
    # A round that averages one image trains on this one alone, and the other way round.
    used = {client: batches.averaged(size) for client, size in enumerate(sizes)}
    if config.privacy.secure and used:
        smallest = sorted(used, key=used.__getitem__)[: smallest_sum(config, len(used))]
        in_sum = {client: used[client] for client in smallest}
        images = sum(in_sum.values())
        return [(risk, in_sum) for risk in risks if images <= risk.few_images]
    leaks = [(risk, {k: n for k, n in used.items() if n <= risk.few_images}) for risk in risks]
    return [(risk, few_used) for risk, few_used in leaks if few_used]


def describe_leaks(
    config: Config, algorithm: Algorithm, sizes: Sequence[int], names: Sequence[str] = ()
) -> str | None:
    """Return one line for whoever runs, reads or publishes, or ``None`` if there is no leak."""
    sentences: dict[str, list[str]] = {}
    for risk, used in find_leaks(config, algorithm, sizes):
        recovered = "each image's encoding" if risk.reveals == "encoding" else "the image"
        sentences.setdefault(_describe_use(config, used, len(sizes), names), []).append(recovered)
    if not sentences:
        return None
    parts = [
        f"{use}, so the server could recover {' and '.join(recovered)}"
        for use, recovered in sentences.items()
    ]
    return f"Privacy: {'; '.join(parts)}. See docs/privacy.md."


def summarize_risks(
    config: Config, algorithm: Algorithm, sizes: Sequence[int], names: Sequence[str] = ()
) -> str | None:
    """Return the most serious risk in one short line, or ``None``."""
    if leaks := find_leaks(config, algorithm, sizes):
        images = any(risk.reveals == "image" for risk, _ in leaks)
        learned = f"could recover {'' if images else 'encodings of '}single images"
        if not config.privacy.secure:
            used = {client for _, few_used in leaks for client in few_used}
            learned += f" ({_name_clients(sorted(used), len(sizes), names)})"
    elif gathered := algorithm.asked(config.privacy.secure, "each"):
        learned = f"sees each client's reply to {', '.join(task.name for task in gathered)}"
    else:
        return None
    return f"Privacy: the server {learned}. Details: report.html."


def _name_clients(used: Sequence[int], clients: int, names: Sequence[str]) -> str:
    if len(used) == clients:
        return "all clients"
    own_names = [names[k] for k in used if k < len(names) and names[k] != str(k)]
    return shorten_list(own_names, 2) if own_names else f"{len(used):,} of {clients:,} clients"


def _describe_use(
    config: Config, used: Mapping[int, int], clients: int, names: Sequence[str]
) -> str:
    """Say who uses how many images."""
    if config.privacy.secure:
        return f"a secure sum may cover only {_count_images(sum(used.values()))}"
    who = "clients"
    if len(used) < clients:
        own_names = [names[k] for k in used if k < len(names) and names[k] != str(k)]
        who = f"{len(used):,} of {clients:,} clients"
        who += f" ({shorten_list(own_names, NAMED)})" if own_names else ""
    same = len(set(used.values())) == 1
    return f"{who} use {'' if same else 'at most '}{_count_images(max(used.values()))} per round"


def _count_images(count: int) -> str:
    return "one image" if count == 1 else f"{count:,} images"
