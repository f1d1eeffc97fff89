"""Show reproduced numbers beside those that a paper prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fedssl import config
from fedssl.runs.reproduce import Job
from fedssl.util.text import align_columns, name_measure


def format_tables(jobs: Sequence[Job], words: Sequence[str] = (), width: int | None = None) -> str:
    """Format each table: its name, our numbers beside the paper's, and how the runs differ."""
    groups: dict[str, list[Job]] = {}
    for job in choose_runs(jobs):
        groups.setdefault(job.table, []).append(job)
    blocks = []
    for name, group in groups.items():
        known = config.find_table(group[0].name)
        head = name or "recipes" if known is None else f"{known.title}: {known.about}"
        folder = str(group[0].root / name)
        chosen = [line for job in group for line in _chosen(job, jobs)]
        given = [f"with {' '.join(words)}"] if words else []
        given += _left_out(group)
        blocks.append(
            "\n".join([head, _grid(group, width), *_caption(group), *chosen, *given, folder])
        )
    return "\n\n".join(blocks)


def choose_runs(jobs: Sequence[Job]) -> list[Job]:
    """Return one run of each recipe; of several, the best on held-out images."""
    chosen: dict[str, Job] = {}
    for job in jobs:
        before = chosen.setdefault(job.name, job)
        if job.summary() and (not before.summary() or (job.heldout or 0) > (before.heldout or 0)):
            chosen[job.name] = job
    return list(chosen.values())


def _grid(jobs: Sequence[Job], width: int | None) -> str:
    """Align rows and columns, the longer side downwards."""
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
    return align_columns([["ours (paper's)", *columns], *body], width)


def _label(job: Job, measure: str) -> str:
    """Name the measure if the column alone is not clear."""
    is_clear = job.column and len(job.measures) < 2 and (not job.paper or measure in job.paper)
    return "" if is_clear else name_measure(measure)


def _left_out(jobs: Sequence[Job]) -> list[str]:
    """Name the rows that lack a key of the command."""
    rows: dict[str, dict[str, None]] = {}
    for job in jobs:
        for word in job.left_out:
            rows.setdefault(word, {})[job.row] = None
    return [
        f"{word}: left out for {', '.join(names)}, without this key" for word, names in rows.items()
    ]


def _cell(job: Job, measure: str) -> str:
    """Format our number and the paper's; a run that did not end has no number."""
    numbers = job.judged
    if job.summary() is None:
        ours = "failed"
    elif numbers.get(measure) is None:  # an accuracy that was never looked for is not there
        ours = "not reached" if measure in numbers else "–"
    else:
        ours = f"{numbers[measure]:.0f}" if "rounds_to" in measure else f"{numbers[measure]:.2f}"
    return f"{ours} ({job.paper.get(measure, '–')})"


def _caption(jobs: Sequence[Job]) -> list[str]:
    """Describe how these runs differ from the paper's."""
    reasons = [
        *_unlike(jobs, lambda s: s.rounds, "scaled: {} of {} rounds"),
        *_unlike(jobs, lambda s: s.data.name, "data {} for {}"),
    ]
    # Other protocols measure more or less, but measure the same.
    said = ("rounds", "data.name", "evaluate.protocols")
    other = dict.fromkeys(k for j in jobs for k in j.changed if k not in said)
    if other:
        reasons.append("other " + ", ".join(other))
    return [f"{'; '.join(reasons)}: not comparable with the paper's numbers"] if reasons else []


def _chosen(job: Job, jobs: Sequence[Job]) -> Iterable[str]:
    """Name the value and the round that are shown, and how they were chosen."""
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
