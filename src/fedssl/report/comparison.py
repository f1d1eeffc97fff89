"""Compare runs: a row for each model, as ``fedssl compare`` prints it and the report shows it."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedssl import config
from fedssl.config import plugins
from fedssl.runs.metrics import is_number
from fedssl.runs.reader import RunReader, find_runs
from fedssl.runs.result import split_models
from fedssl.util.text import NOT_PERCENT, align_columns, name_measure, shorten_list

Kind = Literal["run", "baseline", "untrained", "paper"]
Table = Mapping[str, Mapping[str, float]]  # by model and measure
ORDER: tuple[Kind, ...] = ("run", "baseline", "untrained", "paper")
# Runs that differ only in these keys are one experiment.
IGNORED = config.keys_affecting(config.Config, "nothing", "speed") | {"seed"}
# Keys that name no group: those that change no model, and those that every row shows.
UNNAMED = config.keys_affecting(config.Config, "evaluation", "monitoring") | {"algorithm.name"}
LABEL_FIRST = ("data.", "objective.", "partition.", "rounds", "algorithm.", "encoder.")
MOST_NAMES = 5  # in a sentence


@dataclass(frozen=True)
class Value:
    """A measure over the seeds of a row."""

    each: tuple[float, ...]
    seeds: int = 0  # of the row; some may lack this measure

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.each)

    @property
    def spread(self) -> float | None:
        """The sample standard deviation; ``None`` for one seed."""
        return statistics.stdev(self.each) if len(self.each) > 1 else None

    @property
    def exact(self) -> str:
        """Every seed's value."""
        return ", ".join(f"{value:.6g}" for value in self.each)

    def text(self, measure: str) -> str:
        """Format mean ± standard deviation, and how many seeds have this measure."""
        some = f" ({len(self.each)} of {self.seeds})" if len(self.each) < self.seeds else ""
        if measure.startswith("rounds_to"):
            return f"{self.mean:.0f}{some}"
        digits, unit = (2, "") if measure in NOT_PERCENT else (1, " %")
        spread = "" if self.spread is None else f" ± {self.spread:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}{unit}{some}"


@dataclass
class Row:
    """One model, or several that differ only in their seed."""

    name: str
    kind: Kind
    label: str  # of its group of runs
    runs: list[str] = field(default_factory=list)
    seeds: list[str] = field(default_factory=list)
    state: str = ""
    values: dict[str, Value] = field(default_factory=dict)

    def point(self, measure: str) -> dict[str, object]:
        """Return the data of a figure's point."""
        value = self.values[measure]
        spread = {"mean": value.mean, "spread": value.spread, "each": value.each}
        return {"name": self.name, "kind": self.kind, **spread}

    @property
    def about(self) -> list[str]:
        """The cells for runs, seeds and state."""
        cells = (shorten_list(self.runs, MOST_NAMES), ", ".join(self.seeds), self.state)
        return [cell or "–" for cell in cells]


@dataclass(frozen=True)
class Comparison:
    """Rows, and remarks that a reader needs before comparing them."""

    rows: list[Row]
    remarks: list[str]

    @property
    def measures(self) -> list[str]:
        """The measures that any row has."""
        return list(dict.fromkeys(m for row in self.rows for m in row.values))

    @property
    def unlabeled(self) -> list[str]:
        """The measures that need no labels."""
        return [measure for measure in self.measures if measure in NOT_PERCENT]


def table(runs: Sequence[str | Path], width: int | None = None) -> str:
    """Return a table of runs for the terminal, with remarks below it."""
    comparison = compare(find_runs(runs))
    measures = comparison.measures
    lines = [["", "runs", "seeds", "state", *map(name_measure, measures)]]
    for row in comparison.rows:
        values = (row.values.get(m) for m in measures)
        cells = (v.text(m) if v else "–" for m, v in zip(measures, values, strict=True))
        lines.append([row.name, *row.about, *cells])
    return "\n\n".join([align_columns(lines, width), *comparison.remarks])


def compare(runs: Sequence[RunReader]) -> Comparison:
    """Return rows for runs, their baselines, untrained networks and the papers' numbers."""
    groups, names = _group(runs), name_runs(runs)
    rows: list[Row] = []
    for label, group in zip(_label_groups(groups, names), groups, strict=True):
        rows += [row for row in _rows(label, group, names) if not _is_repeated(row, rows)]
    titles = [row.name for row in rows]
    for row in rows:
        if row.kind != "run" and titles.count(row.name) > 1:
            row.name += f" ({row.label})"
    remarks = list(_remarks(runs, names))
    if any(len(value.each) < value.seeds for row in rows for value in row.values.values()):
        remarks.append("(1 of 3): only one of three seeds has this number.")
    return Comparison(sorted(rows, key=lambda row: ORDER.index(row.kind)), remarks)


def name_runs(runs: Sequence[RunReader]) -> dict[Path, str]:
    """Return the shortest end of each run's path that no other run shares."""
    paths = {run.path: run.path.resolve().parts for run in runs}
    names: dict[Path, str] = {}
    for path, parts in paths.items():
        others, depth = {other for other in paths.values() if other != parts}, 1
        while depth < len(parts) and any(other[-depth:] == parts[-depth:] for other in others):
            depth += 1
        names[path] = str(Path(*parts[-depth:]))
    return names


def _is_repeated(row: Row, rows: Iterable[Row]) -> bool:
    """Return whether another run gave the same untrained network, baseline or paper's number."""
    same = (other for other in rows if other.kind == row.kind != "run")
    return any(other.values == row.values and other.name == row.name for other in same)


