"""Lists in a recipe: which runs they are, that a half-done sweep goes on, and its one table."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PLAIN, refused
from PIL import Image
from rounds import interrupt
from safetensors.torch import load_file, save_file

from fedssl import cli, config
from fedssl.runs import batch, checkpoint, loop, sweep
from fedssl.runs.build import Experiment, assemble, build_experiment
from fedssl.runs.folder import SWEEP, lock
from fedssl.util.errors import TrainingError, UserError

SMALL = (
    *("rounds=1", "partition.name=dirichlet", "partition.clients=4", "cohort.size=null"),
    *("data.labels=60", "data.size=8", "objective.projector=[32,16]", "encoder.groups=4"),
    *("evaluate.protocols=knn", "evaluate.baselines=[]", "engine.threads=1"),
)


def tree(*words: str) -> config.Recipe:
    return config.apply_words(config.read_recipe(None), [*SMALL, *words])


def test_every_combination_is_a_run() -> None:
    found = sweep.list_runs(tree("partition.alpha=[5,0.1]", "seed=[0,1]"))
    assert list(found) == [
        "partition.alpha=5,seed=0",
        "partition.alpha=5,seed=1",
        "partition.alpha=0.1,seed=0",
        "partition.alpha=0.1,seed=1",
    ]
    for label, settings in found.items():
        alpha, seed = (float(part.split("=")[1]) for part in label.split(","))
        assert (settings.partition.alpha, settings.seed) == (alpha, seed)  # type: ignore[attr-defined]


def test_values_that_give_the_same_folder_are_refused_unless_they_are_equal() -> None:
    """Otherwise one of the runs would be lost."""
    folder = "two values give the folder encoder.init=a-b.safetensors"
    with refused(None, says=folder):
        sweep.list_runs(tree("encoder.init=[a/b.safetensors,a-b.safetensors]"))
    assert list(sweep.list_runs(tree("seed=[0,0]"))) == ["seed=0"]


def test_a_sweep_of_more_runs_than_anyone_waits_for_is_refused() -> None:
    values = f"[{','.join(map(str, range(101)))}]"
    with refused("rounds", says="a sweep of 10,201 runs"):
        sweep.list_runs(tree(f"rounds={values}", f"seed={values}"))


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["seed=3"], []),
        (["objective.projector=[64,32]"], []),  # takes a list itself
        (["objective.projector=[[64,32],[32,16]]"], ["objective.projector"]),
        (["evaluate.protocols=[knn,linear]"], []),
        (["algorithm.name=[dcco,fedavg]"], ["algorithm.name"]),
        (["precision=[fp32,fp64]", "client.lr=[1,0.1]"], ["client.lr", "precision"]),
        (["augment.crop=[0.2,1]"], []),
    ],
)
def test_what_is_a_sweep(words: list[str], keys: list[str]) -> None:
    assert sorted(config.find_sweep(tree(*words))) == keys


def test_keys_beside_a_list_of_names_are_for_all_that_have_them() -> None:
    words = ("objective.name=[cco,simclr]", "objective.lambda=0.01", "objective.projector=[16,8]")
    found = [s.objective for s in sweep.list_runs(tree(*words)).values()]
    assert [own.name for own in found] == ["cco", "simclr"]
    assert [own.projector for own in found] == [(16, 8)] * 2  # type: ignore[attr-defined]
    assert found[0].lambda_ == 0.01  # type: ignore[attr-defined]


def test_keys_beside_names_stay_in_a_longer_list_and_go_with_another_name() -> None:
    before = tree("algorithm.name=[fedavg,fedprox]", "algorithm.mu=0.5")
    longer = config.apply_words(before, ["algorithm.name=[fedavg,fedprox,ditto]"])
    assert longer["algorithm"]["mu"] == 0.5
    assert "mu" not in config.apply_words(before, ["algorithm.name=fedema"])["algorithm"]
    ditto = config.apply_words(tree("algorithm.name=[fedema,fedprox]", "algorithm.lambda=0.9"), [])
    assert "lambda" not in config.apply_words(ditto, ["algorithm.name=ditto"])["algorithm"]


def test_a_sweep_says_which_keys_its_runs_go_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "run", interrupt)
    words = [*SMALL, "algorithm.name=[fedprox,fedavg]", "algorithm.mu=0.5"]
    words += ["objective.name=[cco,vicreg]", "objective.lambda=0.5"]
    lines = {
        "fedssl: algorithm.mu=0.5: left out for fedavg",
        "fedssl: objective.name=['cco', 'vicreg']: the recipe's "
        "objective.projector=[128, 128, 128] is left out, for cco too",
    }
    del words[words.index("objective.projector=[32,16]")]
    assert cli.main(["run", *words, "--out", str(tmp_path / "a")]) == 130
    assert lines <= set(capsys.readouterr().err.splitlines())
    words += ["objective.projector=[16,8]"]
    assert cli.main(["run", *words, "--out", str(tmp_path / "b")]) == 130
    assert "projector" not in capsys.readouterr().err
    assert cli.main(["run", "--resume", "--out", str(tmp_path / "b")]) == 130
    assert "left out for fedavg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["partition.alpha=[1,-1]"], "partition.alpha=-1.0:"),
        (["seed=[1,x]"], "seed=x:"),
        (["seed=[0,1]", "server.lr=[-1,1]"], "(run server.lr=-1,seed=0)"),
        (["server.lr=[-1,1]", "seed=[3]"], "(run server.lr=-1,seed=3)"),
        (["seed=[]"], "seed=[]:"),
        (["algorithm.name=[dcco,fedavgg]"], "unknown (did you mean fedavg?)"),
        ([f"about=[a,{'é' * 125}]"], f"about={'é' * 54}… is too long a name"),
        # Keys that no run has, or not every run.
        (["algorithm.name=[fedprox,fedavg]", "algorithm.mux=1"], "algorithm.mux: unknown key (did"),
        (["algorithm.name=[fedavg,fedprox]", "algorithm.mu=[1,2]"], "algorithm.mu: unknown key"),
        (["objective=x", "seed=[0,1]"], "objective=x:"),
        # Found when a later run meets its data.
        (["partition.clients=[4,100]"], "partition.clients=100: more than"),
        (["cohort.size=[2,9]"], "cohort.size=9: "),
        (["evaluate.baselines=[[fedavg],[gossip]]"], "server.optimizer=adam: "),
    ],
)
def test_bad_values_are_found_before_the_first_run(
    words: list[str], message: str, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    small = [word for word in SMALL if "objective=x" not in words or "objective." not in word]
    assert message in refusal("run", *small, *words, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_half_done_sweep_goes_on_and_prints_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs that diverge are passed over."""
    words = [*SMALL, "partition.alpha=[5,1,0.1]"]
    real = loop.run

    def one_ends(settings: config.Config, out: Path, resume: bool = False) -> object:
        if out.name == "partition.alpha=5":
            return real(settings, out, resume)
        if out.name == "partition.alpha=1":
            raise TrainingError("the loss is nan")
        raise loop.Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(loop, "run", one_ends)
        assert cli.main(["run", *words, "--out", str(tmp_path)]) == 130
        said = capsys.readouterr().err
        assert "[2/3] partition.alpha=1: the loss is nan" in said
        assert f"fedssl run --resume --out {tmp_path}" in said
        patch.setattr(sweep, "run_all", lambda runs: ())
        assert cli.main(["run", "--resume", "--out", str(tmp_path)]) == 1
        assert "1 of 3 runs" in capsys.readouterr().out
    before = (tmp_path / "partition.alpha=5" / "summary.json").stat().st_mtime_ns
    assert cli.main(["run", *words, "--out", str(tmp_path)]) == 2  # not by accident
    capsys.readouterr()
    assert cli.main(["run", "--resume", "--out", str(tmp_path)]) == 0
    out, said = capsys.readouterr()
    assert "[1/3] partition.alpha=5: finished before" in said
    assert (tmp_path / "partition.alpha=5" / "summary.json").stat().st_mtime_ns == before
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == [
        "untrained", "partition.alpha=5", "partition.alpha=1", "partition.alpha=0.1",
    ]  # fmt: skip
    summary = json.loads((tmp_path / "partition.alpha=0.1" / "summary.json").read_text())
    assert lines[4].endswith(f"{summary['knn_top1']:.1f} %") and "3 of 3 runs" in out


