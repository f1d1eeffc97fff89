"""Runs beside each other, in the terminal and as rows of the page."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from made_runs import made, scored

from fedssl.cli import main
from fedssl.report.compare import Value, compare, table
from fedssl.runs.record import Run, opened
from fedssl.util.errors import UserError


def test_runs_that_differ_only_in_seed_are_one_row(tmp_path: Path) -> None:
    scores = (90.0, 92.5, 93.0)
    runs = [
        made(
            tmp_path / f"s{k}", (f"seed={k}", f"device={'cpu' if k else 'auto'}"), scored(x, 80 + k)
        )
        for k, x in enumerate(scores)
    ]
    found = compare([Run(path) for path in runs])
    assert [(row.name, row.kind, row.seeds) for row in found.rows] == [
        ("dcco", "run", ["0", "1", "2"]),
        ("untrained", "untrained", ["0", "1", "2"]),
    ]
    value = found.rows[0].values["knn_top1"]
    assert (value.mean, value.spread) == (statistics.fmean(scores), statistics.stdev(scores))
    assert "91.8 ± 1.6 %" in table(runs)


def test_a_folder_of_runs_stands_for_all_in_it(tmp_path: Path) -> None:
    """A sweep's runs are its folders; a table's are two levels further down; baselines are not."""
    made(tmp_path / "sweep/seed=0", (), scored(90))
    made(tmp_path / "sweep/seed=1", ("seed=1",), scored(92))
    made(tmp_path / "sweep/seed=1/baselines/fedavg", (), scored(10))
    made(tmp_path / "table/row/column", ("rounds=7",), scored(50))
    single = made(tmp_path / "alone", (), scored(90))
    made(tmp_path / "alone/below", (), scored(90))
    names = [run.name for run in opened([tmp_path / "sweep", tmp_path / "table", single])]
    assert names == ["seed=0", "seed=1", "column", "alone"]
    assert "91.0 ± 1.4 %" in table([tmp_path / "sweep"])
    with pytest.raises(UserError, match="holds no run"):
        opened([tmp_path / "nothing"])


@pytest.mark.parametrize("command", ["compare", "report"])
def test_files_that_lie_beside_runs_are_passed_over(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        made(tmp_path / f"seed={seed}", (f"seed={seed}",), scored(81))
    for name in ("sweep.yaml", "table.jsonl", "report.html", "lock"):
        (tmp_path / name).touch()
    everything = [str(path) for path in sorted(tmp_path.iterdir())]
    assert main([command, *everything]) == 0
    assert "holds no run" not in capsys.readouterr().err
    for name, kind in (("empty", Path.mkdir), ("mine.txt", Path.touch)):
        kind(tmp_path / name)
        assert main([command, *everything, str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert f"{tmp_path / name}: holds no run" in said and said.count("\n") == 1
    assert main([command, str(tmp_path / "sweep.yaml")]) == 2
    assert "sweep.yaml: holds no run" in capsys.readouterr().err


def test_what_some_seeds_lack_is_said(tmp_path: Path) -> None:
    reached = (2, None, None)
    runs = [
        made(tmp_path / f"s{k}", (f"seed={k}",), scored(90 + k, rounds_to_90=round))
        for k, round in enumerate(reached)
    ]
    own = json.loads((runs[2] / "summary.json").read_text())
    del own["knn_top1"], own["result"]["knn_top1"]
    (runs[2] / "summary.json").write_text(json.dumps(own))
    said = table(runs)
    assert "90.5 ± 0.7 % (2 of 3)" in said and "  2 (1 of 3)" in said
    assert "(1 of 3): of three seeds only one has this number." in said
    assert " of " not in table(runs[:1]) and "only one has" not in table(runs[:1])


def test_where_a_run_is_logged_makes_no_other_experiment(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / "a", (), scored(90)),
        made(tmp_path / "b", ("seed=1", "log=[mlflow]"), scored(91)),
    ]
    assert compare([Run(path) for path in runs]).rows[0].seeds == ["0", "1"]


def test_a_name_with_a_line_break_stays_in_its_line(tmp_path: Path) -> None:
    runs = [made(tmp_path / "a\nb", (), None, ({"round": 1},))]
    first, *rest = table(runs).split("\n\n")
    assert len(first.splitlines()) == 2 and "a\N{REPLACEMENT CHARACTER}b" in first
    assert all(len(remark.splitlines()) == 1 for remark in rest)


def test_an_empty_name_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "a", (), scored(90))
    monkeypatch.chdir(tmp_path)
    assert len(opened(["."])) == 1
    with pytest.raises(UserError, match="an empty name is no run"):
        opened([""])


def test_one_seed_has_no_spread() -> None:
    assert Value((91.25,)).spread is None and Value((91.25,)).mean == 91.25


@pytest.mark.parametrize(
    ("word", "label"),
    [
        ("server.lr=0.5", "dcco, server.lr=0.5"),
        ("rounds=7", "dcco, rounds=7"),
        ("algorithm.name=fedavg", "fedavg"),
    ],
)
def test_other_runs_are_rows_of_their_own_that_say_what_differs(
    tmp_path: Path, word: str, label: str
) -> None:
    runs = [made(tmp_path / "a", (), scored(90)), made(tmp_path / "b", (word,), scored(91))]
    rows = compare([Run(path) for path in runs]).rows
    assert [row.kind for row in rows] == ["run", "run", "untrained"]  # which is the same in both
    assert rows[1].name == label and rows[0].name != label


def test_the_same_run_twice_is_not_two_seeds(tmp_path: Path) -> None:
    runs = [made(tmp_path / "a", (), scored(90)), made(tmp_path / "b", (), scored(90))]
    rows = [row for row in compare([Run(path) for path in runs]).rows if row.kind == "run"]
    assert [row.name for row in rows] == ["dcco, a", "dcco, b"]


def test_baselines_paper_and_its_note(tmp_path: Path) -> None:
    words = ("paper.results.knn_top1=95.5", "paper.note=with 1000 rounds")
    summary = scored(90, baselines={"fedavg": {"knn_top1": 85.0}}, initial={"knn_top1": 70.0})
    found = compare([Run(made(tmp_path / "a", words, summary))])
    assert [(row.name, row.values["knn_top1"].mean) for row in found.rows] == [
        ("dcco", 90.0),
        ("fedavg", 85.0),
        ("untrained", 80.0),
        ("as it started", 70.0),
        ("paper, its data", 95.5),
    ]
    assert found.remarks == ["The paper's number: with 1000 rounds"]


def test_personal_and_global_models_are_two_rows(tmp_path: Path) -> None:
    row = {"knn_top1": 90.0, "global_knn_top1": 88.0}
    summary = {**row, "result": row, "untrained": {}, "judged": "personal"}
    words = ("algorithm.name=ditto", "server.optimizer=sgd", "server.lr=1")
    rows = compare([Run(made(tmp_path / "a", words, summary))]).rows
    found = {row.name: row.values["knn_top1"].mean for row in rows}
    assert found == {"ditto, global": 88.0, "ditto, personal": 90.0}


def test_different_data_is_allowed_and_said(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / "a", (), scored(90)),
        made(tmp_path / "b", ("data.name=cifar10",), scored(50)),
    ]
    said = table(runs)
    assert "These runs are of different data sets" in said and "cifar10: b" in said
    assert "different data sets" not in table(runs[:1])


def test_other_folders_are_other_data(tmp_path: Path) -> None:
    """One seed each, and one folder's name: still never a mean."""
    words = [("data.name=folder", f"data.root=/{place}/photos") for place in ("here", "there")]
    runs = [
        made(tmp_path / f"{k}/o", (*own, f"seed={k}"), scored(90 + k))
        for k, own in enumerate(words)
    ]
    rows = [row for row in compare([Run(path) for path in runs]).rows if row.kind == "run"]
    assert [(row.seeds, row.runs) for row in rows] == [(["0"], ["0/o"]), (["1"], ["1/o"])]
    assert [row.name for row in rows] == [
        "dcco, data.root=/here/photos",
        "dcco, data.root=/there/photos",
    ]
    said = table(runs)
    assert "different data sets" in said and "(folder /here/photos: 0/o; folder /there" in said
    assert "relative path" not in said
    sets = [
        made(tmp_path / place, ("data.name=cifar10", f"data.root=/{place}"), scored(50))
        for place in ("one", "two")
    ]
    assert "different data sets" not in table(sets)  # the same images wherever they lie


