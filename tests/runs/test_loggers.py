"""TensorBoard, Weights & Biases and MLflow, the last against a server of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rounds import before_round, press_ctrl_c

from fedssl.cli import main
from fedssl.runs import loggers
from fedssl.runs.loggers import Behind, Line

SMALL = [
    *("rounds=4", "cohort.size=4", "data.size=8", "objective.projector=16,8"),
    *("evaluate.protocols=[knn,linear@100]", "evaluate.every=2", "evaluate.baselines=[]"),
    *("engine.threads=1", "checkpoint.seconds=0"),
]


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


class Recorder:
    """A logger that remembers, or does worse."""

    def __init__(self, write: Any = None) -> None:
        self.got: list[Line] = []
        self.ended: list[bool] = []
        self._write = write

    def write(self, lines: Sequence[Line]) -> None:
        self.got += lines
        if self._write is not None:
            self._write()

    def close(self, finished: bool) -> None:
        self.ended.append(finished)


def use(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    monkeypatch.setattr(loggers, "installed", lambda name: name != "tensorboard")
    monkeypatch.setitem(loggers.NAMED, "wandb", lambda config, out: recorder)  # type: ignore[arg-type]


def test_tensorboard_is_always_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    assert main(["run", *SMALL, "--out", str(out)]) == 0
    board = accumulator.EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    for name in ("loss", "bytes_up"):
        written = [(event.step, event.value) for event in board.Scalars(name)]
        assert written == [(x["round"], pytest.approx(x[name])) for x in lines_of(out)]
    summary = json.loads((out / "summary.json").read_text())
    assert [e.step for e in board.Scalars("knn_top1")] == [2, 4]
    assert board.Scalars("knn_top1")[-1].value == pytest.approx(summary["knn_top1"])
    assert board.Scalars("summary/bytes_up")[0].value == pytest.approx(summary["bytes_up"])


def test_tensorboard_shows_each_round_once_after_a_resume(tmp_path: Path) -> None:
    """Rounds after the last checkpoint are run again, and what they were is forgotten."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for done, lines in ((0, [(1, 1.0), (2, 2.0), (3, 3.0)]), (1, [(2, 20.0)])):
        board = loggers.TensorBoard(tmp_path, done)
        board.write([(round, {"loss": value}) for round, value in lines])
        board.close(finished=False)
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 1.0), (2, 20.0)]


@pytest.mark.parametrize("server", ["foo://x", "/proc/nope"])
def test_a_server_that_does_not_answer_is_said_before_anything(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    said = f"MLFLOW_TRACKING_URI={server}: the server does not answer"
    assert refusal("run", *SMALL, "log=mlflow", "--out", tmp_path / "run").startswith(said)
    assert not (tmp_path / "run").exists()


def test_a_logger_that_does_not_open_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    """Facts that only the logger knows, such as a login, come up in the run's folder."""

    def refuses(config: Any, out: Path) -> Any:
        raise ConnectionError("no login")

    monkeypatch.setattr(loggers, "installed", lambda name: name != "tensorboard")
    monkeypatch.setitem(loggers.NAMED, "wandb", refuses)  # type: ignore[arg-type]
    out = tmp_path / "run"
    said = f"(no login). Correct it, or leave it out with log=[]. The run is in {out}. Then"
    assert said in refusal("run", *SMALL, "log=wandb", "--out", out)
    assert main(["run", "log=[]", "--resume", "--out", str(out)]) == 0


def test_a_logger_gets_every_round_then_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, out = Recorder(), tmp_path / "run"
    use(monkeypatch, recorder)
    assert main(["run", *SMALL, "log=[wandb,wandb]", "--out", str(out)]) == 0
    assert [round for round, _ in recorder.got] == [1, 2, 3, 4, 4] and recorder.ended == [True]
    for (_, numbers), line in zip(recorder.got, lines_of(out), strict=False):
        assert numbers["loss"] == line["loss"] and "exchanges" not in numbers
    summary = json.loads((out / "summary.json").read_text())
    assert recorder.got[-1][1]["knn_top1"] == summary["knn_top1"]
    assert recorder.got[-1][1]["summary/rounds"] == 4


def test_a_stopped_run_is_not_called_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, out = Recorder(), tmp_path / "run"
    use(monkeypatch, recorder)
    before_round(monkeypatch, 1, press_ctrl_c)
    assert main(["run", *SMALL, "log=wandb", "--out", str(out)]) == 130
    assert recorder.ended == [False] and [round for round, _ in recorder.got] == [1, 2]


def test_a_logger_that_fails_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise ConnectionError("server\ngone")

    recorder, out = Recorder(fails), tmp_path / "run"
    use(monkeypatch, recorder)
    assert main(["run", *SMALL, "log=wandb", "--out", str(out)]) == 0
    error = capsys.readouterr().err
    assert error.count("log=wandb: server gone; nothing more goes there, training goes on") == 1
    assert len(lines_of(out)) == 4 and (out / "summary.json").exists() and not recorder.ended


def test_a_logger_that_hangs_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loggers, "PATIENCE", 0.2)
    logger = Behind("mlflow", Recorder(lambda: time.sleep(3)))  # type: ignore[arg-type]
    start = time.monotonic()
    for round in range(5):
        logger.write([(round, {"loss": 1.0})])
    logger.close(True)
    assert time.monotonic() - start < 2
    assert "log=mlflow: no answer for 0.2 s" in capsys.readouterr().err


