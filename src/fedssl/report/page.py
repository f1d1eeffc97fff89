"""Build the page: read each run, fill in every section's template, and join them."""

from __future__ import annotations

import json
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from fedssl import __version__
from fedssl.report import comparison, curves, embeddings, messages
from fedssl.report.comparison import numbers
from fedssl.report.data import Holdings, RunData, load_holdings, try_section
from fedssl.report.description import describe, find_warning
from fedssl.report.embeddings import TestImages
from fedssl.report.history import History, read_history
from fedssl.runs.folder import format_deploy_command
from fedssl.runs.metrics import is_number
from fedssl.runs.reader import RunReader
from fedssl.util.templates import load_templates
from fedssl.util.text import NOT_PERCENT, format_bytes, format_client, name_measure

MOST_SHOWN = 4  # runs with a partition, a map, neighbours and messages of their own
MOST_ROWS = 300  # curves in the table of numbers
MOST_FIGURES = 6  # of accuracies
TEMPLATES = load_templates(
    Path(__file__).with_name("templates"), {"bytes": format_bytes, "measure": name_measure}
)


class ReportedRun:
    """One run with everything that the page shows of it, read when it is first needed."""

    def __init__(self, run: RunReader, label: str, several: bool) -> None:
        self.run = run
        self.label = label
        self.sentence = describe(run, seed=several)
        self.warning = find_warning(run)
        # The recipe for folders says how to use it, and nothing about this run.
        is_own_data = run.settings.data.name in comparison.OWN_DATA
        self.about = "" if is_own_data else run.settings.about
        self._data = RunData(run)

    @cached_property
    def history(self) -> History:
        """The run's metrics."""
        return read_history(self.run)

    @cached_property
    def holdings(self) -> Holdings | str:
        """Each client's images, or why they cannot be shown."""
        return try_section(lambda: load_holdings(self._data))

    @cached_property
    def images(self) -> TestImages | str:
        """The test images with their embeddings, or why they cannot be shown."""
        return try_section(lambda: embeddings.embed_test_images(self._data))

    @cached_property
    def messages(self) -> messages.Sheet:
        """The messages that clients sent."""
        return messages.build_sheet(self.run, self.history)

    @property
    def is_deployed(self) -> bool:
        """True if the clients were real sites."""
        return self.run.settings.engine.sites is not None

    @property
    def command(self) -> str:
        """The command that runs it again."""
        out = f"{self.run.path}-again"
        if self.is_deployed:
            quoted = json.dumps(str(Path(out).absolute()), ensure_ascii=False)
            return format_deploy_command(self.run.path, f"out={quoted}")
        return shlex.join(["fedssl", "run", str(self.run.path / "config.yaml"), "--out", out])

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Seed, device, versions and costs."""
        summary = self.run.summary
        seconds = {"rounds": summary.get("seconds"), **summary.get("overhead", {})}
        versions = (f"{name} {summary[name]}" for name in ("fedssl", "torch") if name in summary)
        parameters = summary.get("parameters")
        facts = {
            "Seed": str(self.run.settings.seed),
            "Device": summary.get("device", ""),
            "Versions": ", ".join(versions),
            "Parameters": f"{parameters:,} in the whole network" if parameters else "",
            "Seconds": ", ".join(f"{k} {v:g}" for k, v in seconds.items() if is_number(v)),
        }
        return [(name, text) for name, text in facts.items() if text]

    @property
    def yaml(self) -> str:
        """The configuration as text."""
        return yaml.safe_dump(self.run.tree, sort_keys=False, allow_unicode=True)


@dataclass(frozen=True)
class Page:
    """The runs of a page; the first few are shown in full."""

    runs: Sequence[ReportedRun]

    @property
    def shown(self) -> Sequence[ReportedRun]:
        """The runs that are shown in full."""
        return self.runs[:MOST_SHOWN]

    @property
    def rest(self) -> Sequence[ReportedRun]:
        """The other runs."""
        return self.runs[MOST_SHOWN:]


def build_page(runs: Sequence[RunReader], say: Callable[[str], None]) -> str:
    """Return the page's HTML; ``say`` is told what is being read."""
    names = comparison.name_runs(runs)
    page = Page([ReportedRun(run, names[run.path], len(runs) > 1) for run in runs])
    for run in page.runs:
        say(f"{run.label}: reading its metrics")
        _ = run.history
    for run in page.shown:
        say(f"{run.label}: embedding its test images")
        _ = run.images
    sections = [
        {"key": key, "title": title, "html": _fill(f"{key}.html", context, page)}
        for key, (title, context) in SECTIONS.items()
    ]
    thumbnails = [
        {"number": number, **vars(run.images.thumbnails)}
        for number, run in enumerate(page.shown)
        if isinstance(run.images, TestImages)
    ]
    text = TEMPLATES.get_template("page.html").render(
        title=page.runs[0].label if len(page.runs) == 1 else f"{len(page.runs)} runs",
        headline=_fill("headline.html", _headline, page),
        sections=sections,
        thumbnails=thumbnails,
        version=__version__,
        date=time.strftime("%Y-%m-%d %H:%M"),
    )
    return text.encode("utf-8", "replace").decode("utf-8")


