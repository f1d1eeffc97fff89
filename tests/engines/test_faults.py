"""A client that misbehaves costs its own reply, with its name and the reason in the metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import relative, replace_task

pytest.importorskip("flwr")
from far import BYOL, Here, Tamper, far_session, go, one_round, small
from flwr.app import Array, ConfigRecord, Error, Message

from fedssl.engines.flower.messages import read_request, write_request
from fedssl.engines.remote.codec import MalformedError, pack
from fedssl.engines.remote.disk_states import History
from fedssl.engines.remote.messages import Request
from fedssl.engines.remote.replies import ReplyChecker, Size
from fedssl.engines.remote.site import Site
from fedssl.federation.client import Client
from fedssl.runs.build import Experiment, build_experiment

TASKS = ("locate", "encode", "descend")
BAD = 3  # the client that misbehaves; one client a node
NODE = 11 + BAD


def replaced(**parts: Any) -> Callable[[Message], Message]:
    """The reply with another dtype, shape or data of its change."""

    def spoil(reply: Message) -> Message:
        record = reply.content.array_records["replies"]
        name = next(name for name in record if name.endswith("/change"))
        old = record[name]
        new = {"dtype": old.dtype, "shape": tuple(old.shape), "data": lambda data: data, **parts}
        record[name] = Array(new["dtype"], new["shape"], old.stype, new["data"](old.data))
        return reply

    return spoil


def numbers(make: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message], Message]:
    return replaced(data=lambda data: make(np.frombuffer(data, np.float64).copy()).tobytes())


def one_nan(values: np.ndarray) -> np.ndarray:
    values[7] = math.nan
    return values


def without_record(reply: Message) -> Message:
    del reply.content.array_records["replies"]
    return reply


def sharing(share: float) -> Callable[[Message], Message]:
    def spoil(reply: Message) -> Message:
        reply.content["shares"] = ConfigRecord({str(BAD): share})
        return reply

    return spoil


def repeated(old: str, new: str) -> Callable[[Message], Message]:
    """The reply with one of its tensors under another name, too."""

    def spoil(reply: Message) -> Message:
        record = reply.content.array_records["replies"]
        record[f"{BAD}/{new}"] = record[f"{BAD}/{old}"]
        return reply

    return spoil


def huge_loss(value: float) -> Callable[[Message], Message]:
    def spoil(reply: Message) -> Message:
        record = reply.content.array_records["replies"]
        old = record[f"{BAD}/loss"]
        record[f"{BAD}/loss"] = Array(old.dtype, (), old.stype, np.float64(value).tobytes())
        return reply

    return spoil


def failed(reply: Message) -> Message:
    """Reply from the SuperLink, like Flower for a node that has gone."""
    error = Message(Error(2, "boom"), reply_to=reply)
    error.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    assert error.metadata.src_node_id == 1
    return error


def silent(reply: Message) -> None:
    """No reply at all."""


SPOILS: dict[str, tuple[Callable[[Message], Message | None], str]] = {
    "NaN": (numbers(one_nan), "not finite"),
    "infinite": (numbers(lambda v: v + np.inf), "not finite"),
    "shape": (numbers(lambda v: v[:-1]), "truncated"),
    "other shape": (replaced(shape=(1, 5)), "shape"),
    "dtype": (replaced(dtype="float32"), "type float32"),
    "unknown dtype": (replaced(dtype="object"), "type object"),
    "oversized": (replaced(data=lambda data: data + bytes(8)), "oversized"),
    "truncated": (replaced(data=lambda data: data[:100]), "truncated"),
    "too large a change": (numbers(lambda v: v * 1e6), "engine.max_norm"),
    "an outlier": (numbers(lambda v: v * 300), "above engine.max_ratio=100 times the usual"),
    "more than was asked": (repeated("change", "more"), "more"),
    "no weight": (sharing(math.nan), "weight"),
    "another weight": (sharing(1e12), "a weight of 1e+12, expected 6"),
    "too large a loss": (huge_loss(1e308), "too large to be averaged"),
    "a loss that is an outlier": (huge_loss(1e6), "its loss is 1e+06, above engine.max_ratio=100"),
    "not ours": (without_record, "fedssl did not write"),
    "error": (failed, "error 2: boom"),
    "silence": (silent, "no answer in time"),
}


def spoiling(how: Callable[[Message], Message | None], task: str = "descend") -> Tamper:
    def tamper(asked: Message, reply: Message) -> Message | None:
        mine = asked.metadata.dst_node_id == NODE
        return how(reply) if mine and asked.metadata.message_type.endswith(task) else reply

    return tamper


def five_nodes(folder: Path, *words: str, tamper: Tamper | None = None) -> tuple[Experiment, Here]:
    return far_session(small("engine.timeout=1", *words), folder, nodes=5, tamper=tamper)


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_bad_reply_costs_only_itself(spoil: str, tmp_path: Path) -> None:
    how, reason = SPOILS[spoil]
    far, _ = five_nodes(tmp_path, "engine.max_norm=1e4", tamper=spoiling(how))
    line = one_round(far, tmp_path)
    assert line["missing"] == 1 and not line["skipped"]
    assert reason in line["faults"][str(BAD)] and "descend" in line["faults"][str(BAD)]
    assert any("no reply of 3" in said for said in line["said"])
    # The round is that of the others, with the moments of all.
    near = build_experiment(small("engine.merge=off"))
    cohort = near.engine.cohort(np.arange(5), 0)
    near.algorithm.round(near.server, Without(cohort, BAD, "descend"))
    assert relative(far.server.weights, near.server.weights) < 1e-10


def scaled(factor: float) -> Callable[[Message], Message]:
    """All numbers of the reply, finite but huge."""

    def spoil(reply: Message) -> Message:
        record = reply.content.array_records["replies"]
        for name, old in list(record.items()):
            data = np.frombuffer(old.data, np.float64) * factor
            record[name] = Array(old.dtype, tuple(old.shape), old.stype, data.tobytes())
        return reply

    return spoil


@pytest.mark.parametrize("task", TASKS)
def test_huge_numbers_reach_no_state_and_blame_no_one_else(task: str, tmp_path: Path) -> None:
    """Huge moments made the others' replies not finite, and these were refused."""
    far, _ = five_nodes(tmp_path, tamper=spoiling(scaled(1e100), task))
    line = one_round(far, tmp_path)
    assert list(line["faults"]) == [str(BAD)] and not line["skipped"]
    near = build_experiment(small("engine.merge=off"))
    cohort = near.engine.cohort(np.arange(5), 0)
    near.algorithm.round(near.server, Without(cohort, BAD, task))
    assert relative(far.server.weights, near.server.weights) < 1e-10
    for name, centre in near.server.state["centre"].items():
        torch.testing.assert_close(far.server.state["centre"][name], centre)


