"""``fedssl.train`` and the run that it returns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import refused
from rounds import before_round, press_ctrl_c

import fedssl
from fedssl.cli import main
from fedssl.runs import progress
from fedssl.runs.folder import make_folder
from fedssl.util.errors import UserError

KEYS: dict[str, Any] = {
    **{"rounds": 3, "cohort__size": 4, "data__size": 8, "objective__projector": (16, 8)},
    **{"evaluate__protocols": ["knn"], "evaluate__baselines": (), "engine__threads": 1},
}
WORDS = [
    *("rounds=3", "cohort.size=4", "data.size=8", "objective.projector=16,8"),
    *("evaluate.protocols=knn", "evaluate.baselines=[]", "engine.threads=1"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> fedssl.Run:
    return fedssl.train(None, tmp_path_factory.mktemp("api") / "run", **KEYS)


def test_it_is_the_command_lines_run(trained: fedssl.Run, tmp_path: Path) -> None:
    """The same configuration, the same numbers, to the bit."""
    pytest.importorskip("pandas")
    out = tmp_path / "run"
    assert main(["run", *WORDS, "--out", str(out)]) == 0
    assert (trained.path / "config.yaml").read_text() == (out / "config.yaml").read_text()
    theirs = fedssl.Run(out)
    assert theirs.metrics["loss"].tolist() == trained.metrics["loss"].tolist()
    assert theirs.summary["result"] == trained.summary["result"]
    bytes_of = [(r.path / "encoder.safetensors").read_bytes() for r in (trained, theirs)]
    assert bytes_of[0] == bytes_of[1]


def test_metrics_are_a_frame_of_rounds(trained: fedssl.Run) -> None:
    pandas = pytest.importorskip("pandas")
    frame = trained.metrics
    lines = [json.loads(x) for x in (trained.path / "metrics.jsonl").read_text().splitlines()]
    assert isinstance(frame, pandas.DataFrame)
    assert frame.index.name == "round" and frame.index.tolist() == [1, 2, 3]
    assert frame["loss"].tolist() == [line["loss"] for line in lines]
    up = [line["exchanges"]["descend"]["up"] for line in lines]
    assert frame["exchanges.descend.up"].tolist() == up


def test_the_encoder_encodes(trained: fedssl.Run) -> None:
    assert trained.encoder is trained.encoder
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    assert trained.encoder.embed(images).shape == (2, trained.encoder.features)


def test_evaluate_gives_a_frame_of_models_and_measures(trained: fedssl.Run) -> None:
    pytest.importorskip("pandas")
    frame = trained.evaluate("knn", "linear@100")
    assert frame.index.tolist() == ["untrained", "result"]
    assert frame.loc["result", "knn_top1"] == trained.summary["knn_top1"]
    assert 0 < frame.loc["result", "linear@100_top1"] <= 100
    assert (
        trained.evaluate(evaluate__k=200).loc["result", "knn_top1"] != frame.loc["result"].iloc[0]
    )
    with pytest.raises(UserError, match=r"only evaluate\.\*, data\.\* and device"):
        trained.evaluate(rounds=5)


def test_protocols_may_be_a_list(trained: fedssl.Run) -> None:
    pytest.importorskip("pandas")
    assert trained.evaluate(["knn"], evaluate__k=3).columns.tolist() == ["knn_top1"]


def test_a_full_disk_is_told_as_what_goes_on_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save", full)
    out = tmp_path / "run"
    with pytest.raises(UserError) as error:
        fedssl.train("default", out, **KEYS)
    assert f"Then continue with fedssl.train(out='{out}', resume=True)." in str(error.value)


def test_recipes_as_a_dict_and_a_file(tmp_path: Path) -> None:
    """Checked as the command line's are, before anything is left on the disk."""
    own = {"extends": "default", "algorithm": {"name": "fedavg"}, "rounds": 1}
    made = fedssl.train(own, tmp_path / "dict", **{k: v for k, v in KEYS.items() if k != "rounds"})
    assert made.settings.algorithm.name == "fedavg" and made.rounds == 1
    assert own["extends"] == "default"  # the caller's, unchanged
    for recipe, keys, said in (
        ({"roundz": 1}, {}, "roundz: unknown key"),
        ("no/such", {}, "no such recipe"),
        ({"extends": 3}, {}, "recipe=3: no such recipe"),
        (None, {"algorithm__nam": "x"}, "algorithm.nam: unknown key"),
        (None, {"rounds": [1, 2]}, "a list of values is a sweep"),
        (tmp_path / "none.yaml", {}, "no such recipe or file"),
    ):
        with pytest.raises(UserError, match=said):
            fedssl.train(recipe, tmp_path / "bad", **keys)  # type: ignore[arg-type]
    assert not (tmp_path / "bad").exists()
    with pytest.raises(UserError, match="holds a run"):
        fedssl.train(out=tmp_path / "dict", **KEYS)
    with pytest.raises(UserError, match=r"resume=true: the run's folder is missing"):
        fedssl.train(resume=True)


