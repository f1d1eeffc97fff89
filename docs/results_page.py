"""The measured rows of the papers, and what they say about the papers' claims.

`docs/generate.py` writes these parts into docs/results.md and into the pages of the papers.
"""

from __future__ import annotations

import collections
import json
import math
import re
import statistics
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from scipy import stats

from fedssl import config
from fedssl.util.text import name_measure

Line = dict[str, Any]  # one run, as `fedssl reproduce` writes it
ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "results" / "rows.jsonl"  # filled by results/add.py
TABLES = ROOT / "results" / "tables.yaml"
NAMES = {"dcco": "DCCO", "fedema": "FedEMA", "decssl": "Dec-SSL", "perfcl": "PerFCL", "ccl": "CCL"}
HIDDEN = ("rounds", "data.name", "evaluate.")  # settings that other columns show
RATES = ("server.lr", "client.lr")  # may be searched, for each seed anew
NEAR = 2.0  # points: at most so far apart are rows that a paper calls about the same
NOT_YET = "not measured yet"
APPEARS, REFUTED, OPEN = "appears", "**does not appear**", "open"


class Row(typing.NamedTuple):
    """A row of a table: its recipe, the paper's numbers, and every run of it on these images."""

    name: str
    recipe: str
    head: str  # the measure that its own classifier's accuracy stands for; empty: it has none
    printed: dict[str, float]  # the paper's numbers; empty if it has none on such images
    lines: list[Line]

    @property
    def groups(self) -> list[list[Line]]:
        """Return comparable runs together: one per seed, of equal images, rounds and settings."""
        found: dict[tuple[str, int], dict[int, dict[str, Line]]] = {}
        for line in self.lines:
            seeds = found.setdefault((_settings_key(line), line["rounds"]), {})
            rates = json.dumps([line["changed"].get(key) for key in RATES])
            seeds.setdefault(line["seed"], {})[rates] = line  # a repetition replaces the former run
        return [
            [max(rates.values(), key=_rate_quality) for _, rates in sorted(seeds.items())]
            for seeds in found.values()
        ]

    @property
    def shown(self) -> list[Line]:
        """Return the runs to show: the longest, then the best on held-out images."""
        return max(self.groups, key=_rank, default=[])

    def measure(self, column: str) -> str:
        """Return the name of a column's measure in this row."""
        return "head_top1" if self.head == column else column

    def value(self, column: str, line: Line) -> float | None:
        """Return a run's number; ``None`` if it failed or was not evaluated so."""
        number: float | None = line["ours"].get(self.measure(column))
        return number


class Table(typing.NamedTuple):
    """One table of results/tables.yaml with its rows."""

    facts: dict[str, Any]
    rows: list[Row]

    @classmethod
    def read_all(cls) -> dict[str, Table]:
        """Read every table, by name."""
        lines = read_lines(ROWS)
        known = yaml.safe_load(TABLES.read_text(encoding="utf-8"))
        return {name: cls(facts, cls._read_rows(facts, lines)) for name, facts in known.items()}

    @staticmethod
    def _read_rows(facts: dict[str, Any], lines: Sequence[Line]) -> list[Row]:
        rows = []
        for name, recipe in facts["rows"].items():
            runs = [e for e in lines if e["recipe"] == recipe]
            runs = [e for e in runs if e["data"].startswith(facts["data"])]
            paper = config.read_recipe(recipe).get("paper", {}).get("results", {})
            printed = paper if facts.get("brackets", True) else {}
            rows.append(Row(name, recipe, facts.get("heads", {}).get(name, ""), printed, runs))
        return rows

    @property
    def paper(self) -> str:
        """The folder of its recipes: a paper, or ``benchmark``."""
        return self.rows[0].recipe.split("/")[0]

    @property
    def source(self) -> str:
        """Whose numbers stand in brackets."""
        return str(self.facts.get("source", "the paper"))

    @property
    def lines(self) -> list[Line]:
        """Every run of its rows."""
        return [line for row in self.rows for line in row.lines]

    @property
    def images(self) -> list[str]:
        """The descriptions of the images that its runs had."""
        return sorted({line["data"] for line in self.lines})

    @property
    def claims(self) -> list[Claim]:
        """The paper's claims about its rows."""
        measure, rates = self.facts["measures"][0], self.facts.get("rates")
        return [
            Claim.parse(text, measure, self.rows, rates) for text in self.facts.get("claims", [])
        ]