@pytest.mark.parametrize("task", TASKS)
def test_of_two_replies_that_differ_much_neither_counts(task: str, tmp_path: Path) -> None:
    """Nobody can tell which one is false. The honest client was named for what the other sent."""
    words = ("engine.timeout=1", "partition.clients=4", "cohort.size=2", "seed=2")
    spoil = spoiling(scaled(1e30), task)
    far, grid = far_session(small(*words), tmp_path, nodes=4, tamper=spoil)
    asked = far.draw_cohort(0).tolist()
    assert BAD in asked
    before = far.server.weights.clone()
    line = one_round(far, tmp_path)
    assert line["skipped"] and torch.equal(far.server.weights, before)
    told = f"{task}: of two replies one is 100 times larger (engine.max_ratio)"
    assert line["faults"] == {str(client): told for client in asked}
    grid.tamper = None
    line = one_round(far, tmp_path)  # nothing false is in the state
    assert not line["skipped"] and "faults" not in line and line["loss"] < 1e3


def test_an_outlier_among_replies_of_zeros_is_noticed(tmp_path: Path) -> None:
    """Most clients' gradients may be 0, but not one of them 1e30."""
    far, _ = five_nodes(tmp_path)
    checker, task = ReplyChecker(far.engine), far.algorithm.tasks()["descend"]
    zeros = {k: Size(loss=1, norm=0, count=100) for k in range(3)}
    assert not checker.find_outliers(task, zeros | {3: Size(loss=1, norm=1, count=100)})
    assert [*checker.find_outliers(task, zeros | {3: Size(loss=1, norm=1e5, count=100)})] == [3]


