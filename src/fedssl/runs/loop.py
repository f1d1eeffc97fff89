"""A run: the loop over rounds, in a folder, with checkpoints and baselines."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from fedssl import config
from fedssl.config import Config, plugins
from fedssl.federation.driver import RoundResult, run_round
from fedssl.runs import checkpoint, metrics
from fedssl.runs.build import Experiment, build_experiment
from fedssl.runs.callbacks import (
    Callback,
    Checkpoints,
    Evaluation,
    MetricsLog,
    Stop,
    announce_compiling,
)
from fedssl.runs.finish import finish_run, list_clients
from fedssl.runs.folder import (
    RUN,
    check_folder,
    check_kind,
    create_config,
    fix_threads,
    format_config,
    is_started,
    lock,
    remove_unfinished,
    remove_unused,
    write_config,
)
from fedssl.runs.metrics import Overhead
from fedssl.runs.progress import Progress
from fedssl.runs.validate import check_environment, describe_privacy, list_warnings
from fedssl.util.errors import TrainingError, UserError
from fedssl.util.files import explain_write_errors, make_folders, write_json
from fedssl.util.memory import explain_full_memory, is_out_of_memory
from fedssl.util.status import say, stage

Say = Callable[[str], None]
MakeCallback = Callable[[Experiment], Callback]


class Interrupted(Exception):
    """Ctrl-C or a polite kill: the checkpoint is written, the run can be resumed."""


@explain_full_memory()
def run(
    settings: Config, out: Path, resume: bool = False, callbacks: Sequence[MakeCallback] = ()
) -> dict[str, Any]:
    """Train, evaluate, and leave the run's folder; return the summary.

    Baselines (``evaluate.baselines``) are runs of their own in ``out/baselines/NAME``. They have
    none of the ``callbacks``.
    """
    settings = fix_threads(settings, out)
    configs = {out: settings}
    for name in sorted(set(settings.evaluate.baselines) - {settings.algorithm.name}):
        configs[out / "baselines" / name] = config.with_algorithm(settings, name)
    try:  # all are checked before the first leaves anything on the disk
        experiments = {
            folder: open_run(each, folder, resume and (folder == out or is_started(folder)))
            for folder, each in configs.items()
        }
    except BaseException:
        remove_unused(out)
        raise
    with contextlib.ExitStack() as stack:
        for folder in configs:
            stack.enter_context(lock(folder))
        runs = [RunInFolder(experiments[f], configs[f], f, resume) for f in configs]
        runs[0].callbacks = [make(experiments[out]) for make in callbacks]
        summaries = execute(runs)
    summary = summaries.pop(out)
    if summaries:
        summary["baselines"] = {folder.name: row["result"] for folder, row in summaries.items()}
        write_json(out / "summary.json", summary)
    return summary


def open_run(settings: Config, out: Path, resume: bool) -> Experiment:
    """Build a run for a folder that is free, or that holds the same run if it is resumed."""
    check_environment(settings, out)
    check_folder(settings, out, resume)
    overhead = Overhead()
    with plugins.translate_errors(), overhead.timed("prepare"), stage("preparing the run"):
        experiment = build_experiment(settings)
    experiment.overhead = overhead
    if experiment.budget is not None and settings.rounds and not resume:
        experiment.budget.check()
    if resume and checkpoint.exists(out):
        clients, otherwise = list_clients(experiment), "start a new run in another folder"
        checkpoint.check_images(out, settings.data, experiment.dataset, otherwise, clients)
    return experiment


class RunInFolder:
    """A run in its folder: its configuration is written, its checkpoint is read."""

    def __init__(self, experiment: Experiment, settings: Config, out: Path, resume: bool) -> None:
        self.experiment, self.settings, self.out = experiment, settings, out
        self.callbacks: list[Callback] = []  # the user's, which may add to a round's metrics
        with explain_write_errors("--out", out):
            make_folders(out)
            check_kind(out, resume and is_started(out), RUN)  # another may have come first
            if not is_started(out):
                create_config(settings, out)
        experiment.engine.open(out)
        experiment.engine.states.files = checkpoint.ClientFiles(out, experiment)
        experiment.record.config = format_config(settings)
        has_checkpoint = resume and checkpoint.read(out, experiment)
        metrics.read_rounds(out, experiment.server.round, experiment.record.metrics)
        if experiment.budget is not None:
            experiment.budget.about = str(out.absolute())
            experiment.budget.resume()
        # Nothing is changed before all was checked.
        with explain_write_errors("--out", out):
            remove_unfinished(out)
            write_config(settings, out)
            if not has_checkpoint:
                write_json(out / "clients.json", list_clients(experiment))
        if resume and not has_checkpoint and (out / metrics.FILE).exists():
            say(f"fedssl: no checkpoint in {out}: it starts at round 1")
        if experiment.server.round < settings.rounds:  # a finished run may get more rounds
            (out / "summary.json").unlink(missing_ok=True)

    def train(self, stop: Stop, log: MetricsLog) -> None:
        """Run the rounds that are left, where the engine's transport is open."""
        experiment, rounds = self.experiment, self.settings.rounds
        label = plugins.short_name(self.settings.algorithm.name)
        bar = Progress(label, rounds, experiment.server.round)
        checkpoints = Checkpoints(experiment, self.out, stop)
        guard = experiment.guard
        others: tuple[Callback, ...] = (Evaluation(experiment), guard, *self.callbacks)
        others += (log, checkpoints, bar)

        def work() -> None:
            experiment.server.public = experiment.public
            stop.server = experiment.server
            idle = config.find_idle_keys(self.settings)
            for warning in (*idle, *list_warnings(experiment), *self._describe_budget()):
                bar.say(warning)
            if not (self.out / checkpoint.FILE).exists():
                checkpoints.write()  # one to go back to, from the first round on
            if experiment.server.round < rounds:
                with announce_compiling(experiment, bar):
                    run_rounds(experiment, self.out, others, stop, bar.say)
            if rounds and all(line.get("skipped") for line in metrics.read(self.out)):
                problem = f"all {rounds} rounds were skipped, so nothing was trained"
                raise TrainingError(problem, f"{self.out / metrics.FILE} says why")
            experiment.engine.rest()

        with contextlib.closing(bar):  # also if the engine cannot start
            experiment.engine.drive(work)

    def _describe_budget(self) -> Iterator[str]:
        """Say what noise will spend, or refuse a first round that is not possible."""
        budget, left = self.experiment.budget, self.settings.rounds - self.experiment.server.round
        if budget is not None and left > 0:
            if not self.experiment.server.round:
                budget.check()
            yield from budget.describe(left)


