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
    monkeypatch.setattr(generate, "TABLES", tables)
    monkeypatch.setattr(generate, "ROWS", rows)

    def written(*lines: Line, table: str = TABLE) -> str:
        tables.write_text(table)
        write(rows, *lines)
        text: str = generate.results("mine")
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
SHORTER = f"{AHEAD}, in fewer rounds"
PNG = {"data": "digits (PNG)", "untrained": {"linear@5000_top1": 6.0}}
HOLDOUT = {"changed": {"data.holdout": 0.1}}
SHORT = {"rounds": 5}
LONG: Line = {"rounds": 100, "changed": {"rounds": 100}}
FIFTH = {"rounds": 2, "paper_rounds": 20}
TWENTIETH = {"rounds": 15, "paper_rounds": 300, "changed": {"rounds": 15}}
FREE = {"changed": {"rounds": 10, "evaluate.every": 5, "server.lr": 0.1, "client.lr": 0.1}}
LOST = {"failed": "nan", "untrained": {}}
UNALIKE = "not measured alike yet"


def test_what_is_not_measured_is_listed_beside_the_papers_numbers(page: Page) -> None:
    text, none = page(), "not measured yet"
    brackets = "In brackets the paper's number, on cifar100."
    assert text.startswith(f"## Mine\n\nTwo rows. {brackets}\n\nNot measured yet.")
    assert cells(text, "untrained") == {LINEAR: "–", ROUNDS: none}  # and no empty columns
    assert cells(text, "`dcco-4`") == {LINEAR: "– (49.6)", ROUNDS: none}
    assert cells(text, "`supervised`") == {LINEAR: "– (42.4)", ROUNDS: none}
    assert cells(text, AHEAD) == {"its numbers": "49.6 and 45.9", WORD: none}
    assert "Every run" not in text and "Settings" not in text


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
    monkeypatch.setattr(generate, "ROWS", rows)
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


def test_under_a_table_stands_where_its_recipes_depart(page: Page) -> None:
    text = page(table=TABLE + "  departs: Its rate is ours.\n").partition("from the paper:")[2]
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
    claim = {"ours": "40.0 and 30.0", "rounds": "10", "seeds": "1 (1 failed) and 1"}
    assert cells(text, AHEAD) == {"its numbers": "49.6 and 45.9", **claim, WORD: "appears"}
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
    claim = {"ours": "20.0", "rounds": "10", "seeds": "1", WORD: "**does not appear**"}
    assert cells(text, FAILS).items() >= claim.items()
    assert cells(page(lost), "`fedavg`")[LINEAR] == "failed (30.7)"


def test_a_table_may_show_shorter_runs_and_claims_keep_the_longest(page: Page) -> None:
    short = four(20.0, rounds=4, round=4, changed={"rounds": 4})
    text = page(short, four(50.0), sixteen(40.0), table=TABLE + "  rounds: 4\n")
    assert cells(text, "`dcco-4`")[LINEAR] == "20.0 (49.6)"
    assert cells(text, "`dcco-16`")[ROUNDS] == "10 of 100"  # it has no others
    assert cells(text, AHEAD)["ours"] == "50.0 and 40.0"


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
    """And an untrained network is the recipe's, too; that of a claim is the run's own."""
    he = {"changed": {"encoder.initializer": "he"}, "untrained": {"linear@5000_top1": 45.0}}
    text = page(*[four(44.0, **he), four(40.0)][::order])
    assert cells(text, "`dcco-4`")[LINEAR] == "40.0 (49.6)"
    assert cells(text, "untrained")[LINEAR] == "5.0"
    text = page(*[fedavg(44.0, **he), fedavg(40.0, rounds=5)][::order])
    assert cells(text, FAILS)[WORD] == "appears"


