"""Run every cell of a paper's table, and show what came out beside what the paper prints."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedssl import __version__, config
from fedssl.config import Config
from fedssl.evaluate.registry import check_holdout, find_chooser
from fedssl.runs import loop, metrics, sweep
from fedssl.runs.reader import read_json
from fedssl.training.trainer import precision_on
from fedssl.util.device import name_device, pick_device
from fedssl.util.errors import TrainingError, UserError, resume_hint
from fedssl.util.files import explain_write_errors, write_text
from fedssl.util.text import align_columns, name_measure

ROOT = Path("runs") / "reproduce"
# Keys that may differ between a finished run and the one that is asked for.
SAME_RUN = config.keys_affecting(config.Config, "nothing", "speed", "location")
# Keys in which a result may differ and still be compared with the paper's.
COMPARABLE = SAME_RUN | config.keys_affecting(config.Config, "rounding", "monitoring") | {"seed"}

BOTH_MODELS = {"per-client_global_top1", "per-client_personal_top1"}
# What a run says of itself.
SAID = ("device", "precision", "seconds", "overhead", "images_per_second", "torch", "fedssl")
TABLE = "table.jsonl"  # in a table's folder: a line for each of its runs
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
    def label(self) -> str:
        """Its name on the screen."""
        return " ".join(filter(None, (self.name, self.choice)))

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
        return read_json(self.folder / "summary.json", {}) or None

    @property
    def failed(self) -> bool:
        """Whether its table's file says that it diverged."""
        return "failed" in _lines(self).get((self.name, self.choice), {})

    @cached_property
    def chooser(self) -> str:
        """The measure that rounds and values are chosen by; empty: nothing is chosen."""
        return find_chooser(self.settings.evaluate)

    @cached_property
    def candidates(self) -> list[Mapping[str, Any]]:
        """The rounds that may count, the last one first; others must have all of its numbers."""
        summary = self.summary() or {}
        end = {**summary, "round": summary.get("rounds", 0)}
        if self.chooser not in summary:
            return [end]
        before = [line for line in metrics.read(self.folder) if line["round"] < end["round"]]
        whole = [line for line in before if summary["result"].keys() <= line.keys()]
        return [end, *({**summary, **line} for line in reversed(whole))]

    @cached_property
    def judged(self) -> Mapping[str, Any]:
        """The numbers of the round that counts: the last, or the best on held-out images."""
        return max(self.candidates, key=lambda line: line.get(self.chooser, 0.0))

    @property
    def heldout(self) -> float | None:
        """Its accuracy on held-out images; none: nothing is chosen."""
        return self.judged.get(self.chooser)

    @property
    def tops(self) -> list[str]:
        """Every accuracy of the result but those that choose."""
        found = [m for m in (self.summary() or {}).get("result", {}) if m.endswith("_top1")]
        return [m for m in found if not self.chooser or not m.endswith(self.chooser)]

    def record(self, commit: str | None = None, failed: str = "") -> dict[str, Any]:
        """A line of table.jsonl: what was measured, and everything it depends on."""
        summary = self.summary() or {}
        values = config.flatten(config.to_tree(self.settings))
        ours = dict.fromkeys((*self.measures, *self.tops))
        said = _so_far(self) if failed else summary
        return {
            "recipe": self.name,
            "choice": self.choice,
            "row": self.published.paper.get("row", self.published.about),
            "ours": {m: self.judged[m] for m in ours if m in self.judged},
            "untrained": summary.get("untrained", {}),
            **({"failed": failed} if failed else {}),
            "round": self.judged["round"],
            "heldout": self.heldout,
            "last": {m: summary[m] for m in ours if m in summary},
            "paper": self.paper,
            "note": self.published.paper.get("note", ""),
            "rounds": self.settings.rounds,
            "paper_rounds": self.published.rounds,
            "data": described(self.settings.data),
            "paper_data": self.published.data.name,
            "changed": {key: values.get(key) for key in self.changed},
            **{key: said.get(key) for key in SAID},
            "seed": self.settings.seed,
            "command": self.command,
            "date": self.date,
            "commit": commit,
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
        return self.tops[:1]

    @property
    def date(self) -> str:
        """When the run came to its end; today where it has not."""
        path = self.folder / "summary.json"
        end = time.localtime(path.stat().st_mtime if path.exists() else None)
        return time.strftime("%Y-%m-%d", end)


def plan(pattern: str, words: Sequence[str], scale: str, out: Path | None) -> list[Job]:
    """What there is to run; refuses, before the first run, whatever can be refused cheaply."""
    share = _scale(scale)
    root = out or (ROOT if share == 1 else ROOT / f"scale-{share:g}")
    jobs = []
    for name in config.match_recipes(pattern):
        recipe = config.read_recipe(name)
        try:
            tree = config.apply_words(recipe, words)
            for choice, settings in _choices(tree).items():
                command = _command(name, words, share, _values(settings, config.find_sweep(tree)))
                own = scaled(settings, share)
                place = (*_place(name), own, config.resolve(recipe), root, command, choice)
                jobs.append(Job(name, *place))
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    for job in jobs:
        _check_folder(job)
    return jobs


def _choices(tree: config.Recipe) -> dict[str, Config]:
    """A run for each combination of the lists' values; what chooses among them is no test image."""
    lists = config.find_sweep(tree)
    found = sweep.list_runs(tree) if lists else {"": config.build(tree)}
    for key, values in lists.items():
        if key == "seed":
            raise UserError(f"seed={values}: a seed is not chosen; run each, with its own --out")
        if not all(find_chooser(settings.evaluate) for settings in found.values()):
            raise UserError(
                f"{key}={values}: one of several values is chosen on held-out images; set "
                "data.holdout=0.1, and add heldout@10% to evaluate.protocols"
            )
    for settings in found.values():
        check_holdout(settings.evaluate, settings.data.holdout)
    return found


def _values(settings: Config, keys: Iterable[str]) -> dict[str, str]:
    """Some of a run's settings, as words that say them."""
    values = config.flatten(config.to_tree(settings))
    plain = {key: values.get(key) for key in keys}
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in plain.items()}


