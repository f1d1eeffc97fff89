"""What left each site: the table for a data-protection officer, for every algorithm."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from made_runs import made, scored

from fedssl import config, report
from fedssl.privacy.exchanges import build_algorithm
from fedssl.report import curves, exchanges
from fedssl.runs.record import Run

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
    algorithm = build_algorithm(config.resolve(config.read_recipe(None), words))
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
    found, algorithm = sheet_of(path), build_algorithm(Run(path).settings)
    kinds = {own.name: own.kind for own in found.exchanges}
    if algorithm.pools_data:
        assert not kinds and "every image would have left" in found.verdict
        assert found.notes == []
    else:
        assert kinds == {
            **dict.fromkeys(algorithm.means, "mean"),
            **dict.fromkeys((*algorithm.gathers, *algorithm.logs), "single"),
        }
        assert exchanges.SIMULATED["local"] in found.notes
    assert ("each client's own reply" in found.verdict) == bool(algorithm.gathers)
    logged = name in ("fedu", "fedema", "featarc")
    assert ("and single numbers of each client for its log" in found.verdict) == logged
    assert any("1000 public images" in note for note in found.notes) == (name == "fedca")
    assert not any("folder's name" in note for note in found.notes)
    text = html.unescape(report.write([path], None).read_text())
    assert "it could not be made" not in text
    for own in found.exchanges:
        assert f"<code>{own.name}</code>" in text and own.carries in text and own.seen in text


def test_bytes_are_sums_and_shares(tmp_path: Path) -> None:
    path = made(tmp_path / "a", WORDS["fedavg"], None, lines(WORDS["fedavg"]))
    moved = sheet_of(path).exchanges[0].moved
    assert (moved.rounds, moved.up, moved.down) == (2, 2000, 60)
    text = report.write([path], None).read_text()
    row = re.search(r"<code>train</code>.*?</tr>", text, re.S)
    assert row is not None and "<td class=n>200 B</td><td class=n>6 B</td>" in row[0]
    assert "2,000 bytes" in row[0] and "60 bytes" in row[0]


def test_an_exchange_of_one_round_is_shared_by_those_asked_for_it(tmp_path: Path) -> None:
    once, always = {"up": 32_768, "down": 64}, {"up": 320, "down": 32}
    rounds = tuple(
        {"round": k, "clients": 32, "exchanges": {"encode": always} | more}
        for k, more in ((1, {"locate": once}), (2, {}), (3, {}))
    )
    path = made(tmp_path / "a", WORDS["dcco"], None, rounds)
    text = report.write([path], None).read_text()
    shares = {
        name: re.findall(r"<td class=n>([^<]*)</td>", row)
        for name, row in re.findall(r"<tr><td><code>(\w+)</code>(.*?)</tr>", text, re.S)
    }
    assert shares == {"locate": ["1", "1.0 kB", "2 B"], "encode": ["3", "10 B", "1 B"]}


def test_who_was_missing_makes_no_reply_smaller(tmp_path: Path) -> None:
    """A client's bytes are those of a client that sent some, in a round that was not cut short."""
    rounds = (
        {"train": {"up": 900, "down": 600, "replied": 3, "reached": 3}},
        {"train": {"up": 600, "down": 400, "replied": 2, "reached": 2}},
        {"train": {"up": 20, "down": 0, "replied": 2, "reached": 0}},  # a secure sum that was lost
        {"train": {"up": 0, "down": 0, "replied": 0, "reached": 0}},
    )
    lines = tuple({"round": k, "clients": 3, "exchanges": own} for k, own in enumerate(rounds, 1))
    path = made(tmp_path / "a", WORDS["fedavg"], None, lines)
    moved = sheet_of(path).exchanges[0].moved
    assert (moved.one_up, moved.one_down, moved.up, moved.down) == (300, 200, 1520, 1000)
    row = re.search(r"<code>train</code>.*?</tr>", report.write([path], None).read_text(), re.S)
    assert row is not None and "<td class=n>300 B</td><td class=n>200 B</td>" in row[0]


def test_a_client_of_a_round_of_several_exchanges(tmp_path: Path) -> None:
    own = {
        "encode": {"up": 30, "down": 3, "replied": 3, "reached": 3},
        "descend": {"up": 40, "down": 4, "replied": 2, "reached": 2},
    }
    lines = ({"round": 1, "clients": 3, "exchanges": own},)
    text = report.write([made(tmp_path / "a", WORDS["dcco"], None, lines)], None).read_text()
    row = re.search(r"<td>all</td>.*?</tr>", text, re.S)
    assert row is not None and "<td class=n>1</td><td class=n>30 B</td><td class=n>3 B" in row[0]


def test_secure_sums(tmp_path: Path) -> None:
    words = (*WORDS["fedavg"], "engine.name=flower", "privacy.secure=true")
    found = sheet_of(made(tmp_path / "a", words, None, lines(words)))
    assert found.verdict == "No image left a client; the server learned only sums over the clients."
    assert [own.kind for own in found.exchanges] == ["masked"]
    said = found.protection[0][1]
    assert said.startswith("yes") and said.endswith("at least 4 of the 5 clients of a round answer")
    early = dict(sheet_of(made(tmp_path / "b", words)).protection)["Secure sum"]
    assert early.endswith("at least 67% of a round's clients, and three, answer")


def test_a_simulation_says_where_it_ran(tmp_path: Path) -> None:
    for name, said in (
        ("local", "in one process: nothing left"),
        ("flower", "in worker processes"),
    ):
        path = made(tmp_path / name, (*WORDS["fedavg"], f"engine.name={name}"))
        notes = [note for note in sheet_of(path).notes if "This run was a simulation" in note]
        assert len(notes) == 1 and said in notes[0]