def test_what_has_not_ended_may_be_judged_in_another_way(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refusal: Callable[..., str],
) -> None:
    out = tmp_path / "a b"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "run", interrupt)
        assert cli.main(["run", *SMALL, "seed=[0]", "--out", str(out)]) == 130
    assert capsys.readouterr().err.endswith(f"fedssl run --resume --out '{out}'\n")
    assert cli.main(["run", "--resume", "--out", str(out), "evaluate.k=3"]) == 0
    said = refusal("run", "--resume", "--out", out, "evaluate.k=5")
    assert said.startswith(f"evaluate.k=5: was 3 in {out / 'seed=0'}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished sweep, and one with a run."""
    root = tmp_path_factory.mktemp("trained")
    assert cli.main(["run", *SMALL, "seed=[0,1]", "--out", str(root / "sweep")]) == 0
    assert cli.main(["run", *SMALL, "--out", str(root / "run")]) == 0
    return root


@pytest.fixture
def folders(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the same, as the current folder."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


NEW = (*SMALL, "seed=[0,1]")


LEFT_OUT = "--out sweep: has the run seed={}, and no list has these values."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=0"], LEFT_OUT.format(0)),
        (["seed=[0,2]"], LEFT_OUT.format(1)),
        (["client.lr=[1,0.1]"], LEFT_OUT.format(0)),
        (["rounds=2"], "rounds=2: with schedule=cosine"),
        (["evaluate.protocols=linear"], "evaluate.protocols=[linear]: was ['knn'] in sweep/seed=0"),
        ([PLAIN, *SMALL], LEFT_OUT.format(0)),
        ([PLAIN, *NEW, "rounds=3"], "rounds=3: with schedule=cosine"),
    ],
)
def test_a_resume_that_would_lose_runs_is_refused(
    words: list[str], message: str, folders: Path, refusal: Callable[..., str]
) -> None:
    before = contents(folders)
    assert refusal("run", "--resume", "--out", "sweep", *words).startswith(message)
    assert contents(folders) == before