def _command(name: str, words: Sequence[str], share: float, own: Mapping[str, str]) -> str:
    """What does one run of these again, with its ``own`` values, wherever the images are."""
    given = {**dict(word.split("=", 1) for word in words), **own}
    if "data.root" in given:
        given["data.root"] = "DIR"
    scale = [] if share == 1 else ["--scale", f"{share:g}"]
    plain = [f"{key}={text}" for key, text in given.items()]
    return shlex.join(["fedssl", "reproduce", name, *scale, *plain])


def described(data: config.Data) -> str:
    """What the images are, as their folder says it; without a word there, the data set's name."""
    about = Path(data.root or "").expanduser() / ABOUT
    if data.root is None or not about.is_file():
        return data.name
    return " ".join(about.read_text(encoding="utf-8").split())


def work(jobs: Sequence[Job]) -> list[Job]:
    """Run what is not finished; a run that diverges is said and passed over. Returns those."""
    begun = {job.folder: job.settings for job in jobs if _started(job)}
    waiting = {job.label: job.settings for job in jobs if job.summary() is None}
    sweep.check_same_images(begun, sweep.check_runs(waiting))
    sweep.update_all_places(begun)
    failed, commit = [], _commit()
    for number, job in enumerate(jobs, 1):
        label = f"[{number}/{len(jobs)}] {job.label}"
        if job.summary() is not None:
            print(f"{label}: finished before", file=sys.stderr)
            _write(job, _lines(job).get((job.name, job.choice), {}).get("commit"))
            continue
        print(label, file=sys.stderr)
        try:
            with resume_hint("Then call it again, and it continues."):
                loop.run(job.settings, job.folder, resume=_started(job))
        except TrainingError as error:
            print(f"{label}: {error}", file=sys.stderr)
            failed.append(job)
            # Without the next sentence, which says where the run is on this machine.
            _write(job, commit, str(error).partition(". ")[0])
        else:
            _write(job, commit)
    return failed


def _so_far(job: Job) -> dict[str, Any]:
    """What a run that failed can say of itself, as a summary says it."""
    device = pick_device(job.settings.device)
    return {
        **(metrics.totals(job.folder, {}) if any(metrics.read(job.folder)) else {}),
        "device": name_device(device),
        "precision": precision_on(device, job.settings.precision),
        "torch": torch.__version__,
        "fedssl": __version__,
    }