@pytest.mark.parametrize(
    ("mean", "other", "spread", "above", "near"),
    [
        (41.1, 40.0, 0.4, "appears", "appears"),
        (41.0, 40.0, 0.4, "too close to say", "appears"),
        (39.0, 40.0, 0.4, "too close to say", "appears"),
        (38.9, 40.0, 0.4, "**does not appear**", "appears"),
        (37.5, 40.0, 0.4, "**does not appear**", "**does not appear**"),
        (42.1, 40.0, 0.4, "appears", "**does not appear**"),
        (42.5, 40.0, 3.0, "too close to say", "too close to say"),
        (37.5, 40.0, 3.0, "too close to say", "too close to say"),
    ],
)
def test_claims_are_computed_from_means_over_seeds(
    page: Page, mean: float, other: float, spread: float, above: str, near: str
) -> None:
    for apart in ((spread, 0.0), (0.0, spread)):  # whichever row's seeds lie apart
        rows = zip((four, sixteen), (mean, other), apart, strict=True)
        text = page(
            *(row(m + side * d / 2, seed=(side + 1) // 2) for row, m, d in rows for side in (-1, 1))
        )
        row = {"its numbers": "49.6 and 45.9", "ours": f"{mean:.1f} and {other:.1f}"}
        row |= {"rounds": "10", "seeds": "2 and 2"}
        assert cells(text, AHEAD) == row | {WORD: above}
        assert cells(text, NEAR) == row | {WORD: near}


@pytest.mark.parametrize(
    ("lines", "claim", "ours", "word"),
    [
        # A row fails seed by seed: it diverges, or ends no better than untrained.
        ([fedavg(None, **LOST), fedavg(30.0, seed=1)], FAILS, "30.0", "in 1 of 2 seeds"),
        ([fedavg(None, **LOST), fedavg(5.0, seed=1)], FAILS, "5.0", "appears"),
        ([fedavg(None, **LOST), fedavg(None, seed=1, **LOST)], FAILS, "failed", "appears"),
        ([fedavg(5.0)], FAILS, "5.0", "appears"),
        ([fedavg(6.0)], FAILS, "6.0", "too close to say"),
        ([fedavg(6.1)], FAILS, "6.1", "**does not appear**"),
        # An untrained network may be that of another run on the same images.
        ([fedavg(30.0, untrained={}), fedavg(31.0, **SHORT, **PNG)], FAILS, "", "not measured yet"),
        ([fedavg(30.0, untrained={}), fedavg(31.0, **SHORT)], FAILS, "30.0", "**does not appear**"),
        # What failed is beaten, and like nothing; it counts only if alone.
        ([four(40.0), sixteen(None, **LOST)], AHEAD, "40.0 and failed", "appears"),
        ([four(40.0), sixteen(None, **LOST)], NEAR, "40.0 and failed", "**does not appear**"),
        ([four(None, **LOST), sixteen(40.0)], AHEAD, "failed and 40.0", "**does not appear**"),
        (
            [four(40.0), sixteen(None, **LOST), four(30.0, **SHORT), sixteen(20.0, **SHORT)],
            *(AHEAD, "30.0 and 20.0", "appears"),
        ),
        ([four(40.0), sixteen(None, ours={"knn_top1": 3.0})], AHEAD, "", "not measured yet"),
        # Rounds: as many, or the same share of their recipes'; of several the most.
        ([four(40.0), sixteen(80.0, **LONG)], AHEAD, "", f"{UNALIKE} (10 and 100 rounds)"),
        ([four(40.0), sixteen(80.0, **LONG), sixteen(30.0)], AHEAD, "40.0 and 30.0", "appears"),
        (
            [four(40.0), sixteen(60.0, **LONG), sixteen(30.0), four(70.0, **LONG)],
            *(AHEAD, "70.0 and 60.0", "appears"),
        ),
        ([four(40.0), sixteen(30.0, **FIFTH)], AHEAD, "40.0 and 30.0", "appears"),
        # A row that is ahead with fewer rounds is ahead.
        ([four(4.0), sixteen(2.0, **LONG)], AHEAD, "4.0 and 2.0", "appears with fewer rounds"),
        ([four(4.0), sixteen(2.0, **LONG)], NEAR, "", f"{UNALIKE} (10 and 100 rounds)"),
        ([four(4.0, **LONG), sixteen(2.0)], AHEAD, "", f"{UNALIKE} (100 and 10 rounds)"),
        ([four(4.0), sixteen(3.5, **LONG)], AHEAD, "", f"{UNALIKE} (10 and 100 rounds)"),
        ([four(4.0), sixteen(2.0, **LONG | HOLDOUT)], AHEAD, "", f"{UNALIKE} (other settings)"),
        # Fewer, but a larger share of its own.
        ([four(4.0), sixteen(2.0, **TWENTIETH)], AHEAD, "", f"{UNALIKE} (10 and 15 rounds)"),
        # Settings: alike, but for rounds, evaluation and rates.
        ([four(40.0), sixteen(30.0, **FREE)], AHEAD, "40.0 and 30.0", "appears"),
        ([four(40.0), sixteen(30.0, **HOLDOUT)], AHEAD, "", f"{UNALIKE} (other settings)"),
        (
            [four(40.0), sixteen(30.0, **HOLDOUT), four(20.0, **HOLDOUT)],
            *(AHEAD, "20.0 and 30.0", "**does not appear**"),
        ),
        # Images: the same.
        ([four(40.0), sixteen(30.0, **PNG)], AHEAD, "", f"{UNALIKE} (other images)"),
        ([sixteen(40.0), supervised(45.0, **PNG)], HEAD, "", f"{UNALIKE} (other images)"),
    ],
)
def test_a_claim_appears_or_not_in_runs_that_are_alike(
    lines: list[Line], claim: str, ours: str, word: str, page: Page
) -> None:
    found = cells(page(*lines), claim)
    assert (found.get("ours", ""), found[WORD]) == (ours, word)


def test_a_claim_is_looked_for_in_shorter_runs_too(page: Page) -> None:
    def pair(linear: float | None, other: float, rounds: int, **more: Any) -> list[Line]:
        own = {"rounds": rounds, "changed": {"rounds": rounds}, **more}
        return [four(linear, **own), sixteen(other, **own)]

    full = pair(50.0, 49.5, 100)
    text = page(*full, *pair(30.0, 40.0, 40, seed=1))
    assert cells(text, AHEAD)["ours"] == "50.0 and 49.5"
    row = {"its numbers": "", "ours": "30.0 and 40.0", "rounds": "40"}
    assert cells(text, SHORTER) == row | {"seeds": "1 and 1", WORD: "**does not appear**"}
    for other in (
        pair(30.0, 40.0, 40)[:1],  # one of the two alone
        pair(30.0, 40.0, 40, **HOLDOUT),  # other settings
        pair(None, 40.0, 40),  # not judged so
    ):
        assert SHORTER not in page(*full, *other)
    text = page(*pair(30.0, 40.0, 40), *pair(None, 40.0, 100, **LOST))  # longer, but failed
    assert cells(text, AHEAD)["rounds"] == "40" and SHORTER not in text
    text = page(fedavg(4.0), fedavg(9.0, **SHORT))
    assert cells(text, FAILS)[WORD] == "appears"
    assert cells(text, f"{FAILS}, in fewer rounds")[WORD] == "**does not appear**"


def test_supervised_training_is_judged_by_its_own_classifier(page: Page) -> None:
    own = supervised(46.0, rounds=3, paper_rounds=3)
    text = page(own, sixteen(44.0, **HOLDOUT), sixteen(40.0, **SHORT))
    row = cells(text, "`supervised`")
    assert row[LINEAR] == "46.0 (42.4)" and row["knn"] == "–"
    claim = {"its numbers": "45.9 and 42.4", "ours": "44.0 and 46.0", "rounds": "10 and 3"}
    assert cells(text, HEAD) == claim | {"seeds": "1 and 1", WORD: "**does not appear**"}
    assert "in fewer rounds" not in text  # rounds are other rounds there


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
    tables = yaml.safe_load(generate.TABLES.read_text(encoding="utf-8"))
    source = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="results.md"))
    made = generate.on_page_markdown(source, page=page, config=None, files=None)
    assert "generated:" not in made
    for name in tables:
        assert f"<!-- generated: results {name} -->" in source
        assert generate.part("results", name, "docs") in made
    assert made.count("\n## ") == len(tables)