class Claim(typing.NamedTuple):
    """A paper's claim about one row or two, with the measure of each."""

    relation: str  # ">", "~" or "fails"
    rows: list[Row]
    measures: list[str]
    named: bool  # the measure is not the table's first
    rates: Sequence[float] | None = None  # that a claim of failing is about; None: all

    @classmethod
    def parse(
        cls, text: str, measure: str, rows: Sequence[Row], rates: Sequence[float] | None = None
    ) -> Claim:
        """Read a claim as results/tables.yaml has it: ``a > b``, perhaps with ``at MEASURE``.

        A training that fails, fails at the ``rates`` of the server that the paper tried.
        """
        known = {row.name: row for row in rows}
        words, _, other = text.partition(" at ")
        left, relation, *rest = words.split()
        pair = [known[name] for name in (left, *rest)]
        if rest:
            rates = None
        if rates is not None:
            pair = [pair[0]._replace(lines=[e for e in pair[0].lines if _rate(e) in rates])]
        measures = (other or measure).split(", ")  # one for both rows, or one for each
        return cls(relation, pair, measures * (len(pair) // len(measures)), bool(other), rates)

    def __str__(self) -> str:
        left, *rest = (f"`{row.name}`" for row in self.rows)
        at = " and ".join(map(name_measure, dict.fromkeys(self.measures)))
        tried = "" if self.rates is None else " at the paper's rates"
        return " ".join([left, self.relation, *rest]) + tried + (f", {at}" if self.named else "")

    @property
    def printed(self) -> str:
        """The paper's numbers, if it has any."""
        found = zip(self.rows, self.measures, strict=True)
        numbers = [row.printed.get(row.measure(measure)) for row, measure in found]
        each = ("–" if number is None else f"{number}" for number in numbers)
        return " and ".join(each) if any(numbers) else ""

    def judge(self) -> Verdict:
        """Compare the runs with the most seeds, at least two if possible, then the longest."""
        if not all(row.lines for row in self.rows):
            return Verdict(NOT_YET)
        found = [Comparison.of(self, groups) for groups in self._comparable()]
        found = [each for each in found if each.seeds]
        if not found:
            return Verdict(NOT_YET if len(self.rows) == 1 else f"{OPEN}: no two runs alike")
        return max(found, key=lambda each: (min(each.seeds, 2), each.rounds, each.seeds)).verdict()

    def _comparable(self) -> Iterator[list[list[Line]]]:
        """Yield groups of runs that differ only in what the claim is about."""
        if len(self.rows) == 1:
            yield from ([group] for group in self.rows[0].groups)
            return
        # A row with its own classifier is another training: only the images must agree.
        is_other = len({row.head for row in self.rows}) > 1
        for left in self.rows[0].groups:
            for right in self.rows[1].groups:
                if _is_comparable(left[0], right[0], is_other):
                    yield [left, right]


class Verdict(typing.NamedTuple):
    """The outcome of a claim, with the numbers behind it as text."""

    word: str
    ours: str = ""
    difference: str = ""
    rounds: str = ""
    seeds: str = ""


class Comparison(typing.NamedTuple):
    """The numbers of a claim by seed; ``None`` stands for training that diverged."""

    relation: str
    pairs: list[tuple[float | None, ...]]
    rounds: int
    shown_rounds: str
    untrained: float | None

    @classmethod
    def of(cls, claim: Claim, groups: Sequence[Sequence[Line]]) -> Comparison:
        """Pair the runs of equal seeds."""
        by_seed = [
            {e["seed"]: row.value(measure, e) for e in group if _is_over(row, measure, e)}
            for row, measure, group in zip(claim.rows, claim.measures, groups, strict=True)
        ]
        common = [seed for seed in sorted(by_seed[0]) if all(seed in each for each in by_seed)]
        pairs = [tuple(each[seed] for each in by_seed) for seed in common]
        if len(claim.rows) == 2:
            pairs = [pair for pair in pairs if pair != (None, None)]  # both diverged
        rounds = [group[0]["rounds"] for group in groups]
        shown = " and ".join(dict.fromkeys(f"{each:,}" for each in rounds))
        alike = [e for e in claim.rows[0].lines if e["data"] == groups[0][0]["data"]]
        untrained = find_untrained(claim.measures[0], [*groups[0], *alike])
        if claim.relation == "fails" and untrained is None:
            pairs = [pair for pair in pairs if pair[0] is None]
        return cls(claim.relation, pairs, min(rounds), shown, untrained)

    @property
    def seeds(self) -> int:
        """How many seeds all rows have."""
        return len(self.pairs)

    def verdict(self) -> Verdict:
        """Judge the claim; with one seed it stays open."""
        columns = list(zip(*self.pairs, strict=True))
        ours = " and ".join(_mean(column) for column in columns)
        low, high = self._interval()
        middle = (low + high) / 2
        spread = "" if self.seeds == 1 else f" ± {(high - low) / 2:.1f}"
        is_shown = self.relation != "fails" and all(None not in pair for pair in self.pairs)
        difference = f"{middle:+.1f}{spread}" if is_shown else ""
        word = self._fails() if self.relation == "fails" else self._relates(low, high)
        if self.seeds == 1:
            word = f"{OPEN}: one seed"
        return Verdict(word, ours, difference, self.shown_rounds, f"{self.seeds}")

    def _interval(self) -> tuple[float, float]:
        """Return the mean paired difference's 95% interval, or the range if a run diverged."""
        gaps = [_subtract(a, b) for a, b in self.pairs] if self.relation != "fails" else [0.0]
        if len(gaps) == 1 or not all(map(math.isfinite, gaps)):
            return min(gaps), max(gaps)
        mean = statistics.fmean(gaps)
        half = stats.t.ppf(0.975, len(gaps) - 1) * statistics.stdev(gaps) / len(gaps) ** 0.5
        return mean - half, mean + half

    def _relates(self, low: float, high: float) -> str:
        if self.relation == ">":
            return APPEARS if low > 0 else REFUTED if high < 0 else OPEN
        if low >= -NEAR and high <= NEAR:
            return APPEARS
        return REFUTED if low > NEAR or high < -NEAR else OPEN

    def _fails(self) -> str:
        """Return whether every seed diverges or ends no better than an untrained network."""
        bad = sum(n is None or n <= (self.untrained or 0.0) for (n,) in self.pairs)
        return APPEARS if bad == self.seeds else REFUTED if not bad else OPEN


def _subtract(a: float | None, b: float | None) -> float:
    """Return how far a run is ahead of another; a run that diverged is infinitely behind."""
    if a is None:
        return -math.inf
    return math.inf if b is None else a - b


def _mean(numbers: Sequence[float | None]) -> str:
    known = [number for number in numbers if number is not None]
    failed = len(numbers) - len(known)
    if not known:
        return "failed"
    return f"{statistics.fmean(known):.1f}" + (f" ({failed} failed)" if failed else "")


def _rate(line: Line) -> float:
    """Return the server's learning rate of a run."""
    rate = line["changed"].get("server.lr")
    return float(config.read_recipe(line["recipe"])["server"]["lr"] if rate is None else rate)


def _is_over(row: Row, measure: str, line: Line) -> bool:
    return row.value(measure, line) is not None or "failed" in line


def _settings_key(line: Line) -> str:
    """Return the key of comparable runs: images and settings, without rounds and rates."""
    ignored = ("rounds", "evaluate.", *RATES)
    other = {key: value for key, value in line["changed"].items() if not key.startswith(ignored)}
    return json.dumps([line["data"], other], sort_keys=True)


def _is_comparable(a: Line, b: Line, is_other: bool) -> bool:
    """Return whether two runs have equally many rounds, or the same share of their recipes'."""
    if is_other:
        return bool(a["data"] == b["data"])
    share = a["rounds"] * b["paper_rounds"] == b["rounds"] * a["paper_rounds"]
    return _settings_key(a) == _settings_key(b) and (share or a["rounds"] == b["rounds"])


def _rate_quality(line: Line) -> tuple[bool, float, bool]:
    """Order a seed's rates: by held-out images, or else the recipe's own first."""
    is_own = not any(key in line["changed"] for key in RATES)
    return bool(line["ours"]), line["heldout"] or 0.0, is_own


def _rank(lines: Sequence[Line]) -> tuple[bool, int, float, int]:
    heldout = [line["heldout"] or 0.0 for line in lines if line["ours"]]
    likeness = -len(lines[0]["changed"])  # to the recipe
    return bool(heldout), lines[0]["rounds"], statistics.fmean(heldout or [0.0]), likeness


# The page


def overview(_: str) -> str:
    """Show a line for each table: its main numbers, and how many of the claims appear."""
    head = ["table", "rows measured", "main rows: ours (theirs)", "claims"]
    rows = []
    for table in Table.read_all().values():
        counts = collections.Counter(_kind(claim.judge()) for claim in table.claims)
        title, measured = table.facts["title"], sum(bool(row.lines) for row in table.rows)
        kinds = " / ".join(f"{counts[kind]}" for kind in (APPEARS, REFUTED, OPEN))
        place = f"{measured} of {len(table.rows)}"
        claims = kinds if table.claims else "–"
        rows.append([f"[{title}](#{_slug(title)})", place, _main_rows(table), claims])
    return format_grid(head, rows)


def _main_rows(table: Table) -> str:
    """Show the measured rows of the first claim; without claims, all measured rows."""
    first = table.facts["measures"][0]
    pairs = [(row, first) for row in table.rows]
    if table.claims:
        pairs = list(zip(table.claims[0].rows, table.claims[0].measures, strict=False))
    known = [f"`{row.name}` {_cell(row, measure)}" for row, measure in pairs if row.lines]
    return ", ".join(known) or "–"


def _slug(title: str) -> str:
    """Return the anchor that Markdown gives to a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def _kind(verdict: Verdict) -> str:
    return verdict.word if verdict.word in (APPEARS, REFUTED) else OPEN


def results(name: str) -> str:
    """Write one table: our numbers beside the paper's, its claims, and every run."""
    table = Table.read_all()[name]
    facts, rows, several = table.facts, table.rows, len(table.images) > 1
    named = sorted({config.read_recipe(row.recipe)["data"]["name"] for row in rows if row.printed})
    brackets = f"In brackets {table.source}'s number, on {', '.join(named)}." if named else ""
    blocks = [f"## {facts['title']}", f"{facts['about'].strip()} {brackets}".strip()]
    if table.lines:
        distances = _distances(table)
        blocks += [f"Images: {'; '.join(table.images)}.{distances}", _beside(table, several)]
        blocks += _settings(rows, several)
    else:
        blocks += [f"Not measured yet: {', '.join(f'`{row.name}`' for row in rows)}."]
    if table.lines and table.claims:
        blocks += [_claims(table.claims)]
    if table.lines and facts.get("looked"):
        blocks += [facts["looked"].strip()]
    blocks += [_departures(table)]
    return "\n\n".join([*blocks, *([_runs(table.lines, several)] if table.lines else [])])


def _distances(table: Table) -> str:
    """Say how different the clients' labels are, where the runs recorded it."""
    found = sorted({round(d, 2) for line in table.lines if (d := line.get("label_distance"))})
    if not found:
        return ""
    text = f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]}"
    return f" Mean earth mover's distance of a client's labels to all: {text}."


