"""A small table on digits, from the first run to the table beside the paper's numbers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import load
from rounds import before_round, press_ctrl_c

from fedssl import __version__, config
from fedssl.cli import main
from fedssl.runs import loop, paper_table, reproduce
from fedssl.runs.batch import check_all
from fedssl.runs.folder import write_config
from fedssl.runs.paper_table import format_tables
from fedssl.util.errors import TrainingError

TABLE = """
table: Tiny Table 1
about: an objective on digits
measure: knn_top1
data: {name: digits, size: 8}
augment: {name: digits}
encoder: {name: tiny, norm: group, groups: 8}
objective: {name: simclr, projector: [16, 16]}
algorithm: {name: fedavg, local_steps: 1, batch: 16}
client: {optimizer: sgd, lr: 0.03}
server: {optimizer: sgd, lr: 1.0}
rounds: 20
engine: {threads: 1}
checkpoint: {seconds: 0}
evaluate: {protocols: [knn], every: 10}
columns:
  noniid: {partition: {name: classes, clients: 5, classes: 2}}
  iid: {partition: {name: iid, clients: 5}}
rows:
  simclr: {paper: [80.1 ± 0.2, 90.2]}
  cco: {objective: {name: cco, projector: [16, 16]}, paper: [70.5, -]}
"""


@pytest.mark.parametrize(
    ("recipe", "models"),
    [
        ("table2/fedbyol/lambda-0.1", ["global", "personal"]),
        ("table2/fedbyol/lambda-5", ["global", "personal"]),  # no number in the paper
        ("table2-fedprox/fedbyol/lambda-0.1", ["global", "local"]),
        ("table2-fedprox/fedbyol/lambda-5", ["global", "local"]),
    ],
)
def test_each_kind_of_model_that_there_is_has_a_column(
    recipe: str, models: list[str], tmp_path: Path
) -> None:
    (job,) = reproduce.plan(f"perfcl/{recipe}", [], "1", tmp_path)
    measures = [f"per-client_{model}_top1" for model in models]
    result = dict.fromkeys(["linear_top1", *measures], 50.0)
    summary = {"result": result, **result, "rounds": job.settings.rounds}
    job.folder.mkdir(parents=True)
    (job.folder / "summary.json").write_text(json.dumps(summary))
    assert job.measures == measures


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(TABLE)
    return "mine.yaml"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_table_is_run_once_and_shown_beside_the_papers_numbers(
    table: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["reproduce", table, "--scale", "0.1", "--out", "a", "device=cpu"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "[3/3] mine.yaml/cco/noniid" in shown.err
    head, columns, simclr, cco, caption, words, folder = shown.out.splitlines()
    assert head == "Tiny Table 1: an objective on digits"
    assert columns.split() == ["ours", "(paper's)", "noniid", "iid"]
    assert caption == "scaled: 2 of 20 rounds: not comparable with the paper's numbers"
    assert words == "with device=cpu" and folder == "a/mine"
    top1 = {
        name: json.loads(Path("a/mine", name, "summary.json").read_text())["knn_top1"]
        for name in ("simclr/noniid", "simclr/iid", "cco/noniid")
    }
    assert simclr.split() == [
        "simclr", f"{top1['simclr/noniid']:.2f}", "(80.1)", f"{top1['simclr/iid']:.2f}", "(90.2)",
    ]  # fmt: skip
    assert cco.split() == ["cco", f"{top1['cco/noniid']:.2f}", "(70.5)"]

    written = lines(Path("a/mine/table.jsonl"))
    assert [row["recipe"] for row in written] == [f"mine.yaml/{name}" for name in top1]
    assert written[0]["ours"] == {"knn_top1": top1["simclr/noniid"]}
    assert written[0]["paper"] == {"knn_top1": 80.1} and written[0]["note"] == "± 0.2"
    assert (written[0]["rounds"], written[0]["paper_rounds"]) == (2, 20)
    assert config.read_yaml(Path("a/mine/cco/noniid/config.yaml"))["evaluate"]["every"] == 1

    monkeypatch.setattr(loop, "run", lambda *_, **__: pytest.fail("it was run again"))
    assert main(command) == 0
    assert capsys.readouterr().out == shown.out
    # Part of the table keeps the other lines.
    assert main(["reproduce", "mine.yaml/*/iid", *command[2:]]) == 0
    assert lines(Path("a/mine/table.jsonl")) == written


ROWS = ("simclr", "byol")
ENCODER = """
table: Tiny Table 2
about: clients differ in the features of an encoder
columns:
  labels: {partition: &skew {name: skew, clients: 3, beta: 0}}
  features: {partition: {<<: *skew, source: features, sources: 3, encoder_recipe: enc.yaml}}
