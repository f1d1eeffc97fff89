from __future__ import annotations

import pytest

from fedssl import config
from fedssl.cli.recipes import format_recipes
from fedssl.runs.progress import Progress
from fedssl.runs.result import format_result
from fedssl.util.text import fit_line, format_bytes, format_client, format_measures


def test_names_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A client's name is that of a folder, which may hold escape sequences and new lines."""
    name = "ward\x1b[2J\nround 9: done"
    assert format_client(name) == "ward\\x1b[2J\\nround 9: done"
    assert format_client("Zürich 病院") == "Zürich 病院"
    assert len(format_measures({name: {"knn_top1": 5.0}}).splitlines()) == 2
    Progress("dcco", 1).say(f"round 1: no reply of {name}")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()


def test_a_sentence_breaks_between_words() -> None:
    sentence = "-0.8 points against an untrained encoder (knn). Likely reason: too few rounds."
    assert fit_line(sentence, None) == sentence
    assert fit_line(sentence, 50).split("\n") == [sentence[:47], sentence[48:]]


def test_rows_with_different_measures() -> None:
    text = format_measures(
        {"a": {"knn_top1": 91.26, "effective_rank": 3.0}, "b": {"knn_top1": 5.0}}
    )
    lines = text.splitlines()
    assert lines[0].split() == ["knn", "effective", "rank"]
    assert lines[1].split() == ["a", "91.3", "%", "3.00"]
    assert lines[2].split() == ["b", "5.0", "%", "–"]


def test_the_papers_number_is_shown_beside_ours_where_the_protocol_is_the_same() -> None:
    settings = config.resolve(config.read_recipe("dcco/table1/dcco/noniid-4"))
    rows = {"linear@5000_top1": 40.0, "knn_top1": 30.0, "uniformity": -1.0}
    text = format_result({**rows, "untrained": rows, "result": rows}, settings)
    assert text.splitlines()[-1].split() == ["paper,", "its", "data", "49.6", "%", "–", "–"]


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 999, 1500, 2.5e9, 4e15)] == [
        "0 B", "999 B", "1.5 kB", "2.5 GB", "4000.0 TB",
    ]  # fmt: skip


def test_rounds_to_a_target_are_shown_beside_the_papers() -> None:
    settings = config.resolve(config.read_recipe("fedema/table11/fedema/epochs-5"))
    rows = {"linear_top1": 71.0}
    summary = {"untrained": rows, "result": rows, "rounds_to_70": 30, "rounds_to_80": None}
    lines = [line.split() for line in format_result(summary, settings).splitlines()]
    assert lines[0] == ["linear", "rounds", "to", "70", "rounds", "to", "80"]
    assert lines[-2:] == [
        ["fedema", "71.0", "%", "30", "–"],
        ["paper,", "its", "data", "–", "40", "80"],
    ]


def test_the_list_has_every_recipe_or_its_table() -> None:
    lines = format_recipes().splitlines()
    names = [line.split()[0] for line in lines[1:]]
    for recipe in config.list_recipes():
        assert recipe in names or recipe.rsplit("/", 2)[0] in names
    assert len(names) == len(set(names)) < 100
    text = "\n".join(lines)
    assert "DCCO Table 1: DCCO beside FedAvg" in text and "/_" not in text
    assert "22 recipes: fedssl recipes fedema/table3" in text
    assert names.index("fedema/table2") < names.index("fedema/table10")


def test_a_prefix_lists_recipes_with_the_papers_numbers() -> None:
    lines = format_recipes("fedema/table3").splitlines()
    assert len(lines) == 23
    (line,) = (line for line in lines if line.startswith("fedema/table3/fedu/cifar10-noniid "))
    assert line.endswith("linear 80.52 (± 0.21)") and "FedEMA Table 3, FedU, CIFAR-10" in line
    assert len(format_recipes("fedema/table3/*/cifar10-noniid").splitlines()) == 6
    (_, line) = format_recipes("fedema/figure5/both").splitlines()
    assert line.endswith("the figure prints no number")
    (_, line) = format_recipes("decssl/figure2/standalone/labels-5").splitlines()
    assert line.endswith("the paper has no such row") and "prints" not in line


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("pattern", [None, "fedema/table3"])
def test_a_table_fits_its_terminal_and_loses_no_letter(pattern: str | None, width: int) -> None:
    wide, narrow = format_recipes(pattern), format_recipes(pattern, width)
    assert max(map(len, narrow.splitlines())) <= width < max(map(len, wide.splitlines()))
    # Long words are cut in two, but every letter is there.
    assert sorted("".join(narrow.split())) == sorted("".join(wide.split()))


def test_measures_become_rows_in_a_narrow_terminal() -> None:
    table = {"untrained": {f"linear@{n}_top1": 50.0 for n in (10, 50, 100, 500)}, "dcco": {}}
    assert len(format_measures(table, 100).splitlines()) == 3
    lines = format_measures(table, 60).splitlines()
    assert lines[0].split() == ["untrained", "dcco"] and len(lines) == 5
    assert lines[1].split() == ["linear,", "10", "labels", "50.0", "%", "–"]