def test_an_update_of_more_images_may_be_larger(tmp_path: Path) -> None:
    """It makes more steps; moments and features do not grow."""
    far, _ = five_nodes(tmp_path)
    far.engine.groups.__dict__["sizes"] = np.array([6, 6, 6, 6, 600])
    checker, tasks = ReplyChecker(far.engine), far.algorithm.tasks()
    sizes = {k: Size(loss=1, norm=1, count=100) for k in range(5)}
    for client, task, refused in ((4, "descend", []), (4, "encode", [4]), (2, "descend", [2])):
        one = sizes | {client: Size(loss=1, norm=5000, count=100)}
        assert [*checker.find_outliers(tasks[task], one)] == refused


def test_moments_of_bounded_encodings_have_a_bound(tmp_path: Path) -> None:
    words = ("objective.bound=1", "engine.max_ratio=null")
    far, _ = five_nodes(tmp_path, *words, tamper=spoiling(scaled(50), "encode"))
    assert "above the bound of 2.236" in one_round(far, tmp_path)["faults"][str(BAD)]


def test_who_sends_false_replies_in_three_rounds_is_not_asked_any_more(tmp_path: Path) -> None:
    far, grid = five_nodes(tmp_path, "rounds=9", tamper=spoiling(scaled(1e9), "encode"))
    lines = [one_round(far, tmp_path) for _ in range(4)]
    left_out = "locate: left out, because its replies were refused in 3 rounds in a row"
    assert "max_ratio" in lines[2]["faults"][str(BAD)]
    assert lines[3]["faults"] == {str(BAD): left_out.replace("locate", "encode")}
    assert not any(line["skipped"] for line in lines)
    sent = len(grid.types)
    one_round(far, tmp_path)
    assert len(grid.types) - sent == 2 * 4


def test_who_sends_false_replies_now_and_then_is_asked_on(tmp_path: Path) -> None:
    far, grid = five_nodes(tmp_path, "rounds=9")
    for is_false in (True, True, False, True):
        grid.tamper = spoiling(scaled(1e9), "encode") if is_false else None
        assert ("faults" in one_round(far, tmp_path)) == is_false
    grid.tamper = None
    assert "faults" not in one_round(far, tmp_path)


def test_a_robust_mean_gets_the_outliers(tmp_path: Path) -> None:
    """It withstands them, and a limit would take the choice from it."""
    far, _ = five_nodes(tmp_path, "cohort.average=median", tamper=spoiling(scaled(300)))
    assert "faults" not in one_round(far, tmp_path)


def test_a_fault_that_most_clients_have_leaves_nobody_out(tmp_path: Path) -> None:
    """The model that they were sent may be at fault."""

    def tamper(asked: Message, reply: Message) -> Message:
        bad = asked.metadata.dst_node_id > 12 and asked.metadata.message_type.endswith("encode")
        return scaled(math.nan)(reply) if bad else reply

    far, _ = five_nodes(tmp_path, "rounds=9", tamper=tamper)
    lines = [one_round(far, tmp_path) for _ in range(4)]
    assert all("not finite" in fault for fault in lines[3]["faults"].values())


class Without:
    """A cohort in which one client does not answer one task."""

    def __init__(self, cohort: Any, client: int, task: str) -> None:
        self.cohort, self.client, self.task = cohort, client, task

    def mean(self, task: Any, *payload: Any) -> Any:
        if task.__name__ == self.task:
            self.cohort.ids = np.setdiff1d(self.cohort.ids, [self.client])
        return self.cohort.mean(task, *payload)


def traffic(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in line if name.startswith(("bytes", "exchanges"))}


@pytest.mark.parametrize("task", TASKS)
def test_who_is_missing_makes_no_others_bytes_fewer(task: str, tmp_path: Path) -> None:
    far, grid = five_nodes(tmp_path, tamper=spoiling(silent, task))
    less = traffic(one_round(far, tmp_path))
    whole = traffic(one_round(build_experiment(small()), tmp_path))
    for name, moved in whole["exchanges"].items():
        there = 4 if TASKS.index(name) >= TASKS.index(task) else 5
        assert less["exchanges"][name] == {key: n * there / 5 for key, n in moved.items()}
        assert grid.types.count(f"train.{name}") == (5 if name == task else there)
    for way in ("up", "down"):
        one = f"bytes_{way}_per_client"
        assert less[one] == whole[one] == whole[f"bytes_{way}"] / 5


