"""Find sites: greet new nodes, wait for enough of them, and name those that cannot take part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, cast

import pytest

pytest.importorskip("flwr")
from fedssl import __version__
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

    def __init__(self, answers: Mapping[int, Introduction | str]) -> None:
        super().__init__(cast("Any", self))
        self.answers = answers
        self.asked: list[int] = []

    def get_node_ids(self) -> list[int]:
        return list(self.answers)

    def exchange(self, messages: Mapping[int, Any], timeout: float) -> dict[int, Any]:
        self.asked += sorted(messages)
        replies = {}
        for node in messages:
            answer = self.answers[node]
            told = {"fault": answer}
            if isinstance(answer, Introduction):
                told = {"facts": json.dumps(asdict(answer))}
            if answer != "silent":
                replies[node] = write_greeting({"version": __version__, **told})
        return replies


def test_a_site_that_cannot_take_part_is_named_once_and_left_alone_for_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes({1: A, 2: REFUSED, 3: "silent"})
    nodes.sites = [A, B]
    for _ in range(3):
        assert nodes.place([0, 1]) == {0: 1}
    assert nodes.asked == [1, 2, 3]
    assert capsys.readouterr().err.splitlines() == [
        f"fedssl: node 2 cannot take part: {REFUSED}",
        "fedssl: node 3 cannot take part: no answer",
    ]
    # Corrected, and started again as another node: it is the same site.
    nodes.answers = {1: A, 4: B}
    assert nodes.place([0, 1]) == {0: 1, 1: 4}
    nodes.answers = {1: A, 4: B, 2: REFUSED}
    monkeypatch.setattr(transport, "RETRY_AFTER", 0.0)
    nodes.place([0])
    assert nodes.asked == [1, 2, 3, 4, 2] and not capsys.readouterr().err


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
        raise RuntimeError("500 Internal Server Error\nmore")

    assert grid_transport._try(locked, [1]) == []
    assert capsys.readouterr().err == "fedssl: the SuperLink failed: 500 Internal Server Error\n"
    assert grid_transport._try(lambda what: iter(what), [1]) == [1]