def test_an_interrupted_run_goes_on(
    trained: fedssl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's stop button is SIGINT; what is left can be resumed to the same numbers."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        before_round(patch, 1, press_ctrl_c)
        with pytest.raises(KeyboardInterrupt, match=r"fedssl.train\(out='.*', resume=True\)"):
            fedssl.train(out=out, **KEYS)
    cut = fedssl.Run(out)
    assert not cut.finished and cut.rounds == 2 and "not finished" in cut._repr_html_()
    whole = fedssl.train(out=out, resume=True)
    files = [(r.path / "encoder.safetensors").read_bytes() for r in (whole, trained)]
    assert whole.finished and whole.rounds == 3 and files[0] == files[1]


def test_a_notebook_shows_it_escaped(trained: fedssl.Run, tmp_path: Path) -> None:
    shown = trained._repr_html_()
    assert "dcco" in shown and f"{trained.summary['knn_top1']:.2f}" in shown
    (tmp_path / "<b>x").mkdir()
    (tmp_path / "<b>x" / "config.yaml").write_text("algorithm: {name: '<script>'}\n")
    shown = fedssl.Run(tmp_path / "<b>x")._repr_html_()
    assert "<b>x" not in shown and "<script>" not in shown and "&lt;script&gt;" in shown


def test_without_pandas_one_line_names_the_extra(
    trained: fedssl.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"Run.metrics needs pandas. .*'fedssl\[frames\]'"):
        _ = trained.metrics
    with pytest.raises(UserError, match=r"fedssl\[frames\]"):
        trained.evaluate("knn")


def test_the_bar_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Live there; plain lines anywhere else."""
    assert not progress.in_notebook() and not progress.Progress("x", 2).live
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", shell)  # type: ignore[arg-type]
    bar = progress.Progress("mine", 2)
    bar.update(1, 0.5, 10)
    bar.update(2, 0.25, 10)
    bar.close()
    assert bar.live and "mine 2/2" in capsys.readouterr().err
    terminal = SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", terminal)  # type: ignore[arg-type]
    assert not progress.in_notebook()


def test_the_first_round_is_not_in_the_estimate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It compiles: 100 s, and each of the others takes 10."""
    clock = iter([0.0, 100.0, 110.0, 120.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(progress.status, "is_due", lambda: True)
    bar = progress.Progress("mine", 5)
    for round in (1, 2, 3):
        bar.update(round, 0.5, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("0.5  ")[1] for line in lines] == [
        "10 images/s  400 s left",
        "100 images/s  30 s left",
        "100 images/s  20 s left",
    ]


def test_a_run_needs_no_folder_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refused("rounds", -1):
        fedssl.train(rounds=-1)
    with refused("data.root", "/nonexistent"):  # found out when it has its folder
        fedssl.train(data__name="folder", data__root="/nonexistent")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_an_empty_name_is_not_the_current_folder(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="out is an empty name"):
        fedssl.train(out="", resume=resume, rounds=1)
    with pytest.raises(UserError, match=r'^recipe="": no such recipe'):
        fedssl.train("", out="run", rounds=1)
    assert not list(tmp_path.iterdir())


def test_runs_that_start_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedssl.runs.folder.time.strftime", lambda form: "now")
    # None of them has written anything yet.
    names = [make_folder("dcco/x") for _ in range(3)]
    assert names == [Path("runs", f"dcco-x-now{end}") for end in ("", "-2", "-3")]
    assert all(name.is_dir() for name in names)


def test_a_folder_that_was_not_used_is_gone_when_python_ends(tmp_path: Path) -> None:
    code = (
        "import os, sys; from fedssl.runs.folder import make_folder as f; "
        "os.chdir(sys.argv[1]); f('a')"
    )
    for then, left in (("", []), ("; (f('b') / 'config.yaml').touch()", ["b"])):
        subprocess.run([sys.executable, "-c", code + then, str(tmp_path)], check=True)
        assert [path.name.partition("-")[0] for path in tmp_path.glob("runs/*")] == left
        assert (tmp_path / "runs").exists() == bool(left)


def test_runs_may_not_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    with refused(None, says="runs is not a folder. Give --out DIR."):
        make_folder("x")


def test_importing_fedssl_stays_cheap() -> None:
    code = (
        "import sys, fedssl, fedssl.api; assert not {'torch', 'numpy', 'pandas'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