def test_who_refuses_has_got_what_was_sent(tmp_path: Path) -> None:
    far, _ = five_nodes(tmp_path, tamper=spoiling(sharing(1e12)))
    moved = one_round(far, tmp_path)["exchanges"]["descend"]
    assert (moved["replied"], moved["reached"]) == (4, 5)


@pytest.mark.parametrize(
    "words",
    [
        ("algorithm.name=ccl", "objective.name=moco", "algorithm.features=6"),
        ("algorithm.name=fedca", "objective.name=simclr", "algorithm.public=5"),
    ],
)
def test_what_travels_with_the_model_and_is_counted_apart(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    far, grid = five_nodes(tmp_path, "algorithm.local_epochs=1", "algorithm.batch=3", *words)
    far.server.public = far.public
    one_round(far, tmp_path)
    whole = one_round(far, tmp_path)["exchanges"]
    grid.tamper = spoiling(silent, "train")
    less = one_round(far, tmp_path)["exchanges"]
    assert whole["share"]["down"] > 0 and whole["share"]["reached"] == 5
    assert less == {task: {k: n * 4 / 5 for k, n in own.items()} for task, own in whole.items()}


@pytest.mark.parametrize("nodes", [5, 0])
def test_too_few_are_a_skipped_round(nodes: int, tmp_path: Path) -> None:
    far, grid = five_nodes(tmp_path, "cohort.minimum=5", tamper=spoiling(silent))
    if not nodes:
        grid.contexts.clear()
    before = far.server.weights.clone()
    line = one_round(far, tmp_path)
    assert line["skipped"] and line["loss"] is None and line["missing"] == (1 if nodes else 5)
    assert torch.equal(far.server.weights, before)


def raises(client: Client) -> None:
    raise ValueError("patient Smith\x1b[2J, image 7")


def counts(client: Client) -> None:
    client.state["count"] = 1


@pytest.mark.parametrize(
    ("before", "fault"),
    [
        (raises, "failed: ValueError"),  # the kind of error and no more
        (counts, "refused: algorithm.name=dcco: client.state['count'] is of type int"),
    ],
)
def test_the_server_gets_to_know_why_a_task_failed(
    before: Callable[[Client], None],
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    far, _ = five_nodes(tmp_path)
    kind = type(far.algorithm)
    real = kind.encode

    def encode(self: Any, client: Client, *payload: Any) -> Any:
        if client.id == BAD:
            before(client)
        return real(self, client, *payload)

    replace_task(monkeypatch, kind, "encode", encode)
    ((client, said),) = one_round(far, tmp_path)["faults"].items()
    assert client == str(BAD) and said.startswith(f"encode: {fault}")
    log = capsys.readouterr().err  # the site's
    assert log and all(line.isprintable() for line in log.splitlines())


@pytest.mark.parametrize(
    ("task", "weight"),
    [
        *itertools.product(["start", "round", "mu", "__init__", "nonsense"], ["samples", None]),
        *(("train", None), ("report", "samples")),  # a mean as a single reply, and the other way
    ],
)
def test_a_site_answers_only_what_the_algorithm_declares(
    task: str, weight: Any, tmp_path: Path
) -> None:
    """Methods of the algorithm that are no exchanges would tell the client's own network."""
    session = build_experiment(small(*BYOL, "algorithm.name=fedema"))
    network = pack(session.trainer.initial)["."]
    request = Request(task, (0,), 0, 0, History(("a",), (0,), 0), weight, 1, {"0/.": network})
    (reply,) = Site(session.engine, tmp_path).answer(request).values()
    assert "this site answers only" in str(reply.fault) and not reply.tensors


@pytest.mark.parametrize("name", ["round", "mu/more", ".", "loss"])
def test_numbers_for_the_log_are_those_that_were_declared(name: str, tmp_path: Path) -> None:
    """A client whose numbers for the log do not count stays in the round."""
    words, more = (*BYOL, "algorithm.name=fedema"), spoiling(repeated("mu", name), "report")
    far, _ = five_nodes(tmp_path, *words, "cohort.minimum=5", tamper=more)
    line = one_round(far, tmp_path)
    assert line["round"] == 1 and isinstance(line["loss"], float) and not line["skipped"]
    assert sorted(line["mu"]) == ["0", "1", "2", "4"] and line["missing"] == 0
    assert "expected the numbers" in line["faults"][str(BAD)]


def test_what_a_client_says_is_one_printable_line(tmp_path: Path) -> None:
    def speaks(reply: Message) -> Message:
        reply.content["shares"] = ConfigRecord({})
        text = "x\nround 9: no reply of ward\x1b[2J" + "y" * 1000
        reply.content["faults"] = ConfigRecord({str(BAD): text})
        return reply

    far, _ = five_nodes(tmp_path, tamper=spoiling(speaks))
    reason = one_round(far, tmp_path)["faults"][str(BAD)]
    assert reason.isprintable() and len(reason) <= 300 and "ward\\x1b[2J" in reason


def test_a_task_may_be_asked_twice_in_a_round(tmp_path: Path) -> None:
    """A value that clients have already is only referred to, whatever the algorithm."""
    far, grid = far_session(small("algorithm.name=fedavg"), tmp_path)
    cohort = far.engine.cohort(np.arange(5), 0)
    first = cohort.mean(far.algorithm.train, far.server.model)
    down = dict(cohort.traffic.down)
    second = cohort.mean(far.algorithm.train, far.server.model)
    torch.testing.assert_close(first["change"], second["change"])
    assert dict(cohort.traffic.down) == down and len(grid.types) == 4
    assert not cohort.faults


def test_a_diverged_client_keeps_its_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, _ = five_nodes(tmp_path, *BYOL, "algorithm.name=fedema")
    go(far, 1)
    before = far.engine.states.on_host(BAD)
    kind = type(far.algorithm)
    real = kind.train

    def diverges(self: Any, client: Any, received: torch.Tensor) -> Any:
        return real(self, client, received * (math.nan if client.id == BAD else 1))

    replace_task(monkeypatch, kind, "train", diverges)
    (cohort,) = go(far, 1)
    assert "not finite" in cohort.faults[BAD]
    after = far.engine.states.on_host(BAD)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("clients", [-1]), ("clients", ["../../x"]), ("task", b"x")),
        *(("attempts", ["../up"]), ("attempts", ["/abs"]), ("attempts", [])),
        *(("committed", 1.5), ("committed", -1), ("arguments", "1")),
    ],
)
def test_requests_name_no_files_of_their_own(name: str, value: Any) -> None:
    content = write_request(
        Request("locate", (0,), 0, 0, History(("0123abcd",), (0,), 0), "samples", 1)
    )
    read_request(content)
    content["request"][name] = value
    with pytest.raises(MalformedError):
        read_request(content)


