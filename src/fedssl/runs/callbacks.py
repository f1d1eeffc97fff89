"""Work beside the rounds of a run: metrics, loggers, evaluation, checkpoints, progress."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from fedssl.config import Config
from fedssl.evaluate import drift
from fedssl.federation.server import Server
from fedssl.runs import checkpoint, loggers, metrics
from fedssl.runs.build import Experiment
from fedssl.runs.folder import check_present
from fedssl.runs.progress import Progress
from fedssl.util.files import append_line, sync, write_text
from fedssl.util.status import stage

LOGGED_ROUNDS = 2000  # loggers show no more, and a point costs as much as a small round
CHECKPOINT_SHARE = 50  # at most one part in so many of a run's time goes into checkpoints


class Stop:
    """A request of the user to stop after this round, or at once while a server prepares one."""

    requested = False
    server: Server | None = None  # of the run that is under way

    @property
    def is_immediate(self) -> bool:
        """Return whether the next request stops the run at once."""
        return self.requested or (self.server is not None and self.server.is_preparing)


class Callback(Protocol):
    """Called after every round."""

    def after_round(self, line: dict[str, Any]) -> None:
        """Use the round's line of metrics, or add numbers to it."""


class Evaluation:
    """Evaluate during training (``evaluate.every``, ``monitor`` and ``drift``)."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment

    def after_round(self, line: dict[str, Any]) -> None:
        """Add the distances of local models, and the measures of the result so far."""
        config, evaluator = self.experiment.config, self.experiment.evaluator
        line |= drift.measure(self.experiment.models, evaluator)
        every, monitor, done = config.evaluate.every, config.evaluate.monitor, line["round"]
        # All protocols run at the end anyway.
        is_due = every and done % every == 0 and (monitor is not None or done < config.rounds)
        if is_due and evaluator.is_possible:
            with self.experiment.overhead.timed("evaluate"), stage("evaluating"):
                line |= evaluator.evaluate_result(self.experiment.models, monitor)


class MetricsLog:
    """Append to ``metrics.jsonl`` and to the loggers.

    Lines after the checkpoint that is resumed are dropped.
    """

    def __init__(self, experiment: Experiment, settings: Config, out: Path) -> None:
        self.experiment, self.path = experiment, out / metrics.FILE
        record, done = experiment.record, experiment.server.round
        kept = metrics.read_rounds(out, done, record.metrics)
        self._digest = hashlib.sha256(kept.encode())
        record.metrics = self._digest.hexdigest()
        write_text(self.path, kept)
        self._loggers = loggers.open_loggers(settings, out, done)
        self._every = max(1, settings.rounds // LOGGED_ROUNDS)
        self._finished = False

    def after_round(self, line: dict[str, Any]) -> None:
        """Write the round's line."""
        check_present(self.path.parent)
        overhead = self.experiment.overhead.take()
        line |= {"overhead": overhead} if overhead else {}
        text = json.dumps(line)
        append_line(self.path, text, durable=False)  # a checkpoint waits for it
        self._digest.update(f"{text}\n".encode())
        self.experiment.record.metrics = self._digest.hexdigest()
        if line["round"] % self._every == 0:
            self._log(line["round"], metrics.numbers(line))

    def finish(self, summary: dict[str, Any]) -> None:
        """Log the result at the last round, and the totals."""
        totals = {f"summary/{name}": v for name, v in metrics.numbers(summary).items()}
        self._log(summary["rounds"], metrics.numbers(summary["result"]) | totals)
        self._finished = True

    def close(self) -> None:
        """Close the loggers."""
        for logger in self._loggers:
            logger.close(self._finished)

    def _log(self, round: int, numbers: Mapping[str, float]) -> None:
        for logger in self._loggers:
            logger.write([(round, dict(numbers))])


class Checkpoints:
    """Write checkpoints now and then, at a stop, and after the last round."""

    def __init__(self, experiment: Experiment, out: Path, stop: Stop) -> None:
        self.experiment = experiment
        self.out = out
        self.stop = stop
        self._saved, self._cost = time.monotonic(), 0.0

    def after_round(self, line: dict[str, Any]) -> None:
        """Write a checkpoint if it is time."""
        config, seconds = self.experiment.config, self.experiment.config.checkpoint.seconds
        wait = seconds and max(seconds, CHECKPOINT_SHARE * self._cost)
        if config.privacy.noise is not None:
            wait = 0  # what was released must not be forgotten
        is_due = time.monotonic() - self._saved >= wait
        if is_due or self.stop.requested or line["round"] == config.rounds:
            started = time.monotonic()
            self.write()
            self._saved = time.monotonic()
            self._cost = self._saved - started

    def write(self) -> None:
        """Write a checkpoint now."""
        with self.experiment.overhead.timed("checkpoint"), stage("writing a checkpoint"):
            check_present(self.out)
            sync(self.out / metrics.FILE)
            checkpoint.write(self.out, self.experiment)


@contextlib.contextmanager
def announce_compiling(experiment: Experiment, progress: Progress) -> Any:
    """Say that compiling takes time, and hide torch's hints on intended settings."""
    trainer = experiment.trainer

    def announce() -> None:
        progress.say("compiling the training step, once: a minute or two")

    if trainer.compiles_passes:
        announce()
    if trainer.compiles or trainer.compiles_passes:
        torch.compiler.reset()  # torch gives up after eight shapes, former runs' counted in
    trainer.announce_compiling = announce  # a loss that is a plain function is never compiled
    with warnings.catch_warnings():
        for hint in ("TensorFloat32 tensor cores", "The AccumulateGrad node's stream"):
            warnings.filterwarnings("ignore", hint)
        yield
