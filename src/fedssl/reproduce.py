"""Run every cell of a paper's table, and show what came out beside what the paper prints."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedssl import config, metrics, run, sweep, tables
from fedssl.config import Config
from fedssl.data import datasets
from fedssl.data.dataset import Dataset
from fedssl.errors import TrainingError, UserError
from fedssl.files import write_text
from fedssl.run import Interrupted as Interrupted
from fedssl.session import client_data

ROOT = Path("runs") / "reproduce"
# Keys that change neither what is trained nor how it is judged.
FREE = ("about", "paper", "device", "checkpoint.", "engine.chunk")
# Keys that a result may differ in and still be compared with the paper's.
COMPARABLE = (
    *FREE, "engine.", "data.root", "data.cache", "seed", "precision",
    "evaluate.every", "evaluate.monitor",
)  # fmt: skip

BOTH_MODELS = {"per-client_global_top1", "per-client_personal_top1"}
HELDOUT = "heldout@"  # measures that may choose: they never see a test image (fedssl.heldout)
SAID = ("device", "precision", "seconds", "images_per_second", "torch", "fedssl")  # by a run
ABOUT = "about.txt"  # in a data set's folder: what the data is, in one line


@dataclass(frozen=True)
class Job:
    """One run of a recipe: its settings here, its settings in the paper, and its folder."""

    name: str
    table: str  # the recipes that are shown together
    row: str
    column: str  # empty: a recipe with a file of its own
    settings: Config
    published: Config
    root: Path
    command: str
    choice: str = ""  # of the values that are searched, those of this run

    @property
    def folder(self) -> Path:
        """Where its run is."""
        return self.root / self.table / self.row / self.column / self.choice

    @property
    def paper(self) -> dict[str, float]:
        """The paper's numbers by measure."""
        return dict(self.published.paper.get("results", {}))

    @cached_property
    def changed(self) -> list[str]:
        """Keys that make the result another one than the paper's."""
        return _differences(self.published, self.settings, COMPARABLE)

    def summary(self) -> dict[str, Any] | None:
        """What the finished run reports; none: it is not finished."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    @cached_property
    def judged(self) -> tuple[int, Mapping[str, Any]]:
        """The round that counts and its numbers: the last, or the best on held-out images."""
        summary = self.summary() or {}
        end = {**summary, "round": summary.get("rounds", 0)}
        name = next((key for key in summary if key.startswith(HELDOUT)), "")
        lines = [line for line in metrics.read(self.folder) if name in line]
        best = max([end, *reversed(lines)], key=lambda line: line[name]) if name else end
        return best["round"], best

    @property
    def heldout(self) -> float | None:
        """The accuracy that rounds and values are chosen by; none: nothing is chosen."""
        numbers = self.judged[1]
        return next((numbers[key] for key in numbers if key.startswith(HELDOUT)), None)

    def record(self, failed: str = "") -> dict[str, Any]:
        """A line of table.jsonl: what was measured, and everything it depends on."""
        summary, (round, numbers) = self.summary() or {}, self.judged
        values = config.flat(config.to_tree(self.settings))
        tops = [m for m in summary.get("result", {}) if m.endswith("_top1")]
        ours = dict.fromkeys(m for m in (*self.measures, *tops) if not m.startswith(HELDOUT))
        return {
            "recipe": self.name,
            "choice": self.choice,
            "row": self.published.paper.get("row", self.published.about),
            "ours": {m: numbers[m] for m in ours if m in numbers},
            "untrained": summary.get("untrained", {}),
            **({"failed": failed} if failed else {}),
            "round": round,
            "heldout": self.heldout,
            "last": {m: summary[m] for m in ours if m in summary},
            "paper": self.paper,
            "note": self.published.paper.get("note", ""),
            "rounds": self.settings.rounds,
            "paper_rounds": self.published.rounds,
            "data": described(self.settings.data),
            "paper_data": self.published.data.name,
            "changed": {key: values.get(key) for key in self.changed},
            **{key: summary.get(key) for key in SAID},
            "seed": self.settings.seed,
            "command": self.command,
            "date": time.strftime("%Y-%m-%d"),
            "folder": str(self.folder),
        }

    @property
    def measures(self) -> list[str]:
        """What is compared; where the paper prints no number, the first accuracy there is.

        Of personal and global models both are shown; the paper's number stands at the one that is
        compared.
        """
        if BOTH_MODELS & self.paper.keys():
            return sorted(BOTH_MODELS)
        if self.paper:
            return list(self.paper)
        found = [m for m in (self.summary() or {}).get("result", {}) if m.endswith("_top1")]
        return found[:1]


def plan(pattern: str, words: Sequence[str], scale: str, out: Path | None) -> list[Job]:
    """What there is to run; refuses, before the first run, whatever can be refused cheaply."""
    share = _scale(scale)
    root = out or (ROOT if share == 1 else ROOT / f"scale-{share:g}")
    jobs = []
    for name in config.matching(pattern):
        recipe = config.read_recipe(name)
        command = _command(name, words, share)
        try:
            for choice, settings in _choices(config.merged(recipe, words)).items():
                own = scaled(settings, share)
                place = (*_place(name), own, config.resolve(recipe), root, command, choice)
                jobs.append(Job(name, *place))
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    for job in jobs:
        _check_folder(job)
    return jobs


def _choices(tree: config.Tree) -> dict[str, Config]:
    """A run for each combination of the lists' values; what chooses among them is no test image."""
    lists = config.swept(tree)
    found = sweep.runs(tree) if lists else {"": config.build(tree)}
    for key, values in lists.items():
        if key == "seed":
            raise UserError(f"seed={values}: a seed is not chosen; run each, with its own --out")
        protocols = next(iter(found.values())).evaluate.protocols or ()
        if not any(HELDOUT in spec for spec in protocols):
            raise UserError(
                f"{key}={values}: one of several values is chosen on held-out images; set "
                "data.holdout=0.1, and add fedssl.heldout:heldout@10% to evaluate.protocols"
            )
    return found