def _commit() -> str | None:
    """The commit of the code that runs; none: it is no checkout of fedssl."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[1]), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # not installed below another's
        dirty = "-dirty" if git("status", "--porcelain", ".") else ""
        return git("rev-parse", "--short", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return None


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
        known = config.find_table(group[0].name)
        head = name or "recipes" if known is None else f"{known.title}: {known.about}"
        folder = str(group[0].root / name)
        chosen = [line for job in group for line in _chosen(job, jobs)]
        given = [f"with {' '.join(words)}"] if words else []
        blocks.append("\n".join([head, _grid(group), *_caption(group), *chosen, *given, folder]))
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
    return align_columns([["ours (paper's)", *columns], *body])


def _label(job: Job, measure: str) -> str:
    """A measure's name where the column alone does not say what is meant."""
    return "" if job.column and len(job.measures) < 2 else name_measure(measure)


def _cell(job: Job, measure: str) -> str:
    """Only what was measured: a run that came to no end has no number."""
    numbers = job.judged
    if job.summary() is None:
        ours = "failed"
    elif numbers.get(measure) is None:  # an accuracy that was never looked for is not there
        ours = "not reached" if measure in numbers else "–"
    else:
        ours = f"{numbers[measure]:.0f}" if "rounds_to" in measure else f"{numbers[measure]:.2f}"
    return f"{ours} ({job.paper.get(measure, '–')})"


def _caption(jobs: Sequence[Job]) -> list[str]:
    """In what these runs differ from the paper's."""
    reasons = [
        *_unlike(jobs, lambda s: s.rounds, "scaled: {} of {} rounds"),
        *_unlike(jobs, lambda s: s.data.name, "data {} for {}"),
    ]
    other = dict.fromkeys(k for j in jobs for k in j.changed if k not in ("rounds", "data.name"))
    if other:
        reasons.append("other " + ", ".join(other))
    return [f"{'; '.join(reasons)}: not comparable with the paper's numbers"] if reasons else []


def _chosen(job: Job, jobs: Sequence[Job]) -> Iterable[str]:
    """Which value and which round are shown; called chosen only where there was another."""
    if job.heldout is None:
        return
    values = sum(other.name == job.name and other.heldout is not None for other in jobs)
    which = f"round {job.judged['round']}" if len(job.candidates) > 1 else ""
    why = f"chosen on held-out images ({job.heldout:.2f})" if which or values > 1 else ""
    said = ", ".join(filter(None, (job.choice, which, why)))
    if said:
        yield f"{job.name}: {said}"


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
    table = config.find_table(name)
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
    """A folder that holds a run holds this one; ``work`` compares images that were moved."""
    if not _started(job):
        return
    before = config.with_absolute_paths(config.build(config.read_yaml(job.folder / "config.yaml")))
    now = config.with_absolute_paths(job.settings)
    for key in _differences(before, now, SAME_RUN):
        old, new = (config.flatten(config.to_tree(c)).get(key) for c in (before, now))
        raise UserError(
            f"{key}={new}: the run in {job.folder} has {old}; choose another folder with --out, "
            "or remove that one"
        )


def _differences(a: Config, b: Config, free: Set[str]) -> list[str]:
    """Keys in which two configurations differ, but for those that do not matter."""
    left, right = (config.flatten(config.to_tree(c)) for c in (a, b))
    return [key for key in {**left, **right} if left.get(key) != right.get(key) and key not in free]


def _lines(job: Job) -> dict[tuple[str, str], dict[str, Any]]:
    """What its table's file has, by recipe and choice."""
    path = job.root / job.table / TABLE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            found[row["recipe"], row.get("choice", "")] = row
        except (ValueError, LookupError, TypeError):
            raise UserError(
                f"{path}: line {number} is no run's; mend it or remove it: finished runs are "
                "written there again"
            ) from None
    return found


def _write(job: Job, commit: str | None, failed: str = "") -> None:
    """Put a run's line into its table's file, in the place of an older one."""
    rows = _lines(job) | {(job.name, job.choice): job.record(commit, failed)}
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values())
    path = job.root / job.table / TABLE
    with explain_write_errors("--out", job.root):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
