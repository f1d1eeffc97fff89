"""Runs beside each other: the rows of the comparison, and ``fedssl compare``, which prints them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedssl import config
from fedssl.config import plugins
from fedssl.runs.metrics import is_number
from fedssl.runs.record import Run, opened, section
from fedssl.runs.result import split_models
from fedssl.util.text import NOT_PERCENT, align_columns, name_measure

Kind = Literal["run", "baseline", "untrained", "paper"]
# Two runs that differ in nothing else are the same experiment.
APART = config.keys_affecting(config.Config, "nothing", "speed") | {"seed"}
OWN = ("folder", "paired")  # data that only its folder tells from others
TELLING = ("data.", "objective.", "partition.", "rounds", "algorithm.", "encoder.")


@dataclass(frozen=True)
class Value:
    """A measure over the seeds of a row."""

    each: tuple[float, ...]
    of: int = 0  # seeds in all; some may not have it

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.each) if len(self.each) > 1 else self.each[0]

    @property
    def spread(self) -> float | None:
        """The standard deviation of a sample; none for one seed."""
        return statistics.stdev(self.each) if len(self.each) > 1 else None


@dataclass
class Row:
    """One model, or several that differ only in their seed."""

    name: str
    kind: Kind
    label: str  # what tells its runs from the others
    runs: list[str] = field(default_factory=list)
    seeds: list[str] = field(default_factory=list)
    state: str = ""
    values: dict[str, Value] = field(default_factory=dict)

    @property
    def about(self) -> list[str]:
        """Runs, seeds and state, as cells."""
        return [_some(self.runs) or "–", _in_short(self.seeds) or "–", self.state or "–"]


@dataclass(frozen=True)
class Comparison:
    """The rows, and what a reader must know before comparing them."""

    rows: list[Row]
    remarks: list[str]

    @property
    def measures(self) -> list[str]:
        """All measures that any row has, in their order."""
        return list(dict.fromkeys(m for row in self.rows for m in row.values))


def table(runs: Sequence[str | Path]) -> str:
    """Runs as a table for the terminal, with what makes them hard to compare below it."""
    found = compare(opened(runs))
    head = ["", "runs", "seeds", "state", *map(name_measure, found.measures)]
    body = [
        [row.name, *row.about, *(text(m, row.values.get(m)) for m in found.measures)]
        for row in found.rows
    ]
    aligned = align_columns([[_one_line(cell) for cell in cells] for cells in (head, *body)])
    return "\n\n".join([aligned, *map(_one_line, found.remarks)])


def _one_line(text: str) -> str:
    """A cell as it can stand in a line: a folder's name may hold anything."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def text(measure: str, value: Value | None) -> str:
    """A cell: mean ± standard deviation, and of how many seeds where some have no such number."""
    if value is None:
        return "–"
    some = f" ({len(value.each)} of {value.of})" if len(value.each) < value.of else ""
    if measure.startswith("rounds_to"):
        return f"{value.mean:.0f}{some}"
    digits, unit = (2, "") if measure in NOT_PERCENT else (1, " %")
    spread = "" if value.spread is None else f" ± {value.spread:.{digits}f}"
    return f"{value.mean:.{digits}f}{spread}{unit}{some}"


def compare(runs: Sequence[Run]) -> Comparison:
    """The rows of runs, of their baselines and of untrained networks, and the papers' numbers."""
    groups, named = list(_groups(runs).values()), names(runs)
    rows: list[Row] = []
    labels = _labels([group[0] for group in groups], named)
    for label, group in zip(labels, groups, strict=True):
        rows += [row for row in _rows(label, group, named) if not _known(row, rows)]
    titles = [row.name for row in rows]
    for row in rows:
        if row.kind != "run" and titles.count(row.name) > 1:
            row.name += f" ({row.label})"
    order: tuple[Kind, ...] = ("run", "baseline", "untrained", "paper")
    remarks = list(_remarks(runs, named))
    if any(len(value.each) < value.of for row in rows for value in row.values.values()):
        remarks.append("(1 of 3): of three seeds only one has this number.")
    return Comparison(sorted(rows, key=lambda row: order.index(row.kind)), remarks)


