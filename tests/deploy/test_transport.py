"""Find sites: greet new nodes, wait for enough of them, and name those that cannot take part."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, cast

import pytest

pytest.importorskip("flwr")
from fedssl import __version__
from fedssl.config.schema import Engine
from fedssl.deploy import transport
from fedssl.deploy.introduction import Introduction
from fedssl.deploy.transport import SiteTransport
from fedssl.engines.flower import transport as grid_transport
from fedssl.engines.flower.messages import write_greeting
from fedssl.util.errors import UserError

A = Introduction("a", "here", 8, (1,), 16, 16)
B = Introduction("b", "there", 8, (1,), 16, 16)
REFUSED = "refused: no such folder"


class Nodes(SiteTransport):
    """Sites that answer as given, without Flower."""

    def __init__(self, answers: Mapping[int, Introduction | str], minimum: int = 1) -> None:
        super().__init__(cast("Any", self), Engine(), minimum)
        self.answers = dict(answers)
        self.asked_nodes: list[int] = []

    def get_node_ids(self) -> list[int]:
        return list(self.answers)

    def post(self, node: int, kind: str, content: Any, timeout: float) -> str | None:
        self.asked_nodes.append(node)
        return f"message-{len(self.asked_nodes)}"

    def collect(self, waiting: dict[str, int]) -> dict[int, Any]:
        replies = {}
        for number, node in list(waiting.items()):
            answer = self.answers[node]
            told = {"fault": answer}
            if isinstance(answer, Introduction):
                told = {"facts": json.dumps(asdict(answer))}
            if answer != "silent":
                replies[waiting.pop(number) and node] = write_greeting(
                    {"version": __version__, **told}
                )
        return replies


def test_a_site_that_cannot_take_part_is_named_once_and_left_alone_for_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes({1: A, 2: REFUSED, 3: "silent"})
    nodes.sites = [A, B]
    for _ in range(3):
        assert nodes.place([0, 1]) == {0: 1}
    assert nodes.asked_nodes == [1, 2, 3]
    assert capsys.readouterr().err == f"fedssl: node 2 cannot take part: {REFUSED}\n"
    monkeypatch.setattr(transport, "GREETING_TIMEOUT", 0.0)
    assert nodes.place([0, 1]) == {0: 1} and nodes.asked_nodes == [1, 2, 3]
    assert capsys.readouterr().err == "fedssl: node 3 cannot take part: no answer\n"
    # Corrected, and started again as another node: it is the same site.
    nodes.answers = {1: A, 4: B}
    assert nodes.place([0, 1]) == {0: 1, 1: 4}
    nodes.answers = {1: A, 4: B, 2: REFUSED}
    monkeypatch.setattr(transport, "RETRY_AFTER", 0.0)
    nodes.place([0])
    assert nodes.asked_nodes == [1, 2, 3, 4, 2] and not capsys.readouterr().err


def test_a_site_that_comes_back_with_other_weights_is_not_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = replace(A, constants="0" * 64)
    nodes = Nodes({1: first})
    nodes.sites = nodes.wait(1, 60.0)
    nodes.answers = {2: replace(first, constants="1" * 64)}
    assert nodes.place([0]) == {}
    assert "not those that it started the run with" in capsys.readouterr().err
    nodes.answers = {3: first}
    assert nodes.place([0]) == {0: 3}


def test_a_silent_node_costs_no_round_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cost each exchange two minutes. A run starts after a moment of patience."""
    nodes = Nodes({1: A, 2: B, 3: "silent"})
    monkeypatch.setattr(transport, "PATIENCE", 0.1)
    started = time.monotonic()
    nodes.sites = nodes.wait(2, 60.0)
    for _ in range(20):
        assert nodes.place([0, 1]) == {0: 1, 1: 2}
    assert time.monotonic() - started < 5 and nodes.asked_nodes == [1, 2, 3]