@pytest.mark.parametrize(
    "words", [["seed=[0,1,2]"], ["seed=[2,1,0]", "device=cpu"], [PLAIN, *SMALL, "seed=[0,1,2]"]]
)
def test_values_may_be_added_to_a_list(
    words: list[str], folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "--resume", "--out", "sweep", *words]) == 0
    out, said = capsys.readouterr()
    assert "3 of 3 runs" in out and said.count(": finished before") == 2
    assert sorted(config.read_yaml(Path("sweep/sweep.yaml"))["seed"]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        # In a recipe's order, keys that it has not are in that of the words.
        (["seed=[0]", "precision=[fp32]"], [PLAIN, *SMALL, "precision=[fp32]", "seed=[0]"]),
        # One of two keys of which one replaces the other is put anew, behind the rest.
        (["cohort.size=[2]", "cohort.minimum=[1]"], ["cohort.size=[2]"]),
    ],
)
def test_a_resume_finds_its_runs_whatever_order_keys_have(
    first: list[str], then: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *SMALL, *first, "--out", str(tmp_path)]) == 0
    before = sorted(tmp_path.iterdir())
    capsys.readouterr()
    assert cli.main(["run", "--resume", "--out", str(tmp_path), *then]) == 0
    assert "finished before" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*NEW, "--out", "run"], "--out run: holds a run."),
        (["--resume", "--out", "run", "seed=[0,1]"], "--out run: holds a run."),
        ([*SMALL, "--out", "sweep"], "--out sweep: holds a sweep."),
        (["--resume", "--out", "nowhere", *NEW], "--resume: nowhere holds no sweep."),
        ([*NEW, "--out", "/proc/fedssl"], "--out /proc/fedssl: cannot be written (No such file"),
        ([*NEW, "--out", "run/lock"], "--out run/lock: cannot be written (File exists)."),
    ],
)
def test_a_folder_that_cannot_have_the_sweep(
    words: list[str], message: str, folders: Path, refusal: Callable[..., str]
) -> None:
    before = contents(folders)
    said = refusal("run", *words)
    assert said.startswith(message) and "room" not in said
    assert contents(folders) == before


def test_a_damaged_summary_is_named(folders: Path, refusal: Callable[..., str]) -> None:
    (folders / "sweep/seed=1/summary.json").write_text("{")
    before, said = contents(folders), "sweep/seed=1/summary.json is not JSON"
    assert refusal("run", "--resume", "--out", "sweep").startswith(said)
    assert contents(folders) == before