rows:
  simclr: {}
  byol: {objective: {name: byol, projector: [16, 16], predictor: [16, 16]}}
"""


@pytest.fixture
def features(table: str) -> str:
    base = TABLE.partition("columns:")[0].partition("data:")
    common = "data:" + base[2]
    Path("common.yaml").write_text(common)
    other = "extends: common.yaml\nencoder: {groups: 4}\nobjective: {name: supervised}\n"
    Path("enc.yaml").write_text(other)
    Path("features.yaml").write_text("extends: common.yaml" + ENCODER)
    return "features.yaml"


def test_an_encoder_that_partitions_need_is_trained_first_and_once(
    features: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["reproduce", features, "--scale", "0.1", "--out", "a", "device=cpu"]
    assert main(command) == 0
    titles = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    names = ["enc.yaml", *(f"{features}/{r}/{c}" for r in ROWS for c in ("labels", "features"))]
    assert titles == [f"[{i}/5] {name}" for i, name in enumerate(names, 1)]
    settings = config.read_yaml(Path("a/features/simclr/features/config.yaml"))
    assert settings["partition"]["encoder"] == str(Path("a/enc").absolute())
    assert config.read_yaml(Path("a/features/simclr/labels/config.yaml"))["partition"] == {
        **settings["partition"], "source": "labels", "encoder": None, "encoder_recipe": None,
        "sources": 5,
    }  # fmt: skip
    written = lines(Path("a/features/table.jsonl"))
    assert all(row["changed"] == {"rounds": 2} for row in written)
    held = json.loads(Path("a/features/simclr/features/clients.json").read_text())

    with monkeypatch.context() as patch:
        patch.setattr(loop, "run", lambda *_, **__: pytest.fail("it was run again"))
        assert main(command) == 0
    row = f"{features}/simclr/features"
    given = ["reproduce", row, "--scale", "0.1", "--out", "b", "partition.encoder=a/enc"]
    assert main(given) == 0 and not Path("b/enc").exists()
    folder = Path("b/features/simclr/features")
    assert json.loads((folder / "clients.json").read_text()) == held
    # The rows' own keys are checked before the encoder is trained.
    assert main(["reproduce", row, "--out", "c", "partition.sources=5000"]) == 2
    assert "partition.sources=5000" in capsys.readouterr().err and not Path("c").exists()


def test_a_searched_key_leaves_the_encoder_alone(features: str) -> None:
    words = ["data.holdout=0.1", "evaluate.protocols=[knn,heldout@10%]", "client.lr=[0.01,0.03]"]
    jobs = reproduce.plan(f"{features}/*/features", words, "1", Path("a"))
    assert [job.choice for job in jobs] == ["", *["client.lr=0.01", "client.lr=0.03"] * 2]
    assert jobs[0].settings.client.lr == 0.03 and jobs[0].settings.data.holdout == 0.1


def test_ctrl_c_and_the_same_command_again(
    table: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def in_the_second_run() -> None:
        begun.append(1)
        if len(begun) == 2:
            press_ctrl_c()

    command = ["reproduce", table, "--scale", "0.1"]  # three runs of two rounds
    before_round(monkeypatch, 0, in_the_second_run)
    assert main(command) == 130
    shown = capsys.readouterr()
    assert "The same command continues" in shown.err
    rows = [line.split()[0] for line in shown.out.splitlines()]
    assert rows.count("simclr") == 1, "what is finished is shown, and nothing else"
    assert "failed" not in shown.out
    root = Path("runs/reproduce/scale-0.1/mine")
    assert (root / "simclr/noniid/summary.json").exists()
    assert not (root / "simclr/iid/summary.json").exists()
    assert main(command) == 0
    assert len(begun) == 3, "the interrupted run went on from where it was"
    assert len(lines(root / "table.jsonl")) == 3


def test_a_full_disk_is_told_as_what_goes_on_here(
    table: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no --resume, neither here nor in results/measure.py."""

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    Path("plan.txt").write_text(f"{table}/simclr/iid rounds=2\n")
    here = (main, ["reproduce", f"{table}/simclr/iid", "rounds=2", "--out", "a"])
    for command, words in (here, (load("results/measure.py").main, ["plan.txt", "--out", "b"])):
        with monkeypatch.context() as disk:
            disk.setattr("safetensors.torch.save", full)
            assert command(words) == 2
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.endswith("Then call it again, and it continues.")
        assert command(words) == 0
        capsys.readouterr()


