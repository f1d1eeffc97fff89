"""Kill runs with SIGKILL, continue them, and compare the bits of what they leave.

    python benchmarks/attacks/kills.py --count 1000     random moments of a run and of its resumes
    python benchmarks/attacks/kills.py --operations     before each operation on a file

The run trains FedEMA, whose clients keep states, on images in a folder, which it decodes into a
cache. It is killed until it gets through, and must then have left the bits of a run that nobody
killed, and no temporary file. With ``--operations`` a kill also takes, at random, what was written
and not yet forced to the disk, as a power cut does.

Runs are forks of this process, so that a kill costs no start of Python.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedssl.util.tuning import shorten_thread_waits

shorten_thread_waits()  # as the command line does, before torch

import torch
from PIL import Image
from safetensors.torch import load_file

from fedssl import cli, report
from fedssl.runs import metrics

WORDS = (
    *("data.name=folder", "data.size=8", "data.levels=client,class", "partition.name=folder"),
    *("cohort.size=2", "encoder.norm=batch", "objective.name=byol", "objective.projector=[16,16]"),
    *("objective.predictor=[16,16]", "algorithm.name=fedema", "algorithm.local_epochs=1"),
    *("algorithm.batch=4", "evaluate.protocols=[knn]", "engine.threads=1", "checkpoint.seconds=0"),
    *("evaluate.baselines=[]", "encoder.name=tiny", "encoder.groups=4"),
)
KILLS = 4  # of one run, at most, before it may get through
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.chmod")
PATIENCE = 900.0  # seconds that a run may take, on a busy machine, before it counts as hanging
Spoil = Callable[[Path], None]  # prepares a child to kill itself


class Trial:
    """A run in a folder of its own, with its own cache."""

    def __init__(self, place: Path, rounds: int) -> None:
        self.out, self.cache = place / "run", place / "cache"
        self.log = place / "log.txt"
        images = place.parent / "images"
        self.words = [*WORDS, f"rounds={rounds}", f"data.root={images}", f"data.cache={self.cache}"]
        place.mkdir()

    def start(self, spoil: Spoil | None = None) -> int:
        """Start the run, or continue it, in a fork; return its process."""
        process = os.fork()
        if process:
            return process
        code = 70
        try:
            words = ["run", "--out", str(self.out)]
            is_started = (self.out / "config.yaml").exists()
            words += ["--resume"] if is_started else self.words
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if spoil is not None:
                spoil(self.out.parent)
            code = cli.main(words)
        finally:
            os._exit(code)

    def finish(self) -> None:
        """Let the run get through; fail if it cannot."""
        code, seconds = wait(self.start())
        if code != 0:
            raise SystemExit(f"exit code {code} after {seconds:.1f} s: {self.log.read_text()}")

    def result(self) -> dict[str, Any]:
        """Return what must be the same in each run."""
        out = self.out
        left = sorted(p.relative_to(out) for p in out.rglob("*") if p.is_file())
        kept = [path for path in left if path.parts[0] != "tensorboard"]
        times = {"seconds", "overhead"}
        lines = [{k: v for k, v in line.items() if k not in times} for line in metrics.read(out)]
        states = sorted((out / "checkpoint").rglob("*.safetensors"))
        return {
            "files": [str(path) for path in kept],
            "cache": sorted(path.name for path in self.cache.glob("*/*")),
            "strays": sorted(path.name for path in self.cache.glob(".*")),
            "metrics": lines,
            "clients": (out / "clients.json").read_text(),
            "encoder": (out / "encoder.safetensors").read_bytes(),
            "states": {
                f"{path.name}/{name}": tensor.numpy().tobytes()
                for path in states
                for name, tensor in load_file(path).items()
            },
        }


def wait(process: int) -> tuple[int, float]:
    """Wait for a process; return its exit code, negative for a signal, and its seconds."""
    started = time.monotonic()
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        seconds = time.monotonic() - started
        if ended:
            return os.waitstatus_to_exitcode(status), seconds
        if seconds > PATIENCE:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            raise SystemExit(f"a run hangs: {seconds:.0f} s")
        time.sleep(0.002)


def kill_after(process: int, seconds: float) -> bool:
    """Kill a process after some time; return whether it was still at work."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"exit code {code}")
    return code == -signal.SIGKILL


# Operations on files -----------------------------------------------------------------------------


