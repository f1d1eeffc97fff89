"""The plain-text tables that commands print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedssl import config
from fedssl.config import Config
from fedssl.util import plugins

Row = Mapping[str, float]
MEASURES = ("effective_rank", "alignment", "uniformity")


def result(summary: Mapping[str, Any], settings: Config) -> str:
    """The closing table of a run: its result beside an untrained network and the baselines."""
    table = {"untrained": summary["untrained"]}
    if "initial" in summary:
        table["as it started"] = summary["initial"]
    for name, row in summary.get("baselines", {}).items():
        table |= models(name, row, config.variant("algorithm", name).judges)
    published = {k: v for k, v in settings.paper.get("results", {}).items() if k in summary}
    row = summary["result"] | {k: summary[k] for k in published}
    judged = summary.get("judged", "global")
    table |= models(plugins.label(settings.algorithm.name), row, judged)
    if published:
        compared = {key.removeprefix("per-client_").split("_")[0] for key in published}
        which = "".join(f" ({name} model)" for name in ("global", "personal") if name in compared)
        table[f"paper{which}, its data"] = {_of_a_client(k)[1]: v for k, v in published.items()}
    return rows(table)


def models(name: str, result: Row, judged: str) -> dict[str, dict[str, float]]:
    """The rows of one run: one, or one for the global and one for the clients' own models.

    ``judged`` says which of them the plain measures are about.
    """
    table: dict[str, dict[str, float]] = {"global": {}, "personal": {}}
    for key, value in result.items():
        which, measure = _of_a_client(key)
        table[which or judged][measure] = value
    named = {f"{name}, {which}": row for which, row in table.items() if row}
    return named if len(named) > 1 else {name: next(iter(named.values()), {})}


def _of_a_client(measure: str) -> tuple[str | None, str]:
    """Whose model a measure is about, where its name says so, and its name without that."""
    if measure.startswith("global_"):
        return "global", measure.removeprefix("global_")
    for which in ("global", "personal"):
        start = f"per-client_{which}_"
        if measure.startswith(start):
            return which, "per-client_" + measure.removeprefix(start)
    return None, measure


def rows(table: Mapping[str, Mapping[str, float]]) -> str:
    """One row a model, one column a measure."""
    measures = list(dict.fromkeys(m for row in table.values() for m in row))
    head = ["", *(title(m) for m in measures)]
    body = [[name, *(_cell(m, row.get(m)) for m in measures)] for name, row in table.items()]
    return align([head, *body])


def _cell(measure: str, value: float | None) -> str:
    if value is None:
        return "–"
    if measure.startswith("rounds_to"):
        return f"{value:.0f}"
    return f"{value:.2f}" if measure in MEASURES else f"{value:.1f} %"


def title(measure: str) -> str:
    """A measure's name for people: ``linear@500_top1`` is ``linear, 500 labels``."""
    name = measure.removesuffix("_top1")
    protocol, at, labels = name.partition("@")
    labels, _, more = labels.partition("_")  # of a protocol with several measures
    if at and labels.endswith("%"):
        return f"{protocol}, {labels[:-1]} % of labels"
    return f"{protocol}, {labels} labels{more and f' {more}'}" if at else name.replace("_", " ")


def closing(summary: Mapping[str, Any]) -> str:
    """What the run cost, in one line; and whose normalization layers were judged, if not plain."""
    judged = summary.get("norm_layers", "the model's own")
    norms = "" if judged == "the model's own" else f"normalization layers: {judged}\n"
    return norms + (
        f"{summary['rounds']} rounds, {summary['seconds']:.1f} s, "
        f"{summary['images_per_second']:,.0f} images/s, "
        f"{size(summary['bytes_up'])} up and {size(summary['bytes_down'])} down over all clients"
    )


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def recipes(pattern: str | None = None) -> str:
    """The recipes that a pattern names, with the paper's numbers; none: all, tables as one line."""
    lines = [["recipe", "what it reproduces", "the paper's number"]]
    if pattern is not None:
        return align(lines + [_recipe(name) for name in config.matching(pattern)])
    files: dict[str, int] = {}
    for name in config.recipes():
        table = config.table(name)
        file = name if table is None else table.file
        files[file] = files.get(file, 0) + 1
    return align(lines + [_file(file, count) for file, count in files.items()])


def _file(name: str, count: int) -> list[str]:
    """The line of a table, or of a recipe with a file of its own."""
    table = config.table(name)
    if table is None:
        return _recipe(name)
    return [name, f"{table.title}: {table.about}", f"{count} recipes: fedssl recipes {name}"]


def _recipe(name: str) -> list[str]:
    """Name, what it is, and the paper's numbers with what there is to say about them."""
    tree = config.read_recipe(name)
    paper = tree.get("paper", {})
    numbers = ", ".join(f"{title(k)} {v}" for k, v in paper.get("results", {}).items())
    note = str(paper.get("note", ""))
    what = str(paper.get("row") or tree.get("about", ""))
    return [name, what, f"{numbers} ({note})" if numbers and note else numbers or note]


def align(lines: list[list[str]]) -> str:
    """Columns of equal width; numbers to the right, words to the left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def cell(text: str, width: int, column: int) -> str:
        numeric = column > 0 and all(line[column][:1] in "0123456789–-" for line in lines[1:])
        return text.rjust(width) if numeric else text.ljust(width)

    return "\n".join(
        "  ".join(cell(t, w, i) for i, (t, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )
