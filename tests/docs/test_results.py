"""The page of what was measured is computed from the lines that runs wrote, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from helpers import load

from fedssl import config
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.cco import CCO
from fedssl.runs import loop
from fedssl.util.errors import TrainingError

ROOT = Path(__file__).resolve().parents[2]
TABLE = """
mine:
  title: Mine
  about: Two rows.
  data: digits (
  measures: [linear@5000_top1, knn_top1]
  rows:
    dcco-4: dcco/table1/dcco/noniid-4
    dcco-16: dcco/table1/dcco/noniid-16
    fedavg: dcco/table1/cco-fedavg/noniid-16
    supervised: dcco/table1/supervised-5000/pooled
  heads: {supervised: linear@5000_top1}
  claims: [dcco-4 > dcco-16, dcco-4 ~ dcco-16, fedavg fails, dcco-16 > supervised]
"""
Line = dict[str, Any]
Page = Callable[..., str]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load("docs/generate.py")


@pytest.fixture
def page(generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    """Write the page of a table from some lines."""
    tables, rows = tmp_path / "tables.yaml", tmp_path / "rows.jsonl"
    monkeypatch.setattr(generate.results_page, "TABLES", tables)
    monkeypatch.setattr(generate.results_page, "ROWS", rows)

    def written(*lines: Line, table: str = TABLE) -> str:
        tables.write_text(table)
        write(rows, *lines)
        text: str = generate.results_page.results("mine")
        return text

    return written


def line(recipe: str, linear: float | None, **other: Any) -> Line:
    """A line as a run writes it."""
    ours = {} if linear is None else {"linear@5000_top1": linear, "knn_top1": 7.0}
    known = {
        "recipe": config.match_recipes(f"dcco/cifar100-{recipe}")[0], "data": "digits (JPEG)",
        "ours": ours, "seed": 0,
        "untrained": {"linear@5000_top1": 5.0}, "round": 10, "rounds": 10, "paper_rounds": 100,
        "heldout": None, "changed": {}, "seconds": 90.0, "command": "fedssl reproduce x",
        "device": "cpu", "precision": "fp32", "commit": "abc", "date": "today",
    }  # fmt: skip
    return known | other


def four(linear: float | None, **other: Any) -> Line:
    return line("noniid-4", linear, **other)


def sixteen(linear: float | None, **other: Any) -> Line:
    return line("noniid-16", linear, **other)


def fedavg(linear: float | None, **other: Any) -> Line:
    return line("noniid-16-cco-fedavg", linear, **other)


def supervised(accuracy: float, **other: Any) -> Line:
    return line("supervised-5000", None, ours={"head_top1": accuracy}, **other)


def write(path: Path, *lines: Line) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


def cells(page: str, start: str) -> dict[str, str]:
    """A row of the page by its columns' names."""
    table: list[list[str]] = []
    found = []
    for text in page.splitlines():
        table = [*table, [cell.strip() for cell in text.strip("|").split("|")]] * ("|" in text[:1])
        if table and table[-1][0] == start:
            found.append(dict(zip(table[0][1:], table[-1][1:], strict=True)))
    (only,) = found
    return only


ROUNDS, LINEAR, WORD = "rounds", "linear, 5000 labels", "in our rows"
AHEAD, NEAR, FAILS = "`dcco-4` > `dcco-16`", "`dcco-4` ~ `dcco-16`", "`fedavg` fails"
HEAD = "`dcco-16` > `supervised`"
GAP, REFUTED = "difference (95%)", "**does not appear**"
PNG = {"data": "digits (PNG)", "untrained": {"linear@5000_top1": 6.0}}
HOLDOUT = {"changed": {"data.holdout": 0.1}}
LONG: Line = {"rounds": 100, "changed": {"rounds": 100}}
FIFTH = {"rounds": 2, "paper_rounds": 20}
FREE = {"changed": {"rounds": 10, "evaluate.every": 5, "server.lr": 0.1, "client.lr": 0.1}}
LOST = {"failed": "nan", "untrained": {}}
UNALIKE = "open: no two runs alike"


def test_rows_that_are_not_measured_are_listed(page: Page) -> None:
    text, none = page(), "not measured yet"
    brackets = "In brackets the paper's number, on cifar100."
    assert text.startswith(f"## Mine\n\nTwo rows. {brackets}\n\nNot measured yet: `dcco-4`, ")
    assert "Every run" not in text and "Settings" not in text and "claim" not in text
    text = page(sixteen(30.0))
    assert cells(text, "`dcco-4`")[ROUNDS] == none
    assert cells(text, "`supervised`")[LINEAR] == "– (42.4)"
    assert cells(text, AHEAD) == {"its numbers": "49.6 and 45.9", WORD: none}


def test_a_papers_page_opens_with_all_its_tables_and_figures(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    papers, rows = tmp_path / "papers.yaml", tmp_path / "rows.jsonl"
    papers.write_text(
        "dcco:\n"
        "  Figure 2: A diagram.\n"
        "  Table 1: {recipes: [dcco/table1/dcco, dcco/table1/cco-fedavg], departs: The rate.}\n"
        "perfcl: {}\n"
    )
    monkeypatch.setattr(generate, "PAPERS", papers)
    monkeypatch.setattr(generate.results_page, "ROWS", rows)
    write(rows, four(30.0), line("noniid-16", 20.0, rounds=100), line("noniid-8", None))
    table = generate.contents("dcco").splitlines()
    assert table[2] == "| Figure 2 | – | – | A diagram. |"
    recipes = "`dcco/table1/dcco`, `dcco/table1/cco-fedavg`"
    shown = "2 of 13: digits (JPEG), 10% to 100% of the rounds"
    assert table[3] == f"| Table 1 | {recipes} | {shown} | The rate. |"
    # Recipes that no entry names are not lost; their table may be named in part.
    assert [cells.split(" | ")[1] for cells in table[4:]] == [
        "`dcco/appendix-c`", "`dcco/halves-fashion-mnist`", "`dcco/table1`", "`dcco/table2`",
    ]  # fmt: skip
    assert "| Table I | `perfcl/table1` | no |" in generate.contents("perfcl")
    papers.write_text("dcco:\n  Table 1: {recipes: [], departs: Rates, and more.}\n")
    with pytest.raises(ValueError, match="Table 1"):
        generate.contents("dcco")  # YAML would end the text at the comma


def test_under_a_table_stands_where_its_recipes_depart(page: Page) -> None:
    text = page(table=TABLE + "  departs: Its rate is ours.\n").partition(
        "from the paper</summary>"
    )[2]
    assert text.startswith("\n\n- Its rate is ours.\n- Where the paper is silent")
    assert "[DCCO's page](docs/papers/dcco.md)" in text
    failing = TABLE.replace("cco-fedavg/noniid-16", "cco-fedavg/noniid-4")
    assert "- `fedavg`: the paper reports that training failed." in page(table=failing)
    spread = TABLE.replace("dcco/table1/dcco/noniid-16\n", "fedema/table3/fedu/cifar10-noniid\n")
    assert "±" not in page(table=spread)  # ± 0.21 is no departure
    alone = "rows: {one: decssl/figure6/dec-ssl/epochs-1, two: decssl/figure6/dec-sl/epochs-1}"
    text = page(table=re.sub(r"rows:.*", alone, TABLE, flags=re.DOTALL))
    assert "- all rows: the figure prints no number." in text


def test_seeds_stand_together_and_other_images_elsewhere(page: Page) -> None:
    second = {"changed": {"data.holdout": 0.1, "rounds": 10}, "seconds": 60.0, "beside": True}
    text = page(
        four(40.04, changed={"rounds": 10, "data.holdout": 0.1}),
        four(42.0, seed=1, **second),
        sixteen(99.0, data="photos"),
    )
    assert "Images: digits (JPEG)." in text and "99.0" not in text
    assert cells(text, "untrained")[LINEAR] == "5.0" and cells(text, "untrained")["knn"] == "–"
    row = {LINEAR: "40.0, 42.0 (49.6)", "knn": "7.0, 7.0", ROUNDS: "10 of 100"}
    assert cells(text, "`dcco-4`") == row | {"seed: minutes": "0: 1.5, 1: 1.0\\*"}
    assert "chosen:\n\n- `dcco-4`: `data.holdout=0.1`\n\n" in text
    assert cells(text, "`dcco-16`")[ROUNDS] == "not measured yet"
    runs = text.partition("Every run")[2]
    assert runs.count("`fedssl reproduce x`") == 2 and "| cpu, fp32, abc, today |" in runs


def test_images_that_are_not_the_same_are_no_seeds_of_one_row(page: Page) -> None:
    text = page(four(40.0), four(60.0, seed=1, **PNG))
    assert cells(text, "`dcco-4`")[LINEAR] == "40.0 (49.6)"
    assert "- `dcco-4`: digits (JPEG)\n" in text
    assert cells(text, "untrained, digits (JPEG)")[LINEAR] == "5.0"
    assert cells(text, "untrained, digits (PNG)")[LINEAR] == "6.0"


def test_a_seed_that_failed_is_shown_and_not_counted(page: Page) -> None:
    lost = four(None, round=0, seconds=None, **LOST)
    text = page(lost, four(40.0, seed=1, round=5), sixteen(30.0))
    row = {LINEAR: "failed, 40.0 (49.6)", "knn": "failed, 7.0", ROUNDS: "10 of 100"}
    assert cells(text, "`dcco-4`") == row | {"seed: minutes": "0: –, 1: 1.5"}
    assert "- `dcco-4`: none (seed 0); round 5 (seed 1)\n" in text
    assert cells(text, "untrained")[LINEAR] == "5.0"
    assert cells(page(lost, sixteen(30.0)), "`dcco-4`")["seed: minutes"] == "0: –"


def test_of_several_runs_the_longest_then_the_best_on_held_out_images_is_shown(page: Page) -> None:
    lost = fedavg(None, rounds=20, changed={"rounds": 20}, **LOST)
    text = page(
        fedavg(30.0, heldout=3.0, changed={"objective.lambda": 1}),
        fedavg(20.0, heldout=4.0, changed={"objective.lambda": 2}, round=4),
        fedavg(50.0, heldout=9.0, rounds=5, round=5, changed={"rounds": 5}),
        lost,
    )
    row = cells(text, "`fedavg`")
    assert row[LINEAR] == "20.0 (30.7)" and row[ROUNDS] == "10 of 100"
    assert "- `fedavg`: `objective.lambda=2`, round 4\n" in text
    assert cells(page(lost), "`fedavg`")[LINEAR] == "failed (30.7)"


def test_each_seed_has_its_own_rate_and_none_is_left_out(page: Page) -> None:
    def run(linear: float, heldout: float | None, seed: int, rate: float) -> Line:
        more = {"server.lr": rate, "data.holdout": 0.1}
        return four(linear, heldout=heldout, seed=seed, changed=more)

    text = page(run(41, 9, 0, 0.1), run(30, 3, 0, 0.2), run(40, 2, 1, 0.1), run(32, 4, 1, 0.2))
    assert cells(text, "`dcco-4`")[LINEAR] == "41.0, 32.0 (49.6)"
    first, second = (f"`server.lr={rate}`, `data.holdout=0.1`" for rate in (0.1, 0.2))
    assert f"- `dcco-4`: {first} (seed 0); {second} (seed 1)\n" in text
    # Nothing to choose by: the recipe's own rate.
    text = page(run(41, None, 0, 0.1), four(20.0, **HOLDOUT))
    assert cells(text, "`dcco-4`")[LINEAR] == "20.0 (49.6)"


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_runs_that_of_the_recipe_is_shown(page: Page, order: int) -> None:
    """So is its untrained network."""
    he = {"changed": {"encoder.initializer": "he"}, "untrained": {"linear@5000_top1": 45.0}}
    text = page(*[four(44.0, **he), four(40.0)][::order])
    assert cells(text, "`dcco-4`")[LINEAR] == "40.0 (49.6)"
    assert cells(text, "untrained")[LINEAR] == "5.0"


def seeds(row: Callable[..., Line], *numbers: float | None, **more: Any) -> list[Line]:
    """Runs of seeds 0, 1, …; ``None`` diverged."""
    return [
        row(number, seed=seed, **(more if number is not None else more | LOST))
        for seed, number in enumerate(numbers)
    ]


@pytest.mark.parametrize(
    ("left", "right", "difference", "above", "near"),
    [
        # The interval of two equal differences is a point; others need Student's factor of 12.7.
        ((45.0, 41.0), (40.0, 36.0), "+5.0 ± 0.0", "appears", REFUTED),
        ((35.0, 31.0), (40.0, 36.0), "-5.0 ± 0.0", REFUTED, REFUTED),
        ((41.0, 37.0), (40.0, 36.0), "+1.0 ± 0.0", "appears", "appears"),
        ((40.1, 36.0), (40.0, 36.0), "+0.1 ± 0.6", "open", "appears"),
        ((42.0, 41.0), (40.0, 36.0), "+3.5 ± 19.1", "open", "open"),
        # Pairs of seeds that differ much from each other say as much as seeds that are alike.
        ((60.0, 20.0), (58.9, 19.1), "+1.0 ± 1.3", "open", "open"),
        ((45.0, 45.2, 45.1), (40.0, 40.1, 40.2), "+5.0 ± 0.2", "appears", REFUTED),
        ((45.0,), (40.0,), "+5.0", "open: one seed", "open: one seed"),
        # A seed that diverged is behind; where both did, nothing is learned.
        ((40.0, 41.0), (None, 30.0), "", "appears", REFUTED),
        ((40.0, 29.0), (None, 30.0), "", "open", "open"),
        ((None, None), (40.0, 30.0), "", REFUTED, REFUTED),
        ((45.0, 41.0, None), (40.0, 36.0, None), "+5.0 ± 0.0", "appears", REFUTED),
    ],
)
def test_claims_are_judged_by_paired_seeds(
    page: Page,
    left: tuple[float | None, ...],
    right: tuple[float | None, ...],
    difference: str,
    above: str,
    near: str,
) -> None:
    text = page(*seeds(four, *left), *seeds(sixteen, *right))
    found = cells(text, AHEAD)
    assert (found.get(GAP, ""), found[WORD]) == (difference, above)
    assert cells(text, NEAR)[WORD] == near


@pytest.mark.parametrize(
    ("numbers", "word"),
    [
        ((None, 5.0), "appears"),  # untrained: 5.0
        ((None, 30.0), "open"),
        ((30.0, 6.0), REFUTED),
        ((None,), "open: one seed"),
    ],
)
def test_a_row_fails_if_every_seed_does(
    page: Page, numbers: tuple[float | None, ...], word: str
) -> None:
    assert cells(page(*seeds(fedavg, *numbers)), FAILS)[WORD] == word


def test_a_row_fails_at_the_rates_that_the_paper_tried(page: Page) -> None:
    """Another rate with which it learns is better on held-out images, and does not count."""
    lower = {"changed": {"server.lr": 1e-4}, "heldout": 50.0}
    lines = (*seeds(fedavg, 2.0, 3.0), *seeds(fedavg, 40.0, 41.0, **lower))
    assert cells(page(*lines), FAILS)[WORD] == REFUTED
    tried = TABLE + "  rates: [0.005, 0.001]\n"
    assert cells(page(*lines, table=tried), FAILS + " at the paper's rates")[WORD] == "appears"


@pytest.mark.parametrize(
    ("other", "claim", "ours", "word"),
    [
        (seeds(sixteen, 30.0, 31.0), AHEAD, "40.5 and 30.5", "appears"),
        (seeds(sixteen, 30.0, 31.0, **FIFTH), AHEAD, "40.5 and 30.5", "appears"),  # of the rounds
        (seeds(sixteen, 30.0, 31.0, **FREE), AHEAD, "40.5 and 30.5", "appears"),  # other rates
        (seeds(sixteen, 30.0, 31.0, **LONG), AHEAD, "", UNALIKE),
        (seeds(sixteen, 30.0, 31.0, **HOLDOUT), AHEAD, "", UNALIKE),
        (seeds(sixteen, 30.0, 31.0, **PNG), AHEAD, "", UNALIKE),
        ([sixteen(30.0, seed=7)], AHEAD, "", UNALIKE),
        # Two seeds count more than one seed with more rounds.
        (
            [
                *seeds(four, 60.0, **LONG),
                *seeds(sixteen, 50.0, **LONG),
                *seeds(sixteen, 30.0, 31.0),
            ],
            *(AHEAD, "40.5 and 30.5", "appears"),
        ),
        (
            [*seeds(four, 60, 62, **LONG), *seeds(sixteen, 50, 52, **LONG), *seeds(sixteen, 3, 3)],
            *(AHEAD, "61.0 and 51.0", "appears"),
        ),
        # Supervised training is another training: only the images must be the same.
        ([*seeds(sixteen, 44, 44.5), supervised(46), supervised(47, seed=1)], HEAD, "", "open"),
        ([sixteen(44), supervised(46, **PNG)], HEAD, "", UNALIKE),
    ],
)
def test_claims_compare_runs_that_are_alike(
    other: list[Line], claim: str, ours: str, word: str, page: Page
) -> None:
    found = cells(page(*seeds(four, 40.0, 41.0), *other), claim)
    assert found[WORD] == word
    assert not ours or found["ours"] == ours


def test_supervised_training_is_judged_by_its_own_classifier(page: Page) -> None:
    own = [supervised(46.0 + k, rounds=3, paper_rounds=3, seed=k) for k in (0, 1)]
    text = page(*own, *seeds(sixteen, 44.0, 45.0, **HOLDOUT))
    row = cells(text, "`supervised`")
    assert row[LINEAR] == "46.0, 47.0 (42.4)" and row["knn"] == "–"
    claim = {"ours": "44.5 and 46.5", "rounds": "10 and 3", "seeds": "2", WORD: REFUTED}
    assert cells(text, HEAD).items() >= claim.items()


def test_the_overview_shows_main_rows_and_counts_claims(generate: ModuleType, page: Page) -> None:
    page(*seeds(four, 40.0, 41.0), *seeds(sixteen, 30.0, 31.0), *seeds(fedavg, 30.0, 30.0))
    counts = [
        cell.strip() for cell in generate.results_page.overview("").splitlines()[-1].split("|")
    ]
    main = "`dcco-4` 40.0, 41.0 (49.6), `dcco-16` 30.0, 31.0 (45.9)"
    assert counts[1:-1] == ["[Mine](#mine)", "3 of 4", main, "1 / 2 / 1"]


def test_a_table_says_how_different_the_clients_are(page: Page) -> None:
    assert "earth mover" not in page(four(40.0))
    assert "labels to all: 0.8." in page(four(40.0, label_distance=0.8))
    text = page(four(40.0, label_distance=0.8), sixteen(30.0, label_distance=0.91))
    assert "labels to all: 0.8 to 0.91." in text


def test_lines_are_added_in_the_place_of_older_ones(tmp_path: Path) -> None:
    add = load("results/add.py")
    home, kept = tmp_path / "table.jsonl", tmp_path / "rows.jsonl"
    write(home, four(40.0, folder="/tmp/elsewhere", commit=None), four(41.0, seed=1, commit="own"))
    assert add.add([home], kept, "aaa") == 2
    assert "elsewhere" not in kept.read_text() and '"commit": "aaa"' in kept.read_text()
    newer = [four(50.0), four(60.0, changed={"rounds": 5})]
    for each in newer:
        del each["commit"]
    write(home, *newer)
    assert add.add([home], kept, "bbb", beside=True) == 3
    found = [json.loads(text) for text in kept.read_text().splitlines()]
    assert [each["ours"]["linear@5000_top1"] for each in found] == [50.0, 41.0, 60.0]
    assert [each["commit"] for each in found] == ["bbb", "own", "bbb"]
    assert ["beside" in each for each in found] == [True, False, True]


def test_the_page_is_what_the_generator_writes(generate: ModuleType) -> None:
    tables = yaml.safe_load(generate.results_page.TABLES.read_text(encoding="utf-8"))
    source = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="results.md"))
    made = generate.on_page_markdown(source, page=page, config=None, files=None)
    assert "generated:" not in made
    for name in tables:
        assert f"<!-- generated: results {name} -->" in source
        assert generate.part("results", name, "docs") in made
    assert made.count("\n## ") == len(tables) + 1  # how to read the page