def _command(name: str, words: Sequence[str], share: float) -> str:
    """What runs one recipe of these again, wherever the images are."""
    plain = ["data.root=DIR" if word.startswith("data.root=") else word for word in words]
    scale = [] if share == 1 else ["--scale", f"{share:g}"]
    return shlex.join(["fedssl", "reproduce", name, *scale, *plain])


def described(data: config.Data) -> str:
    """What the images are, as their folder says it; without a word there, the data set's name."""
    about = Path(data.root or "").expanduser() / ABOUT
    if data.root is None or not about.is_file():
        return data.name
    return " ".join(about.read_text(encoding="utf-8").split())


def work(jobs: Sequence[Job]) -> list[Job]:
    """Run what is not finished; a run that diverges is said and passed over. Returns those."""
    check_data((job.name, job.settings) for job in jobs if job.summary() is None)
    failed = []
    for number, job in enumerate(jobs, 1):
        label = " ".join(filter(None, (f"[{number}/{len(jobs)}] {job.name}", job.choice)))
        if job.summary() is not None:
            print(f"{label}: finished before", file=sys.stderr)
            _write(job)
            continue
        print(label, file=sys.stderr)
        try:
            run.run(job.settings, job.folder, resume=_started(job))
        except TrainingError as error:
            print(f"{label}: {error}", file=sys.stderr)
            failed.append(job)
            _write(job, str(error))
        else:
            _write(job)
    return failed


def check_data(runs: Iterable[tuple[str, Config]]) -> None:
    """Refuse, before the first run, data that is not there or not to be divided as asked."""
    loaded: dict[tuple[config.Data, int], Dataset] = {}
    for name, settings in runs:
        place = (settings.data, settings.seed)
        try:
            if place not in loaded:
                loaded[place] = datasets.load(*place)
            client_data(settings, loaded[place])
        except UserError as error:
            raise UserError(f"{name}: {error}") from None


def scaled(settings: Config, share: float) -> Config:
    """The same run with a share of its rounds, judged as often in between."""
    every = settings.evaluate.every
    evaluate = dataclasses.replace(settings.evaluate, every=every and max(1, round(every * share)))
    rounds = max(1, round(settings.rounds * share)) if settings.rounds else 0
    return dataclasses.replace(settings, rounds=rounds, evaluate=evaluate)


def report(jobs: Sequence[Job], words: Sequence[str] = ()) -> str:
    """For each table: its name, ours beside the paper's, and in what they differ."""
    groups: dict[str, list[Job]] = {}
    for job in best(jobs):
        groups.setdefault(job.table, []).append(job)
    blocks = []
    for name, group in groups.items():
        known = config.table(group[0].name)
        head = name or "recipes" if known is None else f"{known.title}: {known.about}"
        folder = str(group[0].root / name)
        blocks.append("\n".join([head, _grid(group), *_caption(group, words), folder]))
    return "\n\n".join(blocks)


def best(jobs: Sequence[Job]) -> list[Job]:
    """One run of each recipe: of several, the best on held-out images."""
    found: dict[str, Job] = {}
    for job in jobs:
        before = found.setdefault(job.name, job)
        if job.summary() and (not before.summary() or (job.heldout or 0) > (before.heldout or 0)):
            found[job.name] = job
    return list(found.values())


