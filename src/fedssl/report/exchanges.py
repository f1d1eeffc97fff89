"""What left each site: every exchange by name, what the server saw of it, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fedssl import deploy, plugins
from fedssl.config import Config
from fedssl.report.curves import History
from fedssl.runs import Run

Kind = Literal["single", "mean", "masked"]
ONE_PROCESS = (
    "This run was a simulation in one process: nothing left any machine. The table says what the "
    "same recipe sends between sites and server."
)


@dataclass(frozen=True)
class Exchange:
    """One exchange of a run."""

    name: str
    carries: str  # in words
    seen: str  # what of it the server sees
    rounds: int
    up: int  # bytes over all clients and rounds
    down: int
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
            Exchange(
                name, "(not known in this version)", "(not known)", *_cost(history, name), "mean"
            )
            for name in history.exchanges
        ]
        verdict = "The configuration is of another version: what each exchange carries is not said."
        return Sheet(verdict, rows, [], _protection(run.tree.get("privacy"), history, run))
    config, algorithm = run.config, deploy.algorithm_of(run.config)
    rows = [_exchange(name, config, algorithm, history) for name in _names(algorithm, history)]
    notes = [] if config.engine.sites is not None or algorithm.pools_data else [ONE_PROCESS]
    unasked = [name for name in _declared(algorithm) if name not in history.exchanges]
    if unasked and history.lines and not algorithm.pools_data:
        notes.append(f"Declared, and not asked for in this run: {', '.join(unasked)}.")
    if not algorithm.pools_data:
        text = deploy.protection(config).replace("**", "").replace("`", "")
        notes += [" ".join(part.split()) for part in text.split("\n\n")]
    protection = _protection(run.tree.get("privacy"), history, run)
    return Sheet(_verdict(config, algorithm, history), rows, notes, protection)


def _declared(algorithm: Any) -> list[str]:
    asked = (*algorithm.means, *algorithm.gathers)
    return list(
        dict.fromkeys((*asked, *(t for t in algorithm.logs if t not in algorithm.simulated)))
    )


def _names(algorithm: Any, history: History) -> list[str]:
    """Those that were asked for; before the first round those that will be."""
    if algorithm.pools_data:
        return []
    return list(history.exchanges) if history.lines else _declared(algorithm)


def _cost(history: History, name: str) -> tuple[int, int, int]:
    moved = history.exchanges.get(name, {})
    return moved.get("rounds", 0), moved.get("up", 0), moved.get("down", 0)


def _exchange(name: str, config: Config, algorithm: Any, history: History) -> Exchange:
    seen, kind = _seen(name, config, algorithm)
    carries = deploy.about(algorithm, name)
    return Exchange(name, carries, seen, *_cost(history, name), kind)


def _seen(name: str, config: Config, algorithm: Any) -> tuple[str, Kind]:
    """What the server sees of an exchange's replies, in words and as a kind."""
    if name in algorithm.gathers:
        return "each client's own reply", "single"
    if name in algorithm.logs:
        return "single numbers of each client, for the log", "single"
    if config.cohort.average != "mean":
        return f"each client's own reply; the {config.cohort.average} is used", "single"
    noise = "" if config.privacy.noise is None else ", with noise added"
    if config.privacy.secure:
        return f"only the sum over the clients (masked){noise}", "masked"
    return f"only the mean is used{noise}; replies reach the server unmasked", "mean"


def _verdict(config: Config, algorithm: Any, history: History) -> str:
    """One plain sentence."""
    if algorithm.pools_data:
        return (
            f"{plugins.label(config.algorithm.name)} has all data in one place: in reality every "
            "image would have left its site."
        )
    if not algorithm.has_global and not algorithm.gathers:
        return "No image and no model left a client; each trained alone."
    if algorithm.gathers:
        tasks = " and ".join(f"“{task}”" for task in algorithm.gathers)
        return (
            f"No image left a client as it is, but the server saw each client's own reply to "
            f"{tasks}, not only means."
        )
    if config.cohort.average != "mean":
        return "No image left a client; the server compared the clients' own model changes."
    what = (
        "No image left a client; the server used only means over the clients, which it computed "
        "from replies that it could have looked at"
    )
    if config.privacy.secure:
        what = "No image left a client; the server learned only sums over the clients"
    spent = history.last.get("epsilon")
    if isinstance(spent, (int, float)):
        what += f", with noise that makes all of it ({spent:.3g}, {config.privacy.delta:g})"
        what += "-differentially private for a client's whole data"
    return what + "."


def _protection(privacy: Any, history: History, run: Run) -> list[tuple[str, str]]:
    """What was protected how, as name and words."""
    keys = privacy if isinstance(privacy, dict) else {}
    secure, noise = bool(keys.get("secure")), keys.get("noise")
    rows = [("Secure sum", "no")]
    if secure:
        share = keys.get("threshold", 0)
        rows = [
            ("Secure sum", f"yes: masked with keys of the clients; at least {share:.0%} answer")
        ]
    if noise is None:
        return [*rows, ("Noise (differential privacy)", "no")]
    said = f"{noise:g} times the norm {keys.get('clip', 1):g} to which contributions are clipped"
    rows.append(("Noise (differential privacy)", said))
    spent = {**history.last, **run.summary}
    if "epsilon" in spent:
        rows.append(("(ε, δ) spent", f"({spent['epsilon']:.4g}, {spent['delta']:g})"))
    return rows
