"""Format a run's result as a plain-text table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedssl.config import Config, plugins, variant
from fedssl.privacy.accountant import VACUOUS
from fedssl.util.text import format_bytes, format_measures

Row = Mapping[str, float]


def format_result(summary: Mapping[str, Any], config: Config, width: int | None = None) -> str:
    """Format the result beside an untrained network, the baselines and the paper's numbers."""
    table = {"untrained": summary["untrained"]}
    if "initial" in summary:
        table["as it started"] = summary["initial"]
    for name, row in summary.get("baselines", {}).items():
        table |= split_models(name, row, variant("algorithm", name).result.evaluated)
    published = {k: v for k, v in config.paper.get("results", {}).items() if k in summary}
    row = summary["result"] | {k: summary[k] for k in published}
    model = summary.get("judged", "global")
    table |= split_models(plugins.short_name(config.algorithm.name), row, model)
    if published:
        compared = {key.removeprefix("per-client_").split("_")[0] for key in published}
        which = "".join(f" ({name} model)" for name in ("global", "personal") if name in compared)
        table[f"paper{which}, its data"] = {_split_measure(k)[1]: v for k, v in published.items()}
    return format_measures(table, width)


def split_models(name: str, result: Row, model: str) -> dict[str, dict[str, float]]:
    """Return the rows of a run: one, or one each for the global, personal and peers' models.

    Measures that do not name a model belong to ``model``.
    """
    table: dict[str, dict[str, float]] = {"global": {}, "personal": {}, "peers": {}}
    for key, value in result.items():
        which, measure = _split_measure(key)
        table[which or model][measure] = value
    rows = {f"{name}, {which}": row for which, row in table.items() if row}
    return rows if len(rows) > 1 else {name: next(iter(rows.values()), {})}


def _split_measure(measure: str) -> tuple[str | None, str]:
    """Return the model that a measure's name says it is about, and the name without it."""
    for which in ("global", "peers"):
        if measure.startswith(f"{which}_"):
            return which, measure.removeprefix(f"{which}_")
    for which in ("global", "personal"):
        start = f"per-client_{which}_"
        if measure.startswith(start):
            return which, "per-client_" + measure.removeprefix(start)
    return None, measure


def format_privacy(summary: Mapping[str, Any]) -> str | None:
    """Format the privacy that noise spent, in one line; ``None`` without noise."""
    if "epsilon" not in summary:
        return None
    line = f"Privacy: ε = {summary['epsilon']:.3g} for δ = {summary['delta']:g}"
    if summary.get("runs_counted", 1) > 1:
        line += f", {summary['epsilon_total']:.3g} with all {summary['runs_counted']} runs"
        line += " on these images"
    return line + (" (vacuous)" if summary.get("epsilon_total", 0) > VACUOUS else "")


def format_cost(summary: Mapping[str, Any]) -> str:
    """Format the cost of a run in one line, after a line on special normalization layers."""
    layers = summary.get("norm_layers", "the model's own")
    norms = "" if layers == "the model's own" else f"normalization layers: {layers}\n"
    return norms + (
        f"{summary['rounds']} round{'s' * (summary['rounds'] != 1)}, {summary['seconds']:.1f} s, "
        f"{summary['images_per_second']:,.0f} images/s, "
        f"{format_bytes(summary['bytes_up'])} up and {format_bytes(summary['bytes_down'])} down "
        "over all clients"
    )
