"""Run every cell of a paper's table."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedssl import __version__, config
from fedssl.config import Config
from fedssl.evaluate.registry import check_holdout, find_chooser
from fedssl.runs import metrics
from fedssl.runs.batch import PlannedRun, check_all, name_in_errors, run_all
from fedssl.runs.folder import find_changes
from fedssl.runs.sweep import list_runs
from fedssl.training.trainer import precision_on
from fedssl.util.device import name_device, pick_device
from fedssl.util.errors import UserError, resume_hint
from fedssl.util.files import explain_write_errors, make_folders, write_text

ROOT = Path("runs") / "reproduce"
# Keys in which a result may differ and still be compared with the paper's.
COMPARABLE = {"seed"} | config.keys_affecting(
    config.Config, "nothing", "speed", "location", "rounding", "monitoring"
)
BOTH_MODELS = {"per-client_global_top1", "per-client_personal_top1"}
# Facts about a run that are copied from its summary.
COPIED = (
    *("device", "precision", "seconds", "overhead", "images_per_second"),
    *("label_distance", "torch", "fedssl"),
)
TABLE = "table.jsonl"  # in a table's folder: a line for each of its runs
ABOUT = "about.txt"  # in a data set's folder: what the data is, in one line


@dataclass(frozen=True)
class Job(PlannedRun):
    """One run of a recipe: its settings here, its settings in the paper, and its place."""

    name: str
    root: Path
    table: str  # the recipes that are shown together
    row: str
    column: str  # empty: a recipe with a file of its own
    published: Config
    command: str
    choice: str  # of the values that are searched, those of this run
    left_out: tuple[str, ...] = ()  # words with keys that this row lacks and others have
    needs: PlannedRun | None = None  # the run that trains partition.encoder

    @property
    def checkable(self) -> Config:
        """The settings, without an encoder that is not trained yet."""
        if self.needs is None or self.needs.summary() is not None:
            return self.settings
        return _with_encoder(self.settings, None)

    def after(self, run: PlannedRun) -> Job:
        """Return the same run, with the encoder that another run trains."""
        settings, published = (
            _with_encoder(each, str(run.folder)) for each in (self.settings, self.published)
        )
        return dataclasses.replace(self, settings=settings, published=published, needs=run)

    @property
    def table_file(self) -> Path:
        """The file with a line for each run of the table."""
        return self.root / self.table / TABLE

    @property
    def paper(self) -> dict[str, float]:
        """The paper's numbers by measure."""
        return dict(self.published.paper.get("results", {}))

    @cached_property
    def changed(self) -> dict[str, Any]:
        """The keys that make the result differ from the paper's, with their values."""
        changes = find_changes(self.published, self.settings, COMPARABLE)
        return {key: new for key, (_, new) in changes.items()}

    @property
    def failed(self) -> bool:
        """True if the run diverged, according to the table's file."""
        return "failed" in self.line()

    def line(self) -> Mapping[str, Any]:
        """Return the run's line of the table's file; empty if there is none."""
        return _read_lines(self.table_file).get((self.name, self.choice), {})

    @cached_property
    def chooser(self) -> str:
        """The measure that rounds and values are chosen by; empty if nothing is chosen."""
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
        """The accuracy on held-out images; ``None`` if nothing is chosen."""
        return self.judged.get(self.chooser)

    @property
    def tops(self) -> list[str]:
        """Every accuracy of the result except those that choose."""
        found = [m for m in (self.summary() or {}).get("result", {}) if m.endswith("_top1")]
        return [m for m in found if not self.chooser or not m.endswith(self.chooser)]

    def record(self, commit: str | None = None, failed: str = "") -> dict[str, Any]:
        """Return a line of table.jsonl: the measures, and everything they depend on."""
        summary = self.summary() or {}
        ours = dict.fromkeys((*self.measures, *self.tops))
        facts = _describe_failed(self) if failed else summary
        path = self.folder / "summary.json"
        end = time.localtime(path.stat().st_mtime if path.exists() else None)
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
            "data": _describe_images(self.settings.data),
            "paper_data": self.published.data.name,
            "changed": self.changed,
            **{key: facts.get(key) for key in COPIED},
            "seed": self.settings.seed,
            "command": self.command,
            "date": time.strftime("%Y-%m-%d", end),
            "commit": commit,
            "folder": str(self.folder),
        }

    @property
    def measures(self) -> list[str]:
        """The measures to compare: the paper's, or by default the first accuracy.

        With other protocols than the recipe's, all that were measured. Of personal and global
        models all that the run has are shown; the paper's number stands at the one that is
        compared.
        """
        tops, printed = self.tops, list(self.paper)
        if BOTH_MODELS & (self.paper.keys() or set(tops)):
            own = {m for m in tops if m.startswith("per-client_")}
            printed = sorted(own | self.paper.keys() if tops else BOTH_MODELS)
        if self.settings.evaluate.protocols == self.published.evaluate.protocols:
            return printed or tops[:1]
        asked = [m for m in printed if m in tops or not m.endswith("_top1")]
        return [*asked, *(m for m in tops if m not in printed)] or printed