def names(runs: Sequence[Run]) -> dict[Path, str]:
    """Each run's folder by its name, with those above it as far as two have the same."""
    places = {run.path: run.path.resolve().parts for run in runs}
    found: dict[Path, str] = {}
    for path, own in places.items():
        others, depth = {other for other in places.values() if other != own}, 1
        while depth < len(own) and any(other[-depth:] == own[-depth:] for other in others):
            depth += 1
        found[path] = str(Path(*own[-depth:]))
    return found


def _known(row: Row, rows: Iterable[Row]) -> bool:
    """Whether what every run repeats (an untrained network, a paper's number) stands there."""
    same = (other for other in rows if other.kind == row.kind != "run")
    return any(other.values == row.values and other.name == row.name for other in same)


def _groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ only in their seed, together; the same seed twice is two rows."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        keys = {k: v for k, v in config.flat(run.tree).items() if k not in APART}
        own, copy = json.dumps(keys, sort_keys=True, default=str), 0
        own += "" if run.finished else f" {run.path}"  # a mean over seeds is one of finished runs
        while any(_seed(run) == _seed(o) for o in groups.get(f"{own}{copy}", ())):
            copy += 1
        groups.setdefault(f"{own}{copy}", []).append(run)
    return groups


def _labels(firsts: Sequence[Run], named: Mapping[Path, str]) -> list[str]:
    """What tells each group from the others: its algorithm, and as few other keys as it takes."""
    flat = [config.flat(run.tree) for run in firsts]
    labels = [plugins.short_name(str(own.get("algorithm.name", "a run"))) for own in flat]
    for key in _telling(flat):
        if len(set(labels)) == len(labels):
            return labels
        said = [f", {key}={_short(own[key])}" if own.get(key) is not None else "" for own in flat]
        longer = [label + more for label, more in zip(labels, said, strict=True)]
        if len(set(longer)) > len(set(labels)):
            labels = longer
    twice = {label for label in labels if labels.count(label) > 1}
    each = zip(labels, firsts, strict=True)
    return [f"{label}, {named[run.path]}" if label in twice else label for label, run in each]