def test_of_three_sites_a_secure_sum_needs_all(tmp_path: Path) -> None:
    words = ("engine.name=flower", "engine.sites=3", "cohort.size=null", "privacy.secure=true")
    own = {"round": 1, "clients": 3, "exchanges": {"encode": {"up": 1, "down": 1}}}
    found = sheet_of(made(tmp_path / "a", words, None, (own,)))
    assert "at least 3 of the 3 clients" in dict(found.protection)["Secure sum"]
    assert any("if at least 3 of a round's 3 sites answer" in note for note in found.notes)


def test_noise_and_what_it_spent(tmp_path: Path) -> None:
    words = (*WORDS["dcco"], "privacy.noise=4", "privacy.clip=0.5", "objective.bound=1")
    spent = {"epsilon": 3.25, "delta": 1e-5}
    found = sheet_of(made(tmp_path / "a", words, scored(90) | spent, lines(words, **spent)))
    assert dict(found.protection)["(ε, δ) spent"] == "(3.25, 1e-05)"
    said = dict(found.protection)["Noise (differential privacy)"]
    assert said.startswith(
        "added by the server: 4 times the norm 0.5 to which changes of the model"
    )
    assert "of moments 4 times their norm, 2.236" in said
    assert found.verdict.endswith(
        "it added noise before using them, so what it publishes (the model) is (3.25, 1e-05)-"
        "differentially private for a client's whole data; the server itself is trusted."
    )
    assert all("and the server adds noise before use" in own.seen for own in found.exchanges)
    assert exchanges.PUBLISHED in found.notes


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        (
            "dcco",
            ("objective.bound=2", "privacy.moments_noise=9"),
            "changes of the model are clipped; of moments 9 times their norm, 7.483",
        ),
        ("fedavg", (), "to which contributions are clipped"),
        (
            "fedavg",
            ("privacy.most_samples=4",),
            "to which contributions are clipped, all √2 larger for the weights",
        ),
    ],
)
def test_noise_of_each_norm(name: str, more: tuple[str, ...], said: str, tmp_path: Path) -> None:
    words = (*WORDS[name], "privacy.noise=4", *more)
    protection = dict(sheet_of(made(tmp_path / "a", words)).protection)
    assert protection["Noise (differential privacy)"].endswith(said)


def test_under_noise_and_secure_sums_nothing_is_said_for_the_log(tmp_path: Path) -> None:
    words = (*WORDS["fedema"], "engine.name=flower", "privacy.secure=true")
    found = sheet_of(made(tmp_path / "a", words))
    assert [own.name for own in found.exchanges] == ["train"] and "log" not in found.verdict


def test_alone_a_client_sends_its_loss(tmp_path: Path) -> None:
    words = WORDS["standalone"]
    found = sheet_of(made(tmp_path / "a", words, None, lines(words)))
    assert found.verdict == (
        "No image and no model left a client: each trained alone, and sent only its loss."
    )
    assert [own.carries for own in found.exchanges] == ["Its loss, nothing else"]
    assert not any("secure" in note for note in found.notes)


def test_without_either_it_says_no(tmp_path: Path) -> None:
    found = sheet_of(made(tmp_path / "a", WORDS["fedavg"], None, lines(WORDS["fedavg"])))
    assert [text for _, text in found.protection] == ["no", "no"]
    assert exchanges.PUBLISHED not in found.notes
    assert "replies that it could have looked at" in found.verdict
    assert exchanges.SIMULATED["local"] in found.notes


def test_robust_means_show_single_replies(tmp_path: Path) -> None:
    words = (*WORDS["dcco"], "cohort.average=median")
    found = sheet_of(made(tmp_path / "a", words, None, lines(words)))
    assert [own.kind for own in found.exchanges] == ["single"] * 3
    assert found.verdict == (
        "No image left a client; the server saw each client's own reply to “locate” and “encode” "
        "and “descend” and compared them."
    )
    notes = " ".join(found.notes)
    assert "not possible with cohort.average=median" in notes
    assert "privacy.secure=true" not in notes  # which is refused there


def test_a_deployment_is_no_simulation(tmp_path: Path) -> None:
    words = (
        *("algorithm.name=fedavg", "engine.name=flower", "engine.sites=3", "cohort.size=null"),
        *("data.name=folder", "partition.name=folder"),
    )
    path = made(tmp_path / "a", words, None, lines(words))
    (path / "clients.json").write_text(
        '[{"client": 0, "name": "north", "samples": 7}, {"client": 1, "name": "s", "samples": 9}]'
    )
    notes = sheet_of(path).notes
    assert not set(exchanges.SIMULATED.values()) & set(notes)
    assert any("Besides the table, before training" in n and "folder's name" in n for n in notes)
    assert any("Besides the table, with each reply" in n and "the loss" in n for n in notes)
    assert any("names no file of the site" in note for note in notes)
    text = report.write([path], None).read_text()
    assert "the images are at their sites" in text and '"sizes":[7,9]' in text


def test_what_was_declared_and_not_asked_is_named(tmp_path: Path) -> None:
    own = {"round": 1, "clients": 5, "exchanges": {"encode": {"up": 1, "down": 1}}}
    found = sheet_of(made(tmp_path / "a", WORDS["dcco"], None, (own,)))
    assert "Declared, and not asked for in this run: locate, descend." in found.notes