def test_other_data_and_other_keys_are_named(table: str) -> None:
    words = ["data.name=fashion-mnist", "objective.projector=8,8", "seed=3"]
    jobs = reproduce.plan(table, words, "1", Path("a"))
    caption = format_tables(jobs, words).splitlines()[-3:-1]
    assert caption == [
        "data fashion-mnist for digits; other objective.projector: not comparable with the "
        "paper's numbers",
        "with data.name=fashion-mnist objective.projector=8,8 seed=3",
    ]
    assert "not comparable" not in format_tables(reproduce.plan(table, ["seed=3"], "1", None))


def test_several_measures_and_the_longer_side_downwards(tmp_path: Path) -> None:
    jobs = reproduce.plan("fedema/table11", [], "0.5", tmp_path)
    for job, reached in zip(jobs, (None, 40, 20, 10), strict=True):
        job.folder.mkdir(parents=True)
        summary = {"result": {}, "rounds_to_70": 7, "rounds_to_80": reached, "rounds": 50}
        (job.folder / "summary.json").write_text(json.dumps(summary))
    shown = [line.split("  ") for line in format_tables(jobs).splitlines()]
    assert [line[0] for line in shown[1:9]] == [
        "ours (paper's)", "epochs-1", "epochs-5, rounds to 70", "epochs-5, rounds to 80",
        "epochs-10, rounds to 70", "epochs-10, rounds to 80", "epochs-20, rounds to 70",
        "epochs-20, rounds to 80",
    ]  # fmt: skip
    assert shown[2][-1].strip() == "7 (90)" and shown[4][-1].strip() == "40 (80)"
    assert shown[9] == ["scaled: 50 of 100 rounds: not comparable with the paper's numbers"]
    assert paper_table._cell(jobs[0], "rounds_to_80") == "not reached (–)"
    assert paper_table._cell(jobs[0], "rounds_to_90") == "– (–)", "nobody looked for it"


@pytest.mark.parametrize(
    ("rounds", "every", "share", "expected"),
    [(100, 10, 0.1, (10, 1)), (100, 0, 0.5, (50, 0)), (3, 2, 0.1, (1, 1)), (0, 0, 0.1, (0, 0))],
)
def test_scaled(rounds: int, every: int, share: float, expected: tuple[int, int]) -> None:
    recipe = config.read_recipe("fedema/table3/fedbyol/cifar10-iid")
    words = [f"rounds={rounds}", f"evaluate.every={every}"]
    settings = reproduce.scaled(config.resolve(recipe, words), share)
    assert (settings.rounds, settings.evaluate.every) == expected


def test_a_key_that_a_row_lacks_is_left_out_there(table: str) -> None:
    words = ["objective.temperature=0.3", "seed=3"]
    *simclr, cco = reproduce.plan(table, words, "1", Path("a"))
    assert [job.settings.objective.temperature for job in simclr] == [0.3, 0.3]
    assert cco.settings.objective.name == "cco" and cco.settings.seed == 3
    assert "temperature" in simclr[0].command and "temperature" not in cco.command
    said = "\nobjective.temperature=0.3: left out for cco, without this key\n"
    assert said in format_tables([*simclr, cco], words) and cco.left_out == (words[0],)
    assert "left out" not in format_tables(simclr, words)