def _group(runs: Sequence[RunReader]) -> list[list[RunReader]]:
    """Group finished runs that differ only in their seed; a repeated seed begins a new group."""
    groups: dict[tuple[str, int], list[RunReader]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for run in runs:
        keys = {k: v for k, v in config.flatten(run.tree).items() if k not in IGNORED}
        text = json.dumps(keys, sort_keys=True, default=str)
        text += "" if run.finished else str(run.path)
        seen[text, _seed(run)] += 1
        groups.setdefault((text, seen[text, _seed(run)]), []).append(run)
    return list(groups.values())


def _label_groups(groups: Sequence[Sequence[RunReader]], names: Mapping[Path, str]) -> list[str]:
    """Label each group by its algorithm, and by as few other keys as make labels different."""
    keys = [config.flatten(group[0].tree) for group in groups]
    labels = [plugins.short_name(group[0].settings.algorithm.name) for group in groups]
    for key in _differing_keys(keys):
        if len(set(labels)) == len(labels):
            return labels
        ends = [
            f", {key}={_shorten(values[key])}" if values.get(key) is not None else ""
            for values in keys
        ]
        longer = [label + end for label, end in zip(labels, ends, strict=True)]
        if len(set(longer)) > len(set(labels)):
            labels = longer
    return [
        f"{label}, {names[group[0].path]}" if labels.count(label) > 1 else label
        for label, group in zip(labels, groups, strict=True)
    ]


def _differing_keys(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return keys whose value is not the same in all groups, the most telling ones first."""
    values = {k: {json.dumps(g.get(k), default=str) for g in groups} for own in groups for k in own}
    differing = [k for k, v in values.items() if len(v) > 1 and k not in IGNORED | UNNAMED]
    return sorted(differing, key=lambda k: (not k.startswith(LABEL_FIRST), "name" not in k))


def _shorten(value: Any) -> str:
    """Cut the middle out of a long value: folders and lists often differ at their ends."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 24 else f"{text[:11]}…{text[-12:]}"


def _seed(run: RunReader) -> str:
    return str(run.tree.get("seed", 0))


def _rows(label: str, group: Sequence[RunReader], names: Mapping[Path, str]) -> list[Row]:
    """Return the rows of one group, each with means over its runs."""
    first, seeds, folders = group[0], list(map(_seed, group)), [names[run.path] for run in group]
    state = f"not finished: {first.rounds} of {first.settings.rounds}"
    state = "finished" if first.finished else state
    which = first.summary.get("judged", "global")  # the model that plain measures are about
    models = _join([split_models(label, result(run), which) for run in group]) or {label: {}}
    rows = [Row(n, "run", label, folders, seeds, state, v) for n, v in models.items()]

    def add(kind: Kind, tables: Sequence[Table], shown: list[str] = seeds) -> None:
        joined = _join(tables)
        rows.extend(Row(name, kind, label, seeds=shown, values=v) for name, v in joined.items())

    for name in first.summary.get("baselines", {}):
        model = config.variant("algorithm", name).result.evaluated
        results = [run.summary.get("baselines", {}).get(name, {}) for run in group]
        add("baseline", [split_models(name, each, model) for each in results])
    for key, name in {"untrained": "untrained", "initial": "as it started"}.items():
        add("untrained", [{name: run.summary.get(key, {})} for run in group])
    published = split_models("paper", numbers(first.settings.paper.get("results", {})), which)
    add("paper", [{f"{name}, its data": row for name, row in published.items()}], [])
    return rows


def _join(seeds: Sequence[Table]) -> dict[str, dict[str, Value]]:
    """Join the tables of several seeds into one."""
    joined: dict[str, dict[str, list[float]]] = {}
    for models in seeds:
        for name, row in models.items():
            for measure, value in numbers(row).items():
                joined.setdefault(name, {}).setdefault(measure, []).append(value)
    return {
        name: {measure: Value(tuple(values), len(seeds)) for measure, values in row.items()}
        for name, row in joined.items()
    }


def result(run: RunReader) -> dict[str, float]:
    """Return a run's measures; for an unfinished run, those of its last evaluation."""
    if run.finished:
        reached = {k: v for k, v in run.summary.items() if k.startswith("rounds_to")}
        return numbers(run.summary["result"] | reached)
    last: dict[str, float] = {}
    for line in run.lines():
        last = {k: v for k, v in numbers(line).items() if k.endswith("_top1")} or last
    return last


def _remarks(runs: Sequence[RunReader], names: Mapping[Path, str]) -> Iterator[str]:
    """Name what makes the numbers hard to compare."""
    data: dict[str, list[str]] = {}
    for run in runs:
        data.setdefault(_data_set(run), []).append(names[run.path])
    if len(data) > 1:
        sets = (f"{name}: {shorten_list(users, MOST_NAMES)}" for name, users in data.items())
        yield (
            "These runs use different data sets, so their accuracies cannot be compared "
            f"({'; '.join(sets)})."
        )
    if not all(run.finished for run in runs):
        yield "The numbers of a run that is not finished are those of its last evaluation."
    notes = (run.settings.paper.get("note") for run in runs)
    yield from (f"The paper's number: {note}" for note in dict.fromkeys(notes) if note)


def _data_set(run: RunReader) -> str:
    """Name a run's images."""
    data = run.settings.data
    return f"{data.name} {data.root}" if data.name in config.OWN_DATA else data.name


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries that are finite numbers."""
    return {str(k): v for k, v in row.items() if is_number(v)}
