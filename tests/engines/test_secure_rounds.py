"""Rounds under secure sums: the plain mean within the quantization bound, whoever drops out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import relative

pytest.importorskip("flwr")
from far import BYOL, Tamper, far_session, go, one_round, small, states_of
from flwr.app import Message

from fedssl.engines.remote.disk_states import History
from fedssl.engines.remote.engine import STATES
from fedssl.engines.remote.messages import Request, SecureStep
from fedssl.engines.remote.site import Site
from fedssl.privacy.checks import survivors_needed
from fedssl.runs.build import Experiment, build_experiment
from fedssl.util import trees
from fedssl.util.errors import UserError

SECURE = "privacy.secure=true"
STEPS = ("keys", "shares", "masked", "agree", "unmask")
AFTER = ("agree", "unmask")  # steps after the vectors came
SOON = "engine.timeout=0.5"  # a client that does not answer is waited for


def silent(step: str, *clients: int, task: str = "descend") -> Tamper:
    """Clients (one a node) that do not answer one step of one sum."""

    def tamper(asked: Message, reply: Message) -> Message | None:
        facts = asked.content.config_records["request"]
        hit = facts["task"] == task and facts["step"] == step
        return None if hit and asked.metadata.dst_node_id - 11 in clients else reply

    return tamper


def five_nodes(folder: Path, *words: str, tamper: Tamper | None = None) -> Experiment:
    return far_session(small(SECURE, SOON, *words), folder, nodes=5, tamper=tamper)[0]


UNEVEN = ("data.labels=40", "partition.clients=6", "algorithm.local_epochs=1", "algorithm.batch=4")


@pytest.mark.parametrize(
    "words",
    [("algorithm.name=dcco",), ("algorithm.name=dcco", *UNEVEN), (*BYOL, "algorithm.name=fedema")],
)
def test_secure_rounds_equal_plain_ones(words: tuple[str, ...], tmp_path: Path) -> None:
    plain, _ = far_session(small(*words), tmp_path / "plain")
    secure, _ = far_session(small(*words, SECURE), tmp_path / "secure")
    go(plain, 2)
    rounds = go(secure, 2)
    # 2⁻³³ a number and client, on changes of about 1e-3: far below any float32.
    torch.testing.assert_close(secure.server.weights, plain.server.weights, rtol=0, atol=1e-8)
    assert float(secure.server.log["loss"]) == pytest.approx(float(plain.server.log["loss"]))
    assert not secure.server.client_log  # nothing about single clients, not even for the log
    assert not any(cohort.faults for cohort in rounds)  # which nobody was asked for


def test_the_server_sees_no_reply_and_counts_what_travels(tmp_path: Path) -> None:
    seen: list[Any] = []

    def watch(asked: Message, reply: Message) -> Message:
        seen.append((asked.content.config_records["request"]["step"], reply.content))
        return reply

    far = five_nodes(tmp_path, tamper=watch)
    (cohort,) = go(far, 1)
    assert {step for step, _ in seen} == {"keys", "shares", "masked", "agree", "unmask"}
    vectors = []
    for step, content in seen:
        arrays = content.array_records["replies"]
        assert all(share == 1.0 for share in content.config_records["shares"].values())
        assert bool(arrays) == (step == "masked")
        vectors += [np.frombuffer(a.data, np.int64) for a in arrays.values()]
    for vector in vectors:  # uniform over 64 bits: half of them negative, none small
        assert abs(np.mean(vector < 0) - 0.5) < 5 / np.sqrt(len(vector))
        assert np.abs(vector[2:].astype(float)).min() > 2**30
    assert cohort.traffic.up["descend"] > 8 * len(far.server.weights) * 5
    assert cohort.traffic.down["descend"] > 0


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("lost", [(1,), (0, 4)])
def test_dropouts_cost_only_themselves(step: str, lost: tuple[int, ...], tmp_path: Path) -> None:
    far = five_nodes(tmp_path, "privacy.threshold=0.6", tamper=silent(step, *lost))
    line = one_round(far, tmp_path)
    assert set(line["faults"]) == {str(k) for k in lost}
    # Who is lost after the masked vector came is in the sum all the same.
    assert line["missing"] == (0 if step in AFTER else len(lost))
    # What the lost sent before they went is put on the others: a client's are never less.
    moved, there = line["exchanges"]["descend"], 5 - line["missing"]
    vector = 8 * (len(far.server.weights) + 3)  # with the loss, the weight and a check
    assert (moved["replied"], moved["reached"]) == (there, there)
    assert vector < moved["up"] / there < vector + 3000
    near = build_experiment(small("engine.merge=off"))
    algorithm, model = near.algorithm, near.server.model
    cohort = near.engine.cohort(np.arange(5), 0)
    centre = cohort.mean(algorithm.locate, model)
    moments = cohort.mean(algorithm.encode, model, centre)
    if step not in AFTER:
        cohort.ids = np.setdiff1d(cohort.ids, lost)
    near.server.apply(cohort.mean(algorithm.descend, model, centre, moments))
    assert relative(far.server.weights, near.server.weights) < 1e-8


@pytest.mark.parametrize("step", STEPS)
def test_below_the_threshold_the_round_is_skipped(step: str, tmp_path: Path) -> None:
    far = five_nodes(tmp_path, tamper=silent(step, 1, 2, task="encode"))
    before = far.server.weights.clone()
    line = one_round(far, tmp_path)
    assert line["skipped"] and torch.equal(far.server.weights, before)
    # The next round is a new sum with new keys.
    said = "round 1 skipped: encode: 3 clients are left of the 4 that a secure sum needs"
    assert said in line["said"]
    assert line["missing"] == (0 if step in AFTER else 2)
    if (
        step == "keys"
    ):  # a sum that is lost before the vectors moves 240 bytes of each that is there
        assert line["exchanges"] == {"encode": {"up": 720, "down": 0, "replied": 3, "reached": 3}}
        assert line["bytes_up_per_client"] == 240


@pytest.mark.parametrize(("liars", "skipped"), [(1, False), (2, True)])
def test_false_shares_cost_a_round_only_if_too_few_honest_ones_are_left(
    liars: int, skipped: bool, tmp_path: Path
) -> None:
    def spoil(asked: Message, reply: Message) -> Message:
        facts = asked.content.config_records["request"]
        unmasks = facts["step"] == "unmask" and facts["task"] == "encode"
        if unmasks and asked.metadata.dst_node_id < 11 + liars:
            record = reply.content.config_records["secure"]
            name = next(iter(record))
            record[name] = [bytes(len(value)) for value in record[name]]
        return reply

    far = five_nodes(tmp_path, tamper=spoil)
    before = far.server.weights.clone()
    line = one_round(far, tmp_path)
    assert line["skipped"] == skipped == torch.equal(far.server.weights, before)
    told = "encode, unmask: a false share of a secret of client 0"
    assert line["faults"] == {str(k): told for k in range(liars)}


@pytest.mark.parametrize(
    ("words", "images", "factor", "reason"),
    [
        # As of many more images: the client would take the whole mean.
        ((), 1e5, 1, "encode: the clients' weights are 600024, expected 30"),
        (("objective.bound=1",), 1, 100, "encode: a norm of "),
    ],
)
def test_a_sum_that_honest_clients_cannot_have_is_not_used(
    words: tuple[str, ...],
    images: float,
    factor: float,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One client masks another weight, or moments a hundred times too large."""
    real = Site._contribute

    def lie(self: Site, client: int, request: Request, payload: Any) -> Any:
        share, reply = real(self, client, request, payload)
        if client == 3 and request.task == "encode":
            return share * images, trees.scale(reply, factor)
        return share, reply

    monkeypatch.setattr(Site, "_contribute", lie)
    far = five_nodes(tmp_path, *words)
    before = far.server.weights.clone()
    line = one_round(far, tmp_path)
    assert line["skipped"] and torch.equal(far.server.weights, before)
    assert any(f"round 1 skipped: {reason}" in said for said in line["said"])


