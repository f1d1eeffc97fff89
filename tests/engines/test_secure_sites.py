"""A dishonest server gets one sum over one set of clients per run, round and task."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("flwr")
from far import small

from fedssl.engines.remote.codec import pack, unpack
from fedssl.engines.remote.disk_states import History
from fedssl.engines.remote.messages import Request, SecureStep
from fedssl.engines.remote.payload import hash_arguments
from fedssl.engines.remote.replies import ReplyChecker
from fedssl.engines.remote.secure_site import NodeKeys
from fedssl.engines.remote.site import Site
from fedssl.privacy import secure
from fedssl.privacy.secure import Masker, Spoiled, Unmasker
from fedssl.privacy.secure.identity import Identity, make_identity
from fedssl.runs.build import build_experiment
from fedssl.util.errors import UserError

RUN = "0123abcd"
WORDS = ("engine.name=flower", "privacy.secure=true", "privacy.threshold=0.51")
FEDAVG = ("algorithm.name=fedavg", "data.labels=40")


class Refused(Exception):
    """A site does not answer."""


class Cheat:
    """A server that asks sites for what it likes; each site starts anew for every message."""

    def __init__(self, folder: Path, clients: int = 4, round: int = 0, size: int | None = None):
        drawn = "null" if size is None else size
        numbers = (f"partition.clients={clients}", f"cohort.size={drawn}")
        self.session = build_experiment(small(*WORDS, *FEDAVG, *numbers))
        self.folder, self.round = folder, round
        self.keys: dict[int, NodeKeys] = {}
        self.facts: dict[str, Any] = {
            "task": "train",
            "exchange": 0,
            "history": History((RUN,), (0,), 0),
            "weight": "samples",
        }
        self.model = self.session.trainer.initial

    def ask(self, client: int, step: str, message: Any) -> Any:
        """Return a client's answer to a step of the round's sum."""
        sent = {"arguments": 1, "payload": pack({"0": {".": self.model}})}
        request = Request(
            clients=(client,),
            round=self.round,
            secure=SecureStep(step, {client: message}),
            **self.facts,
            **(sent if step == "masked" else {}),
        )
        site = Site(self.session.engine, self.folder, keys=self.keys.get(client))
        (reply,) = site.answer(request).values()
        if reply.fault is not None:
            raise Refused(reply.fault)
        if step == "masked":
            return cast("Any", unpack(reply.tensors))["masked"].numpy()
        return dict(reply.message)

    def sum(self, clients: Collection[int], lost: Collection[int] = ()) -> list[int]:
        """Go through the protocol with these clients; the ``lost`` send no vector."""
        server = Unmasker(clients, f"{RUN}/{self.round}/train", 3, self.size, self.asked)
        for step in secure.STEPS:
            for client, message in server.ask().items():
                if step != "masked" or client not in lost:
                    server.take(client, self.ask(client, step, message))
        return cast("list[int]", server.total().tolist())

    @property
    def size(self) -> int:
        task = self.session.algorithm.tasks()["train"]
        return secure.size(ReplyChecker(self.session.engine).expected_reply(task))

    @property
    def asked(self) -> str:
        return hash_arguments({"0/.": self.model}, 1, "samples")

    def images(self, total: list[int]) -> int:
        return int(total[0] / 2**32)


def test_two_sums_that_differ_by_one_client_cannot_be_had(tmp_path: Path) -> None:
    """Their difference would be client 3's number of images and its change of the model."""
    cheat = Cheat(tmp_path)
    sizes = cheat.session.engine.groups.sizes
    total = cheat.sum([0, 1, 2])
    assert cheat.images(total) == sum(sizes[:3])
    for changed in (
        {},
        {"exchange": 1},
        {"history": History((RUN, "ffffffff"), (0, 0), 0)},  # a server that was started again
    ):
        cheat.facts |= changed
        with pytest.raises(Refused, match="shares of this sum was answered already"):
            cheat.sum([0, 1, 2, 3])
    # Nor with client 3 in the sum at first, and lost later.
    with pytest.raises(Refused, match="answered already"):
        cheat.sum([0, 1, 2, 3], lost=[3])
    cheat.round = 1  # another round is another sum
    assert cheat.images(cheat.sum([0, 1, 2, 3], lost=[3])) == sum(sizes[:3])
    with pytest.raises(Refused, match="agree of this sum was answered already"):
        cheat.sum([0, 1, 2, 3], lost=[2])