def test_the_protocols_that_were_asked_for_are_compared(table: str) -> None:
    """The paper has kNN; every accuracy that was measured is shown, and nothing else."""
    shown = {}
    for asked in ("linear", "linear,knn"):
        (job,) = reproduce.plan("mine.yaml/cco", [f"evaluate.protocols={asked}"], "1", Path(asked))
        job.folder.mkdir(parents=True)
        result = {f"{name}_top1": 50.0 + len(name) for name in asked.split(",")}
        summary = {**result, "result": result, "rounds": 20}
        (job.folder / "summary.json").write_text(json.dumps(summary))
        shown[asked] = format_tables([job])
        assert "not comparable" not in shown[asked]
    assert "noniid, linear" in shown["linear"] and "56.00 (–)" in shown["linear"]
    assert "70.5" not in shown["linear"]
    assert "53.00 (70.5)" in shown["linear,knn"] and "56.00 (–)" in shown["linear,knn"]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["fedema/tabel3"], "fedema/tabel3"),
        (["mine.yaml/nothing"], "mine.yaml/nothing"),
        *((["mine.yaml", "--scale", share], "--scale") for share in ("0", "1.5", "nan", "a tenth")),
        (["mine.yaml", "bogus=1"], "bogus"),
        (["mine.yaml/cco", "objective.temperature=1"], "objective.temperature"),
        (["mine.yaml", "objective.temprature=1"], "objective.temprature"),
    ],
)
def test_mistakes_are_found_before_the_first_run(
    table: str, words: list[str], key: str, refusal: Callable[..., str]
) -> None:
    assert key in refusal("reproduce", *words)
    assert not Path("runs").exists()


def test_a_folder_with_another_run_is_not_touched(table: str, refusal: Callable[..., str]) -> None:
    folder = Path("a/mine/simclr/iid")
    folder.mkdir(parents=True)
    settings = config.resolve(config.read_recipe("mine.yaml/simclr/iid"), ["device=cpu"])
    write_config(settings, folder)
    (folder / "summary.json").write_text('{"rounds": 20}')
    free = ["device=auto", "log=[mlflow]", "engine.workers=3"]
    (job,) = reproduce.plan("mine.yaml/simclr/iid", free, "1", Path("a"))
    assert not job.changed  # nor do they make another result
    check_all([job])
    for words, said in (
        (["--scale", "0.5"], "rounds=10: with schedule=cosine"),
        (["evaluate.k=3"], f"evaluate.k=3: was 20 in {folder}"),
    ):
        assert refusal("reproduce", table, *words, "--out", "a").startswith(said)


@pytest.mark.parametrize("text", ["{}\n", '{"recipe'])
def test_a_damaged_line_of_a_table_is_named(
    text: str, table: str, refusal: Callable[..., str]
) -> None:
    folder = Path("a/mine/cco/noniid")
    folder.mkdir(parents=True)
    (job,) = reproduce.plan("mine.yaml/cco", [], "1", Path("a"))
    write_config(job.settings, folder)
    (folder / "summary.json").write_text('{"rounds": 20}')
    job.table_file.write_text(text)
    said = "a/mine/table.jsonl: line 1 is not about a run"
    assert refusal("reproduce", "mine.yaml/cco", "--out", "a").startswith(said)


def test_a_mistake_in_the_last_cell_is_told_before_the_first_one_trains(
    table: str, refusal: Callable[..., str]
) -> None:
    Path(table).write_text(f"{TABLE}  last: {{encoder: {{init: nowhere}}, paper: [-, 50.0]}}\n")
    said = refusal("reproduce", table, "--scale", "0.05", "--out", "a")
    assert said.startswith("encoder.init=nowhere: ") and "(run mine.yaml/last/iid)" in said
    assert not Path("a").exists()


SEARCH = ["data.holdout=0.2", "evaluate.protocols=[knn,heldout@20%]"]