def test_a_round_waits_for_greetings_only_if_it_would_be_skipped_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when all sites came back under other numbers."""
    nodes = Nodes({1: A, 2: "silent"}, minimum=2)
    nodes.sites = [A, B]
    monkeypatch.setattr(time, "sleep", lambda seconds: nodes.answers.update({2: B}))
    assert nodes.place([0, 1]) == {0: 1, 1: 2}


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"samples": 2**31 - 1}, "claims 2,147,483,647 images, above engine.max_samples=10000000"),
        ({"samples": 2**31}, "a message that fedssl did not write (ValueError)"),
        ({"constants": "\x1b"}, "a message that fedssl did not write (ValueError)"),
        ({"name": "ward\x1b[2J"}, "a message that fedssl did not write (ValueError)"),
        ({"fault": "no\nfedssl: \x1b[2Jward"}, "no\\nfedssl: \\x1b[2Jward"),
        ({"version": "9\n\x1b"}, f"has fedssl 9\\n\\x1b, the server {__version__}: install"),
        ({"name": "x" * 256}, "a message that fedssl did not write (ValueError)"),
        ({"name": ""}, "a message that fedssl did not write (ValueError)"),
        ({"fault": "x" * 9999}, "x" * 300),
        ({"version": "9" * 9999}, f"has fedssl {'9' * 40}, the server {__version__}: install"),
    ],
)
def test_what_a_node_says_of_itself_is_bounded_and_shown_on_one_line(
    facts: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = Nodes({1: A})
    known = {name: value for name, value in facts.items() if name in asdict(A)}
    other = {name: value for name, value in facts.items() if name not in known}
    greeting = {"version": __version__, "facts": json.dumps(asdict(A) | known)} | other
    nodes.collect = lambda waiting: {waiting.popitem()[1]: write_greeting(greeting)}  # type: ignore
    nodes.greet_new_nodes()
    assert not nodes.connected
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fedssl: node 1 cannot take part: {told}") and line.isprintable()
    assert len(line) < 400


def test_a_site_that_is_not_needed_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    far = Introduction("c", "far", 8, (1,), 16, 16)
    nodes = Nodes({1: A, 2: replace(B, site="new"), 3: far})
    nodes.sites = [A, B]
    for _ in range(2):
        assert nodes.place([0, 1]) == {0: 1}
        nodes.connected[3] = replace(far, samples=9)  # the same site, with one more image
    there, other = capsys.readouterr().err.splitlines()
    assert other == "fedssl: site far has nothing to do: the run has its 2 sites"
    assert "one of them is another there" in there and "FEDSSL_STATE" in there


@pytest.mark.parametrize(
    ("answers", "count", "problem", "fix"),
    [
        ({1: A}, 2, "only 1 of 2 sites connected in time (here)", "Start the others"),
        ({1: A, 2: REFUSED}, 2, "(here)", "Correct what the lines above say of 1 nodes"),
        ({1: A, 2: REFUSED}, 3, "(here)", "Start the others"),
        ({1: A, 2: A}, 2, "1 more with the same folder on the same machine", "Start the others"),
    ],
)
def test_too_few_sites_end_the_wait(
    answers: dict[int, Introduction | str], count: int, problem: str, fix: str
) -> None:
    assert Nodes({1: B, 2: A}).wait(2, 0.1) == [A, B]
    with pytest.raises(UserError) as caught:
        Nodes(answers).wait(count, 0.1)
    assert (caught.value.key, caught.value.value) == ("engine.timeout", "0.1")
    assert problem in caught.value.problem and fix in caught.value.fix


def test_a_superlink_that_fails_once_does_not_end_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def locked(what: list[Any]) -> list[Any]:
        raise RuntimeError("500 \x1b[2JServer Error\nmore")

    assert grid_transport._try(locked, [1]) == []
    assert capsys.readouterr().err == "fedssl: the SuperLink failed: 500 \\x1b[2JServer Error\n"
    assert grid_transport._try(lambda what: iter(what), [1]) == [1]