def test_the_same_sum_is_had_again_after_a_restart(tmp_path: Path) -> None:
    """The stored bytes: masks of other secrets would give the server two views of one vector."""
    cheat, seen = Cheat(tmp_path), []
    real = cheat.ask

    def watch(client: int, step: str, message: Any) -> Any:
        reply = real(client, step, message)
        seen.append(reply.tobytes() if step == "masked" else repr(reply))
        return reply

    cheat.ask = watch  # type: ignore[method-assign]
    first = cheat.sum([0, 1, 2, 3], lost=[1])
    cheat.facts["history"] = History((RUN, "ffffffff"), (0, 0), 0)
    assert cheat.sum([0, 1, 2, 3], lost=[1]) == first
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    cheat.model = cheat.model + 1  # but not of another model
    with pytest.raises(Refused, match="masked of this sum was answered already"):
        cheat.sum([0, 1, 2, 3], lost=[1])


def test_the_fewest_clients_are_those_of_the_sites_recipe(tmp_path: Path) -> None:
    """Whatever number of clients the server names: 9 of 16 here, not 3 of 3."""
    cheat = Cheat(tmp_path, clients=16)
    with pytest.raises(Refused, match="threshold 9 with 3 clients"):
        cheat.sum([0, 1, 2])
    cheat = Cheat(tmp_path / "drawn", clients=16, size=4)
    assert len(cheat.sum([0, 1, 2])) > 1
    cheat.round = 1
    with pytest.raises(Refused, match="5 clients, a round has 4"):  # fewer liars would be enough
        cheat.sum(range(5))


def test_clients_that_were_asked_differently_have_no_sum(tmp_path: Path) -> None:
    """Other models, whose changes are 0, would leave one client's change alone in the sum."""
    cheat = Cheat(tmp_path)
    real, model = cheat.ask, cheat.model

    def ask(client: int, step: str, message: Any) -> Any:
        cheat.model = model if client == 3 else model * 0
        try:
            return real(client, step, message)
        finally:
            cheat.model = model

    cheat.ask = ask  # type: ignore[method-assign]
    with pytest.raises(Spoiled):
        cheat.sum([0, 1, 2, 3])


@pytest.mark.parametrize("step", secure.STEPS[1:])
def test_a_sum_begins_with_keys(step: str, tmp_path: Path) -> None:
    """Else a request that was never answered would stand in the site's record."""
    with pytest.raises(Refused, match=f"{step} of a sum that this site did not begin"):
        Cheat(tmp_path).ask(0, step, {})
    assert not list(tmp_path.glob("sums/*/0-*"))


def test_no_client_gets_arguments_of_its_own(tmp_path: Path) -> None:
    cheat = Cheat(tmp_path)
    request = Request(
        clients=(0,),
        round=0,
        secure=SecureStep("keys", {0: {}}),
        arguments=1,
        payload=pack({"0@0": {".": cheat.model}}),
        **cheat.facts,
    )
    (reply,) = Site(cheat.session.engine, tmp_path).answer(request).values()
    assert "asked differently" in str(reply.fault)


