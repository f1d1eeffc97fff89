"""The page of what was measured is computed from the lines that runs wrote, and nothing else."""

from __future__ import annotations

import json
import re
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
    dcco-4: dcco/cifar100-noniid-4
    dcco-16: dcco/cifar100-noniid-16
    fedavg: dcco/cifar100-noniid-16-cco-fedavg
    supervised: dcco/cifar100-supervised-5000
  heads: {supervised: linear@5000_top1}
  claims: [dcco-4 > dcco-16, dcco-4 ~ dcco-16, fedavg fails, dcco-16 > supervised]
"""


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
SHORTER = f"{AHEAD}, in fewer rounds"


def test_what_is_not_measured_is_listed_beside_the_papers_numbers(
    generate: ModuleType, rows: Path
) -> None:
    page = generate.results("mine")
    brackets = "In brackets the paper's number, on cifar100."
    assert page.startswith(f"## Mine\n\nTwo rows. {brackets}\n\nNot measured yet.")
    none = "not measured yet"
    assert cells(page, "untrained") == {LINEAR: "–", ROUNDS: none}  # and no empty columns
    assert cells(page, "`dcco-4`") == {LINEAR: "– (49.6)", ROUNDS: none}
    assert cells(page, "`supervised`") == {LINEAR: "– (42.4)", ROUNDS: none}
    assert cells(page, AHEAD) == {"its numbers": "49.6 and 45.9", WORD: none}
    assert "Every run" not in page and "Settings" not in page


def test_under_a_table_stands_where_its_recipes_depart(generate: ModuleType, rows: Path) -> None:
    generate.TABLES.write_text(TABLE + "  departs: Its rate is ours.\n")
    page = generate.results("mine").partition("depart from the paper:")[2]
    assert page.startswith("\n\n- Its rate is ours.\n- Where the paper is silent")
    assert "[DCCO's page](docs/papers/dcco.md)" in page
    failing = TABLE.replace("noniid-16-cco-fedavg", "noniid-4-cco-fedavg")
    generate.TABLES.write_text(failing)
    assert "- `fedavg`: the paper reports that training failed." in generate.results("mine")
    spread = TABLE.replace("dcco/cifar100-noniid-16\n", "fedema/table3/fedu/cifar10-noniid\n")
    generate.TABLES.write_text(spread)  # ± 0.21 is no departure
    assert "±" not in generate.results("mine")
    alone = "rows: {one: decssl/figure6/dec-ssl/epochs-1, two: decssl/figure6/dec-sl/epochs-1}"
    generate.TABLES.write_text(re.sub(r"rows:.*", alone, TABLE, flags=re.DOTALL))
    assert "- all rows: the figure prints no number." in generate.results("mine")


def test_seeds_stand_together_and_other_images_elsewhere(generate: ModuleType, rows: Path) -> None:
    write(
        rows,
        line("noniid-4", 40.04, changed={"rounds": 10, "data.holdout": 0.1}),
        line(
            "noniid-4",
            42.0,
            changed={"data.holdout": 0.1, "rounds": 10},
            seed=1,
            seconds=60.0,
            beside=True,
        ),
        line("noniid-16", 99.0, data="photos"),
    )
    page = generate.results("mine")
    assert "Images: digits (JPEG)." in page and "99.0" not in page
    assert cells(page, "untrained")[LINEAR] == "5.0" and cells(page, "untrained")["knn"] == "–"
    row = {LINEAR: "40.0, 42.0 (49.6)", "knn": "7.0, 7.0", ROUNDS: "10 of 100"}
    assert cells(page, "`dcco-4`") == row | {"seed: minutes": "0: 1.5, 1: 1.0\\*"}
    assert "chosen:\n\n- `dcco-4`: `data.holdout=0.1`\n\n" in page
    assert cells(page, "`dcco-16`")[ROUNDS] == "not measured yet"
    runs = page.partition("Every run")[2]
    assert runs.count("`fedssl reproduce x`") == 2 and "| cpu, fp32, abc, today |" in runs


def test_images_that_are_not_the_same_are_no_seeds_of_one_row(
    generate: ModuleType, rows: Path
) -> None:
    other = {"data": "digits (PNG)", "untrained": {"linear@5000_top1": 6.0}}
    write(rows, line("noniid-4", 40.0), line("noniid-4", 60.0, seed=1, **other))
    page = generate.results("mine")
    assert cells(page, "`dcco-4`")[LINEAR] == "40.0 (49.6)"
    assert "- `dcco-4`: digits (JPEG)\n" in page
    assert cells(page, "untrained, digits (JPEG)")[LINEAR] == "5.0"
    assert cells(page, "untrained, digits (PNG)")[LINEAR] == "6.0"
    write(rows, line("noniid-4", 40.0), line("noniid-16", 30.0, **other))
    expected = "not measured alike yet (other images)"
    assert cells(generate.results("mine"), AHEAD)[WORD] == expected
    supervised = line("supervised-5000", None, ours={"head_top1": 45.0}, **other)
    write(rows, line("noniid-16", 40.0), supervised)
    assert cells(generate.results("mine"), "`dcco-16` > `supervised`")[WORD] == expected


def test_a_seed_that_failed_is_shown_and_not_counted(generate: ModuleType, rows: Path) -> None:
    lost = {"failed": "nan", "untrained": {}, "round": 0, "seconds": None, "heldout": None}
    good = line("noniid-4", 40.0, seed=1, round=5)
    write(rows, line("noniid-4", None, **lost), good, line("noniid-16", 30.0))
    page = generate.results("mine")
    row = {LINEAR: "failed, 40.0 (49.6)", "knn": "failed, 7.0", ROUNDS: "10 of 100"}
    assert cells(page, "`dcco-4`") == row | {"seed: minutes": "0: –, 1: 1.5"}
    assert "- `dcco-4`: none (seed 0); round 5 (seed 1)\n" in page
    assert cells(page, "untrained")[LINEAR] == "5.0"
    claim = {"ours": "40.0 and 30.0", "rounds": "10", "seeds": "1 (1 failed) and 1"}
    assert cells(page, AHEAD) == {"its numbers": "49.6 and 45.9", **claim, WORD: "appears"}
    write(rows, line("noniid-4", None, **lost), line("noniid-16", 30.0))
    assert cells(generate.results("mine"), "`dcco-4`")["seed: minutes"] == "0: –"


def test_rows_fail_seed_by_seed(generate: ModuleType, rows: Path) -> None:
    failed = line("noniid-16-cco-fedavg", None, failed="nan", untrained={})
    for other, word in ((30.0, "in 1 of 2 seeds"), (5.0, "appears"), (None, "appears")):
        lost = {} if other else {"failed": "nan"}
        write(rows, failed, line("noniid-16-cco-fedavg", other, seed=1, **lost))
        assert cells(generate.results("mine"), FAILS)[WORD] == word
    for number, word in ((6.0, "too close to say"), (6.1, "**does not appear**")):
        write(rows, line("noniid-16-cco-fedavg", number))
        assert cells(generate.results("mine"), FAILS)[WORD] == word
    blank = line("noniid-16-cco-fedavg", 30.0, untrained={})
    elsewhere = line("noniid-16-cco-fedavg", 31.0, rounds=5, data="digits (PNG)")
    write(rows, blank, elsewhere)
    assert cells(generate.results("mine"), FAILS)[WORD] == "not measured yet"
    write(rows, blank, line("noniid-16-cco-fedavg", 31.0, rounds=5))
    assert cells(generate.results("mine"), FAILS)[WORD] == "**does not appear**"


def test_of_several_runs_the_longest_then_the_best_on_held_out_images_is_shown(
    generate: ModuleType, rows: Path
) -> None:
    several = [
        line("noniid-16-cco-fedavg", 30.0, heldout=3.0, changed={"objective.lambda": 1}),
        line("noniid-16-cco-fedavg", 20.0, heldout=4.0, changed={"objective.lambda": 2}, round=4),
        line("noniid-16-cco-fedavg", 50.0, heldout=9.0, rounds=5, round=5, changed={"rounds": 5}),
        line("noniid-16-cco-fedavg", None, rounds=20, failed="nan", changed={"rounds": 20}),
    ]
    write(rows, *several)
    page = generate.results("mine")
    row = cells(page, "`fedavg`")
    assert row[LINEAR] == "20.0 (30.7)" and row[ROUNDS] == "10 of 100"
    assert "- `fedavg`: `objective.lambda=2`, round 4\n" in page
    claim = {"ours": "20.0", "rounds": "10", "seeds": "1", WORD: "**does not appear**"}
    assert cells(page, FAILS).items() >= claim.items()
    write(rows, several[-1])
    page = generate.results("mine")
    assert cells(page, "`fedavg`")[LINEAR] == "failed (30.7)"
    claim = {"ours": "failed", "rounds": "20", "seeds": "0 (1 failed)", WORD: "appears"}
    assert cells(page, FAILS).items() >= claim.items()
    write(rows, line("noniid-16-cco-fedavg", 5.0))
    assert cells(generate.results("mine"), FAILS)[WORD] == "appears"


def test_a_table_may_show_shorter_runs_and_claims_keep_the_longest(
    generate: ModuleType, rows: Path
) -> None:
    def both(recipe: str, short: float, long: float) -> list[dict[str, Any]]:
        changed = {"rounds": 4}
        return [line(recipe, short, rounds=4, round=4, changed=changed), line(recipe, long)]

    write(rows, *both("noniid-4", 20.0, 50.0), line("noniid-16", 40.0))
    generate.TABLES.write_text(TABLE + "  rounds: 4\n")
    page = generate.results("mine")
    assert cells(page, "`dcco-4`")[LINEAR] == "20.0 (49.6)"
    assert cells(page, "`dcco-16`")[ROUNDS] == "10 of 100"  # it has no others
    assert cells(page, AHEAD)["ours"] == "50.0 and 40.0"


def test_each_seed_has_its_own_rate_and_none_is_left_out(generate: ModuleType, rows: Path) -> None:
    def run(linear: float, heldout: float, seed: int, rate: float) -> dict[str, Any]:
        more = {"server.lr": rate, "data.holdout": 0.1}
        return line("noniid-4", linear, heldout=heldout, seed=seed, changed=more)

    write(rows, run(41, 9, 0, 0.1), run(30, 3, 0, 0.2), run(40, 2, 1, 0.1), run(32, 4, 1, 0.2))
    page = generate.results("mine")
    assert cells(page, "`dcco-4`")[LINEAR] == "41.0, 32.0 (49.6)"
    first, second = (f"`server.lr={rate}`, `data.holdout=0.1`" for rate in (0.1, 0.2))
    assert f"- `dcco-4`: {first} (seed 0); {second} (seed 1)\n" in page
    unchosen = [run(41, None, 0, 0.1), line("noniid-4", 20.0, changed={"data.holdout": 0.1})]
    write(rows, *unchosen)  # nothing to choose by: the recipe's own rate
    assert cells(generate.results("mine"), "`dcco-4`")[LINEAR] == "20.0 (49.6)"


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_runs_that_of_the_recipe_is_shown(
    generate: ModuleType, rows: Path, order: int
) -> None:
    """And an untrained network is the recipe's, too; that of a claim is the run's own."""
    he = {"changed": {"encoder.initializer": "he"}, "untrained": {"linear@5000_top1": 45.0}}
    write(rows, *[line("noniid-4", 44.0, **he), line("noniid-4", 40.0)][::order])
    page = generate.results("mine")
    assert cells(page, "`dcco-4`")[LINEAR] == "40.0 (49.6)"
    assert cells(page, "untrained")[LINEAR] == "5.0"
    both = [line("noniid-16-cco-fedavg", 44.0, **he), line("noniid-16-cco-fedavg", 40.0, rounds=5)]
    write(rows, *both[::order])
    assert cells(generate.results("mine"), "`fedavg` fails")["in our rows"] == "appears"


@pytest.mark.parametrize(
    ("four", "sixteen", "spread", "above", "near"),
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
    generate: ModuleType,
    rows: Path,
    four: float,
    sixteen: float,
    spread: float,
    above: str,
    near: str,
) -> None:
    def seeds(name: str, mean: float, apart: float) -> list[dict[str, Any]]:
        return [line(name, mean - apart / 2), line(name, mean + apart / 2, seed=1)]

    for apart in ((spread, 0.0), (0.0, spread)):  # whichever row's seeds lie apart
        write(rows, *seeds("noniid-4", four, apart[0]), *seeds("noniid-16", sixteen, apart[1]))
        page = generate.results("mine")
        row = {"its numbers": "49.6 and 45.9", "ours": f"{four:.1f} and {sixteen:.1f}"}
        row |= {"rounds": "10", "seeds": "2 and 2"}
        assert cells(page, AHEAD) == row | {WORD: above}
        assert cells(page, NEAR) == row | {WORD: near}


def test_a_run_that_failed_is_beaten_and_one_without_the_measure_is_not_measured(
    generate: ModuleType, rows: Path
) -> None:
    good, bad = line("noniid-4", 40.0), line("noniid-16", None, failed="nan")
    write(rows, good, bad)
    page = generate.results("mine")
    row = cells(page, AHEAD)
    assert row["ours"] == "40.0 and failed" and row["seeds"] == "1 and 0 (1 failed)"
    assert row[WORD] == "appears" and cells(page, NEAR)[WORD] == "**does not appear**"
    write(rows, line("noniid-4", None, failed="nan"), line("noniid-16", 40.0))
    assert cells(generate.results("mine"), AHEAD)[WORD] == "**does not appear**"
    short = [line(name, 30.0, rounds=5) for name in ("noniid-4", "noniid-16")]
    write(rows, good, bad, *short)  # a failure only if alone
    assert cells(generate.results("mine"), AHEAD)["ours"] == "30.0 and 30.0"
    write(rows, good, line("noniid-16", None, ours={"knn_top1": 3.0}))
    assert cells(generate.results("mine"), AHEAD)[WORD] == "not measured yet"


def test_only_runs_of_as_many_rounds_are_compared(generate: ModuleType, rows: Path) -> None:
    longer = line("noniid-16", 80.0, rounds=100, changed={"rounds": 100})
    write(rows, line("noniid-4", 40.0), longer)
    row = cells(generate.results("mine"), AHEAD)
    assert row[WORD] == "not measured alike yet (10 and 100 rounds)" and "ours" not in row
    write(rows, line("noniid-4", 40.0), longer, line("noniid-16", 30.0))
    row = cells(generate.results("mine"), AHEAD)
    assert (row["ours"], row["rounds"], row[WORD]) == ("40.0 and 30.0", "10", "appears")
    both = line("noniid-4", 70.0, rounds=100, changed={"rounds": 100})
    write(rows, line("noniid-4", 40.0), longer, line("noniid-16", 30.0), both)
    assert cells(generate.results("mine"), AHEAD)["ours"] == "70.0 and 80.0"
    assert SHORTER in generate.results("mine")
    write(rows, line("noniid-4", 40.0), line("noniid-16", 30.0, rounds=2, paper_rounds=20))
    row = cells(generate.results("mine"), AHEAD)  # the same share of their recipes' rounds
    assert row["rounds"] == "10 and 2" and row[WORD] == "appears"


def test_a_claim_is_looked_for_in_shorter_runs_too(generate: ModuleType, rows: Path) -> None:
    def pair(four: float | None, sixteen: float, rounds: int, **other: Any) -> list[dict[str, Any]]:
        own = {"rounds": rounds, "changed": {"rounds": rounds}, **other}
        return [line("noniid-4", four, **own), line("noniid-16", sixteen, **own)]

    full = pair(50.0, 49.5, 100)
    write(rows, *full, *pair(30.0, 40.0, 40, seed=1))
    page = generate.results("mine")
    row = {"its numbers": "49.6 and 45.9", "ours": "50.0 and 49.5", "rounds": "100"}
    assert cells(page, AHEAD) == row | {"seeds": "1 and 1", WORD: "too close to say"}
    row = {"its numbers": "", "ours": "30.0 and 40.0", "rounds": "40"}
    assert cells(page, SHORTER) == row | {"seeds": "1 and 1", WORD: "**does not appear**"}
    write(rows, *full, pair(30.0, 40.0, 40)[0])  # one of the two alone
    assert SHORTER not in generate.results("mine")
    write(rows, *full, *pair(30.0, 40.0, 40, changed={"data.holdout": 0.1}))  # other settings
    assert SHORTER not in generate.results("mine")
    write(rows, *pair(30.0, 40.0, 40), *pair(None, 40.0, 100, failed="nan"))  # longer, but failed
    page = generate.results("mine")
    assert cells(page, AHEAD)["rounds"] == "40" and SHORTER not in page
    write(rows, *full, *pair(None, 40.0, 40))  # not judged so
    assert SHORTER not in generate.results("mine")
    alone = line("noniid-16-cco-fedavg", 4.0)
    write(rows, alone, alone | {"rounds": 5, "ours": {"linear@5000_top1": 9.0}})
    assert cells(generate.results("mine"), FAILS)[WORD] == "appears"
    word = cells(generate.results("mine"), f"{FAILS}, in fewer rounds")[WORD]
    assert word == "**does not appear**"


def test_a_row_that_is_ahead_with_fewer_rounds_is_ahead(generate: ModuleType, rows: Path) -> None:
    longer = {"rounds": 100, "changed": {"rounds": 100}}
    write(rows, line("noniid-4", 40.0), line("noniid-16", 30.0, **longer))
    page = generate.results("mine")
    row = cells(page, AHEAD)
    assert (row["ours"], row["rounds"]) == ("40.0 and 30.0", "10 and 100")
    assert row[WORD] == "appears with fewer rounds"
    assert cells(page, NEAR)[WORD] == "not measured alike yet (10 and 100 rounds)"
    unlike = "not measured alike yet (100 and 10 rounds)"
    write(rows, line("noniid-4", 40.0, **longer), line("noniid-16", 30.0))
    assert cells(generate.results("mine"), AHEAD)[WORD] == unlike
    write(rows, line("noniid-4", 40.0), line("noniid-16", 39.5, **longer))
    assert cells(generate.results("mine"), AHEAD)[WORD].startswith("not measured alike yet")
    other = line("noniid-16", 30.0, rounds=100, changed={"data.holdout": 0.1})
    write(rows, line("noniid-4", 40.0), other)
    assert cells(generate.results("mine"), AHEAD)[WORD] == "not measured alike yet (other settings)"
    small = line("noniid-16", 30.0, rounds=15, paper_rounds=300, changed={"rounds": 15})
    write(rows, line("noniid-4", 40.0), small)  # fewer, but a larger share of its own
    assert cells(generate.results("mine"), AHEAD)[WORD].startswith("not measured alike yet")


def test_only_runs_of_like_settings_are_compared(generate: ModuleType, rows: Path) -> None:
    free = {"rounds": 10, "evaluate.every": 5, "server.lr": 0.1, "client.lr": 0.1}
    write(rows, line("noniid-4", 40.0), line("noniid-16", 30.0, changed=free))
    assert cells(generate.results("mine"), AHEAD)[WORD] == "appears"
    kept = line("noniid-16", 30.0, changed={"data.holdout": 0.1})
    write(rows, line("noniid-4", 40.0), kept)
    expected = "not measured alike yet (other settings)"
    assert cells(generate.results("mine"), AHEAD)[WORD] == expected
    like = line("noniid-4", 20.0, changed={"data.holdout": 0.1})
    write(rows, line("noniid-4", 40.0), kept, like)
    assert cells(generate.results("mine"), AHEAD)["ours"] == "20.0 and 30.0"


def test_supervised_training_is_judged_by_its_own_classifier(
    generate: ModuleType, rows: Path
) -> None:
    own = line("supervised-5000", None, ours={"head_top1": 46.0}, rounds=3, paper_rounds=3)
    write(rows, own, line("noniid-16", 44.0, changed={"data.holdout": 0.1}))
    page = generate.results("mine")
    row = cells(page, "`supervised`")
    assert row[LINEAR] == "46.0 (42.4)" and row["knn"] == "–"
    claim = {"its numbers": "45.9 and 42.4", "ours": "44.0 and 46.0", "rounds": "10 and 3"}
    claim |= {"seeds": "1 and 1", WORD: "**does not appear**"}
    assert cells(page, "`dcco-16` > `supervised`") == claim
    write(rows, own, line("noniid-16", 44.0), line("noniid-16", 40.0, rounds=5))
    assert "in fewer rounds" not in generate.results("mine")  # rounds are other rounds there


def test_lines_are_added_in_the_place_of_older_ones(tmp_path: Path) -> None:
    add = load("results/add.py")
    home, kept = tmp_path / "table.jsonl", tmp_path / "rows.jsonl"
    first = line("noniid-4", 40.0, folder="/tmp/elsewhere", commit=None)
    write(home, first, line("noniid-4", 41.0, seed=1, commit="own"))
    assert add.add([home], kept, "aaa") == 2
    assert "elsewhere" not in kept.read_text() and '"commit": "aaa"' in kept.read_text()
    newer = [line("noniid-4", 50.0), line("noniid-4", 60.0, changed={"rounds": 5})]
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
)


def test_rows_of_a_file_run_one_after_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = load("results/measure.py").main
    rates = "dcco/cifar100-noniid-16-cco-fedavg 'server.lr=[0.1,0.01]' # two rows"
    lines = ["# not a row", "", rates, "dcco/cifar100-noniid-4 objective.projector=[16]"]
    (tmp_path / "plan.txt").write_text("\n".join(lines))
    out = tmp_path / "out"
    command = [str(tmp_path / "plan.txt"), "--out", str(out), *SMALL, "objective.projector=[8]"]
    assert main([*command, "--until", "-1"]) == 1
    assert capsys.readouterr().out.count("not finished: dcco/") == 3 and not out.exists()
    assert main(command) == 0
    found = [json.loads(row) for row in (out / "dcco/table.jsonl").read_text().splitlines()]
    assert [row["choice"] for row in found] == ["server.lr=0.1", "server.lr=0.01", ""]
    assert found[2]["changed"]["objective.projector"] == [16]  # a line's own key wins
    assert capsys.readouterr().err.count(" s dcco/") == 3
    assert main(command) == 0
    assert capsys.readouterr().err.count("finished before") == 3


def test_a_row_that_diverged_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverging(*_: Any, **__: Any) -> None:
        raise TrainingError("round 1: the loss is nan", "Its checkpoint is here.")

    main = load("results/measure.py").main
    (tmp_path / "plan.txt").write_text("dcco/cifar100-noniid-4 objective.projector=[8]\n")
    command = [str(tmp_path / "plan.txt"), "--out", str(tmp_path / "out"), *SMALL]
    monkeypatch.setattr(loop, "run", diverging)
    assert main(command) == 0
    (found,) = (tmp_path / "out/dcco/table.jsonl").read_text().splitlines()
    assert json.loads(found)["failed"] == "round 1: the loss is nan"
    monkeypatch.undo()
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().err == "dcco/cifar100-noniid-4: diverged before\n"


def test_a_row_that_breaks_off_does_not_keep_the_others_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, inner = load("results/measure.py"), loop.run

    def broken(settings: config.Config, out: Path, resume: bool) -> dict[str, Any]:
        if out.name == "cifar100-noniid-4":
            raise RuntimeError("a kernel is missing")
        return inner(settings, out, resume)

    monkeypatch.setattr(loop, "run", broken)
    (tmp_path / "plan.txt").write_text("dcco/cifar100-noniid-4\ndcco/cifar100-noniid-16\n")
    command = [str(tmp_path / "plan.txt"), "--out", str(tmp_path / "out"), *SMALL]
    assert measure.main([*command, "objective.projector=[8]"]) == 1
    told = capsys.readouterr()
    assert told.out == "not finished: dcco/cifar100-noniid-4\n"
    assert "RuntimeError: a kernel is missing" in told.err and "noniid-16" in told.err

    def stopped(*_: Any, **__: Any) -> None:
        raise loop.Interrupted

    monkeypatch.setattr(loop, "run", stopped)  # all rows are: nobody asked for the next one
    assert measure.main([*command, "objective.projector=[8]"]) == 130
    assert capsys.readouterr().err.count("[1/1]") == 1


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["# two", "dcco/cifar100-noniid-4", "dcco/cifar100-noniid-4 seed=1"], "line 3: dcco/"),
        (["dcco/cifar100-noniid-4 'seed=1"], "line 1: No closing quotation"),
        (["dcco/nothing"], "line 1: recipe=dcco/nothing"),
        (["dcco/cifar100-noniid-4 rounds=x"], "line 1: rounds=x"),
        (["dcco/cifar100-noniid-4", "dcco/cifar100-noniid-1 encoder.groups=5"], "encoder.groups=5"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_run_as_it_is_runs_no_row(
    lines: list[str] | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if lines is not None:
        (tmp_path / "plan.txt").write_text("\n".join(lines))
    command = [str(tmp_path / "plan.txt"), "--out", str(tmp_path / "out"), *SMALL]
    assert load("results/measure.py").main(command) == 2
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "data", "names"),
    [
        ("items", "CIFAR-10 (", ("decssl", "featarc", "ccl-table1", "perfcl-table2")),
        ("fashion-mnist", "fashion-mnist", ("ccl-fmnist",)),
    ],
)
def test_what_is_planned_settles_all_claims_of_its_tables(
    plan: str,
    data: str,
    names: tuple[str, ...],
    generate: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alike as they are in rounds and settings; that runs have the measures is told elsewhere."""
    lines = (ROOT / f"results/plan-{plan}.txt").read_text(encoding="utf-8").splitlines()
    words = ["data.root=DIR", *(["data.name=folder"] if "(" in data else [])]
    made = []
    for job in load("results/measure.py").planned(lines, words, tmp_path):
        rounds = {"rounds": job.settings.rounds, "paper_rounds": job.published.rounds}
        values = config.flatten(config.to_tree(job.settings))
        changed = {key: values[key] for key in job.changed}
        row = {"recipe": job.name, "data": data, "changed": changed, **rounds}
        made.append(line("", None) | row)
    for name in names:
        table = yaml.safe_load(generate.TABLES.read_text(encoding="utf-8"))[name]
        judged = [each | {"ours": dict.fromkeys(table["measures"], 50.0)} for each in made]
        monkeypatch.setattr(generate, "read_lines", lambda _, judged=judged: judged)
        assert "not measured" not in generate.results(name), name


def test_the_plain_loss_of_cco_is_ours() -> None:
    """What plain_cco.py finds out is about the loss that the rows have, values and gradients."""
    plain, cco = load("results/plain_cco.py"), CCO(CCO.Params("cco"))
    f, g = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    losses = plain.cco(f, g), cco.loss(EncodedBatch((f, g)))
    assert torch.allclose(*losses, rtol=1e-5)
    for a, b in zip(*(torch.autograd.grad(loss, (f, g)) for loss in losses), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)
