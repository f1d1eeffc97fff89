"""Runs in one table, in the terminal and on the page."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from made_runs import made, scored

from fedssl.cli import main
from fedssl.report.comparison import Row, Value, compare, table
from fedssl.runs.reader import RunReader, find_runs


def rows_of(*paths: Path) -> list[Row]:
    return compare([RunReader(path) for path in paths]).rows


def test_runs_that_differ_only_in_seed_are_one_row(tmp_path: Path) -> None:
    scores = (90.0, 92.5, 93.0)
    words = [(f"seed={k}", f"device={'cpu' if k else 'auto'}", "log=[mlflow]") for k in range(3)]
    runs = [
        made(tmp_path / f"s{k}", words[k], scored(score, 80 + k)) for k, score in enumerate(scores)
    ]
    rows = rows_of(*runs)
    assert [(row.name, row.kind, row.seeds) for row in rows] == [
        ("dcco", "run", ["0", "1", "2"]),
        ("untrained", "untrained", ["0", "1", "2"]),
    ]
    value = rows[0].values["knn_top1"]
    assert (value.mean, value.spread) == (statistics.fmean(scores), statistics.stdev(scores))
    assert "91.8 ± 1.6 %" in table(runs)


def test_a_folder_of_runs_stands_for_all_in_it(tmp_path: Path) -> None:
    """The runs of a table are two levels down; baselines are not listed."""
    made(tmp_path / "sweep/seed=0", (), scored(90))
    made(tmp_path / "sweep/seed=1", ("seed=1",), scored(92))
    made(tmp_path / "sweep/seed=1/baselines/fedavg", (), scored(10))
    made(tmp_path / "table/row/column", ("rounds=7",), scored(50))
    single = made(tmp_path / "alone", (), scored(90))
    made(tmp_path / "alone/below", (), scored(90))
    names = [run.name for run in find_runs([tmp_path / "sweep", tmp_path / "table", single])]
    assert names == ["seed=0", "seed=1", "column", "alone"]
    assert "91.0 ± 1.4 %" in table([tmp_path / "sweep"])


@pytest.mark.parametrize("command", ["compare", "report"])
def test_files_beside_runs_are_skipped(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        made(tmp_path / f"seed={seed}", (f"seed={seed}",), scored(81))
    for name in ("sweep.yaml", "table.jsonl", "report.html", "lock"):
        (tmp_path / name).touch()
    everything = [str(path) for path in sorted(tmp_path.iterdir())]
    assert main([command, *everything]) == 0
    (tmp_path / "empty").mkdir()
    for other in (str(tmp_path / "empty"), "", str(tmp_path / "nothing")):
        assert main([command, *everything, other]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_measures_that_some_seeds_lack(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / f"s{k}", (f"seed={k}",), scored(90 + k, rounds_to_90=round))
        for k, round in enumerate((2, None, None))
    ]
    own = json.loads((runs[2] / "summary.json").read_text())
    del own["knn_top1"], own["result"]["knn_top1"]
    (runs[2] / "summary.json").write_text(json.dumps(own))
    said = table(runs)
    assert "90.5 ± 0.7 % (2 of 3)" in said and "  2 (1 of 3)" in said
    assert "(1 of 3): only one of three seeds" in said
    assert " of " not in table(runs[:1])
    assert Value((91.25,)).spread is None


@pytest.mark.parametrize(
    ("word", "label"),
    [
        ("server.lr=0.5", "dcco, server.lr=0.5"),
        ("rounds=7", "dcco, rounds=7"),
        ("algorithm.name=fedavg", "fedavg"),
        ("seed=0", "dcco, b"),  # the same run twice is not two seeds
    ],
)
def test_labels_name_what_differs(tmp_path: Path, word: str, label: str) -> None:
    rows = rows_of(made(tmp_path / "a", (), scored(90)), made(tmp_path / "b", (word,), scored(91)))
    assert [row.kind for row in rows] == ["run", "run", "untrained"]  # which is equal in both
    assert rows[1].name == label and rows[0].name != label


def test_baselines_and_the_papers_number(tmp_path: Path) -> None:
    words = ("paper.results.knn_top1=95.5", "paper.note=with 1000 rounds")
    summary = scored(90, baselines={"fedavg": {"knn_top1": 85.0}}, initial={"knn_top1": 70.0})
    comparison = compare([RunReader(made(tmp_path / "a", words, summary))])
    assert [(row.name, row.values["knn_top1"].mean) for row in comparison.rows] == [
        ("dcco", 90.0),
        ("fedavg", 85.0),
        ("untrained", 80.0),
        ("as it started", 70.0),
        ("paper, its data", 95.5),
    ]
    assert comparison.remarks == ["The paper's number: with 1000 rounds"]


def test_personal_and_global_models_are_two_rows(tmp_path: Path) -> None:
    row = {"knn_top1": 90.0, "global_knn_top1": 88.0}
    summary = {**row, "result": row, "untrained": {}, "judged": "personal"}
    words = ("algorithm.name=ditto", "server.optimizer=sgd", "server.lr=1")
    rows = rows_of(made(tmp_path / "a", words, summary))
    assert {row.name: row.values["knn_top1"].mean for row in rows} == {
        "ditto, global": 88.0, "ditto, personal": 90.0,
    }  # fmt: skip


def test_other_data_is_not_another_seed(tmp_path: Path) -> None:
    """Two folders of one name, with one seed each, are never averaged."""
    runs = [
        made(
            tmp_path / f"{k}/o",
            ("data.name=folder", f"data.root=/{place}/photos", f"seed={k}"),
            scored(90 + k),
        )
        for k, place in enumerate(("here", "there"))
    ]
    rows = [row for row in rows_of(*runs) if row.kind == "run"]
    assert [(row.name, row.seeds, row.runs) for row in rows] == [
        ("dcco, data.root=/here/photos", ["0"], ["0/o"]),
        ("dcco, data.root=/there/photos", ["1"], ["1/o"]),
    ]
    said = table(runs)
    assert "different data sets" in said and "(folder /here/photos: 0/o; folder /there" in said
    # The same images wherever they lie.
    sets = [("data.name=cifar10", f"data.root=/{place}") for place in ("one", "two")]
    same = [made(tmp_path / str(k), words, scored(50)) for k, words in enumerate(sets, 5)]
    assert "different data sets" not in table(same)


def test_long_values_keep_their_end(tmp_path: Path) -> None:
    places = ("leeds", "turin")
    words = [("data.name=folder", f"data.root=/mnt/storage/of/the/project/{p}") for p in places]
    rows = rows_of(*(made(tmp_path / w[1][-5:], w, scored(90)) for w in words))
    assert rows[0].name.endswith("leeds") and rows[1].name.endswith("turin")


def test_unfinished_runs_are_never_averaged(tmp_path: Path) -> None:
    lines = ({"round": 1, "knn_top1": 70.0}, {"round": 2, "loss": 1.0})
    runs = [
        made(tmp_path / "a", ("seed=1",), scored(90)),
        made(tmp_path / "b", ("seed=2",), None, lines),
    ]
    rows = rows_of(*runs)
    assert [row.state for row in rows][:2] == ["finished", "not finished: 2 of 200"]
    assert rows[1].values["knn_top1"].each == (70.0,)
    assert "a run that is not finished are those of its last evaluation" in table(runs)


@pytest.mark.parametrize("command", ["compare", "report"])
@pytest.mark.parametrize(
    ("name", "text"), [("config.yaml", "warmth: 3"), ("summary.json", "{"), ("summary.json", "[]")]
)
def test_a_run_that_cannot_be_read_is_one_line(
    command: str, name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "a", (), scored(90))
    (run / name).write_text(text)
    assert main([command, str(run)]) == 2
    said = capsys.readouterr().err
    assert (name in said or "warmth" in said) and said.count("\n") == 1


def test_cells_are_the_summarys_numbers(tmp_path: Path) -> None:
    said = table([made(tmp_path / "a", (), scored(91.2345, rounds_to_90=7))])
    assert said.splitlines()[1].split()[-3:] == ["91.2", "%", "7"]
