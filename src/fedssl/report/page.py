"""Build the page: read each run, fill in every section's template, and join them."""

from __future__ import annotations

import json
import shlex
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from fedssl import __version__
from fedssl.config import OWN_DATA
from fedssl.report import comparison, curves, embeddings
from fedssl.report.data import Holdings, RunData, load_holdings, try_section
from fedssl.report.description import describe
from fedssl.report.history import History, read_history
from fedssl.report.messages import Sheet
from fedssl.runs.folder import format_deploy_command
from fedssl.runs.metrics import is_number
from fedssl.runs.outcome import Outcome, judge_run
from fedssl.runs.reader import RunReader
from fedssl.util.status import stage
from fedssl.util.templates import load_templates
from fedssl.util.text import format_bytes, format_client, name_measure

MOST_SHOWN = 4  # runs with a partition, a map, neighbours and messages of their own
MOST_FIGURES = 6  # of accuracies
TEMPLATES = load_templates(
    Path(__file__).with_name("templates"), {"bytes": format_bytes, "measure": name_measure}
)
# Title of each section, by the name of its template.
SECTIONS = {
    "result": "Result",
    "curves": "Curves",
    "partition": "Who holds what",
    "messages": "What clients send",
    "clients": "Accuracy of each client",
    "map": "Map of images",
    "neighbours": "Nearest neighbours",
    "rerun": "How to run it again",
}


class ReportedRun:
    """One run with everything that the page shows of it, read when it is first needed."""

    def __init__(self, run: RunReader, label: str, several: bool) -> None:
        self.run, self.label, self.settings = run, label, run.settings
        self.sentence = describe(run, seed=several)
        # The recipe for folders says how to use it, and nothing about this run.
        has_own_data = self.settings.data.name in OWN_DATA
        self.about = "" if has_own_data else self.settings.about
        self.is_deployed = self.settings.engine.sites is not None
        self.is_finished = run.finished
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
    def images(self) -> embeddings.ShownImages | str:
        """Images with their embeddings, or why they cannot be shown."""
        return try_section(lambda: embeddings.embed_images(self._data))

    @cached_property
    def outcome(self) -> Outcome | None:
        """The verdict on the run, if it is finished."""
        return judge_run(self.run) if self.is_finished else None

    @cached_property
    def messages(self) -> Sheet:
        """The messages that clients sent."""
        return Sheet(self.run, self.history)

    @property
    def command(self) -> str:
        """The command that runs it again."""
        out = f"{self.run.path}-again"
        if self.is_deployed:
            quoted = json.dumps(str(Path(out).absolute()), ensure_ascii=False)
            return format_deploy_command(self.run.path, f"out={quoted}")
        return shlex.join(["fedssl", "run", str(self.run.path / "config.yaml"), "--out", out])

    @property
    def facts(self) -> dict[str, str]:
        """Seed, device, versions and costs."""
        summary = self.run.summary
        seconds = {"rounds": summary.get("seconds"), **summary.get("overhead", {})}
        versions = (f"{name} {summary[name]}" for name in ("fedssl", "torch") if name in summary)
        parameters = summary.get("parameters")
        facts = {
            "Seed": str(self.settings.seed),
            "Device": summary.get("device", ""),
            "Versions": ", ".join(versions),
            "Parameters": f"{parameters:,} in the whole network" if parameters else "",
            "Seconds": ", ".join(f"{k} {v:g}" for k, v in seconds.items() if is_number(v)),
        }
        return {name: text for name, text in facts.items() if text}

    @property
    def yaml(self) -> str:
        """The configuration as text."""
        return yaml.safe_dump(self.run.tree, sort_keys=False, allow_unicode=True)

    @property
    def tiles(self) -> Iterator[tuple[str, str, str]]:
        """Value, name and note of the most important numbers."""
        summary, traffic = self.run.summary, self.history.traffic
        untrained = comparison.numbers(summary.get("untrained", {}))
        for name, value in list(comparison.result(self.run).items())[:4]:
            if name.endswith("_top1") and not name.startswith("per-client"):
                note = f"untrained {untrained[name]:.1f} %" if name in untrained else ""
                yield f"{value:.1f} %", name_measure(name), note
        speed = summary.get("images_per_second")
        note = f"{speed:,.0f} images/s" if is_number(speed) else ""
        yield f"{self.history.rounds:,}", "rounds", note
        if traffic.up or traffic.down:
            yield format_bytes(traffic.up), "up in total", f"{format_bytes(traffic.down)} down"

    @property
    def client_scores(self) -> list[dict[str, Any]]:
        """The accuracy of each client, by model."""
        models = self.run.summary.get("per_client", {})
        scores = {model: comparison.numbers(each) for model, each in models.items()}
        return [
            {"model": model, "names": list(each), "scores": list(each.values())}
            for model, each in scores.items()
            if each
        ]