def finished(job: reproduce.Job, end: tuple[float, float], *before: tuple[float, float]) -> None:
    """Leave what a run leaves; each pair is its accuracy on held-out and on test images."""
    job.folder.mkdir(parents=True)
    named = [{"heldout@20%_top1": heldout, "knn_top1": knn} for heldout, knn in (*before, end)]
    lines = [{"round": number, **numbers} for number, numbers in enumerate(named, 1)]
    (job.folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines[:-1]))
    summary = {
        **named[-1],
        "result": named[-1],
        "rounds": max(len(named), job.settings.rounds),
        "untrained": {},
    }
    (job.folder / "summary.json").write_text(json.dumps(summary))


def test_values_and_rounds_are_chosen_on_held_out_images_alone(table: str) -> None:
    words = [*SEARCH, "server.lr=[0.1,1.0]", "evaluate.every=1"]
    jobs = reproduce.plan("mine.yaml/cco", words, "0.1", Path("a"))
    assert [job.choice for job in jobs] == ["server.lr=0.1", "server.lr=1.0"]
    assert [job.settings.server.lr for job in jobs] == [0.1, 1.0]
    assert jobs[1].folder == Path("a/mine/cco/noniid/server.lr=1.0")
    finished(jobs[0], (60.0, 40.0), (62.0, 30.0), (61.0, 70.0))
    finished(jobs[1], (50.0, 99.0), (51.0, 98.0))
    shown = format_tables(jobs)
    assert "30.00 (70.5)" in shown and shown.count("chosen") == 1
    assert "noniid: server.lr=0.1, round 1, chosen on held-out images (62.00)" in shown
    assert format_tables(jobs[::-1]) == shown
    record = jobs[0].record()
    assert record["ours"] == {"knn_top1": 30.0} and record["last"] == {"knn_top1": 40.0}
    assert (record["round"], record["heldout"]) == (1, 62.0)


def test_without_held_out_images_the_last_round_counts(table: str) -> None:
    (job,) = reproduce.plan("mine.yaml/cco", ["evaluate.every=1"], "0.1", Path("a"))
    finished(job, (0.0, 20.0), (0.0, 90.0))
    record = job.record()
    assert (record["round"], record["ours"]["knn_top1"], record["heldout"]) == (2, 20.0, None)
    assert "20.00 (70.5)" in format_tables([job]) and "held-out" not in format_tables([job])


def test_where_nothing_was_to_be_chosen_nothing_is_called_so(table: str) -> None:
    # Rounds that only kNN watches, as FedEMA's recipes do, are none to choose from.
    (job,) = reproduce.plan("mine.yaml/cco", [*SEARCH, "evaluate.every=1"], "0.1", Path("a"))
    finished(job, (50.0, 40.0))
    (job.folder / "metrics.jsonl").write_text(json.dumps({"round": 1, "knn_top1": 90.0}) + "\n")
    shown = format_tables([job])
    assert "40.00 (70.5)" in shown and "chosen" not in shown and "round 1" not in shown
    (job,) = reproduce.plan("mine.yaml/cco", [*SEARCH, "server.lr=[0.1]"], "0.1", Path("b"))
    finished(job, (50.0, 40.0))
    assert "\nmine.yaml/cco/noniid: server.lr=0.1\n" in format_tables([job])
    both = reproduce.plan("mine.yaml/cco", [*SEARCH, "server.lr=[0.1,1.0]"], "0.1", Path("c"))
    finished(both[1], (50.0, 40.0))  # the other one has failed
    assert "\nmine.yaml/cco/noniid: server.lr=1.0\n" in format_tables(both)
    finished(both[0], (40.0, 50.0))
    jobs = reproduce.plan("mine.yaml/cco", [*SEARCH, "server.lr=[0.1,1.0]"], "0.1", Path("c"))
    line = "\nmine.yaml/cco/noniid: server.lr=1.0, chosen on held-out images (50.00)\n"
    assert line in format_tables(jobs)