def _fill(template: str, context: Callable[[Page], Mapping[str, Any]], page: Page) -> Markup:
    """Fill in a section; a section that fails leaves the others as they are."""
    html = try_section(
        lambda: Markup(TEMPLATES.get_template(template).render(page=page, **context(page)))
    )
    if isinstance(html, Markup):
        return html
    return Markup('<p class="empty">Nothing to show: {}.</p>').format(html)


def _headline(page: Page) -> dict[str, Any]:
    return {"tiles": list(_tiles(page.runs[0])) if len(page.runs) == 1 else []}


def _tiles(run: ReportedRun) -> Iterator[tuple[str, str, str]]:
    """Yield value, name and note of the most important numbers."""
    summary, traffic = run.run.summary, run.history.traffic
    untrained = numbers(summary.get("untrained", {}))
    for name, value in list(comparison.result(run.run).items())[:4]:
        if name.endswith("_top1") and not name.startswith("per-client"):
            note = f"untrained {untrained[name]:.1f} %" if name in untrained else ""
            yield f"{value:.1f} %", name_measure(name), note
    speed = summary.get("images_per_second")
    yield f"{run.history.rounds:,}", "rounds", f"{speed:,.0f} images/s" if is_number(speed) else ""
    if traffic.up or traffic.down:
        yield format_bytes(traffic.up), "up in total", f"{format_bytes(traffic.down)} down"


def _result(page: Page) -> dict[str, Any]:
    compared = comparison.compare([run.run for run in page.runs])
    accuracies = [m for m in compared.measures if m.endswith("_top1")][:MOST_FIGURES]
    figures = []
    for measure in accuracies:
        rows = [row for row in compared.rows if measure in row.values]
        figures.append((measure, [_point(row, row.values[measure]) for row in rows]))
    return {
        "comparison": compared,
        "figures": figures,
        "head": ["model", "runs", "seeds", "state", *map(name_measure, compared.measures)],
        "has_accuracy": any(m not in NOT_PERCENT for m in compared.measures),
        "has_unlabeled": any(m in NOT_PERCENT for m in compared.measures),
        "has_seeds": any(len(row.seeds) > 1 for row in compared.rows),
    }


def _point(row: comparison.Row, value: comparison.Value) -> dict[str, Any]:
    spread = {"mean": value.mean, "spread": value.spread, "each": value.each}
    return {"name": row.name, "kind": row.kind, **spread}


def _curves(page: Page) -> dict[str, Any]:
    panels = curves.draw_panels([(run.label, run.history) for run in page.runs])
    series = [(panel.title, series) for panel in panels for series in panel.series]
    rows = [
        [title, curve.name, *(f"{value:.6g} ({round:,})" for value, round in curve.extremes)]
        for title, curve in series[:MOST_ROWS]
    ]
    return {
        "panels": panels,
        "rows": rows,
        "total": len(series),
        "thinned": any(curve.total > len(curve.x) for _, curve in series),
        "most_points": curves.MOST_POINTS,
    }


def _partition(page: Page) -> dict[str, Any]:
    """Show a partition that several runs share once."""
    same_as: dict[str, str] = {}
    first: dict[str, str] = {}
    for run in page.shown:
        same_as[run.label] = first.get(repr(run.holdings), "")
        first.setdefault(repr(run.holdings), run.label)
    return {"same_as": same_as}


def _clients(page: Page) -> dict[str, Any]:
    figures, rows = [], []
    for run in page.runs:
        models = run.run.summary.get("per_client", {})
        scores = {
            model: accuracies for model, each in models.items() if (accuracies := numbers(each))
        }
        rows += [[run.label, model, *_spread(accuracies)] for model, accuracies in scores.items()]
        content = [
            {"model": model, "names": list(accuracies), "scores": list(accuracies.values())}
            for model, accuracies in scores.items()
        ]
        if content and run in page.shown:
            figures.append((run.label if len(page.runs) > 1 else "", content))
    deployed = all(run.is_deployed for run in page.runs)
    return {"figures": figures, "rows": rows, "deployed": deployed}


def _spread(scores: Mapping[str, float]) -> list[str]:
    """Return the cells for the number of clients, the worst, the median and the best."""
    worst, best = (f(scores, key=scores.__getitem__) for f in (min, max))
    return [
        f"{len(scores):,}",
        f"{scores[worst]:.1f} ({format_client(worst)})",
        f"{statistics.median(scores.values()):.1f}",
        f"{scores[best]:.1f} ({format_client(best)})",
    ]


def _nothing(page: Page) -> dict[str, Any]:
    return {}


# Title and context of each section, by the name of its template.
SECTIONS: dict[str, tuple[str, Callable[[Page], Mapping[str, Any]]]] = {
    "result": ("Result", _result),
    "curves": ("Curves", _curves),
    "partition": ("Who holds what", _partition),
    "messages": ("What clients sent", _nothing),
    "clients": ("Accuracy of each client", _clients),
    "map": ("Map of test images", _nothing),
    "neighbours": ("Nearest neighbours", _nothing),
    "rerun": ("How to run it again", _nothing),
}
