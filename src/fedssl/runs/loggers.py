"""Loggers beside ``metrics.jsonl``: TensorBoard always, others if ``log`` names them.

A logger is opened before the first round and gets lines of numbers by name, each with its round.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import queue
import re
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.util.errors import UserError
from fedssl.util.files import write_json

PATIENCE = 30.0  # seconds that the end of a run waits for lines still on their way
# Nothing is reported to the makers, and a server that hangs does not hang us.
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "WANDB_ERROR_REPORTING": "false",
}
_MOST_PARAMS, _MOST_METRICS, _LONGEST = 100, 1000, 500  # of one of MLflow's requests, of a value

Numbers = dict[str, float]
Line = tuple[int, Numbers]  # a round and its numbers


class Logger(ABC):
    """A place for metrics."""

    @abstractmethod
    def write(self, lines: Sequence[Line]) -> None:
        """Write the numbers of some rounds."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Close the logger: the run is finished, or it was stopped and may continue."""


class TensorBoard(Logger):
    """Write events in the folder ``tensorboard`` of the run."""

    def __init__(self, out: Path, round: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = out / "tensorboard"
        self._board = SummaryWriter(str(self._folder), purge_step=round + 1)

    def write(self, lines: Sequence[Line]) -> None:
        """Write scalars, now: TensorBoard's thread would not find a folder that is deleted."""
        for round, numbers in lines:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, round)
        self._board.flush()

    def close(self, finished: bool) -> None:
        """Close the file of events."""
        if self._folder.is_dir():
            self._board.close()


class WandB(Logger):
    """Weights & Biases, in the run's folder unless ``WANDB_MODE`` is set.

    ``wandb sync RUN/wandb/offline-run-…`` sends it later.
    """

    FILE = "wandb.json"

    def __init__(self, config: Config, out: Path) -> None:
        import wandb

        known = _known(out / self.FILE) or uuid.uuid4().hex[:8]
        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedssl"),
            name=out.resolve().name,
            id=known,
            resume="allow",
            reinit="create_new",  # baselines are runs of their own
            dir=str(out),
            mode=mode,
            config=configuration.to_tree(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        write_json(out / self.FILE, {"run": known})

    def write(self, lines: Sequence[Line]) -> None:
        """Log one step per round."""
        for round, numbers in lines:
            self._run.log(numbers, step=round)

    def close(self, finished: bool) -> None:
        """Mark a run that did not finish as failed."""
        self._run.finish(exit_code=0 if finished else 1)


class MLflow(Logger):
    """MLflow: the server of ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the run's folder."""

    FILE = "mlflow.json"

    def __init__(self, config: Config, out: Path) -> None:
        self._client = _connect(
            os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{out.resolve() / 'mlflow.db'}"
        )
        known = _known(out / self.FILE)
        self._id = known if known is not None and self._knows(known) else self._new(config, out)
        self._client.update_run(self._id, status="RUNNING")
        write_json(out / self.FILE, {"run": self._id})

    def _knows(self, run: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            self._client.get_run(run)
        except MlflowException:
            return False
        return True

    def _new(self, config: Config, out: Path) -> str:
        """Create a run with the configuration as its parameters."""
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedssl")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=out.resolve().name).info.run_id
        keys = configuration.flatten(configuration.to_tree(config))
        params = [Param(key, str(value)[:_LONGEST]) for key, value in keys.items()]
        for some in _parts(params, _MOST_PARAMS):
            self._client.log_batch(run, params=some)
        return str(run)

    def write(self, lines: Sequence[Line]) -> None:
        """Log one step per round; MLflow takes no ``@`` or ``%`` in a name."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [
            Metric(re.sub(r"[^\w\-. :/]", "_", name), float(value), now, round)
            for round, numbers in lines
            for name, value in numbers.items()
        ]
        for some in _parts(metrics, _MOST_METRICS):
            self._client.log_batch(self._id, metrics=some)

    def close(self, finished: bool) -> None:
        """Set the run's state in MLflow's list."""
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


class Behind(Logger):
    """A logger in its own thread: training neither waits for it nor fails with it."""

    def __init__(self, name: str, logger: Logger) -> None:
        self.name = name
        self._logger = logger
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()  # ``None`` is the end
        self._finished = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def write(self, lines: Sequence[Line]) -> None:
        """Queue the lines."""
        for line in lines:
            if self._thread.is_alive():
                self._lines.put(line)

    def close(self, finished: bool) -> None:
        """Wait for queued lines, but not for ever."""
        self._finished = finished
        self._lines.put(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._warn(f"no answer for {PATIENCE:g} s")

    def _work(self) -> None:
        try:
            while True:
                items = [self._lines.get()]
                while not self._lines.empty():  # a request may take longer than a round
                    items.append(self._lines.get())
                self._logger.write([line for line in items if line is not None])
                if items[-1] is None:
                    self._logger.close(self._finished)
                    return
        except Exception as error:  # of whatever the logger is made of
            self._warn(_format(error))

    def _warn(self, reason: str) -> None:
        line = f"fedssl: log={self.name}: {reason}; nothing more goes there, training goes on"
        tqdm.write(line, file=sys.stderr)


NAMED: dict[str, type[WandB] | type[MLflow]] = {"wandb": WandB, "mlflow": MLflow}


def require(config: Config) -> None:
    """Check that the loggers work, before the run leaves anything on the disk."""
    for name in config.log:
        if not installed(name):
            fix = f"pip install 'fedssl[{name}]'"
            raise UserError("not installed", key="log", value=name, fix=fix)
    if config.log:
        os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    server = os.environ.get("MLFLOW_TRACKING_URI")
    if "mlflow" in config.log and server:
        try:
            _connect(server).search_experiments(max_results=1)
        except Exception as error:
            problem = f"the server does not answer ({_format(error)})"
            fix = "Start it, set another one, or leave log out."
            raise UserError(problem, key="MLFLOW_TRACKING_URI", value=server, fix=fix) from None


def open_loggers(config: Config, out: Path, round: int) -> list[Logger]:
    """Open the loggers of a run that continues after ``round``."""
    loggers: list[Logger] = []
    if installed("tensorboard"):
        loggers.append(TensorBoard(out, round))
    for name in dict.fromkeys(config.log):  # a logger that is named twice logs once
        try:
            loggers.append(Behind(name, NAMED[name](config, out)))
        except Exception as error:
            for logger in loggers:
                logger.close(False)
            problem = f"cannot be opened ({_format(error)})"
            fix = f"Correct it, or leave it out with log=[]. The run is in {out}."
            raise UserError(problem, key="log", value=name, fix=fix, can_resume=True) from None
    return loggers


def installed(name: str) -> bool:
    """Return whether a package is installed; a folder of its name, as wandb makes it, is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _format(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _connect(server: str) -> Any:
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=server)


def _known(path: Path) -> str | None:
    """Return the logger's name of this run, if it was logged before."""
    return str(json.loads(path.read_text(encoding="utf-8"))["run"]) if path.is_file() else None


def _parts(items: list[Any], most: int) -> Iterator[list[Any]]:
    for first in range(0, len(items), most):
        yield items[first : first + most]
