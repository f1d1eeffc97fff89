"""A run's files after the disk changed them: each change is noticed, named, and nothing is lost."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import flip_bit, refused, timeless
from rounds import RUN, before_round, interrupt

from fedssl import config
from fedssl.runs import checkpoint, folder, loop, metrics
from fedssl.runs.build import build_experiment
from fedssl.runs.reader import RunReader
from fedssl.runs.reevaluate import evaluate

KILLS = Path(__file__).parents[2] / "benchmarks" / "attacks" / "kills.py"
WORDS = (
    *RUN,
    *("algorithm.name=fedema", "objective.name=byol", "objective.predictor=24,16"),
    *("rounds=3", "partition.clients=3"),
)
Refusal = Callable[..., str]


def settings(*words: str) -> config.Config:
    return config.resolve(config.read_recipe(None), [*WORDS, *words])


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after two of three rounds, beside one that got through."""
    out = tmp_path_factory.mktemp("runs")
    loop.run(settings(), out / "whole")
    with pytest.MonkeyPatch.context() as patch:
        before_round(patch, 2, interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.run(settings(), out / "cut")
    return out / "cut"


@pytest.fixture
def out(cut: Path, tmp_path: Path) -> Path:
    return shutil.copytree(cut, tmp_path / "run")


def contents(out: Path) -> dict[str, bytes]:
    """All files of a run; the lock holds the number of the last process."""
    files = (path for path in out.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def assert_continues(out: Path, cut: Path) -> None:
    """The run gets through, and ends as the one that was never stopped."""
    loop.run(settings(), out, resume=True)
    whole = cut.parent / "whole"
    assert timeless(out) == timeless(whole)
    name = "encoder.safetensors"
    assert (out / name).read_bytes() == (whole / name).read_bytes()


# Configuration -----------------------------------------------------------------------------------


def test_every_cut_of_the_configuration_at_a_line_end_is_refused(
    out: Path, cut: Path, refusal: Refusal
) -> None:
    path = out / "config.yaml"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) > 50
    for count in range(len(lines)):
        path.write_bytes(b"".join(lines[:count]))
        before = contents(out)
        said = refusal("run", "--resume", "--out", out)
        assert said.startswith(str(path)) and "copy" in said
        assert contents(out) == before
    path.write_bytes(whole)
    assert_continues(out, cut)


def test_a_changed_value_or_bit_of_the_configuration_is_refused(
    out: Path, refusal: Refusal
) -> None:
    path = out / "config.yaml"
    whole = path.read_bytes()
    assert b"rounds: 3\n" in whole
    bits = random.Random(0).sample(range(8 * len(whole)), 100)
    for data in (
        whole.replace(b"rounds: 3\n", b"rounds: 4\n"),
        *(flip_bit(whole, bit) for bit in bits),
    ):
        path.write_bytes(data)
        assert refusal("run", "--resume", "--out", out).startswith(str(path))
    with refused(None, says=str(path)):
        evaluate(out, [])
    with refused(None, says=str(path)):
        _ = RunReader(out).settings
    with refused(None, says=str(path)):  # also where a recipe says all that it says
        loop.run(settings(), out, resume=True)


def test_the_checkpoint_has_a_copy_of_the_configuration(
    out: Path, cut: Path, refusal: Refusal
) -> None:
    path = out / "config.yaml"
    whole = path.read_text()
    path.unlink()
    folder.read_recipe(None, out)
    assert path.read_text() == whole
    folder.write_config(settings("client.lr=0.06"), out)  # it is whole, and not of this run
    said = refusal("run", "--resume", "--out", out)
    assert said.startswith(str(path)) and "client.lr=0.06" in said and "0.05" in said
    path.unlink()
    assert folder.read_recipe(None, out)[1] == config.read_yaml(path)
    assert_continues(out, cut)


def test_a_cut_sweep_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    words = ("data.size=8", "rounds=0", "evaluate.protocols=knn", "seed=[0,1]")
    from fedssl.cli import main

    assert main(["run", *words, "--out", str(tmp_path / "a")]) == 0
    path = tmp_path / "a" / "sweep.yaml"
    lines = path.read_bytes().splitlines(keepends=True)
    for count in range(len(lines)):
        path.write_bytes(b"".join(lines[:count]))
        assert refusal("run", "--resume", "--out", tmp_path / "a").startswith(str(path))


# Checkpoint --------------------------------------------------------------------------------------


def test_flipped_bits_of_each_file_of_a_checkpoint_are_refused(out: Path, cut: Path) -> None:
    experiment = build_experiment(settings())
    files = sorted((out / "checkpoint").rglob("*.safetensors"))
    assert len(files) == 4  # the server's and three clients'
    chance = random.Random(0)
    for path in files:
        whole = path.read_bytes()
        places = [*range(0, 640, 8), *(chance.randrange(8 * len(whole)) for _ in range(100))]
        for place in places:
            path.write_bytes(flip_bit(whole, place + chance.randrange(8) * (place < 640)))
            with refused(None, says=f"{path} is damaged"):
                checkpoint.read(out, experiment)
        for end in (0, 7, 100, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:end])
            with refused(None, says=f"{path} is damaged"):
                checkpoint.read(out, experiment)
        path.write_bytes(whole)
    assert_continues(out, cut)


def test_damage_is_one_line_on_the_command_line_and_nothing_is_lost(
    out: Path, cut: Path, refusal: Refusal
) -> None:
    for path in sorted((out / "checkpoint").rglob("*.safetensors")):
        whole = path.read_bytes()
        path.write_bytes(flip_bit(whole, 8 * len(whole) - 1))
        before = contents(out)
        assert refusal("run", "--resume", "--out", out).startswith(f"{path} is damaged.")
        assert contents(out) == before
        path.write_bytes(whole)
    assert_continues(out, cut)