def _beside(table: Table, several: bool) -> str:
    """Show our numbers and, in brackets, the paper's, after those of an untrained encoder."""
    measures = table.facts["measures"]
    lines = []
    for images in table.images:
        runs = sorted(
            (e for e in table.lines if e["data"] == images), key=lambda e: len(e["changed"])
        )
        found = [find_untrained(m, runs) for m in measures]
        cells = ["–" if number is None else f"{number:.1f}" for number in found]
        name = f"untrained, {images}" if several else "untrained"
        lines.append([name, *cells, "0" if any(e["untrained"] for e in runs) else NOT_YET, ""])
    for row in table.rows:
        cells = [_cell(row, measure) for measure in measures]
        lines.append([f"`{row.name}`", *cells, *_cost(row.shown)])
    return format_grid(["row", *map(name_measure, measures), "rounds", "seed: minutes"], lines)


def find_untrained(measure: str, lines: Sequence[Line]) -> float | None:
    """Return an untrained network's number; clients' models and the global one are the same."""
    names = (measure, re.sub("_(global|personal)_", "_", measure))
    known = (
        line["untrained"][name] for line in lines for name in names if name in line["untrained"]
    )
    return next(known, None)


def _cell(row: Row, measure: str) -> str:
    """Show our number of each seed, or that it failed, and the paper's."""
    numbers = [(line, row.value(measure, line)) for line in row.shown]
    seeds = [
        f"{number:.1f}" if number is not None else "failed" if "failed" in line else "–"
        for line, number in numbers
    ]
    printed = row.printed.get(row.measure(measure))
    ours = ", ".join(seeds) if set(seeds) - {"–"} else "–"
    return ours if printed is None else f"{ours} ({printed})"


