"""The sections of the page: plain HTML that says it all in tables, and data for the figures."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import yaml

from fedssl.data.partition import worded
from fedssl.report import compare, curves, exchanges, looks
from fedssl.runs.deployed import format_command
from fedssl.runs.metrics import is_number
from fedssl.runs.record import Run, section
from fedssl.util.text import NOT_PERCENT, format_bytes, name_measure

MOST_LOOKS = 4  # runs with a map, a gallery and tables of their own
MOST_NUMBERS = 300  # curves in the table of numbers
SHOWN = " It shows some test images: send this page only to those who may see them."
SHARED = (
    '<p class="hint">A client and round: the mean over the clients whose replies counted (down: '
    "that answered), in the round with the most.</p>"
)
UNLABELED = (
    "Judged without labels. Effective rank: how many directions the features use; higher is "
    "better. Alignment: how far apart two views of an image are; lower is better. Uniformity: how "
    "widely the features spread; lower is wider. They show whether all images became the same "
    "point, and not how well classes can be told."
)
# What an administrator need not know.
PLAIN = {
    "moments": "means over a client's images, of encodings and of their products",
    "encodings": "the numbers that the network makes of an image",
    "unmasked": "the server could look at each client's own",
}


@dataclass
class Subject:
    """One run and all that the page says of it."""

    run: Run
    label: str
    history: curves.History
    data: looks.Data
    looked: looks.Look | str | None = None
    part: looks.Part | str | None = None


@dataclass
class Page:
    """The sections so far, and the data and pictures that their figures need."""

    subjects: list[Subject]
    data: dict[str, list[str]] = field(default_factory=dict)  # as JSON, by kind of figure
    styles: list[str] = field(default_factory=list)

    def figure(self, kind: str, content: Any, title: str, caption: str = "") -> str:
        """A figure that the page's script draws; NaN would take all figures with it."""
        coded = json.dumps(
            content, ensure_ascii=False, separators=(",", ":"), default=list, allow_nan=False
        )
        of_kind = self.data.setdefault(kind, [])
        of_kind.append(coded)
        heading = f'<p class="title">{title}</p>' if title else ""
        below = f"<figcaption>{caption}</figcaption>" if caption else ""
        place = f'<div class="plot" data-kind="{kind}" data-index="{len(of_kind) - 1}"></div>'
        return f'<figure class="{kind}">{heading}{place}{below}</figure>'

    @property
    def first(self) -> list[Subject]:
        """Those that are shown in full."""
        return self.subjects[:MOST_LOOKS]


