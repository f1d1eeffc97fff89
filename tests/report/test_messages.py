"""The messages that clients sent: the table for a data-protection officer."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from made_runs import made, scored

from fedssl import config, report
from fedssl.federation.algorithm import build_algorithm
from fedssl.report.history import read_history
from fedssl.report.messages import Sheet
from fedssl.runs.reader import RunReader

PLAIN = ("server.optimizer=sgd", "server.lr=1", "cohort.size=null", "partition.name=iid")
OBJECTIVES = {
    "fedu": "byol",
    "fedema": "byol",
    "ccl": "moco",
    "fedca": "simclr",
    "fedsc": "spectral",
}
WORDS = {
    name: (
        *(f"algorithm.name={name}", f"objective.name={OBJECTIVES.get(name, 'cco')}"),
        *(*PLAIN, "partition.clients=5"),
    )
    for name in config.VARIANTS["algorithm"]
}
SECURE = ("engine.name=flower", "privacy.secure=true")


def lines(words: tuple[str, ...], **more: Any) -> tuple[dict[str, Any], ...]:
    """Two rounds in which every declared task is asked for."""
    algorithm = build_algorithm(config.resolve(config.read_recipe(None), words))
    tasks = dict.fromkeys(algorithm.tasks())
    moved = {task: {"up": 1000 * (k + 1), "down": 30} for k, task in enumerate(tasks)}
    up = sum(each["up"] for each in moved.values())
    own = {"loss": 1.0, "clients": 5, "exchanges": moved, "bytes_up": up, **more}
    return tuple({"round": k, **own} for k in (1, 2))


def sheet_of(path: Path) -> Sheet:
    run = RunReader(path)
    return Sheet(run, read_history(run))


def page_of(path: Path) -> str:
    return html.unescape(report.write_page([path]).read_text())


def row_of(text: str, name: str) -> list[str]:
    """The cells of numbers in one row of the page's table."""
    row = re.search(rf"<tr><td>(?:<code>)?{name}(?:</code>)?</td>.*?</tr>", text, re.S)
    assert row is not None
    cells = re.findall(r'<td class="n">(.*?)</td>', row[0], re.S)
    return [re.sub(r"<span title=\"(.*?)\">.*?</span>", r"\1", cell) for cell in cells]


@pytest.mark.parametrize("name", WORDS)
def test_every_algorithm(name: str, tmp_path: Path) -> None:
    words = WORDS[name]
    path = made(tmp_path / name, words, scored(90), lines(words))
    sheet, algorithm = sheet_of(path), build_algorithm(RunReader(path).settings)
    text, notes = page_of(path), list(sheet.notes)
    kinds = {row.task: row.visibility for row in sheet.rows}
    if algorithm.pools_data:
        assert not kinds and "every image leaves its site" in sheet.verdict and not notes
    else:
        tasks = algorithm.tasks().values()
        small = {t.name for t in tasks if t.is_logged or t.reveals == "loss"}
        assert kinds == {t.name: "log" if t.name in small else "readable" for t in tasks}
        assert sorted(kinds.values(), reverse=True) == list(kinds.values())  # the readable first
        assert text.count('class="readable"') == len(kinds) - len(small)
    assert ("a simulation in one process" in text) == bool(kinds)
    assert ("each client's own reply" in sheet.verdict) == bool(algorithm.asked(False, "each"))
    logged = name in ("fedu", "fedema", "featarc")
    assert ("and single numbers of each client for its log" in sheet.verdict) == logged
    assert any("200 public images" in note for note in notes) == (name == "fedca")
    assert any("one row for each image" in note for note in notes) == (name in ("ccl", "fedca"))
    assert not any("folder's name" in note for note in notes)
    assert "it could not be made" not in text
    for row in sheet.rows:
        assert f"<code>{row.task}</code>" in text and row.content in text
        assert f"</span>{row.seen.removeprefix('unmasked')}" in text or f">{row.seen}<" in text
    if name == "standalone":
        assert sheet.verdict.endswith("each trains alone and sends only its loss.")
        assert [row.content for row in sheet.rows] == ["Its loss, nothing else"]