def _cost(lines: Sequence[Line]) -> list[str]:
    """Show the rounds, and the minutes of each seed."""
    if not lines:
        return [NOT_YET, ""]
    seeds = [
        f"{line['seed']}: {line['seconds'] / 60:.1f}" + (r"\*" if line.get("beside") else "")
        if line["seconds"]
        else f"{line['seed']}: –"
        for line in lines
    ]
    return [f"{lines[0]['rounds']:,} of {lines[0]['paper_rounds']:,}", ", ".join(seeds)]


def _settings(rows: Sequence[Row], several: bool) -> list[str]:
    """List the settings in which the shown runs differ from their recipes."""
    found: dict[str, list[str]] = {}
    for row in rows:
        seeds = {line["seed"]: _describe_choice(line, several) for line in row.shown}
        text = "; ".join(f"{own or 'none'} (seed {seed})" for seed, own in seeds.items())
        text = next(iter(seeds.values())) if len(set(seeds.values())) == 1 else text
        if text:
            found.setdefault(text, []).append(row.name)
    lines = [f"- {_names(names, rows)}: {text}" for text, names in found.items()]
    head = "Settings that differ from the recipe's, and rounds that were chosen:\n\n"
    return [head + "\n".join(lines)] if lines else []


def _names(names: Sequence[str], rows: Sequence[Row]) -> str:
    is_all = len(names) == len(rows) > 1
    return "all rows" if is_all else ", ".join(f"`{name}`" for name in names)