def table(head: Sequence[str], body: Iterable[Sequence[str]], numeric: int, kind: str = "") -> str:
    """A table of escaped cells; columns from ``numeric`` on are numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if k >= numeric else ''}>{cell}</{tag}>"
            for k, cell in enumerate(row)
        )

    rows = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in body)
    top = f"<thead><tr>{cells('th', head)}</tr></thead>"
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="table">'
        f'<table class="{kind}">{top}<tbody>\n{rows}</tbody></table></div>\n'
    )


def empty(why: str) -> str:
    """The sentence in place of a section."""
    return f'<p class="empty">Nothing to show: {escape(why)}.</p>'


def accuracy(page: Page) -> str:
    """Accuracies beside the baselines, the paper and the other runs."""
    found = compare.compare([subject.run for subject in page.subjects])
    measures = found.measures
    remarks = "".join(f'<p class="remark">{escape(text)}</p>' for text in found.remarks)
    if not measures:
        return remarks + empty("no accuracy has been measured in these runs")
    figures = []
    for measure in [m for m in measures if m.endswith("_top1")][:6]:
        rows = [
            {
                "name": row.name, "kind": row.kind, "mean": row.values[measure].mean,
                "spread": row.values[measure].spread, "each": row.values[measure].each,
            }
            for row in found.rows
            if measure in row.values
        ]  # fmt: skip
        figures.append(page.figure("dots", rows, escape(name_measure(measure))))
    several = any(len(row.seeds) > 1 for row in found.rows)
    head = ["model", "runs", "seeds", "state", *(escape(name_measure(m)) for m in measures)]
    body = [
        [
            *map(escape, (row.name, *row.about)),
            *(_value(measure, row.values.get(measure)) for measure in measures),
        ]
        for row in found.rows
    ]  # fmt: skip
    notes = []
    if any(m not in NOT_PERCENT for m in measures):
        notes.append("Top-1 accuracy in percent, of the last round, never of the best.")
    if any(m in NOT_PERCENT for m in measures):
        notes.append(UNLABELED)
    if several:
        notes.append("With several seeds: mean ± standard deviation of the sample.")
    grid = f'<div class="grid three">{"".join(figures)}</div>' if figures else ""
    return f"{grid}{table(head, body, 4, 'results')}<p>{' '.join(notes)}</p>{remarks}"


def _value(measure: str, value: compare.Value | None) -> str:
    if value is None:
        return "–"
    each = ", ".join(f"{v:.6g}" for v in value.each)
    return f'<span title="{each}">{compare.text(measure, value).replace(" ", "&nbsp;")}</span>'


def curve_figures(page: Page) -> str:
    """Every curve of the metrics, and the same in numbers."""
    found = curves.panels([(subject.label, subject.history) for subject in page.subjects])
    if not found:
        return empty("no round has ended yet")
    figures, rows, thinned = [], [], False
    for panel in found:
        for series in panel["series"]:
            extremes = series.pop("extremes")
            thinned = thinned or series["of"] > len(series["x"])
            cells = (f"{value:.6g} ({round:,})" for round, value in extremes.values())
            rows.append([escape(panel["title"]), escape(series["name"]), *cells])
        figures.append(page.figure("lines", panel, escape(panel["title"]), escape(panel["note"])))
    said = "Point at a figure, or move over it with the arrow keys, to read a round."
    if thinned:
        said += (
            f" Long curves are thinned to at most {curves.POINTS:,} points that keep the smallest "
            "and the largest of every stretch."
        )
    more = f" (the first {MOST_NUMBERS} of {len(rows)})" if len(rows) > MOST_NUMBERS else ""
    head = ["measure", "curve", "first (round)", "last", "lowest", "highest"]
    numbers = table(head, rows[:MOST_NUMBERS], 2)
    return (
        f'<p class="hint">{said}</p><div class="grid three">{"".join(figures)}</div>'
        f"<details><summary>The same in numbers{more}</summary>{numbers}</details>"
    )


def _heading(page: Page, subject: Subject) -> str:
    return f"<h3>{escape(subject.label)}</h3>" if len(page.subjects) > 1 else ""


def holds(page: Page) -> str:
    """The partition as bars."""
    blocks: list[str] = []
    shown: dict[str, str] = {}
    for subject in page.first:
        part, heading = subject.part, _heading(page, subject)
        if not isinstance(part, looks.Part):
            blocks.append(heading + empty(str(part)))
            continue
        own = repr(part)
        if own in shown:
            blocks.append(f"{heading}<p>As in {escape(shown[own])}.</p>")
            continue
        shown[own] = subject.label
        blocks.append(heading + _bars(page, part))
    return "".join(blocks) + _only_first(page)


def _only_first(page: Page) -> str:
    if len(page.subjects) <= MOST_LOOKS:
        return ""
    return f'<p class="hint">Shown for the first {MOST_LOOKS} of {len(page.subjects)} runs.</p>'


def _bars(page: Page, part: looks.Part) -> str:
    every, sizes = part.sizes, part.sizes[: len(part.names)]
    text = (
        f"{len(every):,} clients; {min(every):,} images the smallest, "
        f"{statistics.median(every):g} median, {max(every):,} the largest"
    )
    if len(every) > len(sizes):
        text += f". The first {len(sizes)} are shown"
    if part.distance is not None:
        text += (
            f". Mean earth mover's distance of a client's {part.word} to all: {part.distance:.3f} "
            "(0: every client has the same mixture)"
        )
    if part.held is None:
        text += f". {escape(part.unknown)}"
    content = {"names": part.names, "sizes": sizes, "held": part.held, "classes": part.classes}
    head = ["client", "images", *(map(escape, part.classes) if part.held else ())]
    body = [
        [escape(name), f"{size:,}", *(map(str, part.held[k]) if part.held else ())]
        for k, (name, size) in enumerate(zip(part.names, sizes, strict=True))
    ]
    numbers = ""
    if len(part.classes) <= 30:
        numbers = f"<details><summary>As a table</summary>{table(head, body, 1)}</details>"
    return page.figure("bars", content, "", text + ".") + numbers


def left(page: Page) -> str:
    """What left each site."""
    blocks = [_heading(page, subject) + _sheet(subject) for subject in page.first]
    rest = page.subjects[MOST_LOOKS:]
    if rest:
        body = []
        for subject in rest:
            found = _found(subject)
            up, down = subject.history.moved.up, subject.history.moved.down
            said = ", ".join(f"{name}: {text}" for name, text in found.protection)
            cells = (subject.label, found.verdict, said, format_bytes(up), format_bytes(down))
            body.append([escape(cell) for cell in cells])
        head = ["run", "what the server saw", "protection", "up", "down"]
        blocks.append(f"<h3>The other runs</h3>{table(head, body, 3, 'prose')}")
    return "".join(blocks)


def _found(subject: Subject) -> exchanges.Sheet:
    found = looks.tried(lambda: exchanges.sheet(subject.run, subject.history))
    return exchanges.Sheet(f"Not known: {found}", [], [], []) if isinstance(found, str) else found


def _sheet(subject: Subject) -> str:
    """The table for a data-protection officer."""
    found, whole = _found(subject), subject.history.moved
    head = [
        "exchange", "what a client sends", "what the server sees", "rounds",
        "up, a client and round", "down, a client and round", "up in all", "down in all",
    ]  # fmt: skip
    body = [
        [
            f"<code>{escape(own.name)}</code>", escape(own.carries),
            f'<span class="{own.kind}">{escape(own.seen)}</span>',
            *_moved(own.moved),
        ]
        for own in found.exchanges
    ]  # fmt: skip
    if len(body) > 1:
        body.append(["all", "", "", *_moved(whole)])
    protection = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"
        for name, text in found.protection
    )
    exchanged = table(head, body, 3, "prose totals") + SHARED if body else ""
    notes = "".join(f"<p>{escape(text)}</p>" for text in found.notes) + _plain_words(found)
    return (
        f'<p class="verdict">{escape(found.verdict)}</p>{exchanged}'
        f'<dl class="facts">{protection}</dl>{notes}'
    )


def _plain_words(found: exchanges.Sheet) -> str:
    """What the words of the sheet mean that only those who train networks know."""
    said = " ".join([*(f"{e.carries} {e.seen}" for e in found.exchanges), *found.notes]).lower()
    known = [f"{word}: {meaning}" for word, meaning in PLAIN.items() if word in said]
    return f'<p class="hint">In plain words. {escape("; ".join(known))}.</p>' if known else ""


def _moved(moved: curves.Moved) -> list[str]:
    one = (format_bytes(each) for each in (moved.one_up, moved.one_down))
    return [f"{moved.rounds:,}", *one, *map(_bytes, (moved.up, moved.down))]


def _bytes(count: int) -> str:
    return f'<span title="{count:,} bytes">{format_bytes(count)}</span>'


def clients(page: Page) -> str:
    """Accuracy of each client."""
    blocks, rows = [], []
    for subject in page.subjects:
        scores = section(subject.run.summary, "per_client")
        each = {str(k): compare.numbers(v) for k, v in scores.items() if isinstance(v, Mapping)}
        for model, own in each.items():
            if own:
                rows.append([escape(subject.label), escape(model), *_spread(own)])
        content = [
            {"model": model, "names": list(own), "scores": list(own.values())}
            for model, own in each.items()
            if own
        ]
        if content and subject in page.first:
            heading = escape(subject.label) if len(page.subjects) > 1 else ""
            blocks.append(page.figure("clients", content, heading))
    if not rows and all(_sites(subject.run) for subject in page.subjects):
        return empty("a deployment: clients' test images are at their sites, and judge nothing")
    if not rows:
        return empty(
            "no run has judged its clients one by one; evaluate.protocols=[knn,linear,per-client] "
            "does, where there are labelled test images"
        )
    head = ["run", "model", "clients", "worst", "median", "best"]
    return (
        f"{''.join(blocks)}{table(head, rows, 2)}"
        "<p>Each client's accuracy on its own test images, in percent.</p>"
    )


def _spread(own: Mapping[str, float]) -> list[str]:
    worst, best = min(own, key=own.__getitem__), max(own, key=own.__getitem__)
    middle = statistics.median(own.values())
    return [
        f"{len(own):,}",
        f"{own[worst]:.1f} ({escape(worded(worst))})",
        f"{middle:.1f}",
        f"{own[best]:.1f} ({escape(worded(best))})",
    ]


def feature_map(page: Page) -> str:
    """Test images in two dimensions."""
    blocks = []
    for number, subject in enumerate(page.first):
        look, heading = subject.looked, _heading(page, subject)
        if not isinstance(look, looks.Look):
            blocks.append(heading + empty(str(look)))
            continue
        own = look.sprite
        page.styles.append(
            f".s{number}{{--cols:{own.columns};--rows:{own.rows};"
            f"background-image:url({own.uri})}}\n"
        )
        content = {
            "points": look.points, "labels": look.labels, "classes": look.classes,
            "sprite": number, "columns": own.columns,
        }  # fmt: skip
        shown = len(look.points)
        text = (
            f"{shown:,} test images"
            if shown == look.total
            else (f"{shown:,} of {look.total:,} test images, drawn at random")
        )
        text += f", placed by {escape(look.method)} of the features of the encoder"
        text += f" ({escape(look.model)}). Near means alike to the encoder."
        if look.labels is None:
            text += " There are no labels to colour them by."
        text += SHOWN
        blocks.append(heading + page.figure("map", content, "", text))
    return "".join(blocks) + _only_first(page)


def gallery(page: Page) -> str:
    """Queries with their nearest neighbours before and after training."""
    blocks = []
    for number, subject in enumerate(page.first):
        look, heading = subject.looked, _heading(page, subject)
        if not isinstance(look, looks.Look):
            blocks.append(heading + empty(str(look)))
            continue
        rows = "".join(_neighbours(look, number, own) for own in look.gallery)
        text = "Each row: a test image, and the five test images nearest to it (cosine)"
        text += " as an untrained encoder sees it and as the run's own does."
        text += " Queries are the first images of their classes, not chosen by their result."
        if look.right is not None:
            before, after = look.right
            text += (
                f" Over all {len(look.points):,} images, {before:.1f} % of the five neighbours are "
                f"of the right class before training and {after:.1f} % after."
            )
        text += SHOWN
        head = '<div class="row head"><b>query</b><b>before training</b><b>after training</b></div>'
        blocks.append(f'{heading}<div class="gallery">{head}{rows}</div><p>{text}</p>')
    return "".join(blocks) + _only_first(page)


def _neighbours(look: looks.Look, number: int, own: looks.Neighbours) -> str:
    wanted = None if look.labels is None else look.labels[own.query]

    def cell(image: int, marked: bool) -> str:
        label = None if look.labels is None else look.labels[image]
        name = look.classes[label] if label is not None and 0 <= label < len(look.classes) else ""
        mark, kind = "", ""
        if marked and label is not None and label >= 0:
            mark, kind = ("✓", "right") if label == wanted else ("✗", "wrong")
        place = f"--x:{image % look.sprite.columns};--y:{image // look.sprite.columns}"
        said = escape(
            f"{name} {({'right': 'right class', 'wrong': 'wrong class'}).get(kind, '')}".strip()
        )
        return (
            f'<span class="cell {kind}"><i class="thumb s{number}" style="{place}" role="img" '
            f'aria-label="{said or "image"}" title="{said}"></i>'
            f"<small>{mark}<span>{escape(name)}</span></small></span>"
        )

    sides = "".join(
        f'<div class="near"><b>{title}</b>{"".join(cell(k, True) for k in images)}</div>'
        for title, images in (("before", own.before), ("after", own.after))
    )
    return f'<div class="row"><div class="query">{cell(own.query, False)}</div>{sides}</div>'


def again(page: Page) -> str:
    """Command, versions and configuration."""
    blocks = []
    for subject in page.subjects:
        run = subject.run
        facts = {
            "Command": _command(run),
            "Seed": str(run.tree.get("seed", "")),
            "Device": str(run.summary.get("device", "")),
            "Versions": ", ".join(
                f"{name} {run.summary[name]}" for name in ("fedssl", "torch") if name in run.summary
            ),
            "Parameters": _parameters(run.summary.get("parameters")),
            "Seconds": _seconds(run.summary),
        }
        rows = "".join(
            f"<div><dt>{name}</dt><dd>{_code(name, text)}</dd></div>"
            for name, text in facts.items()
            if text
        )
        text = yaml.safe_dump(run.tree, sort_keys=False, allow_unicode=True)
        block = (
            f'<dl class="facts">{rows}</dl><details><summary>The configuration (config.yaml)'
            f'</summary><pre tabindex="0">{escape(text)}</pre></details>'
        )
        if len(page.subjects) > MOST_LOOKS:
            name = f"<summary>{escape(subject.label)}</summary>"
            blocks.append(f"<details>{name}{block}</details>")
        else:
            blocks.append(_heading(page, subject) + block)
    return "".join(blocks)


def _sites(run: Run) -> bool:
    """Whether its clients were real sites."""
    return bool(section(run.tree, "engine").get("sites"))


def _command(run: Run) -> str:
    """What does it again."""
    out = f"{run.path}-again"
    if _sites(run):
        return format_command(
            run.path, f"out={json.dumps(str(Path(out).absolute()), ensure_ascii=False)}"
        )
    return shlex.join(["fedssl", "run", str(run.path / "config.yaml"), "--out", out])


def _seconds(summary: Mapping[str, Any]) -> str:
    """Of the rounds, and of what else took time."""
    others = section(summary, "overhead")
    known = {"rounds": summary.get("seconds"), **others}
    return ", ".join(f"{name} {taken:g}" for name, taken in known.items() if is_number(taken))


def _parameters(count: Any) -> str:
    return f"{count:,}, of the whole network" if is_number(count) else str(count or "")


def _code(name: str, text: str) -> str:
    return f"<code>{escape(text)}</code>" if name == "Command" else escape(text)
