"""What left each site: every exchange by name, what the server saw of it, and what it cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedssl import privacy
from fedssl.config import Config, plugins
from fedssl.privacy.exchanges import (
    build_algorithm,
    describe_protection,
    describe_task,
    list_exchanges,
)
from fedssl.report.curves import History, Moved
from fedssl.runs.metrics import is_number
from fedssl.runs.record import Run, section

Kind = Literal["single", "mean", "masked"]
SIMULATED = {
    "local": (
        "This run was a simulation in one process: nothing left any machine. The table says what "
        "the same recipe sends between sites and server."
    ),
    "flower": (
        "This run was a simulation in worker processes of Flower's, on one machine unless "
        "RAY_ADDRESS named a cluster; each of them could read all images. The table says what went "
        "between them and the server's process, and what the same recipe sends between sites and "
        "server."
    ),
}
PUBLISHED = (
    "The (ε, δ) is of the model alone. This page and metrics.jsonl are not covered: numbers of "
    "images, bytes and missing replies are exact, and may tell who took part in which round. Do "
    "not publish them."
)
ROBUST = (
    "Secure sums are not possible with cohort.average={}: the server has to look at what each "
    "client sends. Updates and moments of a model are not images, but they can tell things about "
    "them."
)


@dataclass(frozen=True)
class Exchange:
    """One exchange of a run."""

    name: str
    carries: str  # in words
    seen: str  # what of it the server sees
    moved: Moved
    kind: Kind  # each client's own, means in the open, or sums


@dataclass(frozen=True)
class Sheet:
    """The table for a data-protection officer, and the sentences around it."""

    verdict: str
    exchanges: list[Exchange]
    notes: list[str]
    protection: list[tuple[str, str]]


def sheet(run: Run, history: History) -> Sheet:
    """What a run's clients told the server."""
    if run.config is None:
        rows = [
            Exchange(name, "(not known in this version)", "(not known)", moved, "mean")
            for name, moved in history.exchanges.items()
        ]
        verdict = "The configuration is of another version: what each exchange carries is not said."
        return Sheet(verdict, rows, [], _protection(run, history, None))
    config, algorithm = run.config, build_algorithm(run.config)
    rows = [
        _exchange(name, config, algorithm, history) for name in _names(config, algorithm, history)
    ]
    deployed = config.engine.sites is not None
    notes = [] if deployed or algorithm.pools_data else [SIMULATED[config.engine.name]]
    unasked = [name for name in _declared(config, algorithm) if name not in history.exchanges]
    if unasked and history.lines and not algorithm.pools_data:
        notes.append(f"Declared, and not asked for in this run: {', '.join(unasked)}.")
    if not algorithm.pools_data:
        notes += [*_besides(config, deployed), *_protected(config, algorithm)]
    if config.privacy.noise is not None:
        notes.append(PUBLISHED)
    verdict = _verdict(config, algorithm, [own.name for own in rows], history)
    if single := _single(run, config, algorithm):
        verdict += f" But {single}."
    return Sheet(verdict, rows, notes, _protection(run, history, algorithm))


def _single(run: Run, config: Config, algorithm: Any) -> str | None:
    """Whose replies tell of single images, where it is known how many images clients have."""
    sizes = [int(own["samples"]) for own in run.clients]
    return privacy.told(config, algorithm, sizes, [str(own["name"]) for own in run.clients])


def _besides(config: Config, deployed: bool) -> Iterable[str]:
    """What is sent outside the exchanges: by sites' first contact and faults, or to clients."""
    for line in list_exchanges(config).splitlines():
        said = line.removeprefix("- ")
        downwards = said.startswith("(the other way")
        if not said.startswith("`") and (deployed or downwards):
            yield f"Besides the table, {said[1:-1] if downwards else said}."


def _protected(config: Config, algorithm: Any) -> list[str]:
    """How what is sent is protected, as paragraphs; a loss alone needs no words on models."""
    text = describe_protection(config).replace("**", "").replace("`", "")
    sums, *rest = (" ".join(part.split()) for part in text.split("\n\n"))
    if config.cohort.average != "mean":
        sums = ROBUST.format(config.cohort.average)
    return [sums, *rest] if privacy.shares(algorithm) or config.privacy.secure else rest


def _declared(config: Config, algorithm: Any) -> list[str]:
    asked = (*algorithm.asked(config.privacy.secure), *algorithm.gathers)
    return list(
        dict.fromkeys((*asked, *(t for t in algorithm.logs if t not in algorithm.simulated)))
    )


def _names(config: Config, algorithm: Any, history: History) -> list[str]:
    """Those that were asked for; before the first round those that will be."""
    if algorithm.pools_data:
        return []
    if history.lines:
        return list(history.exchanges)
    silent = config.privacy.secure or config.privacy.noise is not None  # nothing for the log
    return [
        name for name in _declared(config, algorithm) if not (silent and name in algorithm.logs)
    ]