def test_a_round_is_chosen_among_those_that_have_every_number(table: str) -> None:
    words = [*SEARCH, "evaluate.every=1"]
    (job,) = reproduce.plan("mine.yaml/cco", words, "0.1", Path("a"))
    finished(job, (50.0, 40.0), (70.0, 30.0), (60.0, 20.0), (55.0, 10.0))
    path = job.folder / "metrics.jsonl"
    first, *rest = lines(path)
    del first["knn_top1"]  # evaluate.monitor has not asked for it
    # With evaluate.monitor the last round has a line as well: it is no other candidate.
    last = {"round": 4, "heldout@20%_top1": 50.0, "knn_top1": 40.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, *rest, last)))
    summary = job.folder / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"rounds_to_70": 3}))
    record = job.record()
    assert (record["round"], record["ours"], record["heldout"]) == (2, {"knn_top1": 20.0}, 60.0)
    assert [line["round"] for line in job.candidates] == [4, 3, 2]
    assert paper_table._cell(job, "rounds_to_70") == "3 (–)", "of the run, not of a round"


def test_what_chooses_is_no_result(tmp_path: Path) -> None:
    words = ["data.holdout=0.2", "evaluate.protocols=[heldout@20%,linear]"]
    (job,) = reproduce.plan("fedema/figure5/encoder", words, "1", tmp_path)
    finished(job, (50.0, 40.0))
    result = {"heldout@20%_top1": 50.0, "linear_top1": 61.0, "global_heldout@20%_top1": 45.0}
    summary = {"result": result, **result, "rounds": job.settings.rounds}
    (job.folder / "summary.json").write_text(json.dumps(summary))
    assert job.measures == ["linear_top1"] and job.record()["ours"] == {"linear_top1": 61.0}


def test_a_search_runs_every_value_and_writes_a_line_for_each(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SEARCH, "server.lr=[0.1,1.0]", "device=cpu", "data.root=null"]
    command = ["reproduce", "mine.yaml/cco", *words, "--scale", "0.1", "--out", "a"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "[2/2] mine.yaml/cco/noniid server.lr=1.0" in shown.err
    written = lines(Path("a/mine/table.jsonl"))
    assert [row["choice"] for row in written] == ["server.lr=0.1", "server.lr=1.0"]
    assert written[0]["changed"] == {
        "data.holdout": 0.2, "server.lr": 0.1, "rounds": 2,
        "evaluate.protocols": ["knn", "heldout@20%"],
    }  # fmt: skip
    assert written[0]["untrained"]["knn_top1"] > 0 and written[0]["seconds"] > 0
    assert written[0]["overhead"].keys() == {"prepare", "evaluate", "checkpoint"}
    assert written[0]["command"].startswith("fedssl reproduce mine.yaml/cco/noniid --scale 0.1 ")
    assert written[0]["command"].endswith(" device=cpu data.root=DIR")
    for row, lr in zip(written, (0.1, 1.0), strict=True):
        _, _, name, _, _, *own = shlex.split(row["command"])
        own = [word for word in own if not word.startswith("data.root=")]
        (again,) = reproduce.plan(name, own, "0.1", Path("b"))
        assert again.settings.server.lr == lr and again.choice == ""
    best = max(written, key=lambda row: row["heldout"])
    assert f"{best['choice']}, round {best['round']}, chosen" in shown.out
    assert main(command) == 0
    assert lines(Path("a/mine/table.jsonl")) == written


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["server.lr=[0.1,1.0]"], "server.lr"),
        (
            ["server.lr=[0.1,1.0]", "data.holdout=0.1", "evaluate.protocols=own.py:heldout@10%"],
            "evaluate.protocols",
        ),
        (["server.lr=[0.1,1.0]", "data.holdout=0.1", SEARCH[1]], "evaluate.protocols"),
        (
            ["server.lr=[0.1,1.0]", "data.holdout=0.1", "evaluate.protocols=[knn,heldout@200]"],
            "evaluate.protocols",
        ),
        (["evaluate.every=1", SEARCH[1]], "evaluate.protocols"),
        (["evaluate.monitor=heldout@10%"], "evaluate.monitor"),
        ([*SEARCH, "seed=[0,1]"], "seed"),
        ([*SEARCH, "partition.seed=[0,1]"], "partition.seed"),
        ([*SEARCH, "server.lr=[0.1,0]"], "server.lr"),
    ],
)
def test_a_search_that_would_choose_on_test_images_is_refused(
    table: str, words: list[str], key: str, refusal: Callable[..., str]
) -> None:
    Path("own.py").write_text("def heldout(*sides):\n    return {'top1': 99.0}\n")
    said = refusal("reproduce", table, *words, "--out", "a")
    assert said.startswith(f"{key}=") and "(recipe mine.yaml/simclr/noniid)" in said
    assert not Path("a").exists()