@pytest.mark.parametrize(
    ("words", "task", "step", "reason"),
    [
        (SECURE, "encode", None, "only in secure sums"),  # a reply in the open
        ("objective.bound=1", "encode", SecureStep("keys"), "only without secure sums"),
        # Two sums of the same encodings would tell of a client that drops out between them.
        (SECURE, "locate", SecureStep("keys"), "only encode, descend"),
        ("objective.bound=1", "locate", None, "only encode, descend"),
    ],
)
def test_a_site_refuses_a_mean_that_would_tell_of_it(
    words: str, task: str, step: SecureStep | None, reason: str, tmp_path: Path
) -> None:
    session = build_experiment(small("engine.name=flower", words))
    request = Request(task, (0,), 0, 0, History(("a",), (0,), 0), "samples", secure=step)
    (reply,) = Site(session.engine, tmp_path).answer(request).values()
    assert f"this site answers {reason}" in str(reply.fault) and not reply.tensors


def test_a_restarted_server_skips_a_round_that_it_cannot_repeat(tmp_path: Path) -> None:
    """Client 3 was missing at first. A sum with it would tell its part, beside the first one."""
    first = five_nodes(tmp_path, tamper=silent("keys", 3, task="encode"))
    assert not one_round(first, tmp_path)["skipped"]
    again = five_nodes(tmp_path)
    again.engine.resume(first.engine.notes(), 0)  # of a checkpoint before the round
    before = again.server.weights.clone()
    line = one_round(again, tmp_path)
    assert line["skipped"] and torch.equal(again.server.weights, before)
    assert sum("answered already, for another request" in f for f in line["faults"].values()) == 4
    line = one_round(again, tmp_path)
    assert not line["skipped"] and "faults" not in line


