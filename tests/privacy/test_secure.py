"""Secure sums: right whoever drops out, and nothing but the sum to be seen."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from Crypto.Protocol.SecretSharing import Shamir
from hypothesis import given, settings
from hypothesis import strategies as st

from fedssl.privacy import secure
from fedssl.privacy.secure import Masker, NotEnough, Spoiled, Unmasker, Vector, masks
from fedssl.privacy.secure.identity import Identity, has_signed, load_identity, read_public_keys
from fedssl.util import trees

CONTEXT = "run/7/train"
ASKED = "the hash of a model"
CLIENTS = [3, 5, 8, 20, 21, 40, 41]  # numbers of a cohort have gaps
THRESHOLD = 4
AFTER = ("agree", "unmask")  # steps after the vectors came
Replace = Callable[[Any], Any]


class Identities(dict[int, Identity]):
    """A key pair for each client, made when it is needed."""

    def __missing__(self, client: int) -> Identity:
        return self.setdefault(client, Identity())


IDENTITIES = Identities()


class Sum:
    """One sum in one process: each step of each client begins from bytes, as on a real site."""

    def __init__(
        self, vectors: Mapping[int, Vector], threshold: int = THRESHOLD, context: str = CONTEXT
    ) -> None:
        self.vectors = vectors
        self.server = Unmasker(
            vectors, context, threshold, len(next(iter(vectors.values()))), ASKED
        )
        self.states = {i: Masker(i, context, threshold).to_bytes() for i in vectors}
        self.refused: dict[int, str] = {}
        self.masked: dict[int, Vector] = {}
        self.messages: dict[str, dict[int, Any]] = {}

    def client(self, number: int, step: str, message: Any) -> Any:
        masker = Masker.from_bytes(self.states[number])
        if step in ("keys", "agree"):
            words = () if step == "keys" else (message,)
            reply: Any = getattr(masker, step)(*words, IDENTITIES[number])
        elif step == "masked":
            reply = self.masked[number] = masker.masked(message, self.vectors[number], ASKED)
        else:
            reply = getattr(masker, step)(message)
        self.states[number] = masker.to_bytes()
        return reply

    def run(
        self,
        lost: Mapping[str, Collection[int]] | None = None,
        change: Mapping[tuple[str, int], Replace] | None = None,
        until: str | None = None,
    ) -> Sum:
        """All steps, or those before ``until``, whose messages are made; ``lost`` do not answer."""
        for step in secure.STEPS:
            self.messages[step] = self.server.ask()
            if step == until:
                break
            for number, message in self.messages[step].items():
                if number in (lost or {}).get(step, ()):
                    continue
                reply = self.client(number, step, message)
                try:
                    self.server.take(number, (change or {}).get((step, number), same)(reply))
                except ValueError as error:
                    self.refused[number] = str(error)
        return self


def same(reply: Any) -> Any:
    return reply


def some_vectors(clients: Collection[int] = CLIENTS, size: int = 5) -> dict[int, Vector]:
    random = np.random.default_rng(0)
    return {i: random.integers(-(2**40), 2**40, size) for i in clients}


def plain(vectors: Mapping[int, Vector], without: Collection[int] = ()) -> list[int]:
    return np.sum([v for i, v in vectors.items() if i not in without], axis=0).tolist()


# The sum


@pytest.mark.parametrize("count", [0, 1, len(CLIENTS) - THRESHOLD])
@pytest.mark.parametrize("step", secure.STEPS)
def test_the_sum_is_that_of_the_vectors_that_came(step: str, count: int) -> None:
    vectors = some_vectors()
    for lost in (CLIENTS[:count], CLIENTS[len(CLIENTS) - count :]):
        total = Sum(vectors).run({step: lost}).server.total()
        # Who is lost after its vector came is in the sum.
        assert total.tolist() == plain(vectors, () if step in AFTER else lost)


def test_the_sum_is_right_when_one_is_lost_at_every_step() -> None:
    vectors = some_vectors(range(11))
    lost = {"keys": [8], "shares": [2], "masked": [5], "agree": [7], "unmask": [0]}
    run = Sum(vectors, threshold=6).run(lost)
    for _ in range(2):  # asking again changes nothing
        assert run.server.total().tolist() == plain(vectors, (8, 2, 5))


@pytest.mark.parametrize("step", secure.STEPS)
def test_with_fewer_than_the_threshold_there_is_no_sum(step: str) -> None:
    run = Sum(some_vectors())
    with pytest.raises(NotEnough) as error:
        run.run({step: CLIENTS[THRESHOLD - 1 :]}).server.total()
    assert (error.value.have, error.value.need) == (THRESHOLD - 1, THRESHOLD)


@st.composite
def cohorts(
    draw: st.DrawFn,
) -> tuple[dict[int, tuple[float, trees.Tree]], int, dict[str, set[int]]]:
    ids = draw(st.lists(st.integers(0, 10**6), min_size=2, max_size=6, unique=True))
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)]))
    numbers = st.floats(-1e4, 1e4, width=32)
    replies = {}
    for i in ids:
        leaf = torch.tensor(draw(st.lists(numbers, min_size=4, max_size=4)))
        inner = (
            leaf[: max(1, int(np.prod(shape)))].clone().reshape(shape)
            if shape != (0,)
            else leaf[:0]
        )
        tree = {"z": {"b": leaf, "a": inner}, "loss": leaf[0].double()}
        replies[i] = (draw(st.integers(1, 500) | st.floats(0.5, 500)), tree)
    threshold = draw(st.integers(max(2, len(ids) // 2 + 1), len(ids)))
    gone = draw(st.lists(st.sampled_from(ids), max_size=len(ids) - threshold, unique=True))
    lost: dict[str, set[int]] = {step: set() for step in secure.STEPS}
    for i in gone:
        lost[draw(st.sampled_from(secure.STEPS))].add(i)
    return replies, threshold, lost


@settings(max_examples=40)
@given(cohorts())
def test_the_mean_is_the_plain_one_within_the_stated_bound(
    cohort: tuple[dict[int, tuple[float, trees.Tree]], int, dict[str, set[int]]],
) -> None:
    replies, threshold, lost = cohort
    vectors = {i: secure.encode(tree, w, len(replies)) for i, (w, tree) in replies.items()}
    total = Sum(vectors, threshold).run(lost).server.total()
    came = [
        (w, {k: v.double() for k, v in trees.flatten(tree).items()})
        for i, (w, tree) in replies.items()
        if not any(i in lost[step] for step in ("keys", "shares", "masked"))
    ]
    mean, weight = trees.mean(came)
    like = next(iter(replies.values()))[1]
    tree, total_weight = secure.decode(total, like)
    rounding = len(came) * 2.0**-33
    assert abs(total_weight - weight) <= rounding + 1e-12 * weight
    ours = trees.flatten(tree)
    assert ours.keys() == mean.keys()
    largest = max(float(tree["z/b"].abs().max()) for _, tree in came)  # "z/b" has all the numbers
    for name, leaf in mean.items():
        assert ours[name].shape == leaf.shape and ours[name].dtype == torch.float64
        bound = rounding * (1 + leaf.abs()) / total_weight + 16 * 2.0**-53 * largest
        assert bool(((ours[name] / total_weight - leaf).abs() <= bound).all())


# Fixed point


def test_a_client_rounds_by_half_a_unit_at_most() -> None:
    values = torch.rand(10_000, dtype=torch.float64) * 200 - 100
    tree, weight = secure.decode(secure.encode({"x": values}, 1, 2), {"x": values})
    error = (tree["x"] - values).abs().max()
    assert 2.0**-34 < error <= 2.0**-33 and weight == 1


def test_leaves_meet_by_name_and_a_leaf_may_be_the_tree() -> None:
    one = {"b": torch.tensor([1.0, 2.0]), "a": {"c": torch.tensor(3.0)}}
    other = {"a": {"c": torch.tensor(3.0)}, "b": torch.tensor([1.0, 2.0])}
    vector = secure.encode(one, 2, 2)
    assert (vector == secure.encode(other, 2, 2)).all() and secure.size(one) == len(vector) == 4
    tree, weight = secure.decode(vector, one)
    assert tree["b"].tolist() == [2, 4] and tree["a"]["c"].item() == 6 and weight == 2
    leaf, weight = secure.decode(secure.encode(one["b"], 3, 2), one["b"])
    assert leaf.tolist() == [3, 6] and weight == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        secure.encode({"x": torch.tensor([0, value])}, 1, 4)
    with pytest.raises(ValueError, match="not finite"):
        secure.encode({"x": torch.zeros(2)}, value, 4)


@pytest.mark.parametrize("sign", [1, -1])
def test_what_could_overflow_is_refused_and_the_most_that_is_allowed_does_not(sign: int) -> None:
    limit = 2.0**31 / 4
    with pytest.raises(ValueError, match="4 clients holds less than 5"):
        secure.encode({"x": torch.tensor([sign * limit], dtype=torch.float64)}, 1, 4)
    most = torch.tensor([sign * np.nextafter(limit, 0)], dtype=torch.float64)
    total = 4 * secure.encode({"x": most}, 1, 4)
    assert secure.decode(total, {"x": most})[0]["x"].tolist() == (4 * most).tolist()
    with pytest.raises(ValueError, match="holds less"):  # the weight counts
        secure.encode({"x": most}, 1.001, 4)


# What the server sees


def seems_random(vector: Vector, other: Vector) -> bool:
    """Bytes as often as each other (p < 1e-9), and no correlation (6 standard deviations)."""
    counts = np.bincount(np.frombuffer(vector.tobytes(), np.uint8), minlength=256)
    expected = 8 * len(vector) / 256
    chi = float(((counts - expected) ** 2 / expected).sum())
    r = np.corrcoef(vector.astype(float), other.astype(float))[0, 1] if other.std() else 0.0
    return 130 < chi < 410 and abs(r) < 6 / len(vector) ** 0.5


def inputs(kind: str, size: int = 20_000) -> Vector:
    if kind == "zeros":
        return np.zeros(size, np.int64)
    large = secure.encode({"x": torch.full((size - 1,), 5e7)}, 1, 7)
    return large if kind == "large" else np.arange(size) * 2**44


def test_the_measure_of_randomness_tells_inputs_from_noise() -> None:
    noise = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 20_000)
    assert seems_random(noise, inputs("ramp"))
    for kind in ("zeros", "large", "ramp"):
        assert not seems_random(inputs(kind), inputs(kind))
    assert not seems_random(noise // 16 + inputs("ramp"), inputs("ramp"))


@pytest.mark.parametrize("kind", ["zeros", "large", "ramp"])
def test_a_masked_vector_is_unrelated_to_its_input(kind: str) -> None:
    vector = inputs(kind)
    runs = [Sum(dict.fromkeys(CLIENTS, vector)).run(until="unmask") for _ in range(2)]
    for i in CLIENTS:
        first, second = (run.masked[i][1:] for run in runs)
        assert seems_random(first, vector)
        assert (first != second).all(), "the same input is masked anew"
        assert seems_random(first - second, vector)
    one, two = (runs[0].masked[i][1:] for i in CLIENTS[:2])
    assert seems_random(one - two, vector), "two clients with one input have nothing in common"
    assert seems_random(np.append(one[1:], one[0]) - one, vector), "nor do a vector's parts"


def test_without_its_self_mask_a_vector_still_has_those_of_its_peers() -> None:
    vector = inputs("large")
    run = Sum(dict.fromkeys(CLIENTS, vector)).run()
    for i in CLIENTS:  # the server rebuilds every self mask: this is what it can see at the end
        stripped = run.masked[i].copy()
        masks.add_self_mask(stripped, CONTEXT, i, run.server._rebuild(i), -1)
        assert seems_random(stripped[1:], vector)
    assert run.server.total().tolist() == (len(CLIENTS) * vector).tolist()


def test_without_its_pair_masks_a_vector_still_has_its_self_mask() -> None:
    """So a vector that comes late, after its client's mask key was rebuilt, stays hidden."""
    vector = inputs("large")
    run = Sum(dict.fromkeys(CLIENTS, vector)).run({"masked": [8]})
    late = run.client(8, "masked", run.messages["masked"][8])
    private = masks.mask_private(CONTEXT, 8, run.server._rebuild(8))
    for peer in CLIENTS:
        if peer != 8:
            public = run.server._keys[peer][1]
            masks.add_pair_mask(late, CONTEXT, ASKED, private, public, 8, peer, -1)
    assert seems_random(late[1:], vector)
    with pytest.raises(ValueError, match="not asked"):
        run.server.take(8, late)