def test_a_command_has_the_lines_own_value_whatever_its_kind(table: str) -> None:
    words = [*SEARCH, "client.lr=[1e-5,0.1]", "objective.projector=[[8,8],[4,4]]", "rounds=[20,40]"]
    jobs = reproduce.plan("mine.yaml/cco", words, "0.5", Path("a"))
    assert len({job.command for job in jobs}) == 8
    for job in jobs:
        _, _, name, option, scale, *own = shlex.split(job.command)
        assert option == "--scale"
        (again,) = reproduce.plan(name, own, scale, Path("b"))
        assert again.settings == job.settings and again.command == job.command


def test_a_line_says_what_the_images_are(table: str) -> None:
    (job,) = reproduce.plan(
        "mine.yaml/cco", ["data.name=folder", "data.root=photos"], "1", Path("a")
    )
    assert job.record()["data"] == "folder" and job.record()["paper_data"] == "digits"
    Path("photos").mkdir()
    Path("photos/about.txt").write_text("photos of\nshoes\n")
    assert job.record()["data"] == "photos of shoes"


def test_a_run_that_diverges_says_what_it_cost_and_the_others_go_on(
    table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed: list[int] = []

    def in_the_first_run() -> None:
        failed.append(1)
        if len(failed) == 1:
            raise TrainingError("round 3: the loss is nan", "See a.")

    before_round(monkeypatch, 2, in_the_first_run)
    words = ["device=cpu", "evaluate.every=0", "--scale", "0.2", "--out", "a"]
    assert main(["reproduce", f"{table}/simclr", *words]) == 1
    shown = capsys.readouterr()
    assert "[1/2] mine.yaml/simclr/noniid: round 3: the loss is nan" in shown.err
    assert "failed (80.1)" in shown.out and "(90.2)" in shown.out
    line, other = lines(Path("a/mine/table.jsonl"))
    assert line["failed"] == "round 3: the loss is nan" and "failed" not in other
    metrics = lines(Path("a/mine/simclr/noniid/metrics.jsonl"))
    assert line["seconds"] == round(sum(row["seconds"] for row in metrics), 3) > 0
    assert line["images_per_second"] > 0 and line["fedssl"] == __version__
    assert (line["device"], line["precision"]) == ("cpu", "fp32")
    assert line["ours"] == line["untrained"] == {}


def test_a_finished_run_keeps_its_day_and_its_commit(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["reproduce", "mine.yaml/cco", "--scale", "0.05", "--out", "a"]
    monkeypatch.setattr(reproduce, "_commit", lambda: "abc1234")
    assert main(command) == 0
    path = Path("a/mine/table.jsonl")
    (line,) = lines(path)
    assert line["date"] == time.strftime("%Y-%m-%d") and line["commit"] == "abc1234"
    os.utime("a/mine/cco/noniid/summary.json", (1e9, 1e9))
    monkeypatch.setattr(reproduce, "_commit", lambda: "another")
    assert main(command) == 0
    (line,) = lines(path)
    assert line["date"].startswith("2001-09-0") and line["commit"] == "abc1234"
    path.unlink()
    assert main(command) == 0
    assert lines(path)[0]["commit"] is None, "nobody knows it any more"


def test_the_commit_is_that_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    code = tmp_path / "src" / "__init__.py"
    code.parent.mkdir()
    code.write_text("a = 1\n")
    monkeypatch.setattr(reproduce, "__file__", str(code.parent / "runs" / "reproduce.py"))
    assert reproduce._commit() is None, "no repository"
    git("init")
    git("commit", "--allow-empty", "-m", "empty")
    assert reproduce._commit() is None, "somebody else's repository"
    git("add", "src")
    git("commit", "-m", "code")
    (tmp_path / "notes").write_text("of no code\n")
    assert reproduce._commit() == git("rev-parse", "--short", "HEAD")
    code.write_text("a = 2\n")
    assert reproduce._commit() == git("rev-parse", "--short", "HEAD") + "-dirty"
