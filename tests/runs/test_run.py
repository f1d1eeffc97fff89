"""Runs from the outside: files, resume to the same bits, and every way to stop early."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import refused, timeless, without_code
from rounds import before_round, interrupt, press_ctrl_c
from safetensors.torch import load_file

from fedssl import config
from fedssl.algorithms.dcco import DCCO
from fedssl.cli import main
from fedssl.engines.local import LocalCohort
from fedssl.federation.server import Server
from fedssl.runs import checkpoint, loop
from fedssl.runs import folder as run_folder
from fedssl.util.errors import TrainingError, UserError

SMALL = (
    *("rounds=6", "cohort.size=6", "data.size=8", "objective.projector=32,32,16"),
    *("evaluate.protocols=knn", "evaluate.baselines=[]", "checkpoint.seconds=0"),
    "engine.threads=1",
)


def small(*words: str) -> config.Config:
    return config.resolve(config.read_recipe(None), [*SMALL, *words])


def lines(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def same_run(a: Path, b: Path) -> bool:
    states = [load_file(folder / checkpoint.FILE) for folder in (a, b)]
    equal = states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][k], states[1][k]) for k in states[0]
    )
    return equal and timeless(a) == timeless(b)


def test_a_run_leaves_its_files(tmp_path: Path) -> None:
    out = tmp_path / "run"
    summary = loop.run(small("evaluate.baselines=fedavg", "evaluate.every=2"), out)
    assert {p.name for p in out.iterdir()} == {
        "config.yaml", "metrics.jsonl", "checkpoint", "encoder.safetensors", "encoder.json",
        "summary.json", "baselines", "tensorboard", "clients.json", "lock",
    }  # fmt: skip
    rows = lines(out)
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "bytes_up", "bytes_down", "seconds", "images", "missing"} <= rows[0].keys()
    assert "knn_top1" in rows[1] and "knn_top1" not in rows[0]
    assert rows[1]["images"] == 24
    assert rows[1]["bytes_up_per_client"] == rows[1]["bytes_up"] / 6  # type: ignore[operator]
    stored = json.loads((out / "summary.json").read_text())
    assert stored == summary
    assert stored["bytes_up"] == sum(row["bytes_up"] for row in rows)  # type: ignore[misc]
    assert stored["label_distance"] == pytest.approx(0.9, abs=0.01)  # one class of ten each
    for name in ("knn_top1", "rounds", "seconds", "images_per_second", "bytes_down"):
        assert name in stored
    assert set(stored["baselines"]) == {"fedavg"} and "knn_top1" in stored["untrained"]
    again = config.build(config.read_yaml(out / "config.yaml"))
    assert again == small("evaluate.baselines=fedavg", "evaluate.every=2")
    note = json.loads((out / "encoder.json").read_text())
    assert note["model"] == "global" and note["features"] == 96
    started = loop.run(small(f"encoder.init={out}", "rounds=0"), tmp_path / "again")
    assert started["knn_top1"] == summary["knn_top1"], "it is the encoder that was evaluated"


def test_what_a_run_spends_outside_rounds_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thing in the line after it; the last checkpoint and evaluation in the summary alone."""
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))  # a second a look
    summary = loop.run(small("rounds=3", "evaluate.every=2", "checkpoint.seconds=0"), tmp_path)
    assert [row["overhead"] for row in lines(tmp_path)] == [
        {"prepare": 1, "checkpoint": 1},
        {"checkpoint": 1, "evaluate": 1},
        {"checkpoint": 1},
    ]
    # The third evaluation looks for the reason of a result below the untrained encoder.
    assert summary["overhead"] == {"checkpoint": 4, "evaluate": 3, "prepare": 1}
    loop.run(small("rounds=3", "evaluate.every=2"), tmp_path, resume=True)  # nothing is left to do
    again = json.loads((tmp_path / "summary.json").read_text())["overhead"]
    assert again == {"checkpoint": 3, "evaluate": 3, "prepare": 2}