def test_every_table_names_recipes_and_claims_rows_that_there_are(generate: ModuleType) -> None:
    tables = yaml.safe_load(generate.results_page.TABLES.read_text(encoding="utf-8"))
    shown = set()
    for table in tables.values():
        assert set(table["rows"].values()) <= set(config.list_recipes())
        assert set(table.get("heads", {})) <= set(table["rows"])
        for claim in table.get("claims", []):
            words, _, measure = claim.partition(" at ")
            left, relation, *right = words.split()
            assert {left, *right} <= set(table["rows"]), claim
            assert (relation, len(right)) in ((">", 1), ("~", 1), ("fails", 0)), claim
            measures = measure.split(", ") if measure else []
            assert set(measures) <= set(table["measures"]), claim
            assert len(measures) in (0, 1, 1 + len(right)), claim
        if "source" not in table:  # a paper's: standalone training is a row, or the reason is given
            assert "standalone" in f"{list(table['rows'])} {table['about'].lower()}"
        shown |= {(recipe, table["data"]) for recipe in table["rows"].values()}
    for each in generate.read_lines(
        generate.results_page.ROWS
    ):  # nothing that was measured is left out
        assert any(each["recipe"] == r and each["data"].startswith(d) for r, d in shown), each


SMALL = (
    *("data.name=digits", "data.size=8", "encoder.name=tiny", "encoder.groups=4", "rounds=1"),
    *("evaluate.protocols=[heldout@10%]", "data.holdout=0.1", "cohort.size=2"),
    "objective.projector=[8]",
)


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    """Write a file of rows; return the arguments of results/measure.py that run it."""

    def written(*lines: str) -> list[str]:
        (tmp_path / "plan.txt").write_text("\n".join(lines))
        return [str(tmp_path / "plan.txt"), "--out", str(tmp_path / "out"), *SMALL]

    return written