def plan(pattern: str, words: Sequence[str], scale: str, out: Path | None) -> list[Job]:
    """List the runs of the recipes that match a pattern, and before them those that they need."""
    share = _read_scale(scale)
    root = out or (ROOT if share == 1 else ROOT / f"scale-{share:g}")
    recipes = {name: config.read_recipe(name) for name in config.match_recipes(pattern)}
    needed = _find_needed(recipes, words)
    first = dict.fromkeys(needed.values())
    recipes = {name: config.read_recipe(name) for name in first} | recipes
    left_out = _find_lacking(recipes, words)
    jobs: list[Job] = []
    for name, recipe in recipes.items():
        table, row, column = _find_place(name)
        own = [word for word in words if word not in left_out[name]]
        if name in first:  # one run for all rows, whatever they search
            swept = config.find_sweep(config.apply_words(recipe, own))
            own = [word for word in own if word.partition("=")[0].strip() not in swept]
        encoder = next((job for job in jobs if job.name == needed.get(name)), None)
        with name_in_errors(name, "recipe"):
            tree = config.apply_words(recipe, own)
            for choice, settings in _list_choices(tree, config.read_words(own)).items():
                job = Job(
                    label=f"{name} {choice}".strip(),
                    settings=scaled(settings, share),
                    folder=root / table / row / column / choice,
                    name=name,
                    root=root,
                    table=table,
                    row=row,
                    column=column,
                    published=config.resolve(recipe),
                    command=_command(name, own, share, _values(settings, config.find_sweep(tree))),
                    choice=choice,
                    left_out=left_out[name],
                )
                jobs.append(job if encoder is None else job.after(encoder))
    return jobs


def _find_needed(recipes: Mapping[str, config.Recipe], words: Sequence[str]) -> dict[str, str]:
    """Return, by recipe, the recipe of the encoder by whose features it divides images."""
    needed = {}
    for name, recipe in recipes.items():
        partition = config.apply_words(recipe, words).get("partition", {})
        uses_features = partition.get("source") == "features" and not partition.get("encoder")
        if uses_features and partition.get("encoder_recipe"):
            needed[name] = str(partition["encoder_recipe"])
    return needed


def _with_encoder(settings: Config, encoder: str | None) -> Config:
    """Return the run with another encoder for its partition."""
    assert isinstance(settings.partition, config.SourceParams)
    partition = dataclasses.replace(settings.partition, encoder=encoder)
    return dataclasses.replace(settings, partition=partition)


def _find_lacking(
    recipes: Mapping[str, config.Recipe], words: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return, by recipe, the words whose keys it lacks and another one has."""
    lacking: dict[str, list[str]] = {name: [] for name in recipes}
    trees = {name: config.apply_words(recipe, words) for name, recipe in recipes.items()}
    for word in words:
        key = word.partition("=")[0].strip()
        section = key.partition(".")[0]
        if section in config.VARIANTS and key != section:
            lacks = [
                n for n, t in trees.items() if key not in config.section_types(section, t[section])
            ]
            for name in lacks if len(lacks) < len(trees) else ():
                lacking[name].append(word)
    return {name: tuple(found) for name, found in lacking.items()}


def _list_choices(tree: config.Recipe, named: Collection[str]) -> dict[str, Config]:
    """Return a run for each combination of values; no test image may choose among them."""
    found = list_runs(tree, named, lambda note: print(f"fedssl: {note}", file=sys.stderr))
    for key, values in config.find_sweep(tree).items():
        if key in ("seed", "partition.seed"):
            fix = "Run each with its own --out."
            raise UserError("a seed is not chosen", key=key, value=values, fix=fix)
        if not all(find_chooser(settings.evaluate) for settings in found.values()):
            problem = "one of several values is chosen on held-out images"
            fix = "Set data.holdout=0.1, and add heldout@10% to evaluate.protocols."
            raise UserError(problem, key=key, value=values, fix=fix)
    for settings in found.values():
        check_holdout(settings.evaluate, settings.data.holdout)
    return found


def _values(settings: Config, keys: Iterable[str]) -> dict[str, str]:
    """Return some of a run's settings as they are written on the command line."""
    values = config.flatten(config.to_tree(settings))
    plain = {key: values.get(key) for key in keys}
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in plain.items()}


