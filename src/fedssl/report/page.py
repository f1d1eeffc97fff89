"""The page: its head, what was run in one sentence, and the sections around one script."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from typing import Protocol

from fedssl import __version__
from fedssl.report import compare, curves, looks, sections, words
from fedssl.report.sections import MOST_LOOKS, Page, Subject, empty
from fedssl.runs.metrics import is_number
from fedssl.runs.record import Run, section
from fedssl.util.text import format_bytes, name_measure

CONTENTS: dict[str, tuple[str, Callable[[Page], str]]] = {
    "accuracy": ("Result", sections.accuracy),
    "curves": ("Curves", sections.curve_figures),
    "holds": ("Who holds what", sections.holds),
    "left": ("What left each site", sections.left),
    "clients": ("Accuracy of each client", sections.clients),
    "map": ("Map of test images", sections.feature_map),
    "gallery": ("Nearest neighbours", sections.gallery),
    "again": ("How to run it again", sections.again),
}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class Teller(Protocol):
    """Whoever wants to know how far it is."""

    def say(self, text: str) -> None:
        """One line."""


def build(runs: Sequence[Run], voice: Teller) -> str:
    """The whole page."""
    subjects = [_subject(run, label, voice) for run, label in _labelled(runs)]
    page = Page(subjects)
    for subject in page.first:
        voice.say(f"{subject.run.name}: its data")
        subject.part = looks.tried(lambda own=subject: looks.partition(own.data))  # type: ignore[misc]
        voice.say(f"{subject.run.name}: the map of its test images")
        subject.looked = looks.tried(lambda own=subject: looks.look(own.data))  # type: ignore[misc]
    made = [
        f'<section id="{key}"><h2>{title}</h2>\n{_section(make, page)}</section>'
        for key, (title, make) in CONTENTS.items()
    ]
    return _document(page, made)


def _section(make: Callable[[Page], str], page: Page) -> str:
    try:
        return make(page)
    except Exception as error:  # files of another version may hold anything; the rest stands
        return empty(f"it could not be made ({type(error).__name__}: {str(error)[:200]})")


def _labelled(runs: Sequence[Run]) -> Iterable[tuple[Run, str]]:
    named = compare.names(runs)
    for run in runs:
        yield run, named[run.path]


def _subject(run: Run, label: str, voice: Teller) -> Subject:
    voice.say(f"{label}: its metrics")
    return Subject(run, label, curves.read(run), looks.Data(run))


def _document(page: Page, made: Sequence[str]) -> str:
    own = resources.files("fedssl.report")
    css, js = ((own / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # Nothing in the block may end it, whatever a class or a folder is called.
    block = ",".join(f'"{kind}":[{",".join(each)}]' for kind, each in page.data.items())
    block = f"{{{block}}}".replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    names = [subject.label for subject in page.subjects]
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    links = "".join(f'<li><a href="#{key}">{name}</a></li>' for key, (name, _) in CONTENTS.items())
    text = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)} · fedssl</title>
<link rel="icon" href="data:,">
<style>
{css}
{"".join(page.styles)}</style>
</head>
<body>
<header>
<p class="kicker">fedssl report</p>
<h1>{escape(title)}</h1>
{_section(_headline, page)}
<nav aria-label="Contents"><ol>{links}</ol></nav>
</header>
<main>
<noscript><p class="care">The figures are drawn by a script that this page carries and that is
turned off here; all numbers are in the tables.</p></noscript>
{"".join(made)}
</main>
<footer><p>Written by fedssl {__version__} on {time.strftime("%Y-%m-%d %H:%M")}.
This page is one file; it asks for nothing from any network.</p></footer>
<div id="tip" role="status" hidden></div>
<script type="application/json" id="data">{block}</script>
<script>
{js}</script>
</body>
</html>
"""
    return text.encode("utf-8", "replace").decode("utf-8")


def _headline(page: Page) -> str:
    if len(page.subjects) > 1:
        return _headline_of_many(page)
    subject = page.subjects[0]
    run = subject.run
    # Of a folder it is the recipe's own: what to give it, and not what this run was.
    mine = section(run.tree, "data").get("name") in compare.OWN
    about = "" if mine else str(run.tree.get("about") or "")
    parts = [f'<p class="lead">{escape(words.sentence(run))}</p>']
    if about:
        parts.append(f'<p class="about">Its recipe: {escape(about)}</p>')
    said, care = words.state(run, subject.history)
    if care:
        parts.append(f'<p class="care">{escape(said)}</p>')
    return "\n".join([*parts, _tiles(subject)])


def _headline_of_many(page: Page) -> str:
    items = []
    for subject in page.subjects:
        said, care = words.state(subject.run, subject.history)
        note = f' <span class="care">{escape(said)}</span>' if care else ""
        text = f"<b>{escape(subject.label)}</b>: {escape(words.sentence(subject.run, True))}{note}"
        items.append(f"<li>{text}</li>")
    listed = f'<ul class="runs">{"".join(items)}</ul>'
    if len(items) > MOST_LOOKS:
        return f"<details><summary>The {len(items)} runs</summary>{listed}</details>"
    return listed


def _tiles(subject: Subject) -> str:
    """A few numbers, large."""
    summary, untrained = subject.run.summary, section(subject.run.summary, "untrained")
    tiles = []
    for name, value in list(compare.result(subject.run).items())[:4]:
        if not name.endswith("_top1") or name.startswith("per-client"):
            continue
        before = untrained.get(name)
        note = f"untrained {before:.1f} %" if is_number(before) else ""
        tiles.append((f"{value:.1f} %", name_measure(name), note))
    rounds = subject.history.rounds
    speed = summary.get("images_per_second")
    note = f"{speed:,.0f} images/s" if is_number(speed) else ""
    tiles.append((f"{rounds:,}", "rounds", note))
    moved = subject.history.moved
    if moved.up or moved.down:
        tiles.append((format_bytes(moved.up), "up in all", f"{format_bytes(moved.down)} down"))
    cells = "".join(
        f"<div><dd>{escape(value)}</dd><dt>{escape(name)}</dt>"
        f'<dd class="note">{escape(note)}</dd></div>'
        for value, name, note in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'