def execute(runs: Sequence[RunInFolder]) -> dict[Path, dict[str, Any]]:
    """Train and finish runs one after another; return their summaries by folder."""
    with contextlib.ExitStack() as stack:
        logs = [MetricsLog(run.experiment, run.settings, run.out) for run in runs]
        for log in logs:
            stack.callback(log.close)
        if note := describe_privacy(runs[0].experiment):  # once: baselines have the same clients
            say(note)
        with _stop_on_signals() as stop, plugins.translate_errors(can_resume=True):
            for run, log in zip(runs, logs, strict=True):
                run.train(stop, log)
        summaries = {run.out: finish_run(run.experiment, run.out) for run in runs}
        for run, log in zip(runs, logs, strict=True):
            log.finish(summaries[run.out])
    return summaries


def run_rounds(
    experiment: Experiment, out: Path, callbacks: Sequence[Callback], stop: Stop, say: Say
) -> None:
    """Run all rounds that are left."""
    server, rounds, budget = experiment.server, experiment.config.rounds, experiment.budget
    while server.round < rounds:
        if budget is not None and not budget.reserve():
            say(budget.describe_stop(server.round))
            return
        try:
            line = run_one_round(experiment, out, say)
        finally:
            if budget is not None:
                budget.settle()
        for callback in callbacks:
            callback.after_round(line)
        if stop.requested and server.round < rounds:
            raise Interrupted