def test_every_table_names_recipes_and_claims_rows_that_there_are(generate: ModuleType) -> None:
    tables = yaml.safe_load(generate.TABLES.read_text(encoding="utf-8"))
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
    for each in generate.read_lines(generate.ROWS):  # nothing that was measured is left out
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
    found = [json.loads(row) for row in (out / "dcco/table1/table.jsonl").read_text().splitlines()]
    assert [row["choice"] for row in found] == ["server.lr=0.1", "server.lr=0.01", ""]
    assert found[2]["changed"]["objective.projector"] == [16]  # a line's own key wins
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
        assert "dcco/table1/dcco/noniid-4: diverged before\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["# two", "dcco/table1/dcco/noniid-4", "dcco/table1/dcco/noniid-4 seed=1"],
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


@pytest.mark.slow
@pytest.mark.parametrize("plan", sorted(ROOT.glob("results/plan-*.txt")), ids=lambda p: p.stem)
def test_what_is_planned_can_run_and_is_not_measured_yet(plan: Path, tmp_path: Path) -> None:
    lines = plan.read_text(encoding="utf-8").splitlines()
    jpeg, original = "CIFAR-10 (", "CIFAR-10 (original"
    known = {"tiny100": "stand-in", "cifar10": jpeg, "items": jpeg, "benchmark": original}
    images = known.get(plan.stem.split("-")[1], plan.stem.removeprefix("plan-"))
    words = (
        ["data.root=DIR"] if images == "fashion-mnist" else ["data.name=folder", "data.root=DIR"]
    )
    planned = load("results/measure.py").planned(lines, words, tmp_path)
    assert planned
    rows = load("results/add.py").read(ROOT / "results/rows.jsonl")
    done = [(r["recipe"], r["changed"], r["seed"]) for r in rows if r["data"].startswith(images)]
    for job in planned:
        values = config.flatten(config.to_tree(job.settings))
        changed = {key: values[key] for key in job.changed}
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