PHOTOS = (
    *("data.name=folder", "data.root=photos", "data.labels=null", "partition.name=iid"),
    *("evaluate.protocols=unlabeled", "data.cache=cache"),
)


def make_photos(*folders: str) -> None:
    for folder in folders:
        Path(folder).mkdir()
        for number in range(12):
            Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(f"{folder}/{number}.png")


def test_a_sweep_goes_on_from_another_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refusal: Callable[..., str],
) -> None:
    """Relative paths, to images and to a file with code."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    make_photos("photos")
    words = [*PHOTOS, "algorithm.name=own.py:Own", "objective.name=simclr"]
    assert cli.main(["run", *SMALL, *words, "seed=[0]", "--out", "out"]) == 0
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    capsys.readouterr()
    assert cli.main(["run", "--resume", "--out", "../out", "seed=[0,1]"]) == 0
    out, said = capsys.readouterr()
    assert "[1/2] seed=0: finished before" in said and "2 of 2 runs" in out
    (tmp_path / "photos/0.png").rename(tmp_path / "photos/x.png")
    said = f"data.root={tmp_path / 'photos'}: the training images are not those of ../out/"
    assert refusal("run", "--resume", "--out", "../out", "seed=[0,1,2]").startswith(said)
    assert not (tmp_path / "out/seed=2").exists()


def test_a_sweep_goes_on_with_images_that_were_moved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refusal: Callable[..., str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_photos("photos", "others")
    Path("others/11.png").rename("others/x.png")
    words = [*PHOTOS, "evaluate.baselines=[fedavg]"]
    assert cli.main(["run", *SMALL, *words, "seed=[0]", "--out", "out"]) == 0
    Path("photos").rename("moved")
    before = contents(Path("out"))
    goes_on = ["run", "--resume", "--out", "out"]
    for more in (["data.root=others"], ["data.root=others", "seed=[0,1]"], ["data.root=nowhere"]):
        said = refusal(*goes_on, *more)
        assert "not those of out/seed=0" in said or "nowhere" in said
        assert contents(Path("out")) == before
    state = Path("out/seed=0") / checkpoint.FILE
    known = state.read_bytes()
    save_file(load_file(state), state, {"round": "1"})
    assert "was written by another version of fedssl" in refusal(*goes_on, "data.root=moved")
    state.write_bytes(known)
    capsys.readouterr()
    assert cli.main([*goes_on, "data.root=moved", "seed=[0,1]"]) == 0
    assert "2 of 2 runs" in capsys.readouterr().out
    below = ("", "baselines/fedavg/")
    written = [f"seed={seed}/{place}config.yaml" for seed in (0, 1) for place in below]
    for file in ("sweep.yaml", *written):
        assert config.read_yaml(Path("out") / file)["data"]["root"] == str(tmp_path / "moved")


def test_of_two_sweeps_in_a_folder_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    """Until the other ends; one that came and went meanwhile is seen, too."""
    out = tmp_path / "out"
    start = ["run", *SMALL, "seed=[0,1]", "--out", str(out)]
    said = f"--out {out}: a run is at work there (process {os.getpid()})."
    with lock(out):
        assert refusal(*start).startswith(said) and not (out / SWEEP).exists()

    def at_work(*_: object) -> object:
        with refused("--out", out, "at work"), lock(out):
            pass
        raise loop.Interrupted

    monkeypatch.setattr(loop, "run", at_work)
    assert cli.main(start) == 130
    before = contents(out)
    with lock(out):
        assert refusal("run", "--resume", "--out", out, "seed=[0,1,2]").startswith(said)
    assert contents(out) == before
    shutil.rmtree(out)

    def meanwhile(runs: object) -> None:
        out.mkdir()
        (out / SWEEP).write_text("seed: [7]")

    monkeypatch.setattr(sweep, "check_all", meanwhile)
    assert "holds a sweep." in refusal(*start)
    assert (out / SWEEP).read_text() == "seed: [7]"


def check(settings: config.Config) -> None:
    batch.check_all([batch.PlannedRun("a", settings, Path("nowhere"))])


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Experiment]:
    """The sessions that a check has made."""
    made: list[Experiment] = []

    def kept(*arguments: Any, **keys: Any) -> Experiment:
        made.append(assemble(*arguments, **keys))
        return made[-1]

    monkeypatch.setattr(batch, "assemble", kept)
    return made


@pytest.mark.parametrize("name", config.VARIANTS["objective"])
def test_a_check_makes_the_same_network_without_weights(
    name: str, checked: list[Experiment]
) -> None:
    headless = name in ("rotation", "mae", "supervised")
    words = [word for word in SMALL if not (headless and word.startswith("objective."))]
    words += ["algorithm.name=fedavg", f"objective.name={name}"]
    words += ["encoder.name=vit-tiny", "encoder.patch=4"] * (name == "mae")
    settings = config.resolve(config.read_recipe(None), words)
    check(settings)
    (session,), real = checked, build_experiment(settings)
    tensors = (session.trainer.flat.vector, session.server.weights, *session.trainer.images)
    assert all(tensor.is_meta for tensor in tensors)
    assert session.trainer.flat.layers == real.trainer.flat.layers
    assert session.engine.merges == real.engine.merges


OWN = """
from dataclasses import dataclass
from torch import nn
from fedssl.algorithms import fedavg
from fedssl.objectives import simclr