def test_rows_of_a_file_run_one_after_another(
    command: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, out = load("results/measure.py").main, tmp_path / "out"
    rates = "dcco/table1/cco-fedavg/noniid-16 'server.lr=[0.1,0.01]' # two rows"
    given = command("# not a row", "", rates, "dcco/table1/dcco/noniid-4 objective.projector=[16]")
    assert main([*given, "--until", "-1"]) == 1
    assert capsys.readouterr().out.count("not finished: dcco/") == 3 and not out.exists()
    assert main(given) == 0
    found = [
        json.loads(row)
        for row in (out / "server.lr=[0.1,0.01]/dcco/table1/table.jsonl").read_text().splitlines()
    ]
    assert [row["choice"] for row in found] == ["server.lr=0.1", "server.lr=0.01"]
    (other,) = (out / "objective.projector=[16]/dcco/table1/table.jsonl").read_text().splitlines()
    assert json.loads(other)["changed"]["objective.projector"] == [16]  # a line's own key wins
    assert capsys.readouterr().err.count(" s dcco/") == 3
    assert main(given) == 0
    assert capsys.readouterr().err.count("finished before") == 3


@pytest.mark.parametrize(
    ("error", "code", "tried", "said"),
    [
        (TrainingError("round 1: the loss is nan"), 0, 2, ""),
        (RuntimeError("a kernel is missing"), 1, 2, "RuntimeError: a kernel is missing"),
        (loop.Interrupted(), 130, 1, "stopped"),  # nobody asked for the next row
    ],
)
def test_a_row_that_breaks_off_does_not_keep_the_others_waiting(
    error: Exception,
    code: int,
    tried: int,
    said: str,
    command: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main, ran = load("results/measure.py").main, []
    given = command("dcco/table1/dcco/noniid-4", "dcco/table1/dcco/noniid-16")

    def fails(settings: config.Config, out: Path, resume: bool) -> None:
        ran.append(out.name)
        raise error

    monkeypatch.setattr(loop, "run", fails)
    assert main(given) == code
    assert ran == ["noniid-4", "noniid-16"][:tried]
    told = capsys.readouterr()
    assert said in told.err and (told.out.startswith("not finished: dcco/")) == (code == 1)
    if code == 0:  # rows that diverged are not run again
        found = (tmp_path / "out/dcco/table1/table.jsonl").read_text().splitlines()
        assert [json.loads(row)["failed"] for row in found] == ["round 1: the loss is nan"] * 2
        assert main(given) == 0 and len(ran) == 2
        assert "dcco/table1/dcco/noniid-4: skipped, it diverged before\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["# two", "dcco/table1/dcco/noniid-4", "dcco/table1/dcco/noniid-4"],
            "line 3: dcco/",
        ),
        (["dcco/table1/dcco/noniid-4 'seed=1"], "line 1: No closing quotation"),
        (["dcco/nothing"], "line 1: recipe=dcco/nothing"),
        (["dcco/table1/dcco/noniid-4 rounds=x"], "line 1: rounds=x"),
        (
            ["dcco/table1/dcco/noniid-4", "dcco/table1/dcco/noniid-1 encoder.groups=5"],
            "encoder.groups=5",
        ),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_run_as_it_is_runs_no_row(
    lines: list[str] | None,
    said: str,
    command: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = command(*(lines or ()))
    if lines is None:
        (tmp_path / "plan.txt").unlink()
    assert load("results/measure.py").main(given) == 2
    told = capsys.readouterr().err
    assert told.startswith("measure.py: ") and said in told and told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_rows_of_several_lines_share_an_encoder(tmp_path: Path) -> None:
    lines = [f"decssl/figure2/dec-ssl/features-{alpha} seed=1" for alpha in (5, 1)]
    jobs = load("results/measure.py").planned(lines, [], tmp_path)
    encoder, *rows = (job.folder.name for job in jobs)
    assert (encoder, rows) == ("feature-encoder", ["features-5", "features-1"])


@pytest.mark.slow
@pytest.mark.parametrize("plan", sorted(ROOT.glob("results/plan-*.txt")), ids=lambda p: p.stem)
def test_what_is_planned_can_run_and_is_not_measured_yet(plan: Path, tmp_path: Path) -> None:
    lines = plan.read_text(encoding="utf-8").splitlines()
    known = {"plan-cifar10": "CIFAR-10 (original"}
    images = known.get(plan.stem, plan.stem.removeprefix("plan-"))
    words = (
        ["data.root=DIR"] if images == "fashion-mnist" else ["data.name=folder", "data.root=DIR"]
    )
    planned = load("results/measure.py").planned(lines, words, tmp_path)
    assert planned
    rows = load("results/add.py").read(ROOT / "results/rows.jsonl")
    done = [(r["recipe"], r["changed"], r["seed"]) for r in rows if r["data"].startswith(images)]
    for job in planned:
        values = config.flatten(config.to_tree(job.settings))
        changed = {key: values.get(key) for key in job.changed}
        assert (job.name, changed, job.settings.seed) not in done
        assert any(
            job.name in table["rows"].values() and images.startswith(table["data"])
            for table in yaml.safe_load((ROOT / "results/tables.yaml").read_text()).values()
        ), job.name


def test_the_plain_loss_of_cco_is_ours() -> None:
    """plain_cco.py has the rows' loss, in values and gradients."""
    plain, cco = load("results/plain_cco.py"), CCO(CCO.Params("cco"))
    f, g = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    losses = plain.cco(f, g), cco.loss(EncodedBatch((f, g)))
    assert torch.allclose(*losses, rtol=1e-5)
    for a, b in zip(*(torch.autograd.grad(loss, (f, g)) for loss in losses), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)
