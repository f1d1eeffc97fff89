"""What the Siamese methods, FedEMA, FedU, Ditto and the norm policies refuse, in one line each.

And what cannot be a folder for results.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedssl import cli, config
from fedssl.runs.session import prepare
from fedssl.util.errors import UserError

SMALL = (
    "rounds=1", "data.size=8", "partition.name=iid", "partition.clients=4", "cohort.size=null",
    "encoder.norm=batch", "algorithm.name=fedavg", "objective.name=byol",
    "objective.projector=32,16", "evaluate.protocols=knn", "evaluate.baselines=[]",
    "engine.threads=1",
)  # fmt: skip


def open_run(words: str) -> None:
    predictive = "name=simclr" not in words and "name=moco" not in words
    head = ["objective.predictor=24,16"] if predictive else []
    prepare(config.resolve(config.read_recipe(None), [*SMALL, *head, *words.split()]))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("algorithm.name=fedema algorithm.tau=1.1", "algorithm.tau=1.1: μ of a client's first"),
        ("algorithm.name=fedema algorithm.tau=-0.1", "algorithm.tau=-0.1: μ of a client's first"),
        ("algorithm.name=fedema algorithm.tau=nan", "algorithm.tau=nan: expected a number"),
        ("algorithm.name=fedema algorithm.lambda=-1", "algorithm.lambda=-1.0: must not be neg"),
        ("algorithm.name=fedema algorithm.lambda=inf", "algorithm.lambda=inf: must"),
        ("algorithm.name=fedema algorithm.lambda=few", "algorithm.lambda=few: expected a number"),
        ("algorithm.name=ditto algorithm.lambda=-0.5", "algorithm.lambda=-0.5: must not be neg"),
        ("algorithm.name=ditto algorithm.lambda=inf", "algorithm.lambda=inf: must"),
        ("algorithm.name=fedema algorithm.decay=1.5", "algorithm.decay=[1.5]: expected one value"),
        ("algorithm.name=fedema algorithm.decay=-1", "algorithm.decay=[-1.0]: expected one value"),
        (
            "algorithm.name=fedema algorithm.decay=0.1,0.2,0.3",
            "algorithm.decay=[0.1, 0.2, 0.3]: expected one value between 0 and 1, or two",
        ),
        ("algorithm.name=fedema algorithm.decay=[]", "algorithm.decay=[]: expected one value"),
        (
            "algorithm.name=fedema algorithm.decay=0.5 algorithm.lambda=2",
            "algorithm.decay=[0.5]: a constant μ leaves nothing for algorithm.lambda=2.0",
        ),
        ("algorithm.name=fedema algorithm.divergence=l2", "algorithm.divergence=l2: unknown"),
        ("algorithm.name=fedema algorithm.parts=head", "algorithm.parts=head: unknown"),
        (
            "algorithm.name=fedema algorithm.parts=predictor objective.predictor=off",
            "algorithm.parts=predictor: acts on the predictor, and objective.name=byol has none "
            "(objective.predictor=off)",
        ),
        (
            "algorithm.name=fedema algorithm.parts=predictor objective.name=moco",
            "algorithm.parts=predictor: acts on the predictor, and objective.name=moco has none;",
        ),
        ("algorithm.name=fedu objective.name=simclr", "algorithm.name=fedu: acts on the predictor"),
        (
            "algorithm.name=fedu objective.predictor=off",
            "algorithm.name=fedu: acts on the predictor, and objective.name=byol has none",
        ),
        ("algorithm.name=fedu algorithm.threshold=-1", "algorithm.threshold=-1.0: must not be"),
        (
            "algorithm.replace=both objective.name=simclr",
            "algorithm.replace=both: objective.name=simclr has no target network",
        ),
        (
            "algorithm.name=ditto algorithm.replace=both objective.name=simsiam",
            "algorithm.replace=both: objective.name=simsiam has no target network",
        ),
        ("algorithm.replace=target", "algorithm.replace=target: unknown"),
        ("objective.name=simclr objective.predictor=off", "objective.predictor: unknown key"),
        ("objective.name=moco objective.predictor=8,16", "objective.predictor: unknown key"),
        ("objective.predictor=24,15", "objective.predictor=[24, 15]: predicts what the projector"),
        ("objective.predictor=[]", "objective.predictor=[]: expected the widths"),
        ("objective.predictor=0,16", "objective.predictor=[0, 16]: expected the widths"),
        ("objective.predictor=on", "objective.predictor=True: expected a list as in [64,"),
        ("objective.momentum=1.2", "objective.momentum=1.2: must be between 0 and 1"),
        ("objective.momentum=-0.2", "objective.momentum=-0.2: must be"),
        (
            "objective.name=moco objective.momentum=2",
            "objective.momentum=2.0: must be between 0 and 1",
        ),
        ("objective.name=moco objective.queue=0", "objective.queue=0: must be at least 1"),
        ("objective.name=moco objective.version=3", "objective.version=3: unknown"),
        ("objective.name=moco objective.temperature=0", "objective.temperature=0.0: must be above"),
        ("algorithm.batch=1", "encoder.norm=batch: needs batches of at least 2"),
        (
            "algorithm.norm_policy=reset encoder.norm=group encoder.groups=8",
            "algorithm.norm_policy=reset: is about batch norm's running statistics, and "
            "encoder.norm=group has none",
        ),
        ("algorithm.norm_policy=mine", "algorithm.norm_policy=mine: unknown"),
        ("partition.fraction=0", "partition.fraction=0.0: must be above 0 and at most 1"),
        ("partition.fraction=2", "partition.fraction=2.0: must be above 0 and at most 1"),
        (
            "partition.name=classes partition.clients=4 partition.classes=2",
            "partition.classes=2: 4 clients × 2 classes = 8 sets do not divide evenly over 10",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_that_names_key_and_value(words: str, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as error:
        open_run(words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "words",
    [
        "algorithm.name=fedema algorithm.tau=0",
        "algorithm.name=fedema algorithm.tau=1 algorithm.lambda=auto",
        "algorithm.name=fedema algorithm.lambda=0",
        "algorithm.name=fedema algorithm.decay=0,1",
        "algorithm.name=fedema algorithm.decay=null algorithm.lambda=3",
        "algorithm.name=ditto algorithm.lambda=0 objective.name=simclr",
        "algorithm.name=fedema objective.name=simsiam algorithm.parts=predictor",
        "objective.predictor=off objective.momentum=1",
        "objective.name=moco objective.queue=1 objective.version=1",
        "algorithm.norm_policy=local encoder.norm=group encoder.groups=8",
        "algorithm.norm_policy=reset partition.fraction=1",
    ],
)
def test_the_limits_are_allowed(words: str) -> None:
    open_run(words)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["run", *SMALL, "--out", ""], "--out"),
        (["run", *SMALL, "--out="], "--out"),
        (["run", *SMALL, "seed=[0,1]", "--out", ""], "--out"),
        (["run", "--resume", "--out", ""], "--out"),
        (["reproduce", "default", "rounds=1", "--out", ""], "--out"),
        (["export", "anything", "--format", "safetensors", "--out", ""], "--out"),
        (["export", "", "--format", "safetensors"], "RUN"),
        (["evaluate", ""], "RUN"),
        (["embed", "", "photos"], "RUN"),
        (["embed", "run", "photos", "--to", ""], "--to"),
        (["search", "", "a.png", "photos"], "RUN"),
        (["search", "run", "", "photos"], "QUERY"),
        (["search", "run", "a.png", "photos", "--html", ""], "--html"),
        (["detect", "", "coco"], "RUN"),
        (["detect", "run", ""], "DIR"),
        (["report", "run", "--out", ""], "--out"),
        (["partition", "--out", ""], "--out"),
        (["deploy", "init", "", "default"], "DIR"),
        (["theory", "representability", "--out", ""], "--out"),
    ],
)
def test_an_empty_name_is_not_the_current_folder(
    words: list[str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    said = capsys.readouterr().err
    assert f": argument {name}: an empty name; give one" in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", ""], 'recipe "": an empty name; give one, or leave it out for the default'),
        (["run", "--out", "run", ""], 'recipe "": an empty name; give one, or leave it out for'),
        (["run", "default", ""], '"": empty, where key=value is expected, as in rounds=100'),
        (["partition", ""], 'recipe "": an empty name; give one'),
        (["reproduce", ""], '"": no recipe has this name'),
        (["report", ""], '"": an empty name is no run'),
        (["compare", ""], '"": an empty name is no run'),
    ],
)
def test_an_empty_word_is_not_the_default(
    words: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fedssl: {line}") and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_current_folder_is_a_runs_if_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", *SMALL, "objective.predictor=24,16", "--out", "."]) == 0
    assert (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("words", [[], ["--resume"]])
def test_a_name_that_is_too_long(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *SMALL, *words, "--out", "x" * 300]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fedssl: --out xxx") and said.count("\n") == 1
    assert said.endswith(": cannot be read (File name too long); choose another folder\n")
