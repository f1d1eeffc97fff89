"""Flower's simulation for real: Ray, worker processes, and a server that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import torch
from helpers import PLAIN, relative
from safetensors.torch import load_file

pytest.importorskip("ray")
import grpc
from far import BYOL, SMALL, small

from fedssl.runs import loop

FLOWER = ("engine.name=flower", "engine.workers=2", "checkpoint.seconds=0")


def start(out: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, *words]
    log = out.with_suffix(".log").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def weights(out: Path) -> torch.Tensor:
    return load_file(out / "checkpoint" / "state.safetensors")["weights"]


def rounds(out: Path) -> list[int]:
    path = out / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line)["round"] for line in text.splitlines() if line.endswith("}")]


def finish(process: subprocess.Popen[bytes], out: Path) -> None:
    code = process.wait(timeout=240)
    assert code == 0, out.with_suffix(".log").read_text()[-3000:]


CCL = (  # without encryption, whose random numbers nobody can repeat
    *("algorithm.name=ccl", "objective.name=moco", "objective.queue=20", "encoder.norm=batch"),
    *("algorithm.local_epochs=1", "algorithm.batch=3", "algorithm.features=8"),
    *("algorithm.neighbours=2", "algorithm.mix=1", "algorithm.share_plain=true"),
)


RUNS = {"dcco": (), "fedavg": ("algorithm.name=fedavg",), "ccl": CCL}
ONE_AFTER_ANOTHER = """import json, sys; from fedssl import cli, report
report.write_page_or_warn = lambda run: None
sys.exit(max(cli.main(["run", *words]) for words in json.loads(sys.argv[1])))"""


@pytest.mark.slow
def test_runs_on_ray_are_local_ones(tmp_path: Path) -> None:
    """In one process, as a table's rows are."""
    out = tmp_path / "far"
    one = "engine.workers=1"  # starts sooner; the first run has two
    more = {"dcco": FLOWER, "fedavg": (*FLOWER, one), "ccl": (*FLOWER, one)}
    commands = [
        [PLAIN, *SMALL, *words, *more[name], "--out", f"{out}-{name}"]
        for name, words in RUNS.items()
    ]
    finish(start(out, "-c", ONE_AFTER_ANOTHER, json.dumps(commands)), out)
    assert "Traceback" not in out.with_suffix(".log").read_text()
    for name, words in RUNS.items():
        near, far = tmp_path / name, tmp_path / f"far-{name}"
        loop.run(small(*words, "engine.merge=off"), near)
        assert relative(weights(far), weights(near)) < 1e-10, name
        assert {path.name for path in far.iterdir()} == {path.name for path in near.iterdir()}


@pytest.mark.slow
def test_a_server_killed_in_a_round_goes_on_where_it_was(tmp_path: Path) -> None:
    """No round lost or done twice, the clients' states included (SIGKILL, then --resume)."""
    out, words = tmp_path / "far", (*BYOL, "algorithm.name=fedema", "rounds=8")
    command = ("-m", "fedssl", "run", "--out", str(out))
    process = start(out, *command, PLAIN, *SMALL, *words, *FLOWER, "checkpoint.seconds=1")
    end = time.monotonic() + 200
    while len(rounds(out)) < 3:
        assert process.poll() is None, out.with_suffix(".log").read_text()[-3000:]
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(rounds(out)) < 8
    finish(start(out, *command, "--resume"), out)
    assert rounds(out) == list(range(1, 9))
    loop.run(small(*words), tmp_path / "near")
    assert relative(weights(out), weights(tmp_path / "near")) < 1e-10


def descendants(process: int) -> set[int]:
    """Return the numbers of a process and of all that it started, by Linux's /proc."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, size = {process}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found


def open_files(processes: set[int]) -> dict[str, int]:
    """Return what the processes have open, and which of them."""
    owners = {}
    for process in processes:
        for path in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                owners[str(path.readlink())] = process
    return owners


def unix_sockets(processes: set[int]) -> list[Path]:
    """Return the files of the sockets that the processes listen at."""
    owners = open_files(processes)
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [
        Path(line[7])
        for line in lines
        if len(line) == 8 and line[3] == "00010000" and f"socket:[{line[6]}]" in owners
    ]


def call_without_token(port: int) -> set[str]:
    """Return how a server of Ray's answers strangers; each has one of the services."""
    answers = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name in (
            *("NodeManagerService/RequestWorkerLease", "CoreWorkerService/PushTask"),
            *("InternalKVGcsService/InternalKVGet", "ObjectManagerService/Push"),
            "LogService/ListLogs",
        ):
            try:
                channel.unary_unary(f"/ray.rpc.{name}")(b"", timeout=30)
                answers.add(f"{name} answered")
            except grpc.RpcError as error:
                answers.add(error.code().name)
    return answers


def listening(processes: set[int]) -> list[tuple[int, str, int]]:
    """Return the process, address (in hexadecimal) and port of every socket that listens."""
    owners = open_files(processes)
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [
        (owners[f"socket:[{line[9]}]"], line[1].split(":")[0], int(line[1].split(":")[1], 16))
        for line in lines
        if line[3] == "0A" and f"socket:[{line[9]}]" in owners
    ]


LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
INTRUDE = """import sys
from ray._raylet import GcsClient
print("nodes:", len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=30)))"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_nobody_without_the_token_reaches_ray(tmp_path: Path) -> None:
    """Ray executes what it is sent, and listened on all interfaces."""
    out = tmp_path / "far"
    words = ("engine.workers=1", "rounds=1000000", "checkpoint.seconds=0")
    process = start(out, "-m", "fedssl", "run", "--out", str(out), *SMALL, *FLOWER, *words)
    try:
        end = time.monotonic() + 200
        while not rounds(out):
            assert process.poll() is None, out.with_suffix(".log").read_text()[-3000:]
            assert time.monotonic() < end
            time.sleep(0.1)
        sockets = listening(descendants(process.pid))
        assert {address for _, address, _ in sockets} <= set(LOOPBACK)
        files = unix_sockets(descendants(process.pid))
        assert files and all(path.parents[3].stat().st_mode & 0o077 == 0 for path in files)
        named = {
            name: (owner, port)
            for owner, _, port in sockets
            for name in ("gcs_server", "RuntimeEnvAgent")
            if name in Path(f"/proc/{owner}/cmdline").read_text().split("\0")[0]
        }
        gcs, agent = named["gcs_server"], named["RuntimeEnvAgent"]
        for _, _, port in sockets:
            if port != agent[1]:  # which speaks HTTP
                assert call_without_token(port) == {"UNAUTHENTICATED", "UNIMPLEMENTED"}
        with pytest.raises(HTTPError, match="401"):
            urlopen(f"http://127.0.0.1:{agent[1]}/get_or_create_runtime_env", b"", timeout=60)
        environment = Path(f"/proc/{gcs[0]}/environ").read_text().split("\0")
        known = dict(word.split("=", 1) for word in environment if word.startswith("RAY_AUTH"))
        without = {name: value for name, value in os.environ.items() if name not in known}
        for given in ({}, known | {"RAY_AUTH_TOKEN": "0" * 64}, known):
            done = subprocess.run(
                [sys.executable, "-c", INTRUDE, f"127.0.0.1:{gcs[1]}"],
                env=without | given,
                capture_output=True,
                text=True,
                timeout=200,
            )
            assert ("nodes: 1" in done.stdout) == (given == known), done.stderr[-2000:]
            assert ("AuthenticationError" in done.stderr) == (given != known)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