@pytest.mark.parametrize(
    "words",
    [
        "algorithm.name=dcco",
        "algorithm.name=fedavg server.optimizer=sgd server.momentum=0.9",
        "algorithm.name=centralized evaluate.baselines=fedavg cohort.minimum=3",
        "algorithm.name=standalone",
        "algorithm.name=standalone server.optimizer=sgd",
        "encoder.norm=batch algorithm.local_epochs=2 algorithm.batch=2 client.lr=0.01",
    ],
)
def test_resume_gives_the_same_bits(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small(*words.split())
    loop.run(settings, tmp_path / "whole")
    with monkeypatch.context() as patch:
        before_round(patch, 2, press_ctrl_c)
        with pytest.raises(loop.Interrupted):
            loop.run(settings, tmp_path / "cut")
    assert len(lines(tmp_path / "cut")) == 3
    torch.set_num_threads(2)  # what the process has does not matter: the run has its own number
    loop.run(settings, tmp_path / "cut", resume=True)
    assert same_run(tmp_path / "whole", tmp_path / "cut")
    encoders = [tmp_path / name / "encoder.safetensors" for name in ("whole", "cut")]
    assert encoders[0].read_bytes() == encoders[1].read_bytes()


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """A real process, killed for good while it works; what the checkpoint lacks is redone."""
    words, cut = ("rounds=40", "checkpoint.seconds=0.3"), tmp_path / "cut"
    victim = subprocess.Popen(
        [sys.executable, "-m", "fedssl", "run", *SMALL, *words, "--out", str(cut)],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (cut / checkpoint.FILE).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    victim.kill()
    assert victim.wait() == -signal.SIGKILL, "it was to be killed before its end"
    loop.run(small(*words), cut, resume=True)
    loop.run(small(*words), tmp_path / "whole")
    assert same_run(tmp_path / "whole", cut)


@pytest.mark.slow
def test_the_machines_number_of_threads_does_not_matter(tmp_path: Path) -> None:
    """Float32, to the bit: the process starts with one thread or with two."""
    code = (
        "import sys, torch; from fedssl import cli, report\n"
        "report.write_page_or_warn = lambda run: None\n"
        "count, words = torch.get_num_threads(), sys.argv[2:]\n"
        "for own in '12':\n"
        "    torch.set_num_threads(count)\n"
        "    out = ['--out', sys.argv[1] + own]\n"
        "    assert cli.main(['run', *words, f'engine.threads={own}', *out]) == 0\n"
    )
    words = [w for w in SMALL if "threads" not in w]
    for name, count in (("a", "1"), ("b", "2")):
        environment = {**os.environ, "OMP_NUM_THREADS": count}
        command = [sys.executable, "-c", code, str(tmp_path / name), *words]
        subprocess.run(command, env=environment, check=True)
    assert same_run(tmp_path / "a1", tmp_path / "b1")
    assert same_run(tmp_path / "a2", tmp_path / "b2")


def test_a_line_cut_short_by_a_kill_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        before_round(patch, 1, press_ctrl_c)
        with pytest.raises(loop.Interrupted):
            loop.run(small(), out)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "loss": 1.0, "seconds": 0.1}\n{"round": 4, "lo')
    loop.run(small(), out, resume=True)
    assert [row["round"] for row in lines(out)] == [1, 2, 3, 4, 5, 6]


def test_resume_before_the_first_checkpoint_starts_anew(tmp_path: Path) -> None:
    out = tmp_path / "run"
    loop.RunInFolder(loop.open_run(small(), out, resume=False), small(), out, resume=False)
    assert loop.run(small(), out, resume=True)["rounds"] == 6


def test_a_finished_run_is_left_alone_or_ends_at_once(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = loop.run(small(), out)
    before = (out / "metrics.jsonl").read_bytes()
    with refused("--out", out, "--resume"):
        loop.run(small("rounds=2"), out)
    with refused("server.lr", 0.1, "was 0.003"):
        loop.run(small("server.lr=0.1"), out, resume=True)
    with refused("--resume", says="holds no run"):
        loop.run(small(), tmp_path / "nothing", resume=True)
    assert {**loop.run(small(), out, resume=True), "overhead": {}} == {**first, "overhead": {}}
    settings = small("evaluate.protocols=knn,linear@10", "checkpoint.seconds=7")
    assert "linear@10_top1" in loop.run(settings, out, resume=True)
    assert config.build(config.read_yaml(out / "config.yaml")) == settings
    assert (out / "metrics.jsonl").read_bytes() == before


def test_of_two_that_start_at_once_in_a_folder_one_is_refused(tmp_path: Path) -> None:
    """Both saw it free; the second to write finds the first's."""
    out, settings = tmp_path / "run", (small(), small("rounds=5"))
    first, second = (loop.open_run(own, out, resume=False) for own in settings)
    loop.RunInFolder(first, settings[0], out, resume=False)
    with refused("--out", out, "holds a run"):
        loop.RunInFolder(second, settings[1], out, resume=False)
    assert config.build(config.read_yaml(out / "config.yaml")) == settings[0]


def test_a_folder_where_a_run_is_at_work_is_refused(tmp_path: Path) -> None:
    """Until that one ends, in whatever way."""
    out = tmp_path / "run"
    loop.run(small("rounds=1"), out)
    code = (
        "import sys, time; from pathlib import Path; from fedssl.runs.folder import lock\n"
        "with lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        try:
            with pytest.raises(UserError, match=rf"a run is at work there \(process {other.pid}\)"):
                loop.run(small("rounds=1"), out, resume=True)
        finally:
            other.kill()
    loop.run(small("rounds=1"), out, resume=True)


def test_a_run_holds_its_folder_while_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(self: loop.RunInFolder, *_: object) -> None:
        with refused("--out", self.out, "a run is at work there"), run_folder.lock(self.out):
            pass
        raise loop.Interrupted

    monkeypatch.setattr(loop.RunInFolder, "train", train)
    with pytest.raises(loop.Interrupted):
        loop.run(small(), tmp_path / "run")
    with run_folder.lock(tmp_path / "run"):
        pass


def test_without_locks_the_second_of_two_runs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network disks may have none, and both have found the folder free."""
    out = tmp_path / "run"

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def meanwhile(*_: object) -> bool:
        out.joinpath("config.yaml").write_text("seed: 7")
        return False

    monkeypatch.setattr("fcntl.flock", no_locks)
    monkeypatch.setattr(loop, "is_started", meanwhile)
    monkeypatch.setattr(loop, "check_kind", lambda *_: None)
    with refused("--out", out, "holds a run. Choose another folder"):
        loop.run(small(), out)
    assert (out / "config.yaml").read_text() == "seed: 7"
    assert not (out / "clients.json").exists()


@pytest.mark.parametrize("words", [[], ["seed=[0,1]"]])
def test_a_folder_of_other_runs_is_left_alone(
    words: list[str], tmp_path: Path, refusal: Callable[..., str]
) -> None:
    """fedssl compare and report would show the new run alone, or a sweep's among the others."""
    for name, file in (("conf", "config.yaml"), ("runs/a", "sweep.yaml"), ("b/x", "metrics.jsonl")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / file).touch()
    for folder, other in (("runs", "a"), ("b", "x")):
        before = sorted((tmp_path / folder).rglob("*"))
        said = f"--out {tmp_path / folder}: holds other runs ({other})."
        assert refusal("run", *SMALL, *words, "--out", tmp_path / folder).startswith(said)
        assert sorted((tmp_path / folder).rglob("*")) == before
    run_folder.check_alone(tmp_path)  # another program's configuration is no run


@pytest.mark.parametrize("words", [[], ["seed=[0]"]])
def test_ctrl_c_while_a_run_is_judged_says_how_to_go_on(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["run", *SMALL, *words, "rounds=1", "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "open_run", interrupt)
        patch.setattr("fedssl.runs.sweep.check_all", interrupt)
        assert main(command) == 130
        assert capsys.readouterr().err == "fedssl: stopped\n"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "finish_run", interrupt)
        assert main(command) == 130
    said = f"fedssl: stopped. Continue with: fedssl run --resume --out {tmp_path / 'out'}\n"
    assert capsys.readouterr().err.endswith(said)
    assert main(["run", "--resume", "--out", str(tmp_path / "out")]) == 0


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the disk be full for files above this size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_no_half_configuration(tmp_path: Path) -> None:
    for write in (run_folder.create_config, run_folder.write_config):
        with largest_file(5), pytest.raises(OSError, match="File too large"):
            write(small(), tmp_path)
        assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_compiled_runs_in_one_process_do_not_use_up_torchs_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives up when one function was compiled for eight shapes; a table has more rows."""
    without_code(monkeypatch)
    for batch in (4, 5):
        words = ("algorithm.local_steps=1", f"algorithm.batch={batch}", "rounds=1", "cohort.size=1")
        own = ("algorithm.name=fedavg", "engine.compile=on", "partition.name=iid", *words)
        settings = small(*own, "partition.clients=9")
        with torch._dynamo.config.patch(recompile_limit=1):
            loop.run(settings, tmp_path / str(batch))


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DCCO.round

    def poisoned(self: DCCO, server: Server, cohort: Any) -> None:
        if server.round == 3:
            server.weights = server.weights * torch.nan
        real(self, server, cohort)

    monkeypatch.setattr(DCCO, "round", poisoned)
    with pytest.raises(TrainingError, match=r"round 4: the loss is nan.*last good checkpoint"):
        loop.run(small(), tmp_path)
    state = load_file(tmp_path / checkpoint.FILE)
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
    monkeypatch.undo()
    assert loop.run(small(), tmp_path, resume=True)["rounds"] == 6


def test_a_checkpoint_that_cannot_be_written_keeps_the_old_one(tmp_path: Path) -> None:
    session = loop.open_run(small(), tmp_path, resume=False)
    checkpoint.write(tmp_path, session)
    before = (tmp_path / checkpoint.FILE).read_bytes()
    said = r"cannot be written .*Make room.*--resume"
    with largest_file(len(before) // 2), pytest.raises(UserError, match=said):
        checkpoint.write(tmp_path, session)
    session.server.weights = session.server.weights * torch.inf
    with pytest.raises(TrainingError, match="no longer finite"):
        checkpoint.write(tmp_path, session)
    assert (tmp_path / checkpoint.FILE).read_bytes() == before
    assert [p.name for p in (tmp_path / "checkpoint").iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ((), "Lower engine.chunk (now 8192). The last good"),
        (("algorithm.batch=2",), "Lower algorithm.batch (now 2) and start a new run in another"),
        (("engine.merge=off",), "Lower algorithm.batch (now all images of a client) and start a"),
    ],
)
def test_without_memory_it_says_what_would_help(
    words: tuple[str, ...], fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(DCCO, "round", full)
    with pytest.raises(UserError) as error:
        loop.run(small(*words), tmp_path / "run")
    assert f"device=cpu: out of memory. {fix}" in str(error.value)
    if "engine.chunk" in fix:  # as it says; of a batch it would be refused
        monkeypatch.undo()
        loop.run(small("engine.chunk=8"), tmp_path / "run", resume=True)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    loop.run(small("rounds=1"), tmp_path)
    (tmp_path / checkpoint.FILE).write_bytes(b"not a checkpoint")
    with refused(None, says=f"{tmp_path / checkpoint.FILE} is damaged"):
        loop.run(small("rounds=1"), tmp_path, resume=True)


def test_a_run_in_which_no_round_counted_fails(tmp_path: Path) -> None:
    """Its encoder would be that of the random weights."""
    for resume in (False, True):
        with pytest.raises(TrainingError, match="all 2 rounds were skipped"):
            loop.run(small("rounds=2", "cohort.dropout=0.999"), tmp_path, resume)
        assert not (tmp_path / "summary.json").exists()


def test_a_skipped_round_leaves_the_model_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, after = LocalCohort.ask, []

    def ask(self, task, payload):  # type: ignore[no-untyped-def]
        if task.name == "encode":
            after.append(payload[0].value)
        return iter(()) if self.round == 2 else real(self, task, payload)

    monkeypatch.setattr(LocalCohort, "ask", ask)
    loop.run(small("rounds=4"), tmp_path)
    rows = lines(tmp_path)
    assert [row["skipped"] for row in rows] == [False, False, True, False]
    assert rows[2]["missing"] == 6
    assert torch.equal(after[2], after[3]) and not torch.equal(after[1], after[2])