def test_a_failure_tells_the_server_one_bit_at_most(tmp_path: Path) -> None:
    """Whether a number overflows depends on the images. Nobody must search for the limit."""
    cheat = Cheat(tmp_path)
    real, model = cheat.ask, cheat.model

    def ask(client: int, step: str, message: Any) -> Any:
        if step == "masked":
            cheat.model = model * math.nan
            for _ in range(2):  # the same request may be sent again
                with pytest.raises(Refused, match="failed: ValueError"):
                    real(client, step, message)
            cheat.model = model
        return real(client, step, message)

    cheat.ask = ask  # type: ignore[method-assign]
    with pytest.raises(Refused, match="asked for already, in another way"):
        cheat.sum([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("facts", "round", "reason"),
    [
        ({"weight": "uniform"}, 0, "weigh by samples, not uniform"),
        ({"weight": "nonsense"}, 0, "weigh by samples, not nonsense"),
        ({}, 3, "round 4, the run has 3"),
    ],
)
def test_a_sum_is_one_of_the_sites_recipe(
    facts: dict[str, Any], round: int, reason: str, tmp_path: Path
) -> None:
    cheat = Cheat(tmp_path, round=round)
    cheat.facts |= facts
    with pytest.raises(Refused, match=reason):
        cheat.sum([0, 1, 2, 3])


def test_a_round_that_the_checkpoint_holds_is_not_done_again(tmp_path: Path) -> None:
    cheat = Cheat(tmp_path, round=1)
    cheat.sum([0, 1, 2])
    cheat.round, cheat.facts["history"] = 2, History((RUN,), (0,), 2)
    cheat.sum([0, 1, 2])
    assert not list(tmp_path.glob("sums/*/1-*"))  # its secrets are gone
    cheat.round, cheat.facts["history"] = 1, History((RUN,), (0,), 0)
    with pytest.raises(Refused, match="round 2 was done already"):
        cheat.sum([0, 1, 2, 3])


def test_a_real_site_is_one_client_of_a_sum(tmp_path: Path) -> None:
    """Under two numbers it would be in two sums."""
    cheat = Cheat(tmp_path)
    config = cheat.session.config
    real = replace(config, engine=replace(config.engine, sites=4))
    cheat.session.engine.trainer.config = real
    site = Site(cheat.session.engine, tmp_path / RUN, is_real=True)
    faults = []
    for client in (0, 0, 1):
        request = Request(
            clients=(client,), round=0, secure=SecureStep("keys", {client: {}}), **cheat.facts
        )
        faults.append(site.answer(request)[client].fault)
    assert faults[:2] == [None, None] and "answered already" in str(faults[2])


@pytest.mark.parametrize(
    ("first", "reason"),
    [(1, "client 1 has another key than before in this run"), (4, "client 4, the run has only 4")],
)
def test_clients_that_the_server_invents_after_the_first_sum_are_refused(
    first: int, reason: str, tmp_path: Path
) -> None:
    """They would leave client 0 alone in a sum."""
    cheat = Cheat(tmp_path)
    cheat.sum([0, 1, 2, 3])
    cheat.round = 1
    invented = {k: (Masker(k, f"{RUN}/1/train", 3), Identity()) for k in range(first, first + 3)}
    real = cheat.ask

    def ask(client: int, step: str, message: Any) -> Any:
        if client == 0:
            return real(client, step, message)
        masker, identity = invented[client]
        if step in ("keys", "agree"):
            return getattr(masker, step)(*[message][: step == "agree"], identity)
        if step == "masked":
            return masker.masked(message, np.zeros(cheat.size, np.int64), cheat.asked)
        return getattr(masker, step)(message)

    cheat.ask = ask  # type: ignore[method-assign]
    with pytest.raises(Refused, match=reason):
        cheat.sum([0, *invented])


def test_a_site_with_a_list_of_peers_takes_part_with_no_others(tmp_path: Path) -> None:
    """The server's own clients would leave one site alone in a sum."""
    cheat, public = Cheat(tmp_path), []
    for k in range(4):
        path = tmp_path / f"site-{k}.key"
        public.append(make_identity(path).public)
        cheat.keys[k] = NodeKeys(str(path), str(tmp_path / "peers"))
    peers = tmp_path / "peers"
    peers.write_bytes(b"# our sites\n\n" + b" name@site\n".join(public[:3]) + b"\n")
    with pytest.raises(Refused, match="key of client 3 is not among this site's peers"):
        cheat.sum([0, 1, 2, 3])
    cheat.round = 1
    cheat.sum([0, 1, 2])  # signed with the keys that their settings name
    message = cheat.ask(0, "keys", {})
    assert message["signed"][0] == public[0]


@pytest.mark.parametrize("text", [None, "no key", "passphrase"])
def test_a_key_file_that_cannot_be_used_is_said_without_its_path(
    text: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "site.key"
    if text == "passphrase":
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(path)]
        subprocess.run(words, check=True)
    elif text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as error:
        NodeKeys(key=str(path)).identity(tmp_path / "own")
    assert error.value.key == "node-config key" and str(tmp_path) not in str(error.value.public)
    if text != "passphrase":
        with pytest.raises(UserError) as error:
            NodeKeys(peers=str(path)).trusted()
        assert error.value.key == "node-config peers"


def test_a_list_of_peers_without_the_site_itself_is_refused_before_the_run(tmp_path: Path) -> None:
    peers, own = tmp_path / "peers", tmp_path / "own"
    peers.write_bytes(Identity().public)
    with pytest.raises(UserError) as error:
        NodeKeys(peers=str(peers)).check(own)
    assert error.value.key == "node-config peers"
    peers.write_bytes(peers.read_bytes() + b"\n" + make_identity(own).public)
    NodeKeys(peers=str(peers)).check(own)
