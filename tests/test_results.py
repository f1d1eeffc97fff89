"""The page of what was measured is computed from the lines that runs wrote, and nothing else."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from fedssl import config

ROOT = Path(__file__).resolve().parent.parent
TABLE = """
mine:
  title: Mine
  about: Two rows.
  data: digits (
  measures: [linear@5000_top1, knn_top1]
  rows:
    dcco-4: dcco/cifar100-noniid-4
    dcco-16: dcco/cifar100-noniid-16
    fedavg: dcco/cifar100-noniid-16-cco-fedavg
    supervised: dcco/cifar100-supervised-5000
  heads: {supervised: linear@5000_top1}
  claims: [dcco-4 > dcco-16, dcco-4 ~ dcco-16, fedavg fails, dcco-16 > supervised]
"""


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load("docs/generate.py")


@pytest.fixture
def rows(generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tables.yaml").write_text(TABLE)
    monkeypatch.setattr(generate, "TABLES", tmp_path / "tables.yaml")
    monkeypatch.setattr(generate, "ROWS", tmp_path / "rows.jsonl")
    return tmp_path / "rows.jsonl"


def line(recipe: str, linear: float | None, **other: Any) -> dict[str, Any]:
    """A line as a run writes it."""
    ours = {} if linear is None else {"linear@5000_top1": linear, "knn_top1": 7.0}
    known = {
        "recipe": f"dcco/cifar100-{recipe}", "data": "digits (JPEG)", "ours": ours, "seed": 0,
        "untrained": {"linear@5000_top1": 5.0}, "round": 10, "rounds": 10, "paper_rounds": 100,
        "heldout": None, "changed": {}, "seconds": 90.0, "command": "fedssl reproduce x",
        "device": "cpu", "precision": "fp32", "commit": "abc", "date": "today",
    }  # fmt: skip
    return known | other


def write(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


def cells(page: str, start: str) -> list[str]:
    (found,) = [each for each in page.splitlines() if each.startswith(f"| {start} |")]
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def test_what_is_not_measured_is_listed_beside_the_papers_numbers(
    generate: ModuleType, rows: Path
) -> None:
    page = generate.results("mine")
    brackets = "In brackets the paper's number, on cifar100."
    assert page.startswith(f"## Mine\n\nTwo rows. {brackets}\n\nNot measured yet.")
    none = "not measured yet"
    assert cells(page, "`dcco-4`") == ["– (49.6)", "–", none, "", "", ""]
    assert cells(page, "`supervised`") == ["– (42.4)", "–", none, "", "", ""]
    assert cells(page, "`dcco-4` > `dcco-16`") == ["49.6 and 45.9", "", "", none]
    assert "Every run" not in page and "untrained" not in page


def test_seeds_stand_together_and_other_images_elsewhere(generate: ModuleType, rows: Path) -> None:
    write(
        rows,
        line("noniid-4", 40.04, changed={"rounds": 10, "server.lr": 0.1}),
        line("noniid-4", 42.0, changed={"server.lr": 0.1, "rounds": 10}, seed=1, seconds=60.0),
        line("noniid-16", 99.0, data="photos"),
    )
    page = generate.results("mine")
    assert "Images: digits (JPEG)." in page and "99.0" not in page
    assert cells(page, "untrained")[:2] == ["5.0", "–"]
    made = ["10 of 100", "0, 1", "1.5, 1.0 min", "`server.lr=0.1`"]
    assert cells(page, "`dcco-4`") == ["40.0, 42.0 (49.6)", "7.0, 7.0", *made]
    assert cells(page, "`dcco-16`")[2] == "not measured yet"
    runs = page.partition("Every run")[2]
    assert runs.count("`fedssl reproduce x`") == 2 and "| cpu, fp32, abc, today |" in runs


def test_of_several_runs_the_longest_then_the_best_on_held_out_images_is_shown(
    generate: ModuleType, rows: Path
) -> None:
    several = [
        line("noniid-16-cco-fedavg", 30.0, heldout=3.0, changed={"server.lr": 1}),
        line("noniid-16-cco-fedavg", 20.0, heldout=4.0, changed={"server.lr": 2}, round=4),
        line("noniid-16-cco-fedavg", 50.0, heldout=9.0, rounds=5, round=5, changed={"rounds": 5}),
        line("noniid-16-cco-fedavg", None, rounds=20, failed="nan", changed={"rounds": 20}),
    ]
    write(rows, *several)
    page = generate.results("mine")
    row = cells(page, "`fedavg`")
    assert row[0] == "20.0 (30.7)" and row[2] == "10 of 100 (round 4 chosen)"
    assert cells(page, "`fedavg` fails")[1:] == ["20.0", "1", "**does not appear**"]
    write(rows, several[-1])
    page = generate.results("mine")
    assert cells(page, "`fedavg`")[0] == "failed (30.7)"
    assert cells(page, "`fedavg` fails")[1:] == ["failed", "1", "appears"]
    write(rows, line("noniid-16-cco-fedavg", 5.0))
    assert cells(generate.results("mine"), "`fedavg` fails")[3] == "appears"


@pytest.mark.parametrize(
    ("four", "sixteen", "above", "near"),
    [
        (40.0, 39.0, "appears", "appears"),
        (40.0, 40.0, "**does not appear**", "appears"),
        (37.5, 40.0, "**does not appear**", "**does not appear**"),
        (40.0, 37.9, "appears", "**does not appear**"),
    ],
)
def test_claims_are_computed_from_means_over_seeds(
    generate: ModuleType, rows: Path, four: float, sixteen: float, above: str, near: str
) -> None:
    pair = [line("noniid-4", four - 9), line("noniid-4", four + 9, seed=1)]
    write(rows, *pair, line("noniid-16", sixteen))
    page = generate.results("mine")
    ours = [f"{four:.1f} and {sixteen:.1f}", "2 and 1"]
    assert cells(page, "`dcco-4` > `dcco-16`") == ["49.6 and 45.9", *ours, above]
    assert cells(page, "`dcco-4` ~ `dcco-16`") == ["49.6 and 45.9", *ours, near]


def test_a_run_that_failed_is_beaten_and_one_without_the_measure_is_not_measured(
    generate: ModuleType, rows: Path
) -> None:
    good, bad = line("noniid-4", 40.0), line("noniid-16", None, failed="nan")
    write(rows, good, bad)
    page = generate.results("mine")
    assert cells(page, "`dcco-4` > `dcco-16`")[1:] == ["40.0 and failed", "1 and 1", "appears"]
    assert cells(page, "`dcco-4` ~ `dcco-16`")[3] == "**does not appear**"
    write(rows, line("noniid-4", None, failed="nan"), line("noniid-16", 40.0))
    assert cells(generate.results("mine"), "`dcco-4` > `dcco-16`")[3] == "**does not appear**"
    write(rows, good, line("noniid-16", None, ours={"knn_top1": 3.0}))
    assert cells(generate.results("mine"), "`dcco-4` > `dcco-16`")[3] == "not measured yet"


def test_only_runs_of_as_many_rounds_are_compared(generate: ModuleType, rows: Path) -> None:
    longer = line("noniid-16", 80.0, rounds=100, changed={"rounds": 100})
    write(rows, line("noniid-4", 40.0), longer)
    claim = "`dcco-4` > `dcco-16`"
    expected = "not measured alike yet (10 and 100 rounds)"
    assert cells(generate.results("mine"), claim)[1:] == ["", "", expected]
    write(rows, line("noniid-4", 40.0), longer, line("noniid-16", 30.0))
    assert cells(generate.results("mine"), claim)[1:] == ["40.0 and 30.0", "1 and 1", "appears"]
    both = line("noniid-4", 70.0, rounds=100, changed={"rounds": 100})
    write(rows, line("noniid-4", 40.0), longer, line("noniid-16", 30.0), both)
    assert cells(generate.results("mine"), claim)[1] == "70.0 and 80.0"


def test_supervised_training_is_judged_by_its_own_classifier(
    generate: ModuleType, rows: Path
) -> None:
    own = line("supervised-5000", None, ours={"head_top1": 45.0}, rounds=3, paper_rounds=3)
    write(rows, own, line("noniid-16", 44.0))
    page = generate.results("mine")
    assert cells(page, "`supervised`")[:2] == ["45.0 (42.4)", "–"]
    claim = cells(page, "`dcco-16` > `supervised`")
    assert claim == ["45.9 and 42.4", "44.0 and 45.0", "1 and 1", "**does not appear**"]


def test_lines_are_added_in_the_place_of_older_ones(tmp_path: Path) -> None:
    add = load("results/add.py")
    home, kept = tmp_path / "table.jsonl", tmp_path / "rows.jsonl"
    first = line("noniid-4", 40.0, folder="/tmp/elsewhere")
    write(home, first, line("noniid-4", 41.0, seed=1))
    assert add.add([home], kept, "aaa") == 2
    assert "elsewhere" not in kept.read_text()
    write(home, line("noniid-4", 50.0), line("noniid-4", 60.0, changed={"rounds": 5}))
    assert add.add([home], kept, "bbb") == 3
    found = [json.loads(text) for text in kept.read_text().splitlines()]
    assert [each["ours"]["linear@5000_top1"] for each in found] == [50.0, 41.0, 60.0]
    assert [each["commit"] for each in found] == ["bbb", "aaa", "bbb"]


def test_the_page_is_what_the_generator_writes(generate: ModuleType) -> None:
    tables = yaml.safe_load(generate.TABLES.read_text(encoding="utf-8"))
    source = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="results.md"))
    made = generate.on_page_markdown(source, page=page, config=None, files=None)
    assert "generated:" not in made
    for name in tables:
        assert f"<!-- generated: results {name} -->" in source
        assert generate.results(name) in made
    assert made.count("\n## ") == len(tables)


def test_every_table_names_recipes_and_claims_rows_that_there_are(generate: ModuleType) -> None:
    tables = yaml.safe_load(generate.TABLES.read_text(encoding="utf-8"))
    shown = set()
    for table in tables.values():
        assert set(table["rows"].values()) <= set(config.recipes())
        assert set(table.get("heads", {})) <= set(table["rows"])
        for claim in table.get("claims", []):
            words, _, measure = claim.partition(" at ")
            left, relation, *right = words.split()
            assert {left, *right} <= set(table["rows"]), claim
            assert (relation, len(right)) in ((">", 1), ("~", 1), ("fails", 0)), claim
            assert not measure or measure in table["measures"], claim
        shown |= {(recipe, table["data"]) for recipe in table["rows"].values()}
    for each in generate.read_lines(generate.ROWS):  # nothing that was measured is left out
        assert any(each["recipe"] == r and each["data"].startswith(d) for r, d in shown), each
