"""The generated parts of the documentation, and what makes a site of its pages.

    python docs/generate.py

writes them into the pages, so that these can be read without a site; a test says where one is
stale. A page asks for a part with ``<!-- generated: commands --><!-- /generated -->``; ``PARTS``
has them all. In the site, links to files outside docs/ become the files' names, since it does not
hold them.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import inspect
import itertools
import json
import os
import posixpath
import re
import statistics
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import griffe
import yaml
from mkdocs.exceptions import PluginError

from fedssl import cli, config
from fedssl.cli.recipes import describe_recipe
from fedssl.data.augment import PRESETS
from fedssl.util.text import name_measure

Line = dict[str, Any]  # of a file of results
NAMES = {"dcco": "DCCO", "fedema": "FedEMA", "decssl": "Dec-SSL", "perfcl": "PerFCL", "ccl": "CCL"}
ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "results" / "measured.jsonl"
ROWS = ROOT / "results" / "rows.jsonl"  # by `fedssl reproduce`, put there by results/add.py
TABLES = ROOT / "results" / "tables.yaml"
PAPERS = ROOT / "results" / "papers.yaml"
SHOWN = ("rounds", "data.name", "evaluate.")  # settings that other columns are about
RATES = ("server.lr", "client.lr")  # may be searched, for each seed anew
NEAR = 2.0  # points that two rows may differ by where a paper says that they are about the same
NOT_YET = "not measured yet"
MARGIN = 1.0  # points, or the seeds' spread if larger: what is closer is too close to say
PART = re.compile(
    r"(?P<alone>^)?(?P<asked><!-- generated: (?P<name>\S+)(?: (?P<argument>[^\n]*?))? -->)"
    r"(?:(?!<!-- generated: ).)*?(?P<end><!-- /generated -->)",
    re.MULTILINE | re.DOTALL,
)
MARK = re.compile(r"<!-- /?generated.*?-->")
TEST = re.compile(r"^<!-- test: .*? -->\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
ROLE = re.compile(r":(?:class|func|meth|mod|attr):(?=`)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """A page as it goes into the site (mkdocs calls this)."""
    here = posixpath.dirname("docs/" + page.file.src_uri)
    return site_links(MARK.sub("", TEST.sub("", markdown)), here)


def filled(page: Path) -> str:
    """A page's text with its generated parts as they should be."""
    here = page.parent.relative_to(ROOT).as_posix()

    def fill(found: re.Match[str]) -> str:
        text = part(found["name"], found["argument"] or "", here)
        between = "\n\n" if found["alone"] is not None else ""
        return f"{found['asked']}{between}{text}{between}{found['end']}"

    return PART.sub(fill, page.read_text(encoding="utf-8"))


def main() -> None:
    """Write what is stale, and name the pages."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if (text := filled(page)) != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(page.relative_to(ROOT))


class Docstrings(griffe.Extension):
    """Docstrings of the Python reference, as they are written here, become Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for everything that it finds."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """Examples as code; references by role as plain code."""
    paragraphs = ROLE.sub("", docstring.replace("  # doctest: +SKIP", "")).split("\n\n")
    return "\n\n".join(
        f"```pycon\n{text}\n```" if text.startswith(">>>") else text for text in paragraphs
    )


def part(name: str, argument: str, here: str) -> str:
    """One generated part, for a page in the folder ``here``."""
    if name not in PARTS:
        raise PluginError(f"generated: {name}: unknown; choose of {', '.join(PARTS)}")

    def link(found: re.Match[str]) -> str:
        words, path, anchor = found[1], found[2], found[3] or ""
        words = Path(path).stem if words == path and path.startswith("docs/") else words
        return f"[{words}]({posixpath.relpath(path, here)}{anchor})"

    return _linked(PARTS[name](argument), link)


def site_links(text: str, here: str) -> str:
    """Links of a page in the folder ``here``, as the site can have them."""

    def link(found: re.Match[str]) -> str:
        words, target = found[1], found[2]
        path = posixpath.normpath(posixpath.join(here, target))
        if not (ROOT / path).exists():
            raise PluginError(f"{target}: a link to a file that is not there, in {here}")
        if path.startswith("docs/"):
            return found[0]
        shown = words.strip("`")
        named = path.endswith(shown) or path.startswith(shown)
        return f"`{path}`" if named else f"{words} (`{path}`)"

    return _linked(text, link)


def _linked(text: str, link: Callable[[re.Match[str]], str]) -> str:
    """Every link of a text as ``link`` has it, but for what looks like one in code."""
    blocks = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(b if b.startswith("```") else LINK.sub(link, b) for b in blocks)


# Configuration keys


def configuration(_: str) -> str:
    """Every key, section by section, and the classes that a section's name may stand for."""
    top = [field for field in dataclasses.fields(config.Config) if not _is_section(field.name)]
    blocks = ["## Top level", _keys("", config.Config, [field.name for field in top])]
    for section in (f.name for f in dataclasses.fields(config.Config) if _is_section(f.name)):
        blocks += [f"## {section}", *_section(section)]
    return "\n\n".join(blocks)