def _command(name: str, words: Sequence[str], share: float, values: Mapping[str, str]) -> str:
    """Return the command that repeats one run, with its ``own`` values."""
    given = {**dict(word.split("=", 1) for word in words), **values}
    if "data.root" in given:
        given["data.root"] = "DIR"
    scale = [] if share == 1 else ["--scale", f"{share:g}"]
    plain = [f"{key}={text}" for key, text in given.items()]
    return shlex.join(["fedssl", "reproduce", name, *scale, *plain])


def _describe_images(data: config.Data) -> str:
    """Describe the images: in the words of their folder, or by the data set's name."""
    about = Path(data.root or "").expanduser() / ABOUT
    if data.root is None or not about.is_file():
        return data.name
    return " ".join(about.read_text(encoding="utf-8").split())


def work(jobs: Sequence[Job]) -> list[Job]:
    """Run what is not finished, skip runs that diverge, and return these."""
    check_all(jobs)
    for job in jobs:
        if job.summary() is not None:
            _write(job, job.line().get("commit"))
    failed, commit = [], _commit()
    with resume_hint("Then call it again, and it continues."):
        for job, error in run_all(jobs):
            _write(job, commit, error.problem if error else "")
            failed += [job] if error else []
    return failed


def _describe_failed(job: Job) -> dict[str, Any]:
    """Return the facts about a failed run that a summary would have."""
    device = pick_device(job.settings.device)
    return {
        **(metrics.totals(job.folder, {}) if any(metrics.read(job.folder)) else {}),
        "device": name_device(device),
        "precision": precision_on(device, job.settings.precision),
        "torch": torch.__version__,
        "fedssl": __version__,
    }


def _commit() -> str | None:
    """Return the commit of the code; ``None`` if it is not a checkout of fedssl."""

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
    """Return the run with a share of its rounds and other training, and as many evaluations."""
    every = settings.evaluate.every
    evaluate = dataclasses.replace(settings.evaluate, every=every and max(1, round(every * share)))
    rounds = max(1, round(settings.rounds * share)) if settings.rounds else 0
    algorithm = settings.algorithm.scaled(share)
    return dataclasses.replace(settings, rounds=rounds, evaluate=evaluate, algorithm=algorithm)


def _read_scale(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        fix = "Use a share of the rounds, above 0 and at most 1."
        raise UserError("not a share", key="--scale", value=text, fix=fix)
    return share


def _find_place(name: str) -> tuple[str, str, str]:
    """Return table, row and column; a recipe with its own file is a row of its folder."""
    table = config.find_table(name)
    if table is None:
        folder, _, stem = name.removesuffix(".yaml").rpartition("/")
        return "" if name.endswith(".yaml") else folder, stem, ""
    row, column = name.removeprefix(table.file + "/").split("/")
    # Of a path only the file's own name: the runs go below --out, wherever the table is.
    file = Path(table.file).stem if table.file.endswith(".yaml") else table.file
    return file, row, column


def _read_lines(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Read a table's file, by recipe and choice."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    runs: dict[tuple[str, str], dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            runs[row["recipe"], row.get("choice", "")] = row
        except (ValueError, LookupError, TypeError):
            fix = "Remove it: finished runs are written there again."
            raise UserError(f"{path}: line {number} is not about a run", fix=fix) from None
    return runs


def _write(job: Job, commit: str | None, failed: str = "") -> None:
    """Write a run's line into its table's file, in place of an older one."""
    rows = _read_lines(job.table_file) | {(job.name, job.choice): job.record(commit, failed)}
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values())
    with explain_write_errors("--out", job.root):
        make_folders(job.table_file.parent)
        write_text(job.table_file, text)