def test_before_the_unmasking_the_sum_is_hidden_too() -> None:
    vector = inputs("large")
    run = Sum(dict.fromkeys(CLIENTS, vector)).run({"unmask": CLIENTS[THRESHOLD - 1 :]})
    assert seems_random(sum(run.masked.values())[1:], vector)
    with pytest.raises(NotEnough):
        run.server.total()
    # One share too few says nothing: the scheme gives some other seed.
    shares = [(1 + CLIENTS.index(i), told[0]) for i, told in run.server._shares.items()]
    wrong = Shamir.combine(shares, False)
    held = Masker.from_bytes(run.states[CLIENTS[-1]]).held[CLIENTS[0]]
    right = Shamir.combine([*shares, (len(CLIENTS), held[:16])], False)
    stripped = [run.masked[CLIENTS[0]].copy() for _ in range(2)]
    for out, seed in zip(stripped, (wrong, right), strict=True):
        masks.add_self_mask(out, CONTEXT, CLIENTS[0], seed, -1)
    assert (stripped[0] != stripped[1]).all()


def test_what_goes_through_the_server_shows_no_secret() -> None:
    run = Sum(some_vectors())
    secrets = {i: Masker.from_bytes(state) for i, state in run.states.items()}
    run.run()
    lists = [
        m for step in run.messages.values() for message in step.values() for m in message.values()
    ]
    lists += [r for replies in run.server._replies for r in replies.values()]
    seen = b"|".join(item for each in lists for item in each if isinstance(item, bytes))
    assert run.server._keys[3][0] in seen
    for masker in secrets.values():
        for secret in (masker.box, masker.seed, masker.secret):
            assert secret not in seen
        assert "secret" not in repr(masker) and "seed" not in repr(masker)


