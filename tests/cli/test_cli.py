"""The command line as a user types it."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fedssl.cli import main
from fedssl.contrib import doctor
from fedssl.runs import loggers
from fedssl.runs.folder import make_folder
from fedssl.util import status

SMALL = [
    "rounds=2",
    "cohort.size=4",
    "data.size=8",
    "objective.projector=32,32,16",
    "evaluate.protocols=knn",
    "evaluate.baselines=[]",
    "engine.threads=1",
]


def test_help_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys, fedssl.cli\n"
        "try: fedssl.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    times = []
    for _ in range(3):  # by the processor's time: others use this machine too
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times) < 0.3


def test_run_evaluate_partition_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["run", *SMALL, "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "untrained" in shown.out and "dcco" in shown.out and str(out) in shown.out
    assert "round 2/2" in shown.err and "images/s" in shown.err and "s left" in shown.err

    assert main(["evaluate", str(out), "evaluate.protocols=knn,unlabeled"]) == 0
    shown = capsys.readouterr()
    assert "effective rank" in shown.out and "result" in shown.out
    assert (out / "evaluations.jsonl").read_text().count("\n") == 1

    assert main(["partition", "partition.samples=8"]) == 0
    assert "179" in capsys.readouterr().out  # 1,438 training digits make 179 clients of 8

    assert main(["recipes"]) == 0
    assert "dcco/table1 " in capsys.readouterr().out
    assert main(["recipes", "fedema/table3/fedbyol"]) == 0
    assert "fedema/table3/fedbyol/cifar10-noniid" in capsys.readouterr().out


def test_runs_without_out_get_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", *SMALL]) == 0
    assert main(["run", *SMALL]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_words_may_stand_after_options(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["run", "--out", str(out), *SMALL]) == 0
    assert main(["run", *SMALL, "--out", str(tmp_path / "b"), "rounds=1", "seed=4"]) == 0
    assert "seed: 4" in (tmp_path / "b" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "fedssl: the following arguments are required: COMMAND (see fedssl --help)"),
        ("rnu", "fedssl: argument COMMAND: invalid choice: 'rnu' (choose from "),
        ("run --bogus x", "fedssl run: unrecognized arguments: --bogus (see fedssl run --help)"),
        ("recipes default other", "fedssl recipes: unrecognized arguments: other (see fedssl rec"),
        ("deploy init", "fedssl deploy init: the following arguments are required: DIR, RECIPE ("),
    ],
)
def test_a_command_that_is_not_understood_is_one_line(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    said = capsys.readouterr().err
    assert said.startswith(line) and said.endswith(" --help)\n") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("default", "default"),
        ("fedema/table3/fedbyol/cifar10-noniid", "fedema-table3-fedbyol-cifar10-noniid"),
        ("fedema/figure7a/lambda-0.2/cifar10-noniid", "fedema-figure7a-lambda-0.2-cifar10-noniid"),
        ("/some/where/mine.yaml", "mine"),
        ("../mine.yaml/row/column", "mine-row-column"),
        ("dcco/derm-64.yaml", "derm-64"),
    ],
)
def test_a_runs_folder_is_named_after_its_recipe(
    name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = make_folder(name)
    assert out.parent == Path("runs") and out.name.startswith(f"{folder}-2")


@pytest.mark.parametrize(
    ("words", "place", "fix"),
    [
        ("run bogus=1", "bogus: ", ""),
        ("run --resume", "--resume: ", "Add --out DIR."),
        ("run no-such-recipe", "recipe=no-such-recipe: ", ""),
        ("run fedema/table3", "recipe=fedema/table3: ", ""),
        ("recipes fedema/tabel3", "recipe=fedema/tabel3: ", ""),
        ("run folder data.root=set/train", "data.root=set/train: ", ""),
        ("run folder data.root=photos evaluate.protocols=nn", "evaluate.protocols=nn: ", ""),
        ("run data.name=folder", "data.name=folder: ", ""),
        ("run partition.samples=5000", "partition.samples=5000: ", ""),
        ("run encoder.groups=5", "encoder.groups=5: ", ""),
        ("run objective.projector=16,16,16 encoder.groups=16", "encoder.groups=16: ", ""),
        ("run evaluate.protocols=linear@7", "evaluate.protocols=linear@7: ", ""),
        ("run evaluate.tower=second", "evaluate.tower=second: ", ""),
        ("run device=quantum", "device=quantum: ", ""),
        ("run device=\x1b[2J", r"device=\x1b[2J: ", ""),  # which would clear a terminal
        ("run augment.name=vivid", "augment.name=vivid: ", ""),
        ("run encoder.init=/nonexistent", "encoder.init=/nonexistent: ", ""),
        ("run encoder.init=half", "encoder.init=half: ", ""),
        ("run partition.samples=1", "algorithm.name=fedavg: ", ""),  # its baseline
        # A folder in the wrong place: the right command.
        ("run --resume photos", "--resume: ", "Add --out photos."),
        ("run photos", "recipe=photos: ", "fedssl run folder data.root=photos"),
        ("run folder photos", "photos: ", "fedssl run folder data.root=photos"),
        ("run half", "recipe=half: ", "fedssl run --resume --out half"),
        ("partition --out a.gif", "--out a.gif: ", "Use a name such as a.png."),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: str,
    place: str,
    fix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("photos", "half", "set/train", "set/test"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "half/config.yaml").touch()  # a run that has not ended
    assert main(words.split()) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"fedssl: {place}") and shown.endswith(f"{fix}\n")
    assert shown.count("\n") == 1
    assert not (tmp_path / "runs").exists(), "nothing may be left behind"


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("/proc/fedssl", "--out /proc/fedssl: cannot be written"),
        ("/tmp/" + 300 * "a", "File name too long. Use a shorter name."),
        ("/tmp/caf\udce9", r"--out /tmp/caf\xe9: not UTF-8. Use another name."),
    ],
    ids=["not writable", "too long", "not UTF-8"],
)
def test_an_out_that_cannot_be_written(
    out: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *SMALL, "--out", out]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "a"))

    monkeypatch.setattr(doctor, "report", refused)
    assert main(["doctor"]) == 2
    said = f"fedssl: {tmp_path}/a: Permission denied. Change the permissions of the file or"
    assert said in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file it hits: a limit that the checkpoint exceeds, the metrics, config.yaml."""
    # TensorBoard writes in a thread of its own, which complains in its own way.
    monkeypatch.setattr(loggers, "open_loggers", lambda *_: [])
    for limit in (20_000, 2_500, 100):
        out = tmp_path / str(limit)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            code = main(["run", *SMALL, "rounds=10", "--out", str(out)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        shown = capsys.readouterr().err
        assert code == 2 and "File too large" in shown.splitlines()[-1]
        assert "Traceback" not in shown


def test_commands_that_take_seconds_say_what_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["run", *SMALL, "--out", str(tmp_path / "run")]) == 0
    texts: list[str] = []
    monkeypatch.setattr(status._display, "add", lambda stage: texts.append(stage.text))
    monkeypatch.setattr(status._display, "remove", lambda stage: None)
    monkeypatch.setattr(status._display, "show_live", texts.append)
    monkeypatch.setattr(status, "is_terminal", lambda: True)
    monkeypatch.setattr(doctor, "report", str)
    sweep = "seed=[0,1] rounds=0 evaluate.baselines=[] evaluate.protocols=knn"
    for command, text in {
        f"evaluate {tmp_path / 'run'}": "reading the run",
        f"evaluate {tmp_path / 'run'} evaluate.k=5": "evaluating an untrained encoder",
        f"export {tmp_path / 'run'} --format safetensors --out {tmp_path / 'a'}": "writing",
        f"deploy init {tmp_path / 'app'} folder engine.sites=2 data.size=32": "checking the recipe",
        "partition partition.samples=8": "loading the images",
        f"run {sweep} --out {tmp_path / 'two'}": "checking seed=1",
        "doctor": "looking",
    }.items():
        texts.clear()
        assert main(command.split()) == 0
        assert any(each.startswith(text) for each in texts)