def test_a_relative_folder_may_be_two(tmp_path: Path) -> None:
    """Runs of an older version keep it as it was given."""
    runs = [
        made(tmp_path / name, ("data.name=folder", "data.root=/X", f"seed={k}"), scored(90))
        for k, name in enumerate(("a/o", "a/p", "b/o"))
    ]
    for file in (run / "config.yaml" for run in runs):
        file.write_text(file.read_text().replace("/X", "photos"))
    said = table(runs)
    assert f"folder photos: a relative path, in runs of different folders ({tmp_path}/a, " in said
    assert "a/o, p, b/o" in said
    assert "relative path" not in table(runs[:2])


def test_long_values_are_cut_where_they_do_not_differ(tmp_path: Path) -> None:
    roots = ("/mnt/storage/of/the/project/leeds", "/mnt/storage/of/the/project/turin")
    runs = [
        made(tmp_path / str(k), ("data.name=folder", f"data.root={root}"), scored(90))
        for k, root in enumerate(roots)
    ]
    rows = compare([Run(path) for path in runs]).rows
    assert rows[0].name.endswith("leeds") and rows[1].name.endswith("turin")


def test_unfinished_runs_are_said_and_never_averaged(tmp_path: Path) -> None:
    lines = ({"round": 1, "knn_top1": 70.0}, {"round": 2, "loss": 1.0})
    runs = [
        made(tmp_path / "a", ("seed=1",), scored(90)),
        made(tmp_path / "b", ("seed=2",), None, lines),
    ]
    found = compare([Run(path) for path in runs])
    assert [row.state for row in found.rows][:2] == ["finished", "not finished: 2 of 200"]
    assert found.rows[1].values["knn_top1"].each == (70.0,)
    assert "b: not finished, round 2 of 200" in table(runs)


def test_another_version_is_said(tmp_path: Path) -> None:
    old = made(tmp_path / "old", (), {"knn_top1": 77.0})
    with (old / "config.yaml").open("a") as file:
        file.write("warmth: 3\n")
    said = table([old])
    assert "of another version" in said and "warmth" in said and "77.0 %" in said


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "a", (), scored(90))
    assert main(["compare", str(run)]) == 0
    assert "90.0 %" in capsys.readouterr().out
    (tmp_path / "none").mkdir()
    assert main(["compare", str(run), str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (run / "summary.json").write_text("{")
    assert main(["compare", str(run)]) == 2
    said = capsys.readouterr().err
    assert "summary.json" in said and said.count("\n") == 1


def test_values_of_the_table_are_those_of_the_summary(tmp_path: Path) -> None:
    run = made(tmp_path / "a", (), scored(91.2345, rounds_to_90=7))
    cells = table([run]).splitlines()[1].split()
    assert cells[-3:] == ["91.2", "%", "7"]
    assert json.loads((run / "summary.json").read_text())["knn_top1"] == 91.2345