@pytest.mark.parametrize("lost", ["request", "known", "payload", "task", "starts"])
def test_a_request_without_a_part_is_refused(lost: str) -> None:
    content = write_request(Request("locate", (0,), 0, 0, History(("0123abcd",), (0,), 0)))
    del (content if lost in content else content["request"])[lost]
    with pytest.raises(MalformedError, match="KeyError"):
        read_request(content)


def test_a_site_is_not_told_of_tensors_that_it_did_not_get(tmp_path: Path) -> None:
    session = build_experiment(small("algorithm.name=fedavg"))
    network = pack(session.trainer.initial)["."]
    first = Request("train", (0,), 0, 0, History(("a",), (0,), 0), "samples", 1, {"0/.": network})
    later = replace(first, exchange=1, payload={})
    site = Site(session.engine, tmp_path)
    for known in ((0, "1/."), (7, "0/.")):
        assert site.answer(first)[0].fault is None
        fault = site.answer(replace(later, known={"0/.": known}))[0].fault
        assert fault == f"refused: exchange {known[0]} brought no {known[1]} here"
    assert site.answer(replace(later, known={"0/.": (0, "0/.")}))[0].fault is None


def test_what_a_server_asks_is_shown_on_one_line_of_the_sites_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = build_experiment(small())
    request = Request("x\nround 9\x1b[2J", (0,), 0, 0, History(("a",), (0,), 0), "samples")
    assert Site(session.engine, tmp_path).answer(request)[0].fault
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable() and line.startswith("fedssl: refused: task x\\nround 9\\x1b[2J: ")