def test_a_restarted_server_gets_the_same_sums_of_the_same_clients(tmp_path: Path) -> None:
    weights, states, known, words = [], [], [], (*BYOL, "algorithm.name=fedema")
    first = five_nodes(tmp_path, *words)
    for session in (first, five_nodes(tmp_path, *words)):
        session.engine.resume(first.engine.notes(), 0)
        known.append(dict(session.engine.identities))
        assert not one_round(session, tmp_path)["skipped"]
        weights.append(session.server.weights)
        states.append(states_of(session))
    assert torch.equal(*weights)
    assert known[1] == first.engine.identities and len(known[1]) == 5
    # The vectors are those of the first time, and the clients' states belong to the second, too.
    assert len(states[0]) == 5
    np.testing.assert_equal(states[1], states[0])


def test_secrets_are_for_the_site_alone_and_do_not_pile_up(tmp_path: Path) -> None:
    far, _ = far_session(small(SECURE), tmp_path)
    for _ in range(3):
        go(far, 1)
        far.engine.committed(far.server.round)
    sums = tmp_path / STATES / "sums"
    assert len(list(sums.glob("*/*-*"))) == 5 * 2  # the last round's, of each client and task
    files = [path for path in sums.rglob("*") if path.is_file() and path.suffix != ".pub"]
    assert all(path.parent.stat().st_mode & 0o077 == 0 for path in files)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("privacy.secure=true",), "engine.name"),
        (("engine.name=flower", SECURE, "cohort.average=median"), "cohort.average"),
        (("engine.name=flower", SECURE, "cohort.size=2"), "privacy.secure"),
        (("engine.name=flower", SECURE, "engine.updates=fp16"), "engine.updates"),
        (("engine.name=flower", SECURE, "engine.max_norm=2"), "engine.max_norm"),
        (("engine.name=flower", "algorithm.name=centralized"), "engine.name"),
    ],
)
def test_combinations_that_are_refused(words: tuple[str, ...], key: str) -> None:
    with pytest.raises(UserError) as error:
        build_experiment(small(*words))
    assert error.value.key == key


@pytest.mark.parametrize(
    ("share", "clients", "need"),
    [(0.67, 3, 3), (0.51, 3, 3), (0.51, 4, 3), (1, 5, 5), (0.51, 2, 3), (0.51, 100, 51)],
)
def test_survivors_needed(share: float, clients: int, need: int) -> None:
    assert survivors_needed(share, clients) == need


def test_survivors_are_more_than_half_by_the_least_threshold_that_is_allowed() -> None:
    least = math.nextafter(0.5, 1)
    small(f"privacy.threshold={least!r}")
    for clients in (*range(3, 2000), *(2**power + k for power in range(11, 50) for k in (0, 1))):
        assert survivors_needed(least, clients) == max(3, clients // 2 + 1)