def _is_section(name: str) -> bool:
    return dataclasses.is_dataclass(config.key_types(config.Config)[name])


def _section(section: str) -> Iterator[str]:
    kind = config.key_types(config.Config)[section]
    yield _docstring(kind)
    fields = [field.name for field in dataclasses.fields(kind)]
    if section not in config.VARIANTS:
        standard = next(f.default for f in dataclasses.fields(config.Config) if f.name == section)
        yield _keys(f"{section}.", kind, fields, standard)
        if section == "augment":
            yield f"Presets: {', '.join(f'`{name}`' for name in PRESETS)}."
        return
    yield _keys(f"{section}.", kind, fields, variants=list(config.VARIANTS[section]))
    for name in config.VARIANTS[section]:
        yield from _variant(section, name, fields)


def _variant(section: str, name: str, shared: Sequence[str]) -> Iterator[str]:
    """Return the docstring of a section's class, and the keys that only it has."""
    kind = config.variant(section, name)
    file = Path(inspect.getfile(kind)).relative_to(ROOT).as_posix()
    yield f"### `{section}.name={name}`"
    yield f"{_docstring(kind)}\n\n`{file}`, class `{kind.__name__}`."
    fields = {field.name: field for field in dataclasses.fields(kind.Params)}
    base = {f.name: f for f in dataclasses.fields(config.key_types(config.Config)[section])}
    own = [n for n in fields if n not in shared or fields[n].default != base[n].default]
    own.remove("name") if "name" in own else None
    if own:
        about = inspect.getdoc(kind.Params) or ""
        if not re.fullmatch(r"Keys of [^.]*\.", about):
            yield as_markdown(about)
        yield _keys(f"{section}.", kind.Params, own)


def _docstring(thing: Any) -> str:
    return as_markdown(inspect.getdoc(thing) or "")