def test_every_secret_and_nonce_is_drawn_anew() -> None:
    one, two = (Masker(5, CONTEXT, THRESHOLD) for _ in range(2))
    for name in ("box", "secret", "seed"):
        assert getattr(one, name) != getattr(two, name)
    run = Sum(some_vectors()).run(until="masked")
    masker = Masker.from_bytes(run.states[5])
    nonces = {masker._seal(8, b"x" * 32)[: masks.NONCE] for _ in range(9)}
    assert len(nonces) == 9


# What a client tells, and what it refuses


def test_a_client_tells_one_share_of_each_peer_and_the_right_one() -> None:
    run = Sum(some_vectors()).run({"masked": [8, 40]}, until="unmask")
    held = Masker.from_bytes(run.states[5]).held
    told = run.client(5, "unmask", run.messages["unmask"][5])["shares"]
    assert len(told) == len(CLIENTS)
    for i, share in zip(CLIENTS, told, strict=True):
        assert share == (held[i][16:] if i in (8, 40) else held[i][:16])
    assert Masker.from_bytes(run.states[5]).held == {}


def first(count: int) -> Replace:
    return lambda m: {name: m[name][: count * len(m[name]) // len(m["clients"])] for name in m}


def one_more(message: Any) -> Any:
    """Client 99, too, with keys of its own."""
    own = Masker(99, CONTEXT, THRESHOLD).keys(IDENTITIES[99]) | {"clients": [99]}
    return {name: message[name] + own[name] for name in message}


def twin(message: Any) -> Any:
    """The server's own keys for client 20, signed with the identity of client 8."""
    reply = Masker(20, CONTEXT, THRESHOLD).keys(IDENTITIES[8])
    return forge(reply)(message)


def forge(reply: Any) -> Replace:
    """Another reply to the step ``keys`` in place of that of client 20."""
    return lambda m: {
        **m,
        "keys": [*m["keys"][:9], *reply["keys"], *m["keys"][12:]],
        "signed": [*m["signed"][:6], *reply["signed"], *m["signed"][8:]],
    }


def man_in_the_middle(message: Any) -> Any:
    """The server's own keys for client 20, with the client's identity and old signature."""
    reply = Masker(20, CONTEXT, THRESHOLD).keys(Identity())
    return forge({"keys": reply["keys"], "signed": message["signed"][6:8]})(message)


def from_another_sum(message: Any) -> Any:
    return forge(Masker(20, "run/6/train", THRESHOLD).keys(IDENTITIES[20]))(message)


def other_keys_of_mine(message: Any) -> Any:
    """New keys of client 5, which it signed itself."""
    reply = Masker(5, CONTEXT, THRESHOLD).keys(IDENTITIES[5])
    keys, signed = message["keys"], message["signed"]
    return {
        **message,
        "keys": [*keys[:3], *reply["keys"], *keys[6:]],
        "signed": [*signed[:2], *reply["signed"], *signed[4:]],
    }


def my_keys_signed_by_another(message: Any) -> Any:
    other, signed = Identity(), message["signed"]
    own = other.sign(masks.keys_statement(CONTEXT, 5, message["keys"][3:6]))
    return {**message, "signed": [*signed[:2], other.public, own, *signed[4:]]}


def survivors(clients: Any) -> Replace:
    return lambda m: {"survivors": clients}


def without(*clients: int) -> Replace:
    """The signatures of the others."""

    def leave_out(message: Any) -> Any:
        kept = [i for i, k in enumerate(message["signers"]) if k not in clients]
        return {name: [values[i] for i in kept] for name, values in message.items()}

    return leave_out


def signed_by_all(clients: Collection[int]) -> Replace:
    """All signatures that exist, under other survivors: what a client signed elsewhere."""

    def sign(message: Any) -> Any:
        text = masks.survivors_statement(CONTEXT, clients)
        return {**message, "signatures": [IDENTITIES[k].sign(text) for k in message["signers"]]}

    return sign


@pytest.mark.parametrize(
    ("step", "change", "reason"),
    [
        ("shares", lambda m: {**m, "keys": m["keys"][::-1]}, "not signed"),
        ("shares", man_in_the_middle, "client 20 are not signed"),
        ("shares", from_another_sum, "client 20 are not signed"),
        ("shares", other_keys_of_mine, "other keys of this client"),
        ("shares", my_keys_signed_by_another, "other keys of this client"),
        ("shares", twin, "same key"),
        ("shares", lambda m: {**m, "keys": m["keys"][:3] * 7}, "same key"),
        ("shares", lambda m: {n: v[len(v) // 7 :] + v[: len(v) // 7] for n, v in m.items()
                              if n != "clients"} | {"clients": m["clients"]}, "not signed"),
        ("shares", first(3), "threshold 4 with 3"),
        ("shares", one_more, "with 8"),
        ("shares", lambda m: {**m, "keys": m["keys"][:-1]}, "20 items, not 21"),
        ("shares", lambda m: {**m, "keys": [k[:-1] for k in m["keys"]]}, "wrong length"),
        ("shares", lambda m: {**m, "clients": [3, *m["clients"][:-1]]}, "twice"),
        ("masked", lambda m: {k: v[: len(v) // 3] for k, v in m.items()}, "3 participants, fewer"),
        ("masked", lambda m: {**m, "senders": [5, *m["senders"][1:]]}, "not peers"),
        ("masked", lambda m: {**m, "senders": [99, *m["senders"][1:]]}, "not peers"),
        ("masked", lambda m: {**m, "bundles": m["bundles"][1:]}, "5 items, not 6"),
        ("agree", survivors([3, 5, 8]), "fewer than the threshold"),
        ("agree", survivors([*CLIENTS, 99]), "not this client and peers"),
        ("agree", survivors([3, 8, 20, 21, 40, 41]), "not this client and peers"),  # I am here
        ("agree", survivors([3, 3, 5, 8, 20, 21, 40, 41]), "twice"),
        ("agree", survivors([3, 5, 8, 20, 21, 40, "41"]), "not a list"),
        ("agree", survivors(None), "not a list"),
        ("unmask", without(3, 8, 20, 21), "3 signers, fewer"),
        ("unmask", lambda m: {**m, "signers": [99, *m["signers"][1:]]}, "not survivors"),
        ("unmask", lambda m: {**m, "signatures": m["signatures"][::-1]}, "did not sign"),
        ("unmask", signed_by_all(CLIENTS[:-1]), "client 3 did not sign the survivors"),
    ],
)  # fmt: skip
def test_a_client_refuses_what_is_not_a_step_of_its_sum(
    step: str, change: Replace, reason: str
) -> None:
    """Such as keys of another cohort, too few or unknown peers, or to unmask more than a sum."""
    run = Sum(some_vectors()).run(until=step)
    before, message = run.states[5], run.messages[step][5]
    with pytest.raises(ValueError, match=reason):
        run.client(5, step, change(message))
    assert run.states[5] == before
    run.client(5, step, message)
    assert run.states[5] != before


def test_a_client_keeps_no_share_with_another_mark() -> None:
    """The server would call it false later, and count an honest client as a liar."""
    run = Sum(some_vectors()).run(until="masked")
    message = run.messages["masked"][5]
    place = 2 * message["senders"].index(8)
    for changed in (place, place + 1):  # of either secret
        marks = [bytes(32) if i == changed else each for i, each in enumerate(message["marks"])]
        masker = Masker.from_bytes(run.states[5])
        masker.masked({**message, "marks": marks}, run.vectors[5], ASKED)
        assert sorted(masker.held) == [3, 5, 20, 21, 40, 41]


@pytest.mark.parametrize("now", range(5))
@pytest.mark.parametrize("asked", range(5))
def test_a_client_answers_each_step_once_and_in_order(now: int, asked: int) -> None:
    run, step = Sum(some_vectors()).run(until=secure.STEPS[now]), secure.STEPS[asked]
    if now == asked:
        run.client(5, step, run.messages[step][5])
    with pytest.raises(ValueError, match="out of turn"):
        run.client(5, step, run.messages.get(step, {}).get(5))


def test_a_client_masks_only_what_was_encoded() -> None:
    run = Sum(some_vectors()).run(until="masked")
    for vector in (np.zeros(5), np.zeros((5, 1), np.int64)):
        run.vectors = {5: vector}  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="encoded"):
            run.client(5, "masked", run.messages["masked"][5])


@pytest.mark.parametrize(("clients", "threshold"), [(1, 1), (2, 1), (4, 2), (7, 3), (3, 1), (0, 0)])
def test_a_threshold_of_half_or_of_one_is_refused(clients: int, threshold: int) -> None:
    with pytest.raises(ValueError, match="more than half"):
        Unmasker(range(clients), CONTEXT, threshold, 5, ASKED)


# Faults


LOW_ORDER = bytes(32)  # nobody can agree on a key with this one


def weaken(place: int) -> Replace:
    """Keys of client 8, which it signed, with one that would stop every peer."""

    def change(reply: Any) -> Any:
        keys = [LOW_ORDER if i == place else key for i, key in enumerate(reply["keys"])]
        own = IDENTITIES[8].sign(masks.keys_statement(CONTEXT, 8, keys))
        return {"keys": keys, "signed": [reply["signed"][0], own]}

    return change


@pytest.mark.parametrize(
    ("step", "change", "reason"),
    [
        ("keys", lambda r: None, "not a list"),
        ("keys", lambda r: {}, "not a list"),
        ("keys", lambda r: {"keys": ["a", "b", "c"]}, "not a list"),
        ("keys", lambda r: {**r, "keys": r["keys"] * 2}, "6 items, not 3"),
        ("keys", lambda r: {**r, "keys": [*r["keys"][:2], r["keys"][2][:-1]]}, "wrong length"),
        ("keys", weaken(0), ""),
        ("keys", weaken(1), ""),
        ("keys", lambda r: {**r, "signed": [r["signed"][0], b"x" * 64]}, "not signed"),
        ("keys", lambda r: {**r, "signed": [b"x", r["signed"][1]]}, "not signed"),
        ("keys", lambda r: {**r, "signed": [b"x" * 5000, r["signed"][1]]}, "wrong length"),
        ("shares", lambda r: {**r, "bundles": r["bundles"][1:]}, "5 items, not 6"),
        ("shares", lambda r: {**r, "marks": r["marks"][1:]}, "13 items, not 14"),
        ("shares", lambda r: {**r, "bundles": [b[1:] for b in r["bundles"]]}, "wrong length"),
        ("shares", lambda r: r["bundles"], "not a list"),
        ("masked", lambda r: r[1:], "shape"),
        ("masked", lambda r: r[None], "shape"),
        ("masked", lambda r: r.astype(float), "integers"),
        ("masked", lambda r: r.tolist(), "integers"),
        ("agree", lambda r: {"signature": [b"x" * 64]}, "not of this client"),
        ("agree", lambda r: {}, "not a list"),
        ("unmask", lambda r: {"shares": r["shares"][1:]}, "6 items, not 7"),
        ("unmask", lambda r: {"shares": [s + b"x" for s in r["shares"]]}, "wrong length"),
        ("unmask", lambda r: {"shares": 3}, "not a list"),
    ],
)
def test_a_malformed_reply_costs_its_sender_only(step: str, change: Replace, reason: str) -> None:
    vectors = some_vectors()
    run = Sum(vectors).run(change={(step, 8): change})
    assert run.refused.keys() == {8} and reason in run.refused[8]
    assert run.server.total().tolist() == plain(vectors, () if step in AFTER else (8,))


def test_who_was_not_asked_or_answers_twice_is_refused() -> None:
    run = Sum(some_vectors()).run({"masked": [8]}, until="unmask")
    reply = run.client(5, "unmask", run.messages["unmask"][5])
    run.server.take(5, reply)
    for number in (5, 8, 99):
        with pytest.raises(ValueError, match="not asked, or answers twice"):
            run.server.take(number, reply)


def flip(bundle: bytes, place: int = 20) -> bytes:
    return bundle[:place] + bytes([bundle[place] ^ 1]) + bundle[place + 1 :]


def spoil(count: int) -> Replace:
    """Bundles of which the first ``count`` do not open."""
    return lambda reply: {
        **reply,
        "bundles": [flip(b) if i < count else b for i, b in enumerate(reply["bundles"])],
    }


@pytest.mark.parametrize("lost", [[], [8]])
def test_a_tampered_bundle_is_a_share_less(lost: list[int]) -> None:
    vectors = some_vectors()
    run = Sum(vectors).run({"masked": lost}, {("shares", 8): spoil(2)})
    assert run.server._shares[3][2] == run.server._shares[5][2] == b""
    assert run.server._shares[20][2] != b""
    assert run.server.total().tolist() == plain(vectors, lost)
    run = Sum(vectors).run({"masked": lost}, {("shares", 8): spoil(6)})
    with pytest.raises(Spoiled) as error:
        run.server.total()
    assert error.value.client == 8


@pytest.mark.parametrize("place", [0, 12, 59])
def test_a_bundle_opens_for_its_receiver_in_its_sum_only(place: int) -> None:
    run = Sum(some_vectors()).run(until="masked")
    message: Any = run.messages["masked"][5]
    bundle, masker = message["bundles"][1], Masker.from_bytes(run.states[5])
    assert message["senders"][1] == 8 and masker._open(8, bundle)
    assert masker._open(8, flip(bundle, place)) is None
    assert masker._open(8, bundle[:-1]) is None
    assert masker._open(8, Masker.from_bytes(run.states[8])._seal(5, b"no two shares")) is None
    assert masker._open(20, bundle) is None
    assert Masker.from_bytes(run.states[3])._open(8, bundle) is None
    assert dataclasses.replace(masker, context="run/8/train")._open(8, bundle) is None


def test_masks_belong_to_one_sum() -> None:
    run = Sum(some_vectors()).run(until="masked")
    masker, message = Masker.from_bytes(run.states[5]), run.messages["masked"][5]
    other = dataclasses.replace(masker, context="run/8/train", held={})
    vector = run.vectors[5]
    assert (masker.masked(message, vector, ASKED) != other.masked(message, vector, ASKED)).all()
    keys = [masks.derive(b"x" * 16, masks.label(*label)) for label in LABELS]
    assert len(set(keys)) == len(keys)


LABELS: list[tuple[Any, ...]] = [
    ("run/1/train", "self mask", 1),
    ("run/1/train", "self mask", 11),
    ("run/1/train", "pair mask", 1, 1),
    ("run/1/train", "pair mask", 11),
    ("run/11/train", "self mask", 1),
    ("run/1/moments", "self mask", 1),
]


def test_a_false_vector_is_noticed() -> None:
    run = Sum(some_vectors()).run(change={("masked", 3): lambda v: v * 0})
    assert not run.refused
    with pytest.raises(Spoiled):
        run.server.total()


def lie(reply: dict[str, Any]) -> dict[str, Any]:
    """One false share, that of client 8."""
    return {"shares": [share if i != 2 else bytes(16) for i, share in enumerate(reply["shares"])]}


@pytest.mark.parametrize("lost", [[], [8]])
def test_false_shares_cost_nothing_while_enough_honest_ones_are_there(lost: list[int]) -> None:
    vectors, liars = some_vectors(), CLIENTS[:1] if lost else CLIENTS[:3:2]
    change = {("unmask", liar): lie for liar in liars}
    run = Sum(vectors).run({"masked": lost}, change)
    assert run.refused == dict.fromkeys(liars, "a false share of a secret of client 8")
    assert run.server.total().tolist() == plain(vectors, lost)


def test_who_shares_a_false_secret_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its marks fit its shares, but these rebuild another seed than the one that it uses."""
    run = Sum(some_vectors()).run(until="shares")
    state = Masker.from_bytes(run.states[8])
    used, state.seed = state.seed, b"x" * 16
    monkeypatch.setattr(Masker, "_public_keys", lambda self: run.server._keys[self.me])
    run.states[8] = state.to_bytes()
    for step in secure.STEPS[1:]:
        messages = run.messages[step] if step == "shares" else run.server.ask()
        for number, message in messages.items():
            run.server.take(number, run.client(number, step, message))
        if step == "shares":
            cheat = Masker.from_bytes(run.states[8])
            cheat.seed = used
            run.states[8] = cheat.to_bytes()
    with pytest.raises(Spoiled) as error:
        run.server.total()
    assert error.value.client == 8


def test_a_client_that_copies_keys_or_changes_its_own_is_out() -> None:
    """Else every peer would refuse the whole sum."""
    vectors = some_vectors()
    first = Sum(vectors)
    copy = first.server.identities

    def copied(reply: Any) -> Any:
        """Signed with its own identity, but the keys of client 8."""
        keys = first.server._keys[8]
        own = IDENTITIES[41].sign(masks.keys_statement(CONTEXT, 41, keys))
        return {"keys": keys, "signed": [IDENTITIES[41].public, own]}

    def signed_by_another(reply: Any) -> Any:
        return Masker(40, CONTEXT, 4).keys(IDENTITIES[8])

    first.run(change={("keys", 40): signed_by_another, ("keys", 41): copied})
    assert first.refused == dict.fromkeys([40, 41], "keys: another client has one of them")
    assert first.server.total().tolist() == plain(vectors, [40, 41])
    second = Sum(vectors)
    second.server.identities = copy
    second.run(change={("keys", 21): lambda r: Masker(21, CONTEXT, 4).keys(Identity())})
    assert second.refused == {21: "keys: signed with another key than before in this run"}
    assert second.server.total().tolist() == plain(vectors, [21])


def test_two_groups_that_sign_other_survivors_have_no_sum() -> None:
    """A server tells half of the clients that 41 sent a vector, and the other half that it did not.

    Without their agreement, shares of both secrets of client 41 would come together.
    """
    run = Sum(some_vectors()).run(until="agree")
    signed: dict[int, bytes] = {}
    for number, message in run.messages["agree"].items():
        if number != 41:
            mine = message if number < 20 else {"survivors": CLIENTS[:-1]}
            signed[number] = run.client(number, "agree", mine)["signature"][0]
    for number in signed:
        message = {"signers": [*signed], "signatures": [*signed.values()]}
        with pytest.raises(ValueError, match="did not sign the survivors"):
            run.client(number, "unmask", message)


@pytest.mark.parametrize("kind", ["ecdsa", "ed25519"])
def test_keys_of_ssh_keygen_sign(kind: str, tmp_path: Path) -> None:
    bits = ("-b", "384") if kind == "ecdsa" else ()
    path = tmp_path / "site.key"
    words = ["ssh-keygen", "-q", "-t", kind, *bits, "-N", "", "-C", "a site", "-f", str(path)]
    subprocess.run(words, check=True)
    mine, (public,) = load_identity(path), read_public_keys(tmp_path / "site.key.pub")
    assert mine.public == public and has_signed(public, b"text", mine.sign(b"text"))
    assert not has_signed(public, b"other text", mine.sign(b"text"))
    assert not has_signed(Identity().public, b"text", mine.sign(b"text"))


# State


def test_the_state_comes_back_from_bytes_at_every_step() -> None:
    for step in secure.STEPS:
        run = Sum(some_vectors()).run(until=step)
        for number, state in run.states.items():
            masker = Masker.from_bytes(state)
            assert masker.to_bytes() == state and masker.me == number
            assert masker.step == secure.STEPS.index(step)
            if step in AFTER:  # no longer needed
                assert masker.box == masker.secret == masker.seed == b""


def test_a_mask_goes_on_over_pieces_of_the_keystream() -> None:
    count = masks.CHUNK // 8
    long, short = np.zeros(2 * count + 3, np.int64), np.zeros(count + 1, np.int64)
    masks.add_mask(long, b"k" * 32, 1)
    masks.add_mask(short, b"k" * 32, 1)
    assert (long[: count + 1] == short).all() and len(np.unique(long)) == len(long)
    masks.add_mask(long, b"k" * 32, -1)
    assert not long.any()