class Operations:
    """Counts a process's operations on files below a folder, and kills it before one of them.

    ``lose`` is the chance that the kill takes what is not yet on the disk.
    """

    def __init__(self, folder: Path, fatal: int, lose: float, seed: int) -> None:
        self.folder, self.fatal, self.lose = str(folder), fatal, lose
        self.random = random.Random(seed)
        self.count = 0
        self.safe: dict[str, int] = {}  # path → bytes that are on the disk
        self._fsync = os.fsync

    def watch(self) -> None:
        """Count from here on."""
        sys.addaudithook(self._hear)
        os.fsync = self._sync  # type: ignore[assignment]

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = set(mode) & set("wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR)
            if writes and self._is_ours(path):
                self._step(event)
                known = os.stat(path).st_size if os.path.exists(path) else 0  # noqa: PTH110, PTH116
                self.safe.setdefault(str(path), 0 if mode and "w" in mode else known)
        elif event in CHANGES and self._is_ours(args[0]):
            self._step(event)
            size = self.safe.pop(str(args[0]), None)
            if event in ("os.rename", "os.link") and size is not None:
                self.safe[str(args[1])] = size

    def _sync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
        if self._is_ours(path):
            self._step("fsync")
            self.safe.pop(path, None)
        self._fsync(descriptor)

    def _is_ours(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and str(path).startswith(self.folder)

    def _step(self, event: str) -> None:
        self.count += 1
        if self.count == self.fatal:
            for path, size in self.safe.items() if self.random.random() < self.lose else ():
                if os.path.exists(path):  # noqa: PTH110
                    written = os.stat(path).st_size  # noqa: PTH116
                    os.truncate(path, self.random.randint(min(size, written), written))
            os.kill(os.getpid(), signal.SIGKILL)


def kill_before_operation(trial: Trial, number: int, seed: int) -> bool:
    """Start a run that is killed before an operation; return false if it had fewer."""

    def spoil(folder: Path) -> None:
        # The list of operations of TensorBoard and of the compiler is not ours.
        Operations(folder, number, 0.5, seed).watch()

    code, _ = wait(trial.start(spoil))
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"exit code {code}: {trial.log.read_text()}")
    return code != 0


# Attacks -----------------------------------------------------------------------------------------


def attack_operations(place: Path, reference: dict[str, Any], rounds: int, step: int) -> int:
    """Kill a run before each operation, or each ``step``-th; return the number of kills."""
    kills = 0
    for number in range(1, 1 << 20, step):
        trial = Trial(place / f"operation-{number}", rounds)
        was_killed = kill_before_operation(trial, number, number)
        kills += was_killed
        trial.finish()
        compare(trial, reference)
        shutil.rmtree(trial.out.parent)
        if not was_killed:
            break
    return kills


def attack_moments(
    place: Path, reference: dict[str, Any], rounds: int, count: int, seconds: float, seed: int
) -> int:
    """Kill runs and their resumes at random moments, ``count`` times; return the runs."""
    moments, kills, runs = random.Random(seed), 0, 0
    while kills < count:
        trial = Trial(place / f"moment-{runs}", rounds)
        for _ in range(min(moments.randint(1, KILLS), count - kills)):
            if not kill_after(trial.start(), moments.uniform(0, seconds)):
                break
            kills += 1
        trial.finish()
        compare(trial, reference)
        shutil.rmtree(trial.out.parent)
        runs += 1
        if runs % 50 == 0:
            print(f"{kills} kills, {runs} runs, all with the same bits", flush=True)
    return runs


def compare(trial: Trial, reference: dict[str, Any]) -> None:
    """Stop at the first difference to the run that nobody killed."""
    for name, value in trial.result().items():
        if value != reference[name]:
            shown = json.dumps([value, reference[name]], default=repr)[:2000]
            raise SystemExit(f"{trial.out}: {name} differs: {shown}\n{trial.log.read_text()}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="kills at random moments")
    parser.add_argument("--operations", action="store_true", help="kill before each operation")
    parser.add_argument("--step", type=int, default=1, help="skip so many operations")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a fork has only the thread that called it
    report.write_page_or_warn = lambda run: None  # takes longer than the run
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        place = Path(folder)
        make_images(place / "images")
        whole = Trial(place / "whole", options.rounds)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            # Here, so that forks find everything imported.
            assert cli.main(["run", "--out", str(whole.out), *whole.words]) == 0
        reference = whole.result()
        again = Trial(place / "again", options.rounds)
        started = time.monotonic()
        again.finish()
        seconds = time.monotonic() - started
        assert not reference["strays"]
        compare(again, reference)
        started = time.monotonic()
        if options.operations:
            kills = attack_operations(place, reference, options.rounds, options.step)
            what = "kills before operations on files"
        else:
            kills = options.count
            attack_moments(place, reference, options.rounds, kills, seconds, options.seed)
            what = "kills at random moments"
        minutes = (time.monotonic() - started) / 60
    print(f"{kills} {what}: all runs ended with the same bits ({minutes:.1f} minutes)")


def make_images(root: Path) -> None:
    """Write small images of two classes at three clients."""
    generator = random.Random(0)
    for client in ("east", "north", "west"):
        for kind in ("cat", "dog"):
            for split, count in (("train", 4), ("test", 2)):
                folder = root / split / client / kind
                folder.mkdir(parents=True)
                for number in range(count):
                    pixels = bytes(generator.randrange(256) for _ in range(8 * 8 * 3))
                    Image.frombytes("RGB", (8, 8), pixels).save(folder / f"{number}.png")


if __name__ == "__main__":
    main()