def _keys(
    prefix: str, kind: Any, names: Sequence[str], standard: Any = None, variants: Sequence[str] = ()
) -> str:
    """Return a table of keys: values, range, default and description."""
    kinds, facts = config.key_types(kind), config.facts_of(kind)
    rows = ["| key | values | default | description |", "| --- | --- | --- | --- |"]
    for field in (f for f in dataclasses.fields(kind) if f.name in names):
        key = field.name.rstrip("_")
        values = ", ".join(filter(None, (_words(kinds[key]), facts[key].range)))
        if key == "name" and variants:
            values = ", ".join(f"`{name}`" for name in variants)
        default = _default(field) if standard is None else _value(getattr(standard, field.name))
        needs = facts[key].needs and f" Only with `{prefix}{facts[key].needs}`."
        cells = (
            f"`{prefix}{key}`",
            values,
            default,
            facts[key].help + needs.replace("|", "` or `"),
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _words(kind: Any) -> str:
    """A type in words."""
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return ", ".join(_value(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("`null`" if a is type(None) else _words(a) for a in arguments)
    if origin is tuple:
        plural = {int: "whole numbers", float: "numbers", str: "texts"}
        every = arguments[-1] is Ellipsis
        item = plural.get(arguments[0]) or _words(arguments[0])
        return f"list of {item}" if every else f"list of {len(arguments)} numbers"
    known = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`"}
    return known.get(kind, "keys and values")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return _value(field.default)
    return "" if field.default_factory is dataclasses.MISSING else _value(field.default_factory())


def _value(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    if value is None or isinstance(value, bool):
        value = json.dumps(value)
    return f"`{value}`" if value != "" else ""


# Command line


def commands(_: str) -> str:
    """Return the output of ``--help`` for every command."""
    with mock.patch.dict(os.environ, {"COLUMNS": "88", "NO_COLOR": "1"}):
        parsers = list(_parsers(cli.build_parser()))
        return "\n\n".join(
            f"## {p.prog}\n\n```text\n{p.format_help().rstrip()}\n```" for p in parsers
        )


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)


# Papers


def contents(paper: str) -> str:
    """Every table and figure of a paper: its recipes, what was measured, and what departs."""
    entries = yaml.safe_load(PAPERS.read_text(encoding="utf-8"))[paper]
    rows, named = [], set()
    for title, entry in entries.items():
        if isinstance(entry, str):
            rows.append([title, "–", "–", entry])
            continue
        found = [name for each in entry["recipes"] for name in config.match_recipes(each)]
        named |= set(found)
        patterns = ", ".join(f"`{each}`" for each in entry["recipes"])
        rows.append([title, patterns, _count_measured(found), _departure(entry, found)])
    files: dict[str, list[str]] = {}
    for name in (name for name in config.match_recipes(paper) if name not in named):
        table = config.find_table(name)
        files.setdefault(name if table is None else table.file, []).append(name)
    for file, names in files.items():
        table = config.find_table(names[0])
        title = describe_recipe(file)[1] if table is None else table.title
        title = re.sub(rf"^{NAMES[paper]} ", "", title)
        rows.append([title, f"`{file}`", _count_measured(names), _departure({}, names)])
    return _grid(["in the paper", "recipes", "measured", "departs"], rows)


def _departure(entry: dict[str, Any], names: Sequence[str]) -> str:
    """Return the departures of an entry, and the remark of its tables of recipes."""
    tables = (config.find_table(name) for name in names)
    notes = dict.fromkeys(str(t.tree["note"]) for t in tables if t and "note" in t.tree)
    return " ".join([*([entry["departs"]] if "departs" in entry else []), *map(_stop, notes)])


def _stop(text: str) -> str:
    """A remark as a sentence."""
    return f"{_sentence(text)}."


def _count_measured(names: Sequence[str]) -> str:
    """How many recipes have results, on which images, and with what share of the rounds."""
    lines = [line for line in read_lines(ROWS) if line["recipe"] in names and line["ours"]]
    trials = {name for line in _lines() for name in _named_recipes(line)} & set(names)
    if not lines:
        return "trials, below" if trials else "no"
    images = ", ".join(dict.fromkeys(line["data"].partition(": ")[0] for line in lines))
    shares: dict[str, float] = {}
    for line in lines:
        share = line["rounds"] / max(1, line["paper_rounds"])
        shares[line["recipe"]] = max(share, shares.get(line["recipe"], 0.0))
    ends = dict.fromkeys(
        f"{100 * share:.0f}%" for share in (min(shares.values()), max(shares.values()))
    )
    rounds = "" if list(ends) == ["100%"] else f", {' to '.join(ends)} of the rounds"
    return f"{len(shares)} of {len(names)}: {images}{rounds}"


def _named_recipes(line: Line) -> list[str]:
    """The recipes that a measured line's command names."""
    recipe = _read_recipe(line)
    return config.match_recipes(recipe) if recipe else []


def recipes(paper: str) -> str:
    """A paper's recipes: a line a table, and one for files of their own that begin alike."""
    files: dict[str, list[str]] = {}
    for name in config.match_recipes(paper):
        table = config.find_table(name)
        files.setdefault(name.split("-")[0] if table is None else table.file, []).append(name)
    rows = ["| recipes | what they are | how many |", "| --- | --- | --- |"]
    for file, names in files.items():
        table, about = config.find_table(names[0]), describe_recipe(names[0])[1]
        if table is not None:
            about = f"{table.title}: {table.about}"
        elif len(names) > 1:
            file, about = f"{file}-*", about.split(",")[0]
        else:
            file = names[0]
        rows.append(f"| `{file}` | {about} | {len(names)} |")
    return "\n".join(rows)


def compared(pattern: str) -> str:
    """The paper's numbers, and ours with the images and the rounds that they had."""
    rows = ["| recipe | measure | the paper's | ours |", "| --- | --- | --- | --- |"]
    lines = read_lines(ROWS)
    for name in config.match_recipes(pattern):
        paper = config.read_recipe(name).get("paper", {})
        results = dict(paper.get("results", {}))
        if not results and paper.get("note"):
            results = {"": paper["note"]}
        mine = [line for line in lines if line["recipe"] == name]
        for measure, number in results.items():
            ours = _by_images(mine, measure)
            rows.append(f"| `{name}` | {name_measure(measure)} | {number} | {ours} |")
    return "\n".join(rows)


def _by_images(lines: Sequence[Line], measure: str) -> str:
    """A recipe's numbers seed by seed, with the first words on their images, and their rounds."""
    found = []
    for images in dict.fromkeys(line["data"] for line in lines):
        shown = Row("", "", "", {}, [line for line in lines if line["data"] == images]).shown
        numbers = [line["ours"][measure] for line in shown if measure in line["ours"]]
        if numbers:
            text = ", ".join(f"{number:.1f}" for number in numbers)
            rounds = f"{shown[0]['rounds']:,} of {shown[0]['paper_rounds']:,} rounds"
            found.append(f"{text} ({images.partition(': ')[0]}, {rounds})")
    return "; ".join(found) or NOT_YET


def measured(paper: str) -> str:
    """The lines of measured.jsonl that name a paper's method, with what they were made with."""
    blocks = []
    for line in _lines():
        about = re.search(rf"\b{NAMES[paper]}\b", line["what"])
        if not about and paper != _read_recipe(line).split("/")[0]:
            continue
        origin = f"{line['hardware']}, commit {line['commit']}, {line['date']}"
        blocks += [f"**{_sentence(line['what'])}** ({origin})", f"```text\n{line['command']}\n```"]
        blocks.append(_numbers(line))
        if line.get("note"):
            blocks.append(f"{_sentence(line['note'])}.")
    return "\n\n".join(blocks) or "Not measured yet."


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _numbers(line: dict[str, Any]) -> str:
    """A table; what is longer than a few numbers is in the file only."""
    other, rows = line.get("untrained", {}), []
    for key, value in line["numbers"].items():
        values = value if isinstance(value, list) else [value]
        if len(values) > 8 or not all(isinstance(v, (int, float)) for v in values):
            continue
        shown = ", ".join(f"{v:,}" for v in values)
        rows.append(f"| {name_measure(key)} | {shown} | {other.get(key, '')} |")
    head = f"| measure | ours | {'untrained' if other else ''} |\n| --- | --- | --- |"
    more = "\nWhat is longer is in `results/measured.jsonl`."
    return "\n".join(
        ([head, *rows] if rows else []) + ([more] if len(rows) < len(line["numbers"]) else [])
    )


def _read_recipe(line: dict[str, Any]) -> str:
    """The recipe that a measured line's command names; empty: none."""
    words = line["command"].split()
    if len(words) < 3 or words[0] != "fedssl" or words[1] not in ("run", "reproduce"):
        return ""
    return "" if "=" in words[2] else words[2].strip("'")


def _lines() -> list[dict[str, Any]]:
    return read_lines(MEASURED)


# Results


class Row(typing.NamedTuple):
    """A row of a table: its recipe, the paper's numbers, and every run of it on these images."""

    name: str
    recipe: str
    head: str  # the measure that its own classifier's accuracy stands for; empty: it has none
    printed: dict[str, float]  # by the paper; empty: none, or none on images like these
    lines: list[Line]
    rounds: int | None = None  # that the table shows where there are such; none: the most

    @property
    def groups(self) -> list[list[Line]]:
        """Return runs to show together: a line per seed, of like images, rounds and settings."""
        found: dict[tuple[str, int], dict[int, dict[str, Line]]] = {}
        for line in self.lines:
            seeds = found.setdefault((_trained(line), line["rounds"]), {})
            rates = json.dumps([line["changed"].get(key) for key in RATES])
            seeds.setdefault(line["seed"], {})[rates] = line  # of two runs alike the later counts
        return [
            [max(rates.values(), key=_choice) for _, rates in sorted(seeds.items())]
            for seeds in found.values()
        ]

    @property
    def shown(self) -> list[Line]:
        """Return the runs to show: of the table's rounds or the most, the best on held-out images.

        Failures come last.
        """
        return max(
            self.groups, key=lambda of: (of[0]["rounds"] == self.rounds, *_rank(of)), default=[]
        )

    def value(self, measure: str, line: Line) -> float | None:
        """A run's number; none: it failed, or was not judged so."""
        number: float | None = line["ours"].get(self.own(measure))
        return number

    def own(self, measure: str) -> str:
        """Return the name of a column's measure in this row."""
        return "head_top1" if self.head == measure else measure


def _trained(line: Line) -> str:
    """Return the key of comparable runs: images and settings, without rounds and rates."""
    apart = ("rounds", "evaluate.", *RATES)
    other = {key: value for key, value in line["changed"].items() if not key.startswith(apart)}
    return json.dumps([line["data"], other], sort_keys=True)


def _choice(line: Line) -> tuple[bool, float, bool]:
    """Return a seed's best rate on held-out images; without such images the recipe's own."""
    own = not any(key in line["changed"] for key in RATES)
    return bool(line["ours"]), line["heldout"] or 0.0, own


def _rank(lines: Sequence[Line]) -> tuple[bool, int, float, int]:
    chosen = [line["heldout"] or 0.0 for line in lines if line["ours"]]
    likest = -len(lines[0]["changed"])  # to the recipe
    return bool(chosen), lines[0]["rounds"], statistics.fmean(chosen or [0.0]), likest


def overview(_: str) -> str:
    """A line for each table of results/tables.yaml: what is measured, and what became of claims."""
    lines = []
    for name in yaml.safe_load(TABLES.read_text(encoding="utf-8")):
        table, rows, *_rest = _table(name)
        claims = _claims_of(table, rows)
        words = [verdicts(of.relation, of.pair, of.measures)[0][-1] for of in claims]
        found = collections.Counter(word.strip("*").partition(" (")[0] for word in words)
        order = sorted(found, key=lambda word: (word.startswith("not measured"), word))
        anchor = re.sub(r"[^\w -]", "", table["title"].lower()).replace(" ", "-")
        measured = f"{sum(bool(row.lines) for row in rows)} of {len(rows)}"
        told = ", ".join(f"{word}: {found[word]}" for word in order)
        lines.append([f"[{table['title']}](#{anchor})", measured, told])
    return _grid(["table", "rows measured", "the paper's claims"], lines)


def results(name: str) -> str:
    """A table of results/tables.yaml: ours beside the paper's, its claims, and every run."""
    table, rows, known, data = _table(name)
    of = sorted({config.read_recipe(row.recipe)["data"]["name"] for row in rows if row.printed})
    source = table.get("source", "the paper")
    brackets = [f"In brackets {source}'s number, on {', '.join(of)}."] if of else []
    blocks = [f"## {table['title']}", " ".join([table["about"].strip(), *brackets])]
    blocks += [f"Images: {'; '.join(data)}." if data else "Not measured yet."]
    blocks += [_beside(table["measures"], rows, data), *_settings(rows, len(data) > 1)]
    blocks += [_departures(table, rows)]
    if claims := _claims_of(table, rows):
        blocks += [_claims(claims)]
    if table.get("looked"):
        blocks += [f"Looked into: {table['looked'].strip()}"]
    return "\n\n".join([*blocks, *([_runs(known, len(data) > 1)] if known else [])])


def _table(name: str) -> tuple[dict[str, Any], list[Row], list[Line], list[str]]:
    """A table of results/tables.yaml, its rows, every run of them, and what images these had."""
    table = yaml.safe_load(TABLES.read_text(encoding="utf-8"))[name]
    rows = _rows(table)
    known = [line for row in rows for line in row.lines]
    return table, rows, known, sorted({line["data"] for line in known})


def _rows(table: dict[str, Any]) -> list[Row]:
    lines = read_lines(ROWS)
    rows = []
    for name, recipe in table["rows"].items():
        own = [e for e in lines if e["recipe"] == recipe and e["data"].startswith(table["data"])]
        paper = config.read_recipe(recipe).get("paper", {}).get("results", {})
        printed = paper if table.get("brackets", True) else {}
        head = table.get("heads", {}).get(name, "")
        rows.append(Row(name, recipe, head, printed, own, table.get("rounds")))
    return rows


def _beside(measures: Sequence[str], rows: Sequence[Row], data: Sequence[str]) -> str:
    """Ours and, in brackets, the paper's, a row a recipe, after an untrained encoder."""
    head = ["row", *map(name_measure, measures), "rounds", "seed: minutes"]
    known = sorted((e for row in rows for e in row.lines), key=lambda line: len(line["changed"]))
    lines = []
    for images in data or [""]:
        of = [line for line in known if line["data"] == images]
        found = [_untrained(m, of) for m in measures]
        cells = ["–" if number is None else f"{number:.1f}" for number in found]
        name = f"untrained, {images}" if len(data) > 1 else "untrained"
        lines.append([name, *cells, "0" if any(line["untrained"] for line in of) else NOT_YET, ""])
    for row in rows:
        cells = [_cell(row, measure) for measure in measures]
        lines.append([f"`{row.name}`", *cells, *_made(row.shown)])
    return _grid(head, lines)


def _untrained(measure: str, lines: Sequence[Line]) -> float | None:
    """The first number of an untrained network; clients' models and the global one are one."""
    names = (measure, re.sub("_(global|personal)_", "_", measure))
    known = (
        line["untrained"][name] for line in lines for name in names if name in line["untrained"]
    )
    return next(known, None)


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns that say nothing."""
    full = [i for i in range(len(head)) if any(row[i] not in ("", "–") for row in rows)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(_line([line[i] for i in full]) for line in lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cell(row: Row, measure: str) -> str:
    """Our number or that it failed, seed by seed, or none; and the paper's."""
    numbers = [(line, row.value(measure, line)) for line in row.shown]
    seeds = [_number(number, "failed" in line) for line, number in numbers]
    printed = row.printed.get(row.own(measure))
    ours = ", ".join(seeds) if set(seeds) - {"–"} else "–"
    return ours if printed is None else f"{ours} ({printed})"


def _number(number: float | None, failed: bool) -> str:
    return ("failed" if failed else "–") if number is None else f"{number:.1f}"


def _made(lines: Sequence[Line]) -> list[str]:
    """Rounds, and each seed's time."""
    if not lines:
        return [NOT_YET, ""]
    stars = [r"\*" if line.get("beside") else "" for line in lines]  # two would be italics
    times = [
        f"{line['seconds'] / 60:.1f}{star}" if line["seconds"] else "–"
        for line, star in zip(lines, stars, strict=True)
    ]
    seeds = [f"{line['seed']}: {time}" for line, time in zip(lines, times, strict=True)]
    return [f"{lines[0]['rounds']:,} of {lines[0]['paper_rounds']:,}", ", ".join(seeds)]


def _settings(rows: Sequence[Row], images: bool) -> list[str]:
    """In what the runs that are shown differ from their recipes, and which of them do."""
    found: dict[str, list[str]] = {}
    for row in rows:
        seeds = {line["seed"]: _chosen(line, images) for line in row.shown}
        text = "; ".join(f"{own or 'none'} (seed {seed})" for seed, own in seeds.items())
        text = next(iter(seeds.values())) if len(set(seeds.values())) == 1 else text
        if text:
            found.setdefault(text, []).append(row.name)
    lines = [f"- {_names(names, rows)}: {text}" for text, names in found.items()]
    head = "Settings other than the recipe's, and rounds that were chosen:\n\n"
    return [head + "\n".join(lines)] if lines else []


def _names(names: Sequence[str], rows: Sequence[Row]) -> str:
    """Rows by name."""
    every = len(names) == len(rows) > 1
    return "all rows" if every else ", ".join(f"`{name}`" for name in names)


def _chosen(line: Line, images: bool) -> str:
    """A run's settings, and its round if that is not the last."""
    early = line["ours"] and line["round"] < line["rounds"]
    at = [f"round {line['round']:,}"] if early else []
    return ", ".join(filter(None, [_changed(line, images), *at]))


def _changed(line: Line, images: bool) -> str:
    """A run's settings that its recipe has not, and those that were searched."""
    searched = line.get("choice", "")
    other = [
        f"{key}={value}"
        for key, value in line["changed"].items()
        if not key.startswith(SHOWN) and f"{key}=" not in searched
    ]
    first = sorted(other, key=lambda text: not text.startswith(RATES))
    shown = [f"`{text}`" for text in [searched, *first] if text]
    return ", ".join(([line["data"]] if images else []) + shown)


def _departures(table: dict[str, Any], rows: Sequence[Row]) -> str:
    """In what the recipes themselves differ from the paper, as far as they say it."""
    notes: dict[str, list[str]] = {}
    for row in rows:
        note = config.read_recipe(row.recipe).get("paper", {}).get("note", "")
        if note and not note.startswith("±"):  # the spread of the paper's own number
            notes.setdefault(note, []).append(row.name)
    paper = rows[0].recipe.split("/")[0]
    text = [f"- {table['departs'].strip()}"] if "departs" in table else []
    text += [f"- {_names(names, rows)}: {note}." for note, names in notes.items()]
    if paper in NAMES:
        page = f"[{NAMES[paper]}'s page](docs/papers/{paper}.md)"
        text += [f"- Where the paper is silent, our reading is on {page}."]
    source = table.get("source", "the paper")
    return f"Where the recipes themselves depart from {source}:\n\n" + "\n".join(text)


class Claim(typing.NamedTuple):
    """A paper's claim about one row or two, with the measure of each."""

    relation: str
    pair: list[Row]
    measures: list[str]
    named: bool  # the measure is not the table's first

    @classmethod
    def of(cls, text: str, measure: str, rows: Sequence[Row]) -> Claim:
        """A claim as results/tables.yaml has it."""
        known = {row.name: row for row in rows}
        words, _, other = text.partition(" at ")
        left, relation, *rest = words.split()
        pair = [known[name] for name in (left, *rest)]
        measures = (other or measure).split(", ")
        # one for both rows, or one for each
        return cls(relation, pair, measures * (len(pair) // len(measures)), bool(other))

    def __str__(self) -> str:
        left, *rest = (f"`{row.name}`" for row in self.pair)
        at = " and ".join(map(name_measure, dict.fromkeys(self.measures)))
        return " ".join([left, self.relation, *rest]) + (f", {at}" if self.named else "")

    @property
    def printed(self) -> str:
        """The paper's numbers, if it has any."""
        found = zip(self.pair, self.measures, strict=True)
        numbers = [row.printed.get(row.own(measure)) for row, measure in found]
        each = ("–" if number is None else f"{number}" for number in numbers)
        return " and ".join(each) if any(numbers) else ""


def _claims_of(table: dict[str, Any], rows: Sequence[Row]) -> list[Claim]:
    return [Claim.of(text, table["measures"][0], rows) for text in table.get("claims", [])]


def _claims(claims: Sequence[Claim]) -> str:
    """Return the paper's claims, and whether they appear in our rows."""
    lines = []
    for claim in claims:
        first, *shorter = verdicts(claim.relation, claim.pair, claim.measures)
        lines.append([str(claim), claim.printed, *first])
        lines += [[f"{claim}, in fewer rounds", "", *cells] for cells in shorter]
    head = ["the paper's claim", "its numbers", "ours", "rounds", "seeds", "in our rows"]
    return _grid(head, lines)


class Side(typing.NamedTuple):
    """One side of a claim: a number for each seed that has one, and how many failed."""

    values: list[float]
    failed: int
    rounds: int
    untrained: float | None

    @property
    def mean(self) -> float | None:
        """Over the seeds; none: all failed."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def spread(self) -> float:
        """Between the seeds."""
        return max(self.values) - min(self.values) if self.values else 0.0

    @property
    def seeds(self) -> str:
        """How many numbers there are."""
        return f"{len(self.values)}" + (f" ({self.failed} failed)" if self.failed else "")


def _side(row: Row, measure: str, lines: Sequence[Line]) -> Side:
    numbers = [(row.value(measure, line), "failed" in line) for line in lines]
    values = [number for number, _ in numbers if number is not None]
    alike = [line for line in row.lines if line["data"] == lines[0]["data"]]
    untrained = _untrained(measure, (*lines, *alike))
    failed = sum(fail and number is None for number, fail in numbers)
    return Side(values, failed, lines[0]["rounds"], untrained)


def verdicts(relation: str, pair: Sequence[Row], measures: Sequence[str]) -> list[list[str]]:
    """Our numbers, rounds and seeds, and whether the claim appears; then those of shorter runs."""
    if not all(row.lines for row in pair):
        return [["", "", "", NOT_YET]]
    alike = _alike(pair)
    if alike:
        first, *others = (_verdict(relation, pair, measures, of) for of in alike)
        return [first, *(other for other in others if other[-1] != NOT_YET)]
    if relation == ">" and _shorter(pair):
        *columns, word = _verdict(relation, pair, measures, [row.shown for row in pair])
        if word == "appears":  # otherwise it may be for want of rounds
            return [[*columns, f"{word} with fewer rounds"]]
    return [["", "", "", f"not measured alike yet ({_unlike(pair)})"]]


def _verdict(
    relation: str, pair: Sequence[Row], measures: Sequence[str], compared: Sequence[Sequence[Line]]
) -> list[str]:
    sides = [_side(*of) for of in zip(pair, measures, compared, strict=True)]
    lost = relation == "fails" and sides[0].values and sides[0].untrained is None
    if lost or not all(side.values or side.failed for side in sides):
        return ["", "", "", NOT_YET]
    word = _fails(sides[0]) if relation == "fails" else _ahead(relation, *sides)
    rounds = dict.fromkeys(f"{side.rounds:,}" for side in sides)
    columns = [[_number(side.mean, True) for side in sides], rounds, [s.seeds for s in sides]]
    return [*(" and ".join(column) for column in columns), word]


def _fails(side: Side) -> str:
    """Return, seed by seed, whether a row diverges or ends no better than untrained."""
    above = [value - (side.untrained or 0.0) for value in side.values]
    bad, seeds = side.failed + sum(each <= 0 for each in above), side.failed + len(above)
    if bad:
        return "appears" if bad == seeds else f"in {bad} of {seeds} seeds"
    return "too close to say" if min(above) <= MARGIN else "**does not appear**"


def _ahead(relation: str, left: Side, right: Side) -> str:
    """Return whether means stand in a relation; a failed row is beaten, and like nothing."""
    if left.mean is None or right.mean is None:
        beats = relation == ">" and left.mean is not None
        return "appears" if beats else "**does not appear**"
    ahead, margin = left.mean - right.mean, max(MARGIN, left.spread, right.spread)
    if abs(ahead) <= NEAR if relation == "~" else ahead > margin:
        return "appears"
    return "too close to say" if abs(ahead) <= margin else "**does not appear**"


def _alike(pair: Sequence[Row]) -> list[list[list[Line]]]:
    """Return the runs to compare: of runs alike those with results, the longest first."""
    # A row with a classifier of its own is another training: only the images must be the same.
    other = len({row.head for row in pair}) > 1
    every = map(list, itertools.product(*(row.groups for row in pair)))
    found = [groups for groups in every if _like(groups[0][0], groups[-1][0], other)]
    found.sort(key=lambda of: (all(_rank(own)[0] for own in of), *map(_rank, of)), reverse=True)
    shorter = [of for of in found[1:] if not other and _cut_short(of[0][0], found[0][0][0])]
    return [*found[:1], *shorter]


def _cut_short(a: Line, b: Line) -> bool:
    """Return whether a run differs from another only by fewer rounds."""
    return _trained(a) == _trained(b) and a["rounds"] < b["rounds"]


def _like(a: Line, b: Line, other: bool) -> bool:
    """Return whether two runs have equally many rounds, or the same share of their recipes'."""
    if other:
        return bool(a["data"] == b["data"])
    share = a["rounds"] * b["paper_rounds"] == b["rounds"] * a["paper_rounds"]
    return _trained(a) == _trained(b) and (share or a["rounds"] == b["rounds"])


def _shorter(pair: Sequence[Row]) -> bool:
    """Return whether the first row had fewer rounds than the second, and all else was the same."""
    a, b = (row.shown[0] for row in pair)
    share = a["rounds"] * b["paper_rounds"] < b["rounds"] * a["paper_rounds"]
    return share and _cut_short(a, b)


def _unlike(pair: Sequence[Row]) -> str:
    """In what the runs that are shown differ."""
    a, b = (row.shown[0] for row in pair)
    if a["data"] != b["data"]:
        return "other images"
    alike = _trained(a) == _trained(b)
    return f"{a['rounds']:,} and {b['rounds']:,} rounds" if alike else "other settings"


def _runs(lines: Sequence[Line], images: bool) -> str:
    """Every run with its settings, those that were not chosen too."""
    head = ["accuracies", "held-out", "round", "seed", "settings", "made on", "command"]
    rows = []
    for line in lines:
        tops = ", ".join(f"{name_measure(m)} {value:.1f}" for m, value in line["ours"].items())
        best = "" if line["heldout"] is None else f"{line['heldout']:.1f}"
        made = [line.get(key) for key in ("device", "precision", "commit", "date")]
        place = ", ".join(str(part) for part in made if part)
        at = f"{line['round']:,} of {line['rounds']:,}"
        cells = [line.get("failed") or tops, best, at, str(line["seed"]), _changed(line, images)]
        rows.append([*cells, place, f"`{line['command']}`"])
    return folded("Every run, with its command", _grid(head, rows))


def folded(title: str, text: str) -> str:
    """A text that a click opens, on a site and where Markdown is shown."""
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{text}\n\n</details>'


def read_lines(path: Path) -> list[Line]:
    """A file of JSON lines; none: nothing was measured."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def reading(file: str) -> str:
    """Return the comments of a recipe's file: our reading where the paper is silent."""
    path = ROOT / "src" / "fedssl" / "config" / "recipes" / file
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    return f"{comments.replace('<', '&lt;')} (`{path.relative_to(ROOT)}`)"


def says(names: str) -> str:
    """Return the docstrings of classes, named as module:Class."""
    blocks = []
    for name in names.split():
        module, _, attribute = name.partition(":")
        found = __import__(f"fedssl.{module}", fromlist=["_"])
        thing = getattr(found, attribute) if attribute else found
        file = Path(inspect.getfile(found)).relative_to(ROOT).as_posix()
        label = f"`{attribute}` in `{file}`" if attribute else f"`{file}`"
        blocks.append(f"{label}\n\n{textwrap.indent(_docstring(thing), '> ', lambda _: True)}")
    return "\n\n".join(blocks)


SEEN = {
    "mean": "the mean",
    "each": "**each client's own**",
    "log": "each client's own number, for the log",
    "simulation": "each client's own number, for the log",
}


def exchanges(_: str) -> str:
    """Return the tasks that each algorithm declares."""
    rows = [
        "| algorithm | exchange | what a client tells | the server needs |",
        "| --- | --- | --- | --- |",
    ]
    for name in config.VARIANTS["algorithm"]:
        kind = config.variant("algorithm", name)
        for task in kind.tasks().values():
            about = (getattr(kind, task.name).__doc__ or "").strip().split("\n\n")[0]
            only = " (simulations only)" if task.seen == "simulation" else ""
            text = " ".join(about.split())
            rows.append(f"| `{name}` | `{task.name}`{only} | {text} | {SEEN[task.seen]} |")
    return "\n".join(rows)


def file(path: str) -> str:
    """A Python file of the repository, whole."""
    return f"```python\n{(ROOT / path).read_text(encoding='utf-8').rstrip()}\n```"


def yaml_of(name: str) -> str:
    """A recipe, with everything that it extends."""
    text = yaml.safe_dump(config.read_recipe(name), sort_keys=False, allow_unicode=True)
    return f"```yaml\n{text.rstrip()}\n```"


PARTS: dict[str, Callable[[str], str]] = {
    "commands": commands,
    "compared": compared,
    "configuration": configuration,
    "contents": contents,
    "exchanges": exchanges,
    "file": file,
    "measured": measured,
    "overview": overview,
    "reading": reading,
    "recipe": yaml_of,
    "recipes": recipes,
    "results": results,
    "says": says,
}


if __name__ == "__main__":
    main()
