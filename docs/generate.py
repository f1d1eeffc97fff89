"""The generated parts of the documentation, and what makes a site of its pages.

    python docs/generate.py

writes them into the pages, so that these can be read without a site; a test says where one is
stale. A page asks for a part with ``<!-- generated: commands --><!-- /generated -->``; ``PARTS``
has them all. In the site, links to files outside docs/ become the files' names, since it does not
hold them.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import posixpath
import re
import shlex
import sys
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

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file by its path
import results_page
from results_page import NAMES, NOT_YET, ROOT, Line, Row, format_grid, read_lines

MEASURED = ROOT / "results" / "measured.jsonl"
PAPERS = ROOT / "results" / "papers.yaml"
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
    about, page = _docstring(kind), _find_page(kind)
    if page is not None:  # a docstring stands on one page
        about = f"{about.splitlines()[0]} [More]({page})."
    yield f"{about}\n\n`{file}`, class `{kind.__name__}`."
    fields = {field.name: field for field in dataclasses.fields(kind.Params)}
    base = {f.name: f for f in dataclasses.fields(config.key_types(config.Config)[section])}
    own = [n for n in fields if n not in shared or fields[n].default != base[n].default]
    own.remove("name") if "name" in own else None
    if own:
        about = inspect.getdoc(kind.Params) or ""
        if not re.fullmatch(r"Keys of [^.]*\.", about):
            yield as_markdown(about)
        yield _keys(f"{section}.", kind.Params, own)


def _find_page(kind: type) -> str | None:
    """Return the paper's page that has a class's docstring."""
    name = f"{kind.__module__.removeprefix('fedssl.')}:{kind.__name__}"
    for page in sorted((ROOT / "docs" / "papers").glob("*.md")):
        shown = re.findall(r"<!-- generated: says (.*?) -->", page.read_text(encoding="utf-8"))
        if name in " ".join(shown).split():
            return page.relative_to(ROOT).as_posix()
    return None


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
        if unknown := entry.keys() - {"recipes", "departs"}:
            raise ValueError(f"{PAPERS.name}, {title}: {unknown}. Quote text with a comma.")
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
    return format_grid(["in the paper", "recipes", "measured", "departs"], rows)


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
    lines = [
        line for line in read_lines(results_page.ROWS) if line["recipe"] in names and line["ours"]
    ]
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
    """The paper's numbers that we measured, with our images and rounds, and how many are left."""
    rows = ["| recipe | measure | the paper's | ours |", "| --- | --- | --- | --- |"]
    lines, left = read_lines(results_page.ROWS), 0
    for name in config.match_recipes(pattern):
        mine = [line for line in lines if line["recipe"] == name]
        for measure, number in config.read_recipe(name).get("paper", {}).get("results", {}).items():
            if ours := _by_images(mine, measure):
                rows.append(f"| `{name}` | {name_measure(measure)} | {number} | {ours} |")
            left += not ours
    command = f"fedssl recipes {shlex.quote(pattern)}"
    more = f"{left} more numbers of the paper are {NOT_YET}: `{command}` lists them."
    return "\n\n".join(["\n".join(rows)] * (len(rows) > 2) + [more] * (left > 0))


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
    return "; ".join(found)


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
    "overview": results_page.overview,
    "reading": reading,
    "recipe": yaml_of,
    "recipes": recipes,
    "results": results_page.results,
    "says": says,
}


if __name__ == "__main__":
    main()