def test_bytes_of_a_client_are_those_of_a_complete_round(tmp_path: Path) -> None:
    one = {"up": 40, "down": 4, "replied": 2, "reached": 2}
    rounds = (
        {"encode": {"up": 900, "down": 600, "replied": 3, "reached": 3}, "descend": one},
        {"encode": {"up": 600, "down": 400, "replied": 2, "reached": 2}},
        {"encode": {"up": 20, "down": 0, "replied": 2, "reached": 0}},  # a secure sum that was lost
        {"encode": {"up": 0, "down": 0, "replied": 0, "reached": 0}},
    )
    lines = tuple({"round": k, "clients": 3, "exchanges": own} for k, own in enumerate(rounds, 1))
    text = page_of(made(tmp_path / "a", WORDS["dcco"], None, lines))
    assert row_of(text, "encode") == ["4", "300 B", "200 B", "1,520 bytes", "1,000 bytes"]
    assert row_of(text, "descend") == ["1", "20 B", "2 B", "40 bytes", "4 bytes"]
    assert row_of(text, "all") == ["4", "320 B", "202 B", "1,560 bytes", "1,004 bytes"]
    assert "Declared, but not asked for in this run: locate." in text


def test_secure_sums(tmp_path: Path) -> None:
    words = (*WORDS["fedavg"], *SECURE)
    path = made(tmp_path / "a", words, None, lines(words))
    sheet = sheet_of(path)
    assert (
        sheet.verdict == "No image leaves a client; the server learns only sums over the clients."
    )
    assert [row.visibility for row in sheet.rows] == ["masked"]
    secure = sheet.protection["Secure sums"]
    assert secure.startswith("on") and "at least 4 of the 5 clients of a round" in secure
    text = page_of(path)
    assert "a simulation in Flower's worker processes" in text and 'class="masked">masked<' in text
    early = sheet_of(made(tmp_path / "b", words)).protection["Secure sums"]
    assert "at least 67% of a round's clients, and three," in early
    logged = sheet_of(made(tmp_path / "c", (*WORDS["fedema"], *SECURE)))
    assert [row.task for row in logged.rows] == ["train"] and "log" not in logged.verdict


def test_noise_and_the_budget_it_spent(tmp_path: Path) -> None:
    words = (*WORDS["dcco"], "privacy.noise=4", "privacy.clip=0.5", "objective.bound=1")
    spent = {"epsilon": 3.25, "delta": 1e-5}
    path = made(tmp_path / "a", words, scored(90) | spent, lines(words, **spent))
    sheet = sheet_of(path)
    assert sheet.protection["(ε, δ) spent"] == "(3.25, 1e-05)"
    assert "4 times the norm 0.5 to which model updates" in sheet.protection["Differential privacy"]
    assert "for moments 4 times their norm, 2.236" in sheet.protection["Differential privacy"]
    assert "(3.25, 1e-05)-differentially private for all data of a client" in sheet.verdict
    assert all("adds noise to the sum" in row.seen for row in sheet.rows)
    assert "It does not cover this page and metrics.jsonl" in page_of(path)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        (
            "dcco",
            ("objective.bound=2", "privacy.moments_noise=9"),
            "updates are clipped; for moments 9 times their norm, 7.483",
        ),
        ("fedavg", (), "to which replies are clipped"),
        ("fedavg", ("privacy.most_samples=4",), "all √2 larger for the weights of clients"),
    ],
)
def test_noise_of_each_norm(name: str, more: tuple[str, ...], said: str, tmp_path: Path) -> None:
    words = (*WORDS[name], "privacy.noise=4", *more)
    protection = sheet_of(made(tmp_path / "a", words)).protection
    assert protection["Differential privacy"].endswith(said)


def test_robust_means_show_single_replies(tmp_path: Path) -> None:
    words = (*WORDS["dcco"], "cohort.average=median")
    sheet = sheet_of(made(tmp_path / "a", words, None, lines(words)))
    assert [row.visibility for row in sheet.rows] == ["readable"] * 3
    assert "“locate” and “encode” and “descend” and compares them" in sheet.verdict
    assert sheet.protection["Secure sums"] == "off, and not possible with these settings"


def test_a_deployment_is_no_simulation(tmp_path: Path) -> None:
    words = (
        *("algorithm.name=fedavg", "engine.name=flower", "engine.sites=3", "cohort.size=null"),
        *("data.name=folder", "partition.name=folder"),
    )
    path = made(tmp_path / "a", words, None, lines(words))
    (path / "clients.json").write_text(
        '[{"client": 0, "name": "north", "samples": 7}, {"client": 1, "name": "s", "samples": 9}]'
    )
    notes = list(sheet_of(path).notes)
    for start, part in (
        ("before training", "folder's name"),
        ("with each reply", "the loss"),
        ("when something fails", "names no file of the site"),
    ):
        start = f"Besides the table, a site sends {start}"
        assert any(note.startswith(start) and part in note for note in notes)
    text = page_of(path)
    assert "This run was a simulation" not in text
    assert "the images stay at their sites" in text and '"sizes":[7,9]' in text