def _exchange(name: str, config: Config, algorithm: Any, history: History) -> Exchange:
    seen, kind = _seen(name, config, algorithm)
    carries = (
        describe_task(algorithm, name) if privacy.shares(algorithm) else "Its loss, nothing else"
    )
    return Exchange(name, carries, seen, history.exchanges.get(name, Moved()), kind)


def _seen(name: str, config: Config, algorithm: Any) -> tuple[str, Kind]:
    """What the server sees of an exchange's replies, in words and as a kind."""
    if name in algorithm.gathers:
        return "each client's own reply", "single"
    if name in algorithm.logs:
        return "single numbers of each client, for the log", "single"
    if config.cohort.average != "mean":
        return f"each client's own reply; the {config.cohort.average} is used", "single"
    noise = "" if config.privacy.noise is None else ", and the server adds noise before use"
    if config.privacy.secure:
        return f"only the sum over the clients (masked){noise}", "masked"
    return f"only the mean is used{noise}; replies reach the server unmasked", "mean"


def _verdict(config: Config, algorithm: Any, asked: Sequence[str], history: History) -> str:
    """One plain sentence."""
    if algorithm.pools_data:
        return (
            f"{plugins.short_name(config.algorithm.name)} has all data in one place: in reality "
            "every "
            "image would have left its site."
        )
    if not privacy.shares(algorithm):
        return "No image and no model left a client: each trained alone, and sent only its loss."
    logged = any(task in algorithm.logs and task not in algorithm.simulated for task in asked)
    numbers = ", and single numbers of each client for its log" if logged else ""
    if algorithm.gathers:
        return (
            f"No image left a client as it is, but the server saw each client's own reply to "
            f"{_quoted(algorithm.gathers)}, not only means{numbers}."
        )
    if config.cohort.average != "mean":
        compared = _quoted([t for t in asked if t in algorithm.means] or algorithm.means)
        return (
            f"No image left a client; the server saw each client's own reply to {compared} and "
            f"compared them{numbers}."
        )
    return f"{_sums(config, history)}{numbers}."


def _quoted(tasks: Sequence[str]) -> str:
    return " and ".join(f"“{task}”" for task in tasks)


def _sums(config: Config, history: History) -> str:
    """What a server that needs only means has learned, and who is shielded by noise."""
    what = (
        "No image left a client; the server used only means over the clients, which it computed "
        "from replies that it could have looked at"
    )
    if config.privacy.secure:
        what = "No image left a client; the server learned only sums over the clients"
    spent = history.last.get("epsilon")
    if isinstance(spent, (int, float)):
        what += (
            "; it added noise before using them, so what it publishes (the model) is "
            f"({spent:.3g}, {config.privacy.delta:g})-differentially private for a client's whole "
            "data; the server itself is trusted"
        )
    return what


def _protection(run: Run, history: History, algorithm: Any) -> list[tuple[str, str]]:
    """What was protected how, as name and words."""
    keys = section(run.tree, "privacy")
    secure, noise = bool(keys.get("secure")), keys.get("noise")
    rows = [("Secure sum", "no")]
    if secure:
        share, asked = keys.get("threshold", 0), history.last.get("clients")
        least = f"{share:.0%} of a round's clients, and three,"
        if is_number(asked):
            least = (
                f"{privacy.survivors_needed(share, int(asked))} of the {asked} clients of a round"
            )
        rows = [("Secure sum", f"yes: masked with keys of the clients; at least {least} answer")]
    if noise is None:
        return [*rows, ("Noise (differential privacy)", "no")]
    rows.append(("Noise (differential privacy)", _noise(keys, algorithm)))
    spent = {**history.last, **run.summary}
    if "epsilon" in spent:
        rows.append(("(ε, δ) spent", f"({spent['epsilon']:.4g}, {spent['delta']:g})"))
    return rows


def _noise(keys: Mapping[str, Any], algorithm: Any) -> str:
    """How much noise the server added to the sums; moments have a norm and noise of their own."""
    noise, clip = keys["noise"], keys.get("clip", 1)
    what = "contributions"
    tasks = () if algorithm is None else algorithm.means
    bounds = [algorithm.bound(task) for task in tasks]
    moments = ""
    if bound := next((bound for bound in bounds if bound is not None), None):
        own = keys.get("moments_noise") or noise
        what = "changes of the model"
        moments = f"; of moments {own:g} times their norm, {bound:.4g}"
    more = ", all √2 larger for the weights" if keys.get("most_samples", 1) > 1 else ""
    said = f"added by the server: {noise:g} times the norm {clip:g} to which {what} are clipped"
    return f"{said}{moments}{more}"
