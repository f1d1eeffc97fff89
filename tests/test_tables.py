from __future__ import annotations

from fedssl import config, tables


def test_rows_with_different_measures() -> None:
    text = tables.rows({"a": {"knn_top1": 91.26, "effective_rank": 3.0}, "b": {"knn_top1": 5.0}})
    lines = text.splitlines()
    assert lines[0].split() == ["knn", "effective", "rank"]
    assert lines[1].split() == ["a", "91.3", "%", "3.00"]
    assert lines[2].split() == ["b", "5.0", "%", "–"]


def test_the_papers_number_is_shown_beside_ours_where_the_protocol_is_the_same() -> None:
    settings = config.resolve(config.read_recipe("dcco/cifar100-noniid-4"))
    rows = {"linear@5000_top1": 40.0, "knn_top1": 30.0, "uniformity": -1.0}
    text = tables.result({**rows, "untrained": rows, "result": rows}, settings)
    assert text.splitlines()[-1].split() == ["paper,", "its", "data", "49.6", "%", "–", "–"]


def test_sizes_for_people() -> None:
    assert [tables.size(n) for n in (0, 999, 1500, 2.5e9, 4e15)] == [
        "0 B", "999 B", "1.5 kB", "2.5 GB", "4000.0 TB",
    ]  # fmt: skip


def test_every_recipe_is_listed_with_its_row() -> None:
    text = tables.recipes()
    for name in config.recipes():
        assert name in text
    assert "DCCO Table 1, centralized CCO" in text and "_cifar100" not in text