def test_a_package_that_is_missing_is_said_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    monkeypatch.setattr(loggers, "installed", lambda name: False)
    said = "log=wandb: not installed. pip install 'fedssl[wandb]'"
    assert refusal("run", *SMALL, "log=wandb", "--out", tmp_path / "run") == said
    assert "unknown (did you mean mlflow?)" in refusal("run", "log=mlfow")
    assert not (tmp_path / "run").exists()


def test_a_mere_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a folder where wandb leaves its own."""
    (tmp_path / "some_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not loggers.installed("some_folder") and loggers.installed("json")


def test_wandb_sends_nothing_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []

    def init(**given: Any) -> Any:
        opened.append(given)
        return SimpleNamespace(log=lambda numbers, step: None, finish=lambda exit_code: None)

    fake = SimpleNamespace(init=init, Settings=lambda **given: given)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(loggers, "installed", lambda name: name == "wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    out = tmp_path / "run"
    assert main(["run", *SMALL, "log=wandb", "--out", str(out)]) == 0
    monkeypatch.setenv("WANDB_MODE", "online")
    assert main(["run", "--resume", "--out", str(out)]) == 0
    assert [given["mode"] for given in opened] == ["offline", "online"]
    assert opened[0]["id"] == opened[1]["id"] and opened[0]["dir"] == str(out)
    assert opened[0]["config"]["rounds"] == 4 and os.environ["WANDB_ERROR_REPORTING"] == "false"


def test_wandb_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    out = tmp_path / "run"
    assert main(["run", *SMALL, "log=wandb", "--out", str(out)]) == 0
    (kept,) = out.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 20  # a process of wandb's own writes it
    while b"summary/bytes_up" not in kept.read_bytes():
        assert time.monotonic() < end
        time.sleep(0.1)
    assert b"knn_top1" in kept.read_bytes()


# MLflow -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that was logged without a server: its folder has the database."""
    pytest.importorskip("mlflow")
    out = tmp_path_factory.mktemp("mlflow") / "alone"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        assert main(["run", *SMALL, "rounds=2", "log=mlflow", "--out", str(out)]) == 0
    yield out


@pytest.fixture(scope="module")
def server(database: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """``mlflow server`` on a free port, with what the run without one left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"]
    store = ["--port", str(port), "--backend-store-uri", f"sqlite:///{database / 'mlflow.db'}"]
    log = (database / "server.log").open("wb")
    process = subprocess.Popen(
        [*command, *store], cwd=database, env=environment, stdout=log, stderr=log,
        start_new_session=True,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address, process, database / "server.log")
        yield address, process
    finally:
        kill(process)
        log.close()


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"mlflow server does not answer: {log.read_text()[-2000:]}")


def kill(process: subprocess.Popen[bytes]) -> None:
    """The server and its workers, which are a group of their own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_mlflow_against_a_server(
    server: tuple[str, subprocess.Popen[bytes]],
    database: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refusal: Callable[..., str],
) -> None:
    """Logged, interrupted, resumed as one run; then the server goes away in the middle of one."""
    from mlflow import MlflowClient

    address, process = server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    client, out = MlflowClient(address), tmp_path / "run"
    alone = client.get_run(json.loads((database / "mlflow.json").read_text())["run"])
    assert alone.info.status == "FINISHED" and alone.data.metrics["summary/rounds"] == 2

    with monkeypatch.context() as patch:
        before_round(patch, 2, press_ctrl_c)
        assert main(["run", *SMALL, "log=mlflow", "--out", str(out)]) == 130
    known = json.loads((out / "mlflow.json").read_text())["run"]
    assert client.get_run(known).info.status == "KILLED"
    assert main(["run", "--resume", "--out", str(out)]) == 0
    assert json.loads((out / "mlflow.json").read_text())["run"] == known
    seen = client.get_run(known)
    assert seen.info.status == "FINISHED" and seen.info.run_name == "run"
    assert seen.data.params["algorithm.name"] == "dcco" and seen.data.params["rounds"] == "4"
    history = client.get_metric_history(known, "loss")
    written = sorted((metric.step, metric.value) for metric in history)
    assert written == [(line["round"], pytest.approx(line["loss"])) for line in lines_of(out)]
    summary = json.loads((out / "summary.json").read_text())
    assert seen.data.metrics["knn_top1"] == pytest.approx(summary["knn_top1"])
    assert seen.data.metrics["linear_100_top1"] == pytest.approx(summary["linear@100_top1"])

    capsys.readouterr()
    before_round(monkeypatch, 2, lambda: kill(process))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert main(["run", *SMALL, "log=mlflow", "--out", str(tmp_path / "gone")]) == 0
    assert capsys.readouterr().err.count("log=mlflow: ") == 1
    assert len(lines_of(tmp_path / "gone")) == 4

    said = refusal("run", *SMALL, "log=mlflow", "--out", tmp_path / "never")
    assert said.startswith(f"MLFLOW_TRACKING_URI={address}: the server does not answer")
    assert not (tmp_path / "never").exists()