class Mine(simclr.SimCLR):
    @dataclass(frozen=True)
    class Params(simclr.SimCLR.Params):
        pass

    def head(self, features, norm, classes):
        made = nn.Linear(features, 8)
        assert float(made.weight.detach().norm()) > 0
        return made

class Own(fedavg.FedAvg):
    @dataclass(frozen=True)
    class Params(fedavg.FedAvg.Params):
        pass

    def exact_on_union(self, work):
        return float(work.initial.norm()) < 0
"""


@pytest.mark.parametrize("key", ["objective", "algorithm", "encoder"])
def test_code_that_is_not_ours_may_look_at_weights(
    key: str, tmp_path: Path, checked: list[Experiment]
) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    words = {
        "objective": ["algorithm.name=fedavg", f"objective.name={own}:Mine"],
        "algorithm": [f"algorithm.name={own}:Own"],
        "encoder": ["encoder.name=timm/resnet10t", "encoder.norm=batch", "data.size=32"],
    }
    check(config.build(tree(*words[key])))
    assert not checked[0].trainer.flat.vector.is_meta


def test_an_error_in_code_that_is_not_ours_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line that names the key comes behind the traceback of the user's own code."""
    own = tmp_path / "own.py"
    own.write_text(OWN.replace("return float(work.initial.norm()) < 0", "raise ValueError('no')"))
    words = [*SMALL, f"algorithm.name={own}:Own", "seed=[0,1]", "--out", str(tmp_path / "out")]
    assert cli.main(["run", *words]) == 2
    *trace, line = capsys.readouterr().err.splitlines()
    assert trace[0].startswith("Traceback") and "raise ValueError('no')" in trace[-2]
    assert line.startswith(f"fedssl: algorithm.name={own}:Own: line ")
    assert "ValueError: no (run seed=0)." in line and not (tmp_path / "out").exists()


def test_a_check_reads_given_weights(tmp_path: Path, checked: list[Experiment]) -> None:
    words = ["encoder.groups=8", f"encoder.init={tmp_path / 'encoder.safetensors'}"]
    first = build_experiment(config.build(tree(words[0])))
    state = {name: tensor + 1 for name, tensor in first.tower().encoder.state_dict().items()}
    save_file(state, tmp_path / "encoder.safetensors")
    settings = config.build(tree(*words))
    check(settings)
    assert torch.equal(checked[0].trainer.initial, build_experiment(settings).trainer.initial)
    name = next(iter(state))
    save_file({**state, name: torch.zeros(1)}, tmp_path / "encoder.safetensors")
    with pytest.raises(UserError, match=rf"^encoder.init=.*{name} has the shape \(1,\).*run a"):
        check(settings)


def test_an_error_shortens_the_name_of_its_run() -> None:
    with pytest.raises(UserError) as caught, batch.name_in_errors("server.decay=" + "z" * 9000):
        raise UserError("wrong", key="rounds")
    assert "(run server.decay=zz" in str(caught.value) and len(str(caught.value)) < 400