def test_files_of_clients_cannot_be_exchanged(out: Path) -> None:
    """Each is whole, and each is another client's."""
    first, second, *_ = sorted((out / checkpoint.CLIENTS).iterdir())
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    with refused(None, says="is damaged"):
        loop.run(settings(), out, resume=True)


# Metrics -----------------------------------------------------------------------------------------

Lines = list[str]
ODD: dict[str, Callable[[Lines], Lines]] = {
    "all lost": lambda lines: [],
    "first lost": lambda lines: lines[1:],
    "last lost": lambda lines: lines[:1],
    "doubled": lambda lines: [lines[0], *lines],
    "exchanged": lambda lines: lines[::-1],
    "no JSON": lambda lines: [lines[0], lines[1][:20]],
    "no mapping": lambda lines: [lines[0], "[1]"],
    "null": lambda lines: [lines[0], "null"],
    "a changed number": lambda lines: [lines[0], lines[1].replace('"bytes_up": ', '"bytes_up": 1')],
    "deep": lambda lines: [lines[0], "[" * 100_000],
}


@pytest.mark.parametrize("odd", ODD)
def test_lines_that_are_not_those_of_the_checkpoints_rounds_are_refused(
    odd: str, out: Path, refusal: Refusal
) -> None:
    path = out / metrics.FILE
    path.write_text("".join(f"{line}\n" for line in ODD[odd](path.read_text().splitlines())))
    before = contents(out)
    assert refusal("run", "--resume", "--out", out).startswith(f"{path}: ")
    assert contents(out) == before


def test_lines_after_the_checkpoint_are_dropped(out: Path, cut: Path) -> None:
    with (out / metrics.FILE).open("a") as file:
        file.write(json.dumps({"round": 3, "loss": 0.0}) + '\n{"round": 4, "lo')
    assert_continues(out, cut)


def test_a_missing_file_of_metrics_is_refused(out: Path, refusal: Refusal) -> None:
    (out / metrics.FILE).unlink()
    assert refusal("run", "--resume", "--out", out).startswith(f"{out / metrics.FILE}: ")


# Reading, while a run is at work or after it ----------------------------------------------------

CLIENTS: dict[str, Callable[[list[dict[str, object]]], object]] = {
    "numbers": lambda rows: [1, 2],
    "keys": lambda rows: {},
    "no name": lambda rows: [{"client": 0, "samples": 5}, *rows[1:]],
    "a name that is none": lambda rows: [{**rows[0], "name": None}, *rows[1:]],
    "samples in words": lambda rows: [{**rows[0], "samples": "five"}, *rows[1:]],
}


@pytest.mark.parametrize("odd", CLIENTS)
def test_clients_that_are_none_are_refused(odd: str, out: Path, refusal: Refusal) -> None:
    path = out / "clients.json"
    path.write_text(json.dumps(CLIENTS[odd](json.loads(path.read_text()))))
    for command in (["report", out], ["run", "--resume", "--out", out]):
        assert refusal(*command).startswith(str(path))


@pytest.mark.parametrize(
    "change",
    [
        {"round": 0},
        {"round": True},
        {"round": 10**30},
        {"seconds": "long"},
        {"images": None},
        {"bytes_up": True},
        {"exchanges": [1]},
        {"exchanges": {"train": 5}},
        {"exchanges": {"train": {"up": 5}}},
    ],
    ids=str,
)
def test_an_odd_line_of_metrics_is_named(
    change: dict[str, object], out: Path, refusal: Refusal
) -> None:
    path = out / metrics.FILE
    first, second = path.read_text().splitlines()
    for text in (json.dumps({**json.loads(first), **change}), "{", "null", "[" * 100_000):
        path.write_text(f"{text}\n{second}\n")
        for command in ("report", "compare"):
            assert refusal(command, out).startswith(f"{path}: line 1 is not that of a round")


def test_a_line_that_is_being_written_is_left_out(out: Path) -> None:
    whole = list(metrics.read(out))
    with (out / metrics.FILE).open("a") as file:
        file.write('{"round": 3, "lo')
    assert list(metrics.read(out)) == whole


@pytest.mark.parametrize("seconds", [0, 1000])
def test_a_folder_that_is_deleted_during_the_run_is_one_line(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    before_round(monkeypatch, 1, lambda: shutil.rmtree(out))
    with refused("--out", out, "was deleted"):
        loop.run(settings(f"checkpoint.seconds={seconds}"), out)
    assert not out.exists()


# Kills -------------------------------------------------------------------------------------------


def test_what_a_killed_process_was_writing_goes_at_the_next_start(out: Path, cut: Path) -> None:
    strays = [
        *(out / name for name in (".metrics.jsonl.new", ".config.yaml.new")),
        out / "checkpoint" / ".state.safetensors.new",
        out / checkpoint.CLIENTS / ".0-3.safetensors.new",
        out / "personal" / ".client-0.safetensors.new",
    ]
    (out / "personal").mkdir()
    for stray in strays:
        stray.write_bytes(b"half of a fi")
    (out / ".mine").touch()
    assert_continues(out, cut)
    assert not any(stray.exists() for stray in strays) and (out / ".mine").exists()


def attack(*words: str) -> None:
    done = subprocess.run([sys.executable, KILLS, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "all runs ended with the same bits" in done.stdout


def test_a_run_that_is_killed_goes_on_with_the_same_bits() -> None:
    attack("--operations", "--rounds", "2", "--step", "17")
    attack("--count", "3", "--rounds", "2")


@pytest.mark.slow
def test_a_run_that_is_killed_anywhere_goes_on_with_the_same_bits() -> None:
    attack("--operations")
    attack("--count", "100")
