"""Keys of the Siamese methods that are refused in one line, and names that are no folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from helpers import fault_of

from fedssl import cli, config
from fedssl.runs.build import build_experiment
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
    build_experiment(config.resolve(config.read_recipe(None), [*SMALL, *head, *words.split()]))


# The last word is at fault.
REFUSED = (
    "algorithm.name=fedema algorithm.tau=1.1",
    "algorithm.name=fedema algorithm.tau=nan",
    "algorithm.name=fedema algorithm.lambda=-1",
    "algorithm.name=fedema algorithm.lambda=few",
    "algorithm.name=fedema algorithm.decay=[1.5]",
    "algorithm.name=fedema algorithm.decay=[0.1,0.2,0.3]",
    "algorithm.name=fedema algorithm.decay=[]",
    "algorithm.name=fedema algorithm.lambda=2 algorithm.decay=[0.5]",
    "algorithm.name=fedema algorithm.divergence=l2",
    "algorithm.name=fedema algorithm.parts=head",
    "algorithm.name=fedema objective.predictor=off algorithm.parts=predictor",
    "algorithm.name=fedema objective.name=moco algorithm.parts=predictor",
    "objective.name=simclr algorithm.name=fedu",
    "objective.predictor=off algorithm.name=fedu",
    "objective.name=simclr algorithm.replace=both",
    "algorithm.name=ditto objective.name=simsiam algorithm.replace=both",
    "algorithm.replace=target",
    "objective.predictor=[24,15]",
    "objective.predictor=[]",
    "objective.predictor=on",
    "objective.momentum=1.2",
    "objective.name=moco objective.version=3",
    "encoder.norm=group encoder.groups=8 algorithm.norm_policy=reset",
    "partition.fraction=0",
    "partition.name=classes partition.clients=4 partition.classes=2",
)


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_line_that_names_key_and_value(words: str) -> None:
    key, _, value = words.split()[-1].partition("=")
    with pytest.raises(UserError) as error:
        open_run(words)
    assert fault_of(error.value) == (key, yaml.safe_load(value))
    assert "\n" not in str(error.value)


def test_keys_of_another_objective_are_unknown() -> None:
    with pytest.raises(UserError, match=r"^objective\.predictor: unknown key"):
        open_run("objective.name=simclr objective.predictor=off")


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
        (["reproduce", "default", "rounds=1", "--out", ""], "--out"),
        (["export", "", "--format", "safetensors"], "RUN"),
        (["evaluate", ""], "RUN"),
        (["embed", "run", "photos", "--to", ""], "--to"),
        (["search", "run", "", "photos"], "QUERY"),
        (["search", "run", "a.png", "photos", "--html", ""], "--html"),
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
        (["run", ""], 'recipe="": no such recipe'),
        (["run", "default", ""], '"" is not key=value.'),
        (["partition", ""], 'recipe="": no such recipe'),
        (["reproduce", ""], "recipe=: no recipe has this name"),
        (["report", ""], "an empty name is no run."),
        (["compare", ""], "an empty name is no run."),
    ],
)
def test_an_empty_word_is_not_the_default(
    words: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Callable[..., str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(*words).startswith(line)
    assert not list(tmp_path.iterdir())


def test_the_current_folder_is_a_runs_if_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", *SMALL, "objective.predictor=24,16", "--out", "."]) == 0
    assert (tmp_path / "summary.json").exists()