def _telling(flat: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that are not the same in all, those that people ask for first."""
    keys = dict.fromkeys(k for own in flat for k in own)
    skipped = APART | config.keys_affecting(config.Config, "evaluation", "monitoring")
    skipped |= {"algorithm.name"}
    found = [
        k
        for k in keys
        if k not in skipped | {"algorithm.name"}
        and len({json.dumps(o.get(k), default=str) for o in flat}) > 1
    ]
    return sorted(found, key=lambda k: (not k.startswith(TELLING), "name" not in k))


def _short(value: Any) -> str:
    """Folders and lists differ at their end as often as at their start."""
    said = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return said if len(said) <= 24 else f"{said[:11]}…{said[-12:]}"


def _seed(run: Run) -> str:
    return str(run.tree.get("seed", 0))


def _rows(label: str, group: Sequence[Run], named: Mapping[Path, str]) -> list[Row]:
    """The rows of one group, each a mean over its runs."""
    first, seeds = group[0], [_seed(run) for run in group]
    folders, own = [named[r.path] for r in group], " and ".join(dict.fromkeys(map(state, group)))
    rows = [
        Row(name, "run", label, folders, seeds, own, values)
        for name, values in _joined([_models(label, run) for run in group]).items()
    ] or [Row(label, "run", label, folders, seeds, own)]
    for name in section(first.summary, "baselines"):
        of = [section(section(run.summary, "baselines"), name) for run in group]
        found = _joined([split_models(name, each, _judges(name)) for each in of])
        rows += [Row(n, "baseline", label, seeds=seeds, values=v) for n, v in found.items()]
    for key, name in {"untrained": "untrained", "initial": "as it started"}.items():
        found = _joined([{name: section(run.summary, key)} for run in group])
        rows += [Row(n, "untrained", label, seeds=seeds, values=v) for n, v in found.items()]
    published = numbers(section(section(first.tree, "paper"), "results"))
    found = _joined([split_models("paper", published, judged(first))])
    return rows + [Row(f"{n}, its data", "paper", label, values=v) for n, v in found.items()]


def _joined(tables_: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, Value]]:
    """The same tables of several seeds as one table of values."""
    joined: dict[str, dict[str, list[float]]] = {}
    for table_ in tables_:
        for name, row in table_.items():
            for measure, value in numbers(row).items():
                joined.setdefault(name, {}).setdefault(measure, []).append(value)
    count = len(tables_)
    return {n: {m: Value(tuple(v), count) for m, v in row.items()} for n, row in joined.items()}


def _models(label: str, run: Run) -> dict[str, dict[str, float]]:
    """The rows of a run's own result."""
    return split_models(label, result(run), judged(run))


def _judges(name: str) -> str:
    try:
        return str(config.variant("algorithm", name).judges)
    except Exception:  # an algorithm of somebody's own that is not here any more
        return "global"


def judged(run: Run) -> str:
    """Which model the plain measures are about."""
    return "personal" if run.summary.get("judged") == "personal" else "global"


def result(run: Run) -> dict[str, float]:
    """A run's measures; of one that goes on, those of its last evaluation."""
    if run.finished:
        own = section(run.summary, "result")
        reached = {k: v for k, v in run.summary.items() if k.startswith("rounds_to")}
        return numbers(own or {k: v for k, v in run.summary.items() if k.endswith("_top1")}) | (
            numbers(reached)
        )
    last: dict[str, float] = {}
    for line in run.lines():
        last = {k: v for k, v in numbers(line).items() if k.endswith("_top1")} or last
    return last


def state(run: Run) -> str:
    """Whether the run is what its configuration says, in a few words."""
    if run.config is None:
        return "of another version"
    return "finished" if run.finished else f"not finished: {run.rounds} of {run.config.rounds}"


def _remarks(runs: Sequence[Run], named: Mapping[Path, str]) -> Iterable[str]:
    """What makes the numbers hard to compare."""
    data: dict[str, list[Run]] = {}
    for run in runs:
        data.setdefault(_data(run), []).append(run)
    if len(data) > 1:
        held = "; ".join(f"{d}: {_some([named[r.path] for r in own])}" for d, own in data.items())
        yield f"These runs are of different data sets, so accuracies do not compare ({held})."
    for what, own in data.items():
        places = dict.fromkeys(str(run.path.resolve().parent) for run in own)
        if len(places) > 1 and _relative(own[0]):
            yield (
                f"{what}: a relative path, in runs of different folders ({_some(list(places))}), "
                "so it may mean other images in each; the numbers compare only if it does not."
            )
    for run in runs:
        name = named[run.path]
        if run.config is None:
            yield f"{name}: its configuration is of another version of fedssl: {run.problem}"
        elif not run.finished:
            yield (
                f"{name}: not finished, round {run.rounds} of {run.config.rounds}; its numbers "
                "are those of its last evaluation."
            )
    for note in dict.fromkeys(_note(run) for run in runs):
        if note:
            yield f"The paper's number: {note}"


def _data(run: Run) -> str:
    """Which images a run is of, as far as its configuration tells."""
    own = section(run.tree, "data")
    name = str(own.get("name", "digits"))
    return f"{name} {own['root']}" if name in OWN and own.get("root") else name


def _relative(run: Run) -> bool:
    own = section(run.tree, "data")
    root = str(own.get("root") or "/")
    return own.get("name") in OWN and not Path(root).expanduser().is_absolute()


def _note(run: Run) -> str:
    return str(section(run.tree, "paper").get("note") or "")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _in_short(seeds: Sequence[str]) -> str:
    """Seeds that follow each other as a span."""
    numbers = sorted(int(seed) for seed in seeds if seed.isdecimal())
    follow = len(numbers) > 2 and numbers == list(range(numbers[0], numbers[0] + len(seeds)))
    return f"{numbers[0]}–{numbers[-1]}" if follow else ", ".join(seeds)


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are finite numbers."""
    return {str(k): v for k, v in row.items() if is_number(v)}