def _describe_choice(line: Line, several: bool) -> str:
    """Describe a run's settings, and its round if that is not the last."""
    is_early = line["ours"] and line["round"] < line["rounds"]
    at = [f"round {line['round']:,}"] if is_early else []
    return ", ".join(filter(None, [_describe_settings(line, several), *at]))


def _describe_settings(line: Line, several: bool) -> str:
    """Describe a run's settings that its recipe has not, the searched ones first."""
    searched = line.get("choice", "")
    other = [
        f"{key}={value}"
        for key, value in line["changed"].items()
        if not key.startswith(HIDDEN) and f"{key}=" not in searched
    ]
    ordered = sorted(other, key=lambda text: not text.startswith(RATES))
    shown = [f"`{text}`" for text in [searched, *ordered] if text]
    return ", ".join(([line["data"]] if several else []) + shown)


def _departures(table: Table) -> str:
    """List in what the recipes differ from the paper."""
    notes: dict[str, list[str]] = {}
    for row in table.rows:
        note = config.read_recipe(row.recipe).get("paper", {}).get("note", "")
        if note and not note.startswith("±"):  # the spread of the paper's own number
            notes.setdefault(note, []).append(row.name)
    text = [f"- {table.facts['departs'].strip()}"] if "departs" in table.facts else []
    text += [f"- {_names(names, table.rows)}: {note}." for note, names in notes.items()]
    if table.paper in NAMES:
        page = f"[{NAMES[table.paper]}'s page](docs/papers/{table.paper}.md)"
        text += [f"- Where the paper is silent, our reading is on {page}."]
    return folded(f"Departures of the recipes from {table.source}", "\n".join(text))


def _claims(claims: Sequence[Claim]) -> str:
    """Show the paper's claims, and whether they appear in our rows."""
    head = ["the paper's claim", "its numbers", "in our rows", "ours"]
    head += ["difference (95%)", "rounds", "seeds"]
    return format_grid(head, [[str(claim), claim.printed, *claim.judge()] for claim in claims])


def _runs(lines: Sequence[Line], several: bool) -> str:
    """List every run with its settings, also those that were not chosen."""
    head = ["accuracies", "held-out", "round", "seed", "settings", "made on", "command"]
    rows = []
    for line in lines:
        tops = ", ".join(f"{name_measure(m)} {value:.1f}" for m, value in line["ours"].items())
        best = "" if line["heldout"] is None else f"{line['heldout']:.1f}"
        made = [line.get(key) for key in ("device", "precision", "commit", "date")]
        place = ", ".join(str(part) for part in made if part)
        at = f"{line['round']:,} of {line['rounds']:,}"
        settings = _describe_settings(line, several)
        cells = [line.get("failed") or tops, best, at, str(line["seed"]), settings]
        rows.append([*cells, place, f"`{line['command']}`"])
    return folded("Every run, with its command", format_grid(head, rows))


# Text


def read_lines(path: Path) -> list[Line]:
    """Read a file of JSON lines; without the file nothing was measured."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def format_grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table, without columns that are empty."""
    full = [i for i in range(len(head)) if any(row[i] not in ("", "–") for row in rows)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(_format_line([line[i] for i in full]) for line in lines)


def _format_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def folded(title: str, text: str) -> str:
    """Wrap a text that a click opens, on the site and in Markdown viewers."""
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{text}\n\n</details>'