def run_one_round(experiment: Experiment, out: Path, say: Say) -> dict[str, Any]:
    """Run one round; return its line of metrics."""
    server, started = experiment.server, time.perf_counter()
    if experiment.trainer.watched:
        experiment.trainer.watched.clear()  # the last round's local models
    cohort = experiment.engine.cohort(experiment.draw_cohort(server.round), server.round)
    try:
        done = run_round(experiment.algorithm, server, cohort)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise _describe_memory(experiment, out) from None
    if done.skipped is not None:
        say(f"round {done.number} skipped: {done.skipped}")
    for warning in done.warnings:
        say(f"round {done.number}: {warning}")
    for client, fault in done.faults.items():
        say(f"round {done.number}: no reply of {experiment.names[client]}: {fault}")
    experiment.draw_cohort(server.round)  # while a GPU is at work: reading the loss waits for it
    # Where clients are seen only through noise, no loss leaves them.
    loss = None if done.loss is None else float(done.loss)
    if loss is not None and not math.isfinite(loss):
        problem = f"round {done.number}: the loss is {loss}"
        raise checkpoint.describe_divergence(problem, experiment, out)
    return _make_line(experiment, done, loss, time.perf_counter() - started)


def _make_line(
    experiment: Experiment, done: RoundResult, loss: float | None, seconds: float
) -> dict[str, Any]:
    faults = {str(client): fault for client, fault in done.faults.items()}
    return {
        "round": done.number,
        "loss": loss,
        "seconds": round(seconds, 6),
        "images": experiment.engine.count_images(done),
        "clients": len(done.asked),
        "missing": done.missing,
        "skipped": done.skipped is not None,
        **({"faults": faults} if faults else {}),
        **count_bytes(done),
        **experiment.engine.aggregator.compute_privacy(),
        **{name: float(value) for name, value in done.log.items() if name != "loss"},
        **{name: {str(k): v for k, v in each.items()} for name, each in done.client_log.items()},
    }


def count_bytes(done: RoundResult) -> dict[str, Any]:
    """Count bytes over all clients, for one that took part in every exchange, and by exchange."""
    moved, clients = done.traffic, len(done.asked)
    exchanges = moved.by_exchange()
    one = {
        way: round(sum(metrics.for_one(each, way, clients) for each in exchanges.values()))
        for way in ("up", "down")
    }
    return {
        "bytes_up": sum(moved.up.values()),
        "bytes_down": sum(moved.down.values()),
        "bytes_up_per_client": one["up"],
        "bytes_down_per_client": one["down"],
        "exchanges": exchanges,
    }


def _describe_memory(experiment: Experiment, out: Path) -> UserError:
    """Return the error of a full device. A run keeps its batch, so that takes a new run."""
    settings, device = experiment.config, experiment.trainer.device
    chunk, batch = settings.engine.chunk, settings.algorithm.batch
    now = "all images of a client" if batch is None else batch
    fix = f"Lower algorithm.batch (now {now}) and start a new run in another folder."
    merges = experiment.engine.merges
    if merges:
        fix = f"Lower engine.chunk (now {chunk}). {checkpoint.describe_kept(out)}."
    return UserError("out of memory", key="device", value=device, fix=fix, can_resume=merges)


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[Stop]:
    """Note that the user asks to stop; asking twice, or during preparation, stops at once."""
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_immediate:
            raise KeyboardInterrupt
        stop.requested = True
        say("Stopping after this round. Press Ctrl-C again to stop at once.")

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        before = [signal.signal(number, handle) for number in numbers]
    except ValueError:  # not the main thread: the caller keeps the signals
        yield stop
        return
    try:
        yield stop
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