def _grid(jobs: Sequence[Job]) -> str:
    """Rows and columns, the longer side downwards."""
    cells: dict[tuple[str, str], str] = {}
    for job in jobs:
        for measure in job.measures or [""]:
            label = ", ".join(filter(None, (job.column, _label(job, measure))))
            cells[job.row, label] = _cell(job, measure)
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    if len(columns) > len(rows):
        rows, columns = columns, rows
        cells = {(column, row): text for (row, column), text in cells.items()}
    body = [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]
    return tables.align([["ours (paper's)", *columns], *body])


def _label(job: Job, measure: str) -> str:
    """A measure's name where the column alone does not say what is meant."""
    return "" if job.column and len(job.measures) < 2 else tables.title(measure)


def _cell(job: Job, measure: str) -> str:
    """Only what was measured: a run that came to no end has no number."""
    numbers = job.judged[1]
    if job.summary() is None:
        ours = "failed"
    elif numbers.get(measure) is None:
        ours = "not reached" if measure.startswith("rounds_to") else "–"
    else:
        ours = f"{numbers[measure]:.0f}" if "rounds_to" in measure else f"{numbers[measure]:.2f}"
    return f"{ours} ({job.paper.get(measure, '–')})"


def _caption(jobs: Sequence[Job], words: Sequence[str]) -> list[str]:
    """In what these runs differ from the paper's."""
    reasons = [
        *_unlike(jobs, lambda s: s.rounds, "scaled: {} of {} rounds"),
        *_unlike(jobs, lambda s: s.data.name, "data {} for {}"),
    ]
    other = dict.fromkeys(k for j in jobs for k in j.changed if k not in ("rounds", "data.name"))
    if other:
        reasons.append("other " + ", ".join(other))
    lines = [f"{'; '.join(reasons)}: not comparable with the paper's numbers"] if reasons else []
    searched = (job for job in jobs if job.choice or job.settings.evaluate.every)
    for job in (job for job in searched if job.heldout is not None):
        chosen = ", ".join(filter(None, (job.choice, f"round {job.judged[0]}")))
        lines.append(f"{job.name}: {chosen}, chosen on held-out images ({job.heldout:.2f})")
    return lines + ([f"with {' '.join(words)}"] if words else [])


def _unlike(jobs: Sequence[Job], value: Any, text: str) -> Iterable[str]:
    pairs = dict.fromkeys((value(j.settings), value(j.published)) for j in jobs)
    return [text.format(ours, papers) for ours, papers in pairs if ours != papers]


def _scale(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"--scale={text}: expected a share of the rounds, above 0 and at most 1")
    return share


def _place(name: str) -> tuple[str, str, str]:
    """Table, row and column of a recipe; one with a file of its own is a row of its folder."""
    table = config.table(name)
    if table is None:
        folder, _, stem = name.removesuffix(".yaml").rpartition("/")
        return "" if name.endswith(".yaml") else folder, stem, ""
    row, column = name.removeprefix(table.file + "/").split("/")
    # Of a path only the file's own name: the runs go below --out, wherever the table is.
    file = Path(table.file).stem if table.file.endswith(".yaml") else table.file
    return file, row, column


def _started(job: Job) -> bool:
    return (job.folder / "config.yaml").exists()


def _check_folder(job: Job) -> None:
    """A folder that holds a run holds this one."""
    if not _started(job):
        return
    before = config.placed(config.build(config.read_yaml(job.folder / "config.yaml")))
    now = config.placed(job.settings)
    for key in _differences(before, now, FREE):
        old, new = (config.flat(config.to_tree(c)).get(key) for c in (before, now))
        raise UserError(
            f"{key}={new}: the run in {job.folder} has {old}; choose another folder with --out, "
            "or remove that one"
        )


def _differences(a: Config, b: Config, free: tuple[str, ...]) -> list[str]:
    """Keys in which two configurations differ, but for those that do not matter."""
    left, right = (config.flat(config.to_tree(c)) for c in (a, b))
    return [
        key
        for key in {**left, **right}
        if left.get(key) != right.get(key) and not key.startswith(free)
    ]


def _write(job: Job, failed: str = "") -> None:
    """Put a run's line into its table's file, in the place of an older one."""
    path = job.root / job.table / "table.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = {(row["recipe"], row.get("choice", "")): row for row in map(json.loads, lines)}
    rows[job.name, job.choice] = job.record(failed)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