class Page:
    """The runs of a page; the first few are shown in full."""

    def __init__(self, runs: Sequence[RunReader]) -> None:
        names, several = comparison.name_runs(runs), len(runs) > 1
        self.runs = [ReportedRun(run, names[run.path], several) for run in runs]
        self.shown, self.rest = self.runs[:MOST_SHOWN], self.runs[MOST_SHOWN:]
        self.title = f"{len(runs)} runs" if several else self.runs[0].label

    @property
    def sections(self) -> dict[str, str]:
        """The titles of the sections that have something to show, or to explain."""
        titles = dict(SECTIONS)
        if not any(run.client_scores for run in self.runs):
            del titles["clients"]
        if all(isinstance(run.images, str) for run in self.shown):
            del titles["neighbours"]  # the map's section gives the reason
        return titles

    @cached_property
    def comparison(self) -> comparison.Comparison:
        """The models of all runs."""
        return comparison.compare([run.run for run in self.runs])

    @property
    def accuracies(self) -> Iterator[tuple[str, list[dict[str, object]]]]:
        """The figures of accuracies, with a point for each row of the table."""
        measures = [m for m in self.comparison.measures if m.endswith("_top1")]
        for measure in measures[:MOST_FIGURES]:
            rows = [row for row in self.comparison.rows if measure in row.values]
            yield measure, [row.point(measure) for row in rows]

    @cached_property
    def panels(self) -> list[curves.Panel]:
        """The figures of curves."""
        return curves.draw_panels([(run.label, run.history) for run in self.runs])

    @property
    def first_with_partition(self) -> dict[str, str]:
        """By label, the label of the first run with the same partition, which is shown once."""
        first: dict[str, str] = {}
        return {run.label: first.setdefault(repr(run.holdings), run.label) for run in self.shown}


def build_page(runs: Sequence[RunReader]) -> str:
    """Return the page's HTML."""
    page = Page(runs)
    for run in page.runs:
        with stage(f"reading the metrics of {run.label}"):
            _ = run.history
    for run in page.shown:
        with stage(f"embedding images with {run.label}"):
            _ = run.images
    text = TEMPLATES.get_template("page.html").render(
        page=page,
        headline=_fill("headline", page),
        sections=[(key, title, _fill(key, page)) for key, title in page.sections.items()],
        version=__version__,
        date=time.strftime("%Y-%m-%d %H:%M"),
    )
    return text.encode("utf-8", "replace").decode("utf-8")


def _fill(section: str, page: Page) -> Markup:
    """Fill in a section; a section that fails leaves the others as they are."""
    template = TEMPLATES.get_template(f"{section}.html")
    html = try_section(lambda: Markup(template.render(page=page, spread=_spread)))
    if isinstance(html, Markup):
        return html
    return Markup('<p class="empty">Nothing to show: {}.</p>').format(html)


def _spread(names: Sequence[str], scores: Sequence[float]) -> list[str]:
    """Return the cells for the number of clients, the worst, the median and the best."""
    ranked = sorted(zip(scores, map(format_client, names), strict=True))
    return [
        f"{len(ranked):,}",
        "{:.1f} ({})".format(*ranked[0]),
        f"{statistics.median(scores):.1f}",
        "{:.1f} ({})".format(*ranked[-1]),
    ]
