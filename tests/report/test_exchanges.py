"""What left each site: the table for a data-protection officer, for every algorithm."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from made_runs import made, scored

from fedssl import config, deploy, report
from fedssl.report import curves, exchanges
from fedssl.runs import Run

PLAIN = ("server.optimizer=sgd", "server.lr=1", "cohort.size=null", "partition.name=iid")
OBJECTIVES = {"fedu": "byol", "fedema": "byol", "ccl": "moco", "fedca": "simclr"}
WORDS = {
    name: (
        *(f"algorithm.name={name}", f"objective.name={OBJECTIVES.get(name, 'cco')}"),
        *(*PLAIN, "partition.clients=5"),
    )
    for name in config.VARIANTS["algorithm"]
}


def lines(words: tuple[str, ...], **more: Any) -> tuple[dict[str, Any], ...]:
    """Two rounds in which everything is asked that is declared."""
    algorithm = deploy.algorithm_of(config.resolve(config.read_recipe(None), words))
    tasks = dict.fromkeys((*algorithm.means, *algorithm.gathers, *algorithm.logs))
    moved = {task: {"up": 1000 * (k + 1), "down": 30} for k, task in enumerate(tasks)}
    up = sum(each["up"] for each in moved.values())
    own = {"loss": 1.0, "clients": 5, "exchanges": moved, "bytes_up": up, **more}
    return tuple({"round": k, **own} for k in (1, 2))


def sheet_of(path: Path) -> exchanges.Sheet:
    run = Run(path)
    return exchanges.sheet(run, curves.read(run))


@pytest.mark.parametrize("name", WORDS)
def test_every_algorithm_gets_its_page(name: str, tmp_path: Path) -> None:
    words = WORDS[name]
    path = made(tmp_path / name, words, scored(90), lines(words))
    found, algorithm = sheet_of(path), deploy.algorithm_of(Run(path).settings)
    kinds = {own.name: own.kind for own in found.exchanges}
    if algorithm.pools_data:
        assert not kinds and "every image would have left" in found.verdict
    else:
        assert kinds == {
            **dict.fromkeys(algorithm.means, "mean"),
            **dict.fromkeys((*algorithm.gathers, *algorithm.logs), "single"),
        }
    assert ("each client's own reply" in found.verdict) == bool(algorithm.gathers)
    text = html.unescape(report.write([path], None).read_text())
    assert "it could not be made" not in text
    for own in found.exchanges:
        assert f"<code>{own.name}</code>" in text and own.carries in text and own.seen in text


def test_bytes_are_sums_and_shares(tmp_path: Path) -> None:
    path = made(tmp_path / "a", WORDS["fedavg"], None, lines(WORDS["fedavg"]))
    own = sheet_of(path).exchanges[0]
    assert (own.rounds, own.up, own.down) == (2, 2000, 60)
    text = report.write([path], None).read_text()
    row = re.search(r"<code>train</code>.*?</tr>", text, re.S)
    assert row is not None and "<td class=n>200 B</td><td class=n>6 B</td>" in row[0]
    assert "2,000 bytes" in row[0] and "60 bytes" in row[0]


def test_secure_sums(tmp_path: Path) -> None:
    words = (*WORDS["fedavg"], "engine.name=flower", "privacy.secure=true")
    found = sheet_of(made(tmp_path / "a", words, None, lines(words)))
    assert found.verdict == "No image left a client; the server learned only sums over the clients."
    assert [own.kind for own in found.exchanges] == ["masked"]
    assert found.protection[0][1].startswith("yes") and "67%" in found.protection[0][1]


def test_noise_and_what_it_spent(tmp_path: Path) -> None:
    words = (*WORDS["dcco"], "privacy.noise=4", "privacy.clip=0.5", "objective.bound=1")
    spent = {"epsilon": 3.25, "delta": 1e-5}
    found = sheet_of(made(tmp_path / "a", words, scored(90) | spent, lines(words, **spent)))
    assert dict(found.protection)["(ε, δ) spent"] == "(3.25, 1e-05)"
    assert dict(found.protection)["Noise (differential privacy)"].startswith("4 times the norm 0.5")
    assert "(3.25, 1e-05)-differentially private" in found.verdict
    assert all("with noise added" in own.seen for own in found.exchanges)


def test_without_either_it_says_no(tmp_path: Path) -> None:
    found = sheet_of(made(tmp_path / "a", WORDS["fedavg"], None, lines(WORDS["fedavg"])))
    assert [text for _, text in found.protection] == ["no", "no"]
    assert "replies that it could have looked at" in found.verdict
    assert exchanges.ONE_PROCESS in found.notes


def test_robust_means_show_single_replies(tmp_path: Path) -> None:
    words = (*WORDS["fedavg"], "cohort.average=median")
    found = sheet_of(made(tmp_path / "a", words, None, lines(words)))
    assert [own.kind for own in found.exchanges] == ["single"]


def test_a_deployment_is_no_simulation(tmp_path: Path) -> None:
    words = (
        *("algorithm.name=fedavg", "engine.name=flower", "engine.sites=3", "cohort.size=null"),
        *("data.name=folder", "partition.name=folder"),
    )
    path = made(tmp_path / "a", words, None, lines(words))
    (path / "clients.json").write_text(
        '[{"client": 0, "name": "north", "samples": 7}, {"client": 1, "name": "s", "samples": 9}]'
    )
    assert exchanges.ONE_PROCESS not in sheet_of(path).notes
    text = report.write([path], None).read_text()
    assert "the images are at their sites" in text and '"sizes":[7,9]' in text


def test_what_was_declared_and_not_asked_is_named(tmp_path: Path) -> None:
    own = {"round": 1, "clients": 5, "exchanges": {"encode": {"up": 1, "down": 1}}}
    found = sheet_of(made(tmp_path / "a", WORDS["dcco"], None, (own,)))
    assert "Declared, and not asked for in this run: locate, descend." in found.notes
